//! Guest memory, seen from outside: RAM blocks, ranges of pages, and the capture outcome.

pub mod block;
pub mod outcome;
pub mod page_buffer;
pub mod ranges;
pub mod shared_data;

pub use block::Block;

use serde::{Deserialize, Serialize};

use stillframe_page::PAGE;

/// The content of one page of a block.
#[derive(Debug, Clone, Copy)]
pub struct Page<'a> {
    /// Its number in the block.
    pub number: u64,
    /// Its bytes.
    pub bytes: &'a [u8; PAGE],
}

impl<'a> Page<'a> {
    /// The pages from number `first` on, whose contents lie one after the other. Bytes behind the last whole page
    /// are none.
    pub fn consecutive(first: u64, bytes: &'a [u8]) -> impl Iterator<Item = Page<'a>> {
        let contents = bytes.as_chunks().0.iter();
        (first..)
            .zip(contents)
            .map(|(number, bytes)| Page { number, bytes })
    }
}

/// The properties of a block that are known without reading it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockShape {
    /// Its name.
    pub name: String,
    /// Its length in pages.
    pub pages: u64,
}
