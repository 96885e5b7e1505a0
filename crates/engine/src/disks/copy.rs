//! Pages of a disk in memory.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use stillframe_sys::memfd::{Access, Memfd, MemfdError};

use crate::memory::ranges::{length, union};

/// What was copied of a disk.
#[derive(Debug)]
pub(super) struct DiskCopy {
    /// As long as the disk; what was not copied is a hole.
    file: File,
    /// What was copied, in bytes, in the order in which it was.
    ranges: Vec<Range<u64>>,
}

impl DiskCopy {
    /// Nothing of a disk of this length.
    ///
    /// # Errors
    /// The kernel makes no memory file.
    pub fn new(bytes: u64) -> Result<DiskCopy, MemfdError> {
        let memory = Memfd::sparse("stillframe-disk", bytes)?;
        Ok(DiskCopy {
            file: File::from(memory.reopen(Access::ReadWrite)?),
            ranges: Vec::new(),
        })
    }

    /// Adds a piece, which takes the place of what was copied there before.
    ///
    /// # Errors
    /// There is no memory.
    pub fn add(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)?;
        let end = offset + bytes.len() as u64;
        match self.ranges.last_mut() {
            Some(last) if last.end == offset => last.end = end,
            _ => self.ranges.push(offset..end),
        }
        Ok(())
    }

    /// How much was copied.
    pub fn bytes(&self) -> u64 {
        length(&union(self.ranges.clone()))
    }

    /// What was copied: ascending pieces of at most this number of bytes.
    pub fn pieces(&self, piece_bytes: u64) -> impl Iterator<Item = Range<u64>> {
        let ranges = union(self.ranges.clone()).into_iter();
        ranges.flat_map(move |range| {
            let starts = (range.start..range.end).step_by(piece_bytes as usize);
            starts.map(move |start| start..range.end.min(start + piece_bytes))
        })
    }

    /// Reads a piece.
    ///
    /// # Errors
    /// The memory file fails.
    pub fn read(&self, piece: Range<u64>, buffer: &mut Vec<u8>) -> io::Result<()> {
        buffer.resize((piece.end - piece.start) as usize, 0);
        self.file.read_exact_at(buffer, piece.start)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECTOR: u64 = 512;

    proptest! {
        /// Each sector is what was copied of it last, and there is nothing else.
        #[test]
        fn the_last_copy_of_each_sector_is_kept(
            writes in prop::collection::vec((0u64..60, 1u64..6, 1u8..), 0..30),
            piece_sectors in 1u64..9,
        ) {
            let mut copy = DiskCopy::new(64 << 10).unwrap();
            let mut expected = vec![0; 66];
            for (at, sectors, value) in writes {
                copy.add(at * SECTOR, &vec![value; (sectors * SECTOR) as usize]).unwrap();
                expected[at as usize..(at + sectors) as usize].fill(value);
            }
            let mut found = vec![0; 66];
            let (mut buffer, mut end) = (Vec::new(), 0);
            for piece in copy.pieces(piece_sectors * SECTOR) {
                prop_assert!(end <= piece.start && piece.end - piece.start <= piece_sectors * SECTOR);
                end = piece.end;
                copy.read(piece.clone(), &mut buffer).unwrap();
                for (sector, bytes) in buffer.chunks(SECTOR as usize).enumerate() {
                    prop_assert!(bytes.iter().all(|byte| *byte == bytes[0]));
                    found[piece.start as usize / SECTOR as usize + sector] = bytes[0];
                }
            }
            prop_assert_eq!(found, expected);
        }
    }
}
