//! One RAM block of QEMU: where its pages lie, how they are read and written from outside.
//!
//! | kind | read | an untouched page |
//! | --- | --- | --- |
//! | shared (memfd, file) | through a mapping of our own | is a hole of the file, and zero |
//! | private, anonymous | `process_vm_readv` | is not populated, and zero |
//! | private mapping of a file | `process_vm_readv` | has the file's content |
//!
//! Small blocks (VGA memory, firmware, ACPI tables) are anonymous even where main RAM is shared.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, fallocate};
use stillframe_page::PAGE_BYTES;
use stillframe_qemu::monitor::RamBlock;
use stillframe_sys::memory::{self, MemoryError, RemoteMemory, SharedMapping};
use stillframe_sys::process::{AddressRange, Mapping, Process, ProcessError};
use thiserror::Error;

use crate::memory::ranges::length;

/// Why a RAM block cannot be reached.
#[derive(Debug, Error)]
pub enum BlockError {
    /// QEMU names memory that is not mapped.
    #[error("RAM block {block} lies at {address:#x} by QEMU's account, where nothing is mapped")]
    NotMapped {
        /// The block's name.
        block: String,
        /// The first address without a mapping.
        address: u64,
    },
    /// A page size or length that is not a multiple of 4 KiB.
    #[error("RAM block {block} has {bytes} bytes, which is no whole number of 4 KiB pages")]
    Odd {
        /// The block's name.
        block: String,
        /// Its length.
        bytes: u64,
    },
    /// A shared block made of several files.
    #[error(
        "RAM block {block} is mapped from several files or offsets; give the VM one memory backend per block"
    )]
    Scattered {
        /// The block's name.
        block: String,
    },
    /// Reading QEMU's mappings failed.
    #[error("cannot see the memory of QEMU")]
    Process(#[from] ProcessError),
    /// Reading or writing the file behind a shared block failed.
    #[error("cannot read or write the file behind RAM block {block}")]
    File {
        /// The block's name.
        block: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Reading or writing failed.
    #[error("cannot reach RAM block {block}")]
    Memory {
        /// The block's name.
        block: String,
        /// Why.
        #[source]
        source: MemoryError,
    },
}

/// Whether the guest, and QEMU's main loop with it, runs while its pages are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guest {
    /// It may write and discard any page.
    Running,
    /// Nothing of it changes.
    Stopped,
}

#[derive(Debug)]
enum Backing {
    Shared {
        file: File,
        file_offset: u64,
        mapping: SharedMapping,
    },
    PrivateAnonymous(RemoteMemory),
    PrivateFile(RemoteMemory),
}

/// A RAM block that can be read (and, opened so, written) from outside.
#[derive(Debug)]
pub struct Block {
    name: String,
    address: u64,
    pages: u64,
    backing: Backing,
}

impl Block {
    /// Finds the memory of `ram` in `process`. `writable` is for restore.
    pub fn open(
        process: &Process,
        mappings: &[Mapping],
        ram: &RamBlock,
        writable: bool,
    ) -> Result<Block, BlockError> {
        let name = ram.name.clone();
        if ram.used_bytes == 0 || !ram.used_bytes.is_multiple_of(PAGE_BYTES) {
            return Err(BlockError::Odd {
                block: name,
                bytes: ram.used_bytes,
            });
        }
        let range = AddressRange {
            start: ram.address,
            end: ram.address + ram.used_bytes,
        };
        let parts = covering(mappings, range).map_err(|address| BlockError::NotMapped {
            block: name.clone(),
            address,
        })?;
        let first = parts[0];
        let backing = if parts.iter().any(|part| part.shared) {
            if !one_file(&parts) {
                return Err(BlockError::Scattered { block: name });
            }
            let file = process.open_mapping(first, writable)?;
            let file_offset = first.file_offset + (range.start - first.range.start);
            let mapping = SharedMapping::map(&file, file_offset, ram.used_bytes, writable)
                .map_err(|source| BlockError::Memory {
                    block: name.clone(),
                    source,
                })?;
            Backing::Shared {
                file,
                file_offset,
                mapping,
            }
        } else if parts.iter().all(|part| part.inode == 0) {
            Backing::PrivateAnonymous(RemoteMemory::open(process))
        } else {
            Backing::PrivateFile(RemoteMemory::open(process))
        };
        Ok(Block {
            name,
            address: ram.address,
            pages: ram.used_bytes / PAGE_BYTES,
            backing,
        })
    }

    /// The block's name, such as `pc.ram`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its length in pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// All its pages, as a list of one range.
    pub fn whole(&self) -> Vec<Range<u64>> {
        std::iter::once(0..self.pages).collect()
    }

