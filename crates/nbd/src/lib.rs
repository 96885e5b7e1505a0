//! The network block device protocol (NBD): a client, to which QEMU shows the content of a disk and from which it takes
//! one, and a server, from which QEMU reads a disk.
//!
//! ```text
//!   Client::open ──> negotiation: structured replies, metadata contexts, the export
//!          extents ──> block status: which ranges are written, or hold data
//!          read    ──> several reads in flight, delivered in the order of the ranges
//!          writer  ──> several writes and ranges of zeros in flight, each confirmed
//!   Server::serve ──> one connection: negotiation, then several reads and block status at a time
//!   Hold          ──> one client, which waits for what it reads until it is let go
//! ```
//!
//! Of the protocol's ways the client has one: fixed newstyle negotiation, structured replies to reads, no TLS (the socket
//! is a unix socket of our own). The server also takes older clients, and is for reading only. What the peer sends is
//! checked: to the client a reply that is too long, in the wrong place or incomplete is an error; the server refuses a
//! request that is wrong, and closes a connection with a message that is none.
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
mod server;
#[cfg(test)]
mod tests;
mod wire;
mod writes;

pub use client::{Client, TakePiece};
pub use error::NbdError;
pub use ranges::Extent;
pub use server::{Ended, Export, Hold, Server};
pub use writes::Writer;
