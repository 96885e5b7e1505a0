//! All guest memory of a QEMU, read through `/proc/PID/mem`: an oracle that shares no code with
//! Stillframe. The VM must be paused.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::IoSliceMut;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use crate::qmp::Qmp;

/// Bytes of a guest page.
pub const PAGE_BYTES: usize = 4096;

const ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// Bytes of the clock that KVM writes into a guest's memory for each vCPU (`struct
/// pvclock_vcpu_time_info`, Linux arch/x86/include/asm/pvclock-abi.h).
const KVM_CLOCK_BYTES: usize = 32;

/// A page that is not the same in two images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Its RAM block.
    pub block: String,
    /// Its number there.
    pub page: usize,
    /// Range from the first to behind the last byte that differs.
    pub bytes: Range<usize>,
    /// How many bytes differ.
    pub count: usize,
}

impl Difference {
    /// Whether a vCPU's clock is all that differs. KVM writes it anew, with the new host's time,
    /// when QEMU hands it the clock's address: while the device state is loaded.
    pub fn may_be_kvm_clock(&self) -> bool {
        self.bytes.len() <= KVM_CLOCK_BYTES
    }
}

/// Read at once.
const CHUNK_BYTES: usize = 1 << 20;

/// The content of every RAM block.
#[derive(Debug)]
pub struct Image {
    blocks: Vec<Block>,
}

/// One RAM block. Pages of zeros are left out: a large guest's memory is nearly all zeros.
#[derive(Debug)]
struct Block {
    name: String,
    pages: usize,
    content: BTreeMap<usize, Box<[u8]>>,
}

impl Block {
    fn read(name: &str, memory: &File, address: u64, bytes: u64) -> Result<Block> {
        let pages = usize::try_from(bytes)? / PAGE_BYTES;
        let mut content = BTreeMap::new();
        let mut chunk = vec![0; CHUNK_BYTES];
        for first in (0..pages).step_by(CHUNK_BYTES / PAGE_BYTES) {
            let length = CHUNK_BYTES.min((pages - first) * PAGE_BYTES);
            let chunk = &mut chunk[..length];
            let at = address + (first * PAGE_BYTES) as u64;
            memory
                .read_exact_at(chunk, at)
                .with_context(|| format!("RAM block {name} at {at:#x}"))?;
            for (page, bytes) in (first..).zip(chunk.chunks_exact(PAGE_BYTES)) {
                if bytes != ZEROS {
                    content.insert(page, bytes.into());
                }
            }
        }
        Ok(Block {
            name: name.to_owned(),
            pages,
            content,
        })
    }

    fn page(&self, page: usize) -> &[u8] {
        self.content.get(&page).map_or(&ZEROS, |bytes| bytes)
    }
}

impl Image {
    /// Reads everything.
    pub fn take(pid: i32, qmp: &mut Qmp) -> Result<Image> {
        let memory = File::open(format!("/proc/{pid}/mem"))?;
        let mut blocks = Vec::new();
        for line in qmp.human("info ramblock")?.lines().skip(1) {
            let words: Vec<&str> = line.split_whitespace().collect();
            // name, page size and its unit, offset, used, total, host address, ro|rw
            let [name, _, _, _, used, _, address, ..] = words[..] else {
                bail!("cannot read this line of `info ramblock`: {line}");
            };
            blocks.push(Block::read(name, &memory, hex(address)?, hex(used)?)?);
        }
        if blocks.is_empty() {
            bail!("QEMU names no RAM block");
        }
        // QEMU promises no order.
        blocks.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(Image { blocks })
    }

    /// Pages in all.
    pub fn pages(&self) -> u64 {
        self.blocks.iter().map(|block| block.pages as u64).sum()
    }

    /// Pages of zeros.
    pub fn zero_pages(&self) -> u64 {
        let blocks = self.blocks.iter();
        blocks
            .map(|block| (block.pages - block.content.len()) as u64)
            .sum()
    }

    /// A page of a RAM block; none where there is no such page.
    pub fn page(&self, block: &str, page: usize) -> Option<&[u8]> {
        let block = self.blocks.iter().find(|other| other.name == block)?;
        (page < block.pages).then(|| block.page(page))
    }

    /// The largest RAM block: its name and its pages.
    pub fn largest(&self) -> Result<(&str, usize)> {
        let largest = self.blocks.iter().max_by_key(|block| block.pages);
        let largest = largest.context("an image without blocks")?;
        Ok((&largest.name, largest.pages))
    }

    /// Pages that differ.
    pub fn differing(&self, other: &Image) -> Result<Vec<Difference>> {
        let shape = |image: &Image| -> Vec<(String, usize)> {
            let blocks = image.blocks.iter();
            blocks
                .map(|block| (block.name.clone(), block.pages))
                .collect()
        };
        let (mine, theirs) = (shape(self), shape(other));
        if mine != theirs {
            bail!("other RAM blocks: {mine:?} against {theirs:?}");
        }
        let mut differing = Vec::new();
        for (mine, theirs) in self.blocks.iter().zip(&other.blocks) {
            let pages: BTreeSet<usize> = mine
                .content
                .keys()
                .chain(theirs.content.keys())
                .copied()
                .collect();
            for page in pages {
                let (a, b) = (mine.page(page), theirs.page(page));
                if let Some(bytes) = differing_bytes(a, b) {
                    differing.push(Difference {
                        block: mine.name.clone(),
                        page,
                        bytes,
                        count: a.iter().zip(b).filter(|(a, b)| a != b).count(),
                    });
                }
            }
        }
        Ok(differing)
    }
}

/// Where a process has its one mapping of exactly this many bytes: a QEMU's RAM, whose monitor is not available.
pub fn mapping_of(pid: i32, bytes: usize) -> Result<usize> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let mut found = Vec::new();
    for line in maps.lines() {
        let range = line.split_whitespace().next().unwrap_or_default();
        let (start, end) = range.split_once('-').context("a mapping without range")?;
        let (start, end) = (hex(start)? as usize, hex(end)? as usize);
        if end - start == bytes {
            found.push(start);
        }
    }
    match found[..] {
        [start] => Ok(start),
        _ => bail!("{} mappings have {bytes} bytes", found.len()),
    }
}

/// Reads a page of another process as that process would. Where it is missing, and a fault handler is to fill it,
/// this waits until it is there. (Reading `/proc/PID/mem` does not.)
pub fn ask_for(pid: i32, address: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; PAGE_BYTES];
    let from = RemoteIoVec {
        base: address,
        len: PAGE_BYTES,
    };
    let read = process_vm_readv(
        Pid::from_raw(pid),
        &mut [IoSliceMut::new(&mut bytes)],
        &[from],
    )?;
    match read {
        PAGE_BYTES => Ok(bytes),
        read => bail!("{read} bytes of a page at {address:#x}"),
    }
}

fn differing_bytes(a: &[u8], b: &[u8]) -> Option<Range<usize>> {
    // Slices are compared much faster than bytes one by one, and nearly all are the same.
    if a == b {
        return None;
    }
    let differs = |at: &usize| a[*at] != b[*at];
    let first = (0..a.len()).find(differs)?;
    let last = (0..a.len()).rfind(differs)?;
    Some(first..last + 1)
}

fn hex(word: &str) -> Result<u64> {
    u64::from_str_radix(word.trim_start_matches("0x"), 16).with_context(|| word.to_owned())
}