    /// Where it lies in QEMU's address space.
    pub fn range(&self) -> AddressRange {
        AddressRange {
            start: self.address,
            end: self.address + self.pages * PAGE_BYTES,
        }
    }

    /// Whether its memory is a file's, shared with other processes that map it.
    pub fn is_shared(&self) -> bool {
        matches!(self.backing, Backing::Shared { .. })
    }

    /// Whether never touched pages are certainly zero, so that they need no reading.
    pub fn absent_is_zero(&self) -> bool {
        !matches!(self.backing, Backing::PrivateFile(_))
    }

    /// For a shared block: the pages that the file holds data for; all others are zero now. A page
    /// discarded by the guest (balloon) shows up here and nowhere else: the kernel does not report
    /// it as written. `None` for private blocks, whose discards are reported.
    ///
    /// The kernel looks at each page of the file: [`super::shared_data`] does without most of them.
    pub fn data_pages(&self) -> Result<Option<Vec<Range<u64>>>, BlockError> {
        self.data_pages_among(&(0..self.pages))
    }

    /// The same among these pages only.
    pub fn data_pages_among(
        &self,
        pages: &Range<u64>,
    ) -> Result<Option<Vec<Range<u64>>>, BlockError> {
        let Backing::Shared {
            file, file_offset, ..
        } = &self.backing
        else {
            return Ok(None);
        };
        let start = file_offset + pages.start * PAGE_BYTES;
        let extents = memory::data_extents(file, start, (pages.end - pages.start) * PAGE_BYTES)
            .map_err(|source| self.memory_error(source))?;
        Ok(Some(
            extents
                .iter()
                .map(|bytes| Range {
                    start: pages.start + bytes.start / PAGE_BYTES,
                    end: pages.start + bytes.end.div_ceil(PAGE_BYTES),
                })
                .collect(),
        ))
    }

    /// For a shared block that is the whole of a file in memory: how many pages the file has. `None` where this cannot
    /// be said of the block alone.
    pub fn allocated_pages(&self) -> Result<Option<u64>, BlockError> {
        let Backing::Shared {
            file, file_offset, ..
        } = &self.backing
        else {
            return Ok(None);
        };
        let status = file.metadata().map_err(|source| self.file_error(source))?;
        if *file_offset != 0 || status.len() != self.pages * PAGE_BYTES {
            return Ok(None);
        }
        let bytes = memory::allocated_bytes(file).map_err(|source| self.memory_error(source))?;
        Ok(bytes.map(|bytes| bytes / PAGE_BYTES))
    }

