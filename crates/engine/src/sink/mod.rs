//! Where captured pages go, encoded: the one seam behind capture.
//!
//! ```text
//!   guest memory ──> PageStream (encode, count) ──batches──> PageSink: a repository | a connection
//! ```
//!
//! Batches hold ascending pages of one block. The end of a stream of pages is not in the trait: the manifest of a
//! checkpoint and the hand-over of a VM have nothing in common.

pub mod connection;
pub mod page_stream;
pub mod repository;

use stillframe_page::delta::EncodedDelta;
use stillframe_page::encoding::EncodingError;
use stillframe_page::hash::{ContentHasher, ContentId};

use crate::encoding::page_encoder::PageEncoding;
use crate::memory::Page;
use crate::memory::outcome::Content;

/// Ascending pages of one block, each with its encoding.
#[derive(Debug)]
pub struct EncodedBatch<'b> {
    /// The number of the block.
    pub block: usize,
    /// The pages.
    pub pages: &'b [Page<'b>],
    /// One for each page.
    pub encodings: &'b [PageEncoding],
    /// The id of each page that is stored whole, in their order, if the sink has a hasher.
    pub ids: &'b [ContentId],
    /// The changes of those that are deltas, in the order of the pages.
    pub deltas: Vec<EncodedDelta>,
}

/// Takes encoded pages. A page may come again; its last version counts.
pub trait PageSink {
    /// Why it cannot.
    type Error: From<EncodingError>;

    /// Makes the ids of page contents, if the sink needs any.
    fn hasher(&self) -> Option<&ContentHasher>;

    /// Takes a batch; returns the capture outcome of each page.
    ///
    /// # Errors
    /// The stream is worthless then.
    fn put(&mut self, batch: EncodedBatch<'_>) -> Result<Vec<Content>, Self::Error>;
}
