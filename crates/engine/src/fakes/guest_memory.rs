//! A RAM block in the memory of this process.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use stillframe_page::PAGE_BYTES;
use stillframe_qemu::monitor::RamBlock;
use stillframe_sys::memory::SharedMapping;
use stillframe_sys::process::{Mapping, Process};

use super::pages;
use crate::memory::block::Block;

/// Shared memory, as QEMU has with `memory-backend-memfd`.
pub(crate) struct FakeMemory {
    file: File,
    mapping: SharedMapping,
    /// What QEMU would say about it.
    pub(crate) ram: RamBlock,
}

impl FakeMemory {
    /// One page for each of these bytes, full of it. Pages of zeros are holes.
    pub(crate) fn new(name: &str, fillings: &[u8]) -> FakeMemory {
        let bytes = fillings.len() as u64 * PAGE_BYTES;
        let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, bytes).unwrap();
        let mapping = SharedMapping::map(&file, 0, bytes, true).unwrap();
        let inode = file.metadata().unwrap().ino();
        let of_file = |mapping: &&Mapping| mapping.shared && mapping.inode == inode;
        let mappings = this_process().mappings().unwrap();
        let address = mappings.iter().find(of_file).unwrap().range.start;
        let memory = FakeMemory {
            file,
            mapping,
            ram: RamBlock {
                name: name.to_owned(),
                page_bytes: PAGE_BYTES,
                offset: 0,
                used_bytes: bytes,
                total_bytes: bytes,
                address,
            },
        };
        for (page, &filling) in (0..).zip(fillings).filter(|&(_, &filling)| filling != 0) {
            memory.write(page, filling);
        }
        memory
    }

    /// The block, as the engine opens it.
    pub(crate) fn block(&self) -> Block {
        let process = this_process();
        let mappings = process.mappings().unwrap();
        Block::open(&process, &mappings, &self.ram, true).unwrap()
    }

    /// The guest fills a page.
    pub(crate) fn write(&self, page: u64, filling: u8) {
        let bytes = pages(&[filling]);
        self.mapping.write(page * PAGE_BYTES, &bytes).unwrap();
    }

    /// The guest changes one byte of a page.
    pub(crate) fn change(&self, page: u64, offset: u64, byte: u8) {
        self.mapping
            .write(page * PAGE_BYTES + offset, &[byte])
            .unwrap();
    }

    /// The guest gives a page back.
    pub(crate) fn discard(&self, page: u64) {
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, punch, page * PAGE_BYTES, PAGE_BYTES).unwrap();
    }

    /// All of its pages are allocated, and those that were holes stay so for all who ask.
    pub(crate) fn reserve(&self) {
        let all = self.ram.used_bytes;
        fallocate(&self.file, FallocateFlags::empty(), 0, all).unwrap();
    }

    /// All of it.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.ram.used_bytes as usize];
        self.block().read_slowly(0, &mut bytes).unwrap();
        bytes
    }
}

/// The process that stands for QEMU's.
pub(crate) fn this_process() -> Process {
    Process::open(std::process::id().cast_signed()).unwrap()
}
