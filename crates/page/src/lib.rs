//! Guest pages: their size and names, sets of them (dirty bitmaps), content ids, and the encoding of their contents
//! for storage. Pure functions on bytes, no I/O.

pub mod bitmap;
pub mod delta;
pub mod difference;
pub mod encoding;
pub mod hash;
pub mod varint;
mod zero;

pub use zero::is_zero;

/// The page size of every machine that Stillframe handles (x86-64), in bytes.
pub const PAGE_BYTES: u64 = 4096;
/// The same, for lengths in memory.
pub const PAGE: usize = PAGE_BYTES as usize;

/// One page of a VM's memory. Ordered by block, then by address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestPage {
    /// The index of its RAM block, in the VM's order of blocks.
    pub block: usize,
    /// Its number in the block; 0 is the first page.
    pub page: u64,
}

impl GuestPage {
    /// Page number `page` of RAM block `block`.
    pub const fn new(block: usize, page: u64) -> GuestPage {
        GuestPage { block, page }
    }
}
