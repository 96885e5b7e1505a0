//! Guest memory, seen from outside: RAM blocks, ranges of pages, and the capture outcome.

pub mod block;
pub mod outcome;
pub mod ranges;

pub use block::Block;

use serde::{Deserialize, Serialize};

use block::PAGE;

/// One page on its way: its number in the block, and its bytes.
pub type Page<'a> = (u64, &'a [u8; PAGE]);

/// The properties of a block that are known without reading it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockShape {
    /// Its name.
    pub name: String,
    /// Its length in pages.
    pub pages: u64,
}
