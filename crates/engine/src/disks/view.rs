//! One disk as it was at the pause: its pages, read through QEMU.

use std::ops::Range;

use stillframe_nbd::{Client, Extent, NbdError};
use stillframe_page::{PAGE, PAGE_BYTES};
use stillframe_sys::memfd::Memfd;

use super::copy::DiskCopy;
use super::{DiskSchedule, DisksError};
use crate::memory::{BlockShape, Page};

/// The metadata context that says where a disk has data.
pub(crate) const ALLOCATION: &str = "base:allocation";
/// In it: the range reads as zeros.
pub(crate) const ZERO: u32 = 1 << 1;
/// In that of a bitmap: the range was written.
pub(crate) const WRITTEN: u32 = 1;

/// Bytes of a disk that are gathered before they are handed over: those of the batches of memory.
const BATCH_BYTES: usize = 8 << 20;

/// A disk as it was at the pause.
#[derive(Debug)]
pub struct DiskView {
    pub(super) device: String,
    pub(super) bytes: u64,
    pub(super) content: Content,
    /// It shows what was written since the last checkpoint, and nothing else.
    pub(super) is_increment: bool,
    /// The bitmap that began with it.
    pub(super) bitmap: String,
}

/// Where it is.
#[derive(Debug)]
pub(super) enum Content {
    /// Behind a filter.
    Snapshot(Snapshot),
    /// In memory.
    Copy(DiskCopy),
}

/// A disk behind a filter.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) client: Client,
    /// What the guest has overwritten since.
    pub(super) memory: Memfd,
}

/// What was read of a disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReadDisk {
    /// Bytes that were read: not those which QEMU knows to be zeros.
    pub bytes: u64,
}

impl DiskView {
    /// Whether it shows only what was written since the last checkpoint.
    pub fn is_increment(&self) -> bool {
        self.is_increment
    }

    /// The device that it belongs to.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// QEMU's bitmap that records what is written after it.
    pub fn bitmap(&self) -> &str {
        &self.bitmap
    }

    /// Its length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The disk as a block of pages, of which the last may be filled up with zeros.
    pub fn shape(&self) -> BlockShape {
        BlockShape {
            name: self.device.clone(),
            pages: self.bytes.div_ceil(PAGE_BYTES),
        }
    }

