//! A connection between two engines: pages and messages over one stream of frames.
//!
//! ```text
//!   sink/connection ───> batch ──┐                                    ┌── batch ──> populate/streamed
//!   migration/source ──> message ─┴─> frame ══ one byte stream ══ frame ┴─ message ──> migration/destination
//!                                                                     └── batch ──> source/connection
//! ```
//!
//! The frames are those of the crate `link`, which also makes the stream. [`framing`] has their kinds, [`message`] gives
//! each kind its meaning, [`batch`] is how pages are written down, [`image_pages`] how
//! those are whose content both hosts have, and [`compression`] chooses how they are compressed.

pub mod batch;
pub mod compression;
pub mod framing;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod image_pages;
pub mod message;
#[cfg(test)]
mod tests;
pub mod word;

use stillframe_link::FrameError;
use stillframe_page::encoding::EncodingError;
use thiserror::Error;

pub use framing::Connection;

/// Why a connection is of no more use.
#[derive(Debug, Error)]
pub enum ConnectionError {
    /// No more frames can be exchanged.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A message cannot be written as JSON.
    #[error("cannot write a message")]
    Message(#[source] serde_json::Error),
    /// A frame that no version of this program sends.
    #[error("the other side sent {what}: it is another version of Stillframe, or none")]
    Malformed {
        /// The malformed thing.
        what: String,
    },
    /// The other side has failed.
    #[error("the other side gave up: {why}")]
    GaveUp {
        /// Its own words.
        why: String,
    },
    /// Pages cannot be fetched now.
    #[error("there is no connection for pages to the source: {why}")]
    NoLane {
        /// What became of the last one.
        why: String,
    },
    /// QEMU's end of a connection for a disk failed.
    #[error("QEMU's end of a connection for a disk failed")]
    Socket(#[source] std::io::Error),
    /// A write of the guest waits for the other host.
    #[error("the other side has not answered a request for a disk for {seconds} s")]
    NoAnswer {
        /// For how long.
        seconds: u64,
    },
    /// A page cannot be encoded or decoded.
    #[error("cannot encode or decode a page")]
    Encoding(#[from] EncodingError),
}

/// The peer sent something that this side does not understand.
fn malformed(what: impl Into<String>) -> ConnectionError {
    ConnectionError::Malformed { what: what.into() }
}
