//! A disk whose content is known, or a file in a file system: `workload disk` writes it in many ways, and checks it again
//! and again.
//!
//! Each sector holds words that follow from its number and its generation, or zeros. The generations are in memory. So
//! a guest whose memory and disk are not of one moment finds it out by itself.
//!
//! It prints `disk D tick N` each tick, `disk D checked N` when all of the disk was as it must be, and `CORRUPT disk D ...`
//! otherwise; it ends then.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FallocateFlags, OFlags, fallocate};
use stillframe_sys::memory::SharedMapping;

use crate::arguments::DiskArguments;
use crate::random::{Random, mix};

/// The unit of a disk, in bytes.
const SECTOR_BYTES: usize = 512;
const SECTOR_WORDS: usize = SECTOR_BYTES / 8;
/// Sectors of a page of the guest's page cache.
const PAGE_SECTORS: usize = 8;
/// Alignment of memory for direct requests.
const ALIGNMENT: usize = 4096;
/// Sectors of one request, at most.
const REQUEST_SECTORS: usize = 256;
/// How often all of it is checked, in ticks.
const CHECKED_EVERY: u64 = 20;

/// A sector that is not what it must be.
#[derive(Debug, PartialEq, Eq)]
pub struct WrongSector {
    sector: usize,
    generation: u32,
}

impl fmt::Display for WrongSector {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sector, generation } = self;
        write!(out, "sector {sector} is not of generation {generation}")
    }
}

/// One way of changing it.
#[derive(Debug, Clone, Copy)]
enum Change {
    /// Whole pages, through the page cache.
    Pages,
    /// Sectors, through the page cache: parts of pages.
    Sectors,
    /// Past the page cache.
    Direct,
    /// Sectors of a file, in memory that it is mapped to; else through the page cache.
    Mapped,
    /// Zeros, as a hole where the disk can have one.
    Zeros,
    /// A hole in a file, whose blocks its file system may discard; else zeros.
    Hole,
    /// What was written is on the disk.
    Flush,
}

const CHANGES: [Change; 11] = [
    Change::Pages,
    Change::Pages,
    Change::Sectors,
    Change::Sectors,
    Change::Direct,
    Change::Direct,
    Change::Mapped,
    Change::Mapped,
    Change::Zeros,
    Change::Hole,
    Change::Flush,
];

/// A disk that is written and checked.
struct Disk {
    cached: File,
    direct: File,
    /// Of a file.
    mapping: Option<SharedMapping>,
    /// Of each sector; 0: zeros.
    generations: Vec<u32>,
    generation: u32,
    seed: u64,
    random: Random,
    buffer: Buffer,
}

impl Disk {
    /// A disk of zeros.
    fn open(path: &Path, bytes: u64, seed: u64) -> io::Result<Self> {
        let open = |flags: OFlags| {
            let mut options = OpenOptions::new();
            let options = options.read(true).write(true);
            options.custom_flags(flags.bits() as i32).open(path)
        };
        let cached = open(OFlags::empty())?;
        let mapping = match cached.metadata()?.is_file() {
            true => Some(SharedMapping::map(&cached, 0, bytes, true).map_err(io::Error::other)?),
            false => None,
        };
        Ok(Self {
            cached,
            direct: open(OFlags::DIRECT)?,
            mapping,
            generations: vec![0; bytes as usize / SECTOR_BYTES],
            generation: 0,
            seed,
            random: Random::new(seed),
            buffer: Buffer::new(),
        })
    }

    fn change(&mut self) -> io::Result<()> {
        let change = CHANGES[self.random.below(CHANGES.len())];
        let unit = match change {
            Change::Flush => return self.cached.sync_data(),
            Change::Sectors | Change::Direct | Change::Mapped => 1,
            Change::Pages | Change::Zeros | Change::Hole => PAGE_SECTORS,
        };
        let range = self.range(unit);
        let (offset, bytes) = place(&range);
        if let Change::Zeros | Change::Hole = change {
            self.generations[range].fill(0);
            let zeros = match (change, &self.mapping) {
                (Change::Hole, Some(_)) => FallocateFlags::PUNCH_HOLE,
                _ => FallocateFlags::ZERO_RANGE,
            };
            let zeros = zeros | FallocateFlags::KEEP_SIZE;
            return Ok(fallocate(&self.cached, zeros, offset, bytes as u64)?);
        }
        self.generation += 1;
        self.generations[range.clone()].fill(self.generation);
        let buffer = self.buffer.first(bytes);
        for (sector, into) in range.zip(buffer.chunks_exact_mut(SECTOR_BYTES)) {
            fill(self.seed, sector, self.generation, into);
        }
        match (change, &self.mapping) {
            (Change::Direct, _) => self.direct.write_all_at(buffer, offset),
            (Change::Mapped, Some(mapping)) => {
                mapping.write(offset, buffer).map_err(io::Error::other)
            }
            _ => self.cached.write_all_at(buffer, offset),
        }
    }

    /// Checks some part of it, through the page cache or past it.
    fn check_some(&mut self) -> io::Result<Result<(), WrongSector>> {
        let range = self.range(1);
        let direct = self.random.below(2) == 0;
        self.check(range, direct)
    }

