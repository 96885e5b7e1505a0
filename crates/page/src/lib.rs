//! The kinds of a guest page, and sets of pages: page numbers, dirty bitmaps, content ids, the encoding of pages
//! for storage. Pure functions on bytes, no I/O.

pub mod bitmap;
pub mod delta;
pub mod difference;
pub mod encoding;
pub mod hash;
pub mod varint;
mod zero;

pub use zero::is_zero;

/// The number of a page inside one RAM block (0 = the block's first page).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageIndex(pub u64);
