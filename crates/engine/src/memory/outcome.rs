//! The capture outcome: the contents of captured pages.

use stillframe_page::bitmap::DirtyBitmap;

use crate::memory::BlockShape;

/// The content of a captured page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Only zero bytes.
    Zero,
    /// Content that the repository has already.
    Known,
    /// Content that it did not have.
    New,
}

/// The capture outcome of one block.
#[derive(Debug)]
pub struct Found {
    /// Only zero bytes.
    pub zero: DirtyBitmap,
    /// Anything else.
    pub content: DirtyBitmap,
    /// Content that the repository did not have.
    pub new: DirtyBitmap,
}

impl Found {
    /// The outcome of a block of which no page was captured yet.
    pub fn new(block: &BlockShape) -> Found {
        Found {
            zero: DirtyBitmap::new(block.pages),
            content: DirtyBitmap::new(block.pages),
            new: DirtyBitmap::new(block.pages),
        }
    }

    /// The last word counts: a page may come twice.
    pub fn note(&mut self, page: u64, content: Content) {
        let put = |set: &mut DirtyBitmap, belongs| match belongs {
            true => set.set(page),
            false => set.clear(page),
        };
        put(&mut self.zero, content == Content::Zero);
        put(&mut self.content, content != Content::Zero);
        put(&mut self.new, content == Content::New);
    }
}
