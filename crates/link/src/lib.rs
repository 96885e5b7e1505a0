//! Connections between the engines of two hosts: authenticated, encrypted, framed. They know neither pages nor VMs.
//!
//! ```text
//!   connect ──> tcp ──> tls (or plain text) ──> preface ──> frames      listen ──> accept: the same
//! ```
//!
//! Both sides show a certificate of the same authority ([`identity`], made by [`authority`]); TLS 1.3 is the only
//! version. In the [`preface`] the two programs agree on a version of their protocol, and the receiving side says
//! whether it lets the other one in. Plain text needs the consent of both sides.

pub mod address;
pub mod authority;
mod connect;
mod frame;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod identity;
mod preface;
mod stream;

pub use address::Address;
pub use connect::{ConnectError, Link, Listener, Peer, Security, connect};
pub use frame::{Frame, FrameError, FrameKind, FrameStream};
pub use identity::{Identity, IdentityError};
pub use preface::Versions;
pub use stream::{Closer, Stream};
