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

/// The order in which a page and its neighbours are handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadOrder {
    /// The requested page first, before any work for its neighbours: a thread waits for it.
    RequestedFirst,
    /// All pages in ascending order, adjacent ones in one call.
    Ascending,
}

/// A page to read, and other pages of its RAM block that may be read with it.
#[derive(Debug, Clone, Copy)]
pub struct PageRequest<'n> {
    /// The number of the page.
    pub page: u64,
    /// The numbers of the other pages, ascending.
    pub neighbours: &'n [u64],
    /// The order in which they are handed over.
    pub order: ReadOrder,
}