    /// Reads all pages that may be other than zero, or those that were written, ascending, and hands them over in batches.
    /// `limit_bytes`: what the guest may overwrite meanwhile.
    ///
    /// # Errors
    /// The disk cannot be read, or an error of `take`.
    pub fn read<E: From<DisksError>>(
        &mut self,
        limit_bytes: u64,
        take: &mut dyn FnMut(&[Page<'_>]) -> Result<(), E>,
    ) -> Result<ReadDisk, E> {
        let (device, bytes) = (&*self.device, self.bytes);
        match &mut self.content {
            Content::Snapshot(snapshot) => {
                snapshot.read((device, bytes), self.is_increment, limit_bytes, take)
            }
            Content::Copy(copy) => read_copy(device, copy, take),
        }
    }

    /// Memory that it takes for certain, in bytes.
    pub fn copied_bytes(&self) -> u64 {
        match &self.content {
            Content::Snapshot(_) => 0,
            Content::Copy(copy) => copy.bytes(),
        }
    }

    /// How it was captured.
    pub fn schedule(&self) -> DiskSchedule {
        match self.content {
            Content::Snapshot(_) => DiskSchedule::Filter,
            Content::Copy(_) => DiskSchedule::Rounds,
        }
    }
}

impl Snapshot {
    fn read<E: From<DisksError>>(
        &mut self,
        (device, bytes): (&str, u64),
        is_increment: bool,
        limit_bytes: u64,
        take: &mut dyn FnMut(&[Page<'_>]) -> Result<(), E>,
    ) -> Result<ReadDisk, E> {
        let extents = self.client.extents(0, 0..bytes);
        let extents = extents.map_err(|error| self.failed(device, error, limit_bytes))?;
        let wanted: fn(u32) -> bool = match is_increment {
            true => |flags| flags & WRITTEN != 0,
            false => |flags| flags & ZERO == 0,
        };
        let ranges = pages_of(&extents, wanted, bytes);
        let memory = &self.memory;
        let mut watch = || {
            if memory.used_bytes()? > limit_bytes {
                // Not a byte more: the view ends, and the guest's writes wait for nothing.
                memory.refuse_writes()?;
                return Err(overwritten(device, limit_bytes));
            }
            Ok(())
        };
        match read_pages(&mut self.client, ranges, &mut watch, take) {
            Ok(bytes) => Ok(ReadDisk { bytes }),
            Err(Fault::Sink(error)) => Err(error),
            Err(Fault::Engine(error)) => Err(error.into()),
            Err(Fault::Nbd(error)) => Err(self.failed(device, error, limit_bytes).into()),
        }
    }

    fn failed(&self, device: &str, source: NbdError, limit_bytes: u64) -> DisksError {
        match self.memory.used_bytes() {
            Ok(used) if used > limit_bytes => overwritten(device, limit_bytes),
            _ => DisksError::Read {
                device: device.to_owned(),
                source,
            },
        }
    }
}

/// Hands over what was copied of a disk.
fn read_copy<E: From<DisksError>>(
    device: &str,
    copy: &DiskCopy,
    take: &mut dyn FnMut(&[Page<'_>]) -> Result<(), E>,
) -> Result<ReadDisk, E> {
    let mut batch = Batch::new(take);
    let (mut read, mut bytes) = (0, Vec::new());
    for piece in copy.pieces(BATCH_BYTES as u64) {
        let start = piece.start;
        let copied = copy.read(piece, &mut bytes);
        copied.map_err(|source| DisksError::Copy {
            device: device.to_owned(),
            source,
        })?;
        read += bytes.len() as u64;
        batch.add(start, &bytes)?;
    }
    batch.hand_over()?;
    Ok(ReadDisk { bytes: read })
}

fn overwritten(device: &str, limit_bytes: u64) -> DisksError {
    DisksError::Overwritten {
        device: device.to_owned(),
        limit_mib: limit_bytes >> 20,
    }
}

/// Why reading ended early.
pub(crate) enum Fault<E> {
    /// QEMU, or the connection.
    Nbd(NbdError),
    /// The one who watches.
    Engine(DisksError),
    /// The one who takes.
    Sink(E),
}

/// Reads ranges of whole pages and hands them over in batches. `watch` is called before each piece. Returns the number of
/// bytes.
pub(crate) fn read_pages<E>(
    client: &mut Client,
    ranges: Vec<Range<u64>>,
    watch: &mut dyn FnMut() -> Result<(), DisksError>,
    take: &mut dyn FnMut(&[Page<'_>]) -> Result<(), E>,
) -> Result<u64, Fault<E>> {
    let mut batch = Batch::new(take);
    let mut read = 0;
    client.read(ranges, &mut |offset, bytes| {
        watch()?;
        read += bytes.len() as u64;
        batch.add(offset, bytes).map_err(Fault::Sink)
    })?;
    batch.hand_over().map_err(Fault::Sink)?;
    Ok(read)
}

impl<E> From<NbdError> for Fault<E> {
    fn from(error: NbdError) -> Fault<E> {
        Fault::Nbd(error)
    }
}

impl<E> From<DisksError> for Fault<E> {
    fn from(error: DisksError) -> Fault<E> {
        Fault::Engine(error)
    }
}

/// The ranges of whole pages of extents with such flags; the last ends with the disk.
pub(crate) fn pages_of(
    extents: &[Extent],
    wanted: fn(u32) -> bool,
    disk_bytes: u64,
) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for extent in extents.iter().filter(|extent| wanted(extent.flags)) {
        let start = extent.bytes.start / PAGE_BYTES * PAGE_BYTES;
        let end = extent
            .bytes
            .end
            .next_multiple_of(PAGE_BYTES)
            .min(disk_bytes);
        match ranges.last_mut() {
            Some(last) if last.end >= start => last.end = end,
            _ => ranges.push(start..end),
        }
    }
    ranges
}

/// Pages gathered.
struct Batch<'t, E> {
    take: &'t mut dyn FnMut(&[Page<'_>]) -> Result<(), E>,
    /// Runs of pages: the number of the first, and where its bytes begin.
    runs: Vec<(u64, usize)>,
    bytes: Vec<u8>,
}

impl<'t, E> Batch<'t, E> {
    fn new(take: &'t mut dyn FnMut(&[Page<'_>]) -> Result<(), E>) -> Batch<'t, E> {
        Batch {
            take,
            runs: Vec::new(),
            bytes: Vec::with_capacity(BATCH_BYTES),
        }
    }

    /// Adds bytes that begin at a page.
    fn add(&mut self, offset: u64, bytes: &[u8]) -> Result<(), E> {
        if self.bytes.len() + bytes.len() > BATCH_BYTES {
            self.hand_over()?;
        }
        self.runs.push((offset / PAGE_BYTES, self.bytes.len()));
        self.bytes.extend_from_slice(bytes);
        // The end of the disk.
        self.bytes
            .resize(self.bytes.len().next_multiple_of(PAGE), 0);
        Ok(())
    }

    fn hand_over(&mut self) -> Result<(), E> {
        let ends = self.runs.iter().skip(1).map(|&(_, start)| start);
        let ends = ends.chain([self.bytes.len()]);
        let runs = self.runs.iter().zip(ends);
        let pages: Vec<Page<'_>> = runs
            .flat_map(|(&(first, start), end)| Page::consecutive(first, &self.bytes[start..end]))
            .collect();
        if !pages.is_empty() {
            (self.take)(&pages)?;
        }
        self.runs.clear();
        self.bytes.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A page is read if and only if it has a byte outside all ranges of zeros.
        #[test]
        fn pages_with_any_data_are_read(
            lengths in prop::collection::vec((1u64..20_000, 0u32..4), 0..20),
        ) {
            let mut at = 0;
            let mut extents = Vec::new();
            for (sectors, flags) in lengths {
                let end = at + sectors * 512;
                extents.push(Extent { bytes: at..end, flags });
                at = end;
            }
            let ranges = pages_of(&extents, |flags| flags & 2 == 0, at);
            prop_assert!(ranges.is_sorted_by(|one, next| one.end < next.start));
            for page in 0..at.div_ceil(PAGE_BYTES) {
                let bytes = page * PAGE_BYTES..at.min((page + 1) * PAGE_BYTES);
                let overlaps = |one: &Range<u64>| one.start < bytes.end && bytes.start < one.end;
                let expected = extents.iter().any(|extent| extent.flags & 2 == 0 && overlaps(&extent.bytes));
                let covered = ranges.iter().any(|range| range.start <= bytes.start && bytes.end <= range.end);
                prop_assert_eq!(covered, expected, "page {}", page);
                prop_assert_eq!(ranges.iter().any(overlaps), expected);
            }
        }
    }

    #[test]
    fn runs_of_pages_keep_their_numbers_and_the_last_is_filled_up() {
        let mut seen = Vec::new();
        let mut take = |pages: &[Page<'_>]| {
            seen.extend(
                pages
                    .iter()
                    .map(|page| (page.number, page.bytes[0], page.bytes[PAGE - 1])),
            );
            Ok::<(), ()>(())
        };
        let mut batch = Batch::new(&mut take);
        batch.add(3 * PAGE_BYTES, &[1; 2 * PAGE]).unwrap();
        batch.add(9 * PAGE_BYTES, &[2; 512]).unwrap();
        batch.hand_over().unwrap();
        batch.hand_over().unwrap();
        assert_eq!(seen, [(3, 1, 1), (4, 1, 1), (9, 2, 0)]);
    }
}