    /// Whether none of these pages is a hole of a shared file; true for private blocks.
    pub fn has_data(&self, pages: &[Range<u64>]) -> Result<bool, BlockError> {
        for range in pages {
            let data = self.data_pages_among(range)?;
            if data.is_some_and(|data| length(&data) < range.end - range.start) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Copies pages out. `into[i]` receives the pages `from[i]`; lengths must agree.
    ///
    /// A page of a shared file may be discarded while it is read through our mapping. It then comes out half with
    /// its old content, and the read fills its hole, so that nothing shows the discard any more. read(2) does
    /// neither, but is slower: so it is used while a guest runs.
    pub fn read(
        &self,
        guest: Guest,
        into: &mut [&mut [u8]],
        from: &[Range<u64>],
    ) -> Result<(), BlockError> {
        match &self.backing {
            Backing::PrivateAnonymous(remote) | Backing::PrivateFile(remote) => {
                let from: Vec<AddressRange> =
                    from.iter().map(|pages| self.addresses(pages)).collect();
                remote
                    .read_vectored(into, &from)
                    .map_err(|source| self.memory_error(source))
            }
            Backing::Shared {
                file,
                file_offset,
                mapping,
            } => {
                for (into, pages) in into.iter_mut().zip(from) {
                    let start = pages.start * PAGE_BYTES;
                    match guest {
                        Guest::Running => self.read_file(file, file_offset + start, into)?,
                        Guest::Stopped => mapping
                            .read(start, into)
                            .map_err(|source| self.memory_error(source))?,
                    }
                }
                Ok(())
            }
        }
    }

    /// Copies pages out by the slow way that shares nothing with [`Block::read`]'s fast one: the
    /// oracle of `--verify`. It also leaves holes of a shared file as holes.
    pub fn read_slowly(&self, page: u64, into: &mut [u8]) -> Result<(), BlockError> {
        match &self.backing {
            Backing::PrivateAnonymous(remote) | Backing::PrivateFile(remote) => remote
                .read(self.address + page * PAGE_BYTES, into)
                .map_err(|source| self.memory_error(source)),
            Backing::Shared {
                file, file_offset, ..
            } => self.read_file(file, file_offset + page * PAGE_BYTES, into),
        }
    }

    fn read_file(&self, file: &File, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
        let read = file.read_exact_at(into, offset);
        read.map_err(|source| self.file_error(source))
    }

    /// Writes consecutive pages, starting at `page`.
    pub fn write(&self, page: u64, from: &[u8]) -> Result<(), BlockError> {
        let pages = page..page + from.len() as u64 / PAGE_BYTES;
        self.write_vectored(&[from], &[pages])
    }

    /// Writes pages. `to[i]` receives the pages `from[i]`; lengths must agree.
    ///
    /// Pages of a shared file are written with write(2): a page that is not there yet costs half as much as by a fault of
    /// our mapping, and a file system that is full is an error, not SIGBUS.
    pub fn write_vectored(&self, from: &[&[u8]], to: &[Range<u64>]) -> Result<(), BlockError> {
        match &self.backing {
            Backing::PrivateAnonymous(remote) | Backing::PrivateFile(remote) => {
                let to: Vec<AddressRange> = to.iter().map(|pages| self.addresses(pages)).collect();
                let written = remote.write_vectored(from, &to);
                written.map_err(|source| self.memory_error(source))
            }
            Backing::Shared {
                file,
                file_offset,
                mapping,
            } => {
                let mut both = from.iter().zip(to);
                both.try_for_each(|(from, pages)| {
                    let start = pages.start * PAGE_BYTES;
                    match file.write_all_at(from, file_offset + start) {
                        // hugetlbfs has no write(2) (kernel, Documentation/admin-guide/mm/hugetlbpage.rst).
                        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                            let written = mapping.write(start, from);
                            written.map_err(|source| self.memory_error(source))
                        }
                        written => written.map_err(|source| self.file_error(source)),
                    }
                })
            }
        }
    }

    /// For a shared block: makes holes of these pages. They are missing then, in all processes.
    ///
    /// # Errors
    /// The file system has no holes, or the file was opened to be read only.
    pub fn punch(&self, pages: &Range<u64>) -> Result<(), BlockError> {
        let Backing::Shared {
            file, file_offset, ..
        } = &self.backing
        else {
            return Ok(());
        };
        let start = file_offset + pages.start * PAGE_BYTES;
        let bytes = (pages.end - pages.start) * PAGE_BYTES;
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(file, hole, start, bytes).map_err(|errno| self.file_error(errno.into()))
    }

    /// Where pages lie in QEMU's address space.
    pub fn addresses(&self, pages: &Range<u64>) -> AddressRange {
        AddressRange {
            start: self.address + pages.start * PAGE_BYTES,
            end: self.address + pages.end * PAGE_BYTES,
        }
    }

    fn file_error(&self, source: io::Error) -> BlockError {
        BlockError::File {
            block: self.name.clone(),
            source,
        }
    }

    fn memory_error(&self, source: MemoryError) -> BlockError {
        BlockError::Memory {
            block: self.name.clone(),
            source,
        }
    }
}

/// The mappings that together cover `range` without a gap, or the first uncovered address.
fn covering(mappings: &[Mapping], range: AddressRange) -> Result<Vec<&Mapping>, u64> {
    let mut next = range.start;
    let mut parts = Vec::new();
    for mapping in mappings {
        if mapping.range.start <= next && next < mapping.range.end {
            parts.push(mapping);
            next = mapping.range.end;
        }
        if next >= range.end {
            return Ok(parts);
        }
    }
    Err(next)
}

fn one_file(parts: &[&Mapping]) -> bool {
    parts.windows(2).all(|pair| {
        let (a, b) = (pair[0], pair[1]);
        a.shared == b.shared
            && a.device == b.device
            && a.inode == b.inode
            && a.file_offset + (a.range.end - a.range.start) == b.file_offset
    })
}

#[cfg(test)]
mod tests {
    use stillframe_page::PAGE;

    use super::*;
    use crate::fakes::FakeMemory;

    /// Only a hole shows a discard.
    #[test]
    fn reading_the_memory_of_a_running_guest_fills_no_hole() {
        let memory = FakeMemory::new("block", &[1; 4]);
        memory.discard(1);
        let block = memory.block();
        let all = block.whole();
        let read = |guest| {
            let mut bytes = vec![7; 4 * PAGE];
            block.read(guest, &mut [&mut bytes], &all).unwrap();
            let pages = bytes.chunks(PAGE).map(|page| page[0]);
            (pages.collect::<Vec<u8>>(), block.has_data(&all).unwrap())
        };
        assert_eq!(read(Guest::Running), (vec![1, 0, 1, 1], false));
        // The other way reads the same, and why it is not for a guest that runs.
        assert_eq!(read(Guest::Stopped), (vec![1, 0, 1, 1], true));
    }
}
