//! A connection between two engines: one stream of frames in the simplest form, between processes of one host.
//!
//! ```text
//!   sink/connection ───> batch ──┐                                    ┌── batch ──> populate/streamed
//!   transfer/sender ──> message ─┴─> frame ══ one byte stream ══ frame ┴─ message ──> transfer/receiver
//!                                                                     └── batch ──> source/connection
//! ```
//!
//! [`frame`] knows neither pages nor VMs: length, kind, check. [`message`] gives each kind its meaning, and [`batch`]
//! is how pages are written down. Nothing here is encrypted: the stream has to be private by other means.

pub mod batch;
pub mod frame;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod message;
#[cfg(test)]
mod tests;

use std::io;

use stillframe_page::encoding::EncodingError;
use thiserror::Error;

pub use frame::Connection;

/// Why a connection is of no more use.
#[derive(Debug, Error)]
pub enum ConnectionError {
    /// The stream failed.
    #[error("the connection failed while {doing}")]
    Io {
        /// The action that failed.
        doing: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// It has ended.
    #[error("the other side has closed the connection; its own output says why")]
    Closed,
    /// Nothing came, or nothing was taken.
    #[error("the other side has not answered in time: it hangs, or its machine is overloaded")]
    Silent,
    /// A frame is not the one that was sent.
    #[error("a frame of the connection is damaged: {what}")]
    Damaged {
        /// The thing that does not fit.
        what: &'static str,
    },
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
    /// A page cannot be encoded or decoded.
    #[error("cannot encode or decode a page")]
    Encoding(#[from] EncodingError),
}

/// The peer sent something that this side does not understand.
fn malformed(what: impl Into<String>) -> ConnectionError {
    ConnectionError::Malformed { what: what.into() }
}
