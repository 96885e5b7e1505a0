//! A client of the network block device protocol (NBD), over which QEMU shows the content of a disk
//! and takes it.
//!
//! ```text
//!   Client::open ──> negotiation: structured replies, metadata contexts, the export
//!          extents ──> block status: which ranges are written, or hold data
//!          read    ──> several reads in flight, delivered in the order of the ranges
//!          writer  ──> several writes and ranges of zeros in flight, each confirmed
//! ```
//!
//! Of the protocol's ways there is one: fixed newstyle negotiation, structured replies to reads, no TLS (the socket is a unix
//! socket of our own). What the server sends is checked: a reply that is too long, in the wrong place or incomplete is an
//! error.
//!
//! Format: the NBD protocol, `doc/proto.md` of the NetworkBlockDevice project.

mod client;
mod error;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod negotiation;
mod ranges;
mod reads;
#[cfg(test)]
mod tests;
mod wire;
mod writes;

pub use client::{Client, TakePiece};
pub use error::NbdError;
pub use ranges::Extent;
pub use writes::Writer;
