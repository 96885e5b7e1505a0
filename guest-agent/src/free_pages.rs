//! Which page frames are free, one bit each, from the kernel's flags: eight bytes a page frame.
//!
//! Format: Linux `Documentation/admin-guide/mm/pagemap.rst` and `fs/proc/page.c`.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use thiserror::Error;

/// The kernel's file of flags.
const FLAGS: &str = "/proc/kpageflags";
/// Bytes of flags for a page frame.
const FLAGS_BYTES: usize = 8;
/// The flags of free memory: `KPF_BUDDY` alone.
const FREE: u64 = 1 << 10;
/// Page frames in a byte of the answer.
const BYTE_FRAMES: u64 = 8;
/// Upper bound on the page frames of an answer: 32 KiB of bits, which are 43 KiB of text.
const FRAMES_MAX: u64 = 256 << 10;
/// Bytes of flags that are read at once.
const READ_BYTES: usize = 64 << 10;

/// Why it is not known.
#[derive(Debug, Error)]
pub enum FreePagesError {
    /// The host wants something else.
    #[error(
        "{0:?} are no page frames of one answer: it has {FRAMES_MAX} at most, and begins and ends between bytes"
    )]
    Range(Range<u64>),
    /// The flags cannot be read.
    #[error("cannot read {FLAGS}: {0}; it takes root, and a kernel with CONFIG_PROC_PAGE_MONITOR")]
    Flags(#[from] io::Error),
}

/// Whether each of these page frames is free: bit 0 of byte 0 is the first. The answer is shorter where the machine has no
/// more of them.
pub fn free(first: u64, count: u64) -> Result<Vec<u8>, FreePagesError> {
    let range = first..first.saturating_add(count);
    let is_right = first.is_multiple_of(BYTE_FRAMES)
        && count.is_multiple_of(BYTE_FRAMES)
        && count <= FRAMES_MAX
        && range.end.checked_mul(FLAGS_BYTES as u64).is_some();
    if !is_right {
        return Err(FreePagesError::Range(range));
    }
    Ok(bits_of(&File::open(FLAGS)?, &range)?)
}

fn bits_of(flags: &impl FileExt, range: &Range<u64>) -> io::Result<Vec<u8>> {
    let mut bits = Vec::new();
    let mut buffer = vec![0; READ_BYTES];
    let (mut at, end) = (
        range.start * FLAGS_BYTES as u64,
        range.end * FLAGS_BYTES as u64,
    );
    while at < end {
        let wanted = READ_BYTES.min((end - at) as usize);
        let read = flags.read_at(&mut buffer[..wanted], at)?;
        // Whole bytes of the answer.
        let read = read - read % (FLAGS_BYTES * BYTE_FRAMES as usize);
        if read == 0 {
            break;
        }
        bits.extend(buffer[..read].chunks(FLAGS_BYTES * 8).map(byte));
        at += read as u64;
    }
    Ok(bits)
}

/// Eight page frames.
fn byte(flags: &[u8]) -> u8 {
    let each = flags.as_chunks().0.iter().enumerate();
    each.fold(0, |byte, (bit, flags)| {
        byte | u8::from(u64::from_le_bytes(*flags) == FREE) << bit
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_bit_is_a_page_frame() {
        let mut flags = [FREE; 24];
        (flags[0], flags[9], flags[15]) = (0, 1 << 12, FREE | 1);
        let mut file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = flags.iter().flat_map(|flags| flags.to_le_bytes()).collect();
        file.write_all(&bytes).unwrap();
        assert_eq!(bits_of(&file, &(0..24)).unwrap(), [0xfe, 0x7d, 0xff]);
        assert_eq!(bits_of(&file, &(8..16)).unwrap(), [0x7d]);
        // Behind the last one there is nothing.
        assert_eq!(bits_of(&file, &(16..64)).unwrap(), [0xff]);
        assert!(bits_of(&file, &(64..128)).unwrap().is_empty());
        // Nor in a byte that is not whole.
        file.set_len(17 * 8).unwrap();
        assert_eq!(bits_of(&file, &(0..24)).unwrap(), [0xfe, 0x7d]);
    }

    #[test]
    fn other_ranges_are_refused() {
        for (first, count) in [
            (1, 8),
            (0, 9),
            (0, FRAMES_MAX + 8),
            (u64::MAX - 7, 16),
            (1 << 61, 8),
        ] {
            let refused = free(first, count);
            assert!(
                matches!(refused, Err(FreePagesError::Range(_))),
                "{refused:?}"
            );
        }
    }
}
