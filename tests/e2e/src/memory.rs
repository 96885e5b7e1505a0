//! All guest memory of a QEMU, read through `/proc/PID/mem`: an oracle that shares no code with
//! Stillframe. The VM must be paused.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail};

use crate::qmp::Qmp;

/// Bytes of a guest page.
pub const PAGE_BYTES: usize = 4096;

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
    /// From the first to behind the last byte that differs.
    pub bytes: Range<usize>,
}

impl Difference {
    /// Whether a vCPU's clock is all that differs. KVM writes it anew, with the new host's time,
    /// when QEMU hands it the clock's address: while the device state is loaded.
    pub fn may_be_kvm_clock(&self) -> bool {
        self.bytes.len() <= KVM_CLOCK_BYTES
    }
}

/// The content of every RAM block, by name.
#[derive(Debug)]
pub struct Image {
    /// Name and bytes.
    pub blocks: Vec<(String, Vec<u8>)>,
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
            let (used, address) = (hex(used)?, hex(address)?);
            let mut bytes = vec![0; usize::try_from(used)?];
            memory
                .read_exact_at(&mut bytes, address)
                .with_context(|| format!("RAM block {name} at {address:#x}"))?;
            blocks.push((name.to_owned(), bytes));
        }
        if blocks.is_empty() {
            bail!("QEMU names no RAM block");
        }
        Ok(Image { blocks })
    }

    /// Pages in all.
    pub fn pages(&self) -> u64 {
        self.blocks
            .iter()
            .map(|(_, bytes)| (bytes.len() / PAGE_BYTES) as u64)
            .sum()
    }

    /// Pages that differ.
    pub fn differing(&self, other: &Image) -> Result<Vec<Difference>> {
        let mut differing = Vec::new();
        if self.blocks.len() != other.blocks.len() {
            bail!(
                "{} RAM blocks against {}",
                self.blocks.len(),
                other.blocks.len()
            );
        }
        for (name, mine) in &self.blocks {
            let Some((_, theirs)) = other.blocks.iter().find(|(other, _)| other == name) else {
                bail!("RAM block {name} is missing");
            };
            if mine.len() != theirs.len() {
                bail!(
                    "RAM block {name} has {} bytes against {}",
                    mine.len(),
                    theirs.len()
                );
            }
            for (page, (a, b)) in mine
                .chunks(PAGE_BYTES)
                .zip(theirs.chunks(PAGE_BYTES))
                .enumerate()
            {
                if let Some(bytes) = differing_bytes(a, b) {
                    let block = name.clone();
                    differing.push(Difference { block, page, bytes });
                }
            }
        }
        Ok(differing)
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