    /// Checks all of it past the page cache, and so what the host has.
    fn check_all(&mut self) -> io::Result<Result<(), WrongSector>> {
        for start in (0..self.generations.len()).step_by(REQUEST_SECTORS) {
            let range = start..self.generations.len().min(start + REQUEST_SECTORS);
            if let Err(wrong) = self.check(range, true)? {
                return Ok(Err(wrong));
            }
        }
        Ok(Ok(()))
    }

    fn check(&mut self, range: Range<usize>, direct: bool) -> io::Result<Result<(), WrongSector>> {
        let (offset, bytes) = place(&range);
        let buffer = self.buffer.first(bytes);
        match direct {
            true => self.direct.read_exact_at(buffer, offset)?,
            false => self.cached.read_exact_at(buffer, offset)?,
        }
        let mut expected = [0; SECTOR_BYTES];
        for (sector, found) in range.zip(buffer.chunks_exact(SECTOR_BYTES)) {
            let generation = self.generations[sector];
            fill(self.seed, sector, generation, &mut expected);
            if found != expected {
                return Ok(Err(WrongSector { sector, generation }));
            }
        }
        Ok(Ok(()))
    }

    /// A random range, in units of this number of sectors.
    fn range(&mut self, unit: usize) -> Range<usize> {
        let units = self.generations.len() / unit;
        let start = self.random.below(units);
        let most = (units - start).min(REQUEST_SECTORS / unit);
        let end = start + 1 + self.random.below(most);
        start * unit..end * unit
    }
}

/// Where sectors are: offset and length in bytes.
fn place(range: &Range<usize>) -> (u64, usize) {
    let offset = (range.start * SECTOR_BYTES) as u64;
    (offset, range.len() * SECTOR_BYTES)
}

/// The content of a sector.
fn fill(seed: u64, sector: usize, generation: u32, into: &mut [u8]) {
    if generation == 0 {
        into.fill(0);
        return;
    }
    let first = mix(seed ^ (sector as u64) << 32 ^ u64::from(generation));
    for (number, word) in into.chunks_exact_mut(8).take(SECTOR_WORDS).enumerate() {
        word.copy_from_slice(&mix(first.wrapping_add(number as u64)).to_le_bytes());
    }
}

/// Memory that is aligned for direct requests.
struct Buffer {
    bytes: Vec<u8>,
    start: usize,
}

impl Buffer {
    fn new() -> Self {
        let bytes = vec![0; REQUEST_SECTORS * SECTOR_BYTES + ALIGNMENT];
        let start = bytes.as_ptr().align_offset(ALIGNMENT);
        Self { bytes, start }
    }

    fn first(&mut self, bytes: usize) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + bytes]
    }
}

/// Writes and checks until the disk is wrong, or `--ticks` have gone by. Returns whether it was right.
pub fn run(arguments: &DiskArguments, out: &mut dyn Write) -> io::Result<bool> {
    let bytes = arguments.mib << 20;
    let mut disk = Disk::open(&arguments.file, bytes, arguments.seed)?;
    let name = arguments.file.file_name().unwrap_or_default().display();
    let mut tick = 0;
    while arguments.ticks.is_none_or(|last| tick < last) {
        tick += 1;
        let mut checked = Ok(());
        for _ in 0..arguments.steps {
            disk.change()?;
            checked = checked.and(disk.check_some()?);
        }
        let all = tick % CHECKED_EVERY == 0;
        if all {
            checked = checked.and(disk.check_all()?);
        }
        let line = match &checked {
            Err(wrong) => format!("CORRUPT disk {name} {wrong} tick {tick}\n"),
            Ok(()) if all => format!("disk {name} tick {tick}\ndisk {name} checked {tick}\n"),
            Ok(()) => format!("disk {name} tick {tick}\n"),
        };
        out.write_all(line.as_bytes())?;
        out.flush()?;
        if checked.is_err() {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(arguments.tick_ms));
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: u64 = 4 << 20;

    /// An empty image. Not on a tmpfs, which takes no ranges of zeros on some kernels.
    fn image(name: &str) -> std::path::PathBuf {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../target/{name}"));
        let file = File::create(&path).unwrap();
        file.set_len(BYTES).unwrap();
        path
    }

    #[test]
    fn a_disk_that_is_written_in_all_ways_is_right() {
        let path = image("workload-disk-right");
        let mut disk = Disk::open(&path, BYTES, 7).unwrap();
        for _ in 0..300 {
            disk.change().unwrap();
            assert_eq!(disk.check_some().unwrap(), Ok(()));
        }
        assert_eq!(disk.check_all().unwrap(), Ok(()));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_sector_of_another_moment_is_found() {
        let path = image("workload-disk-wrong");
        let mut disk = Disk::open(&path, BYTES, 7).unwrap();
        let before = std::fs::read(&path).unwrap();
        while disk.generations.iter().all(|&generation| generation == 0) {
            disk.change().unwrap();
        }
        disk.cached.sync_data().unwrap();
        disk.cached.write_all_at(&before, 0).unwrap();
        assert!(disk.check_all().unwrap().is_err());
        std::fs::remove_file(path).unwrap();
    }
}
