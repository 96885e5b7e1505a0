//! What can go wrong between a client and a server.

use std::io;

/// Why a disk cannot be read, written or served over NBD.
#[derive(Debug, thiserror::Error)]
pub enum NbdError {
    /// The connection failed, or the peer was silent for too long.
    #[error("the NBD connection failed")]
    Io(#[from] io::Error),
    /// The peer speaks another protocol, or breaks this one.
    #[error("the NBD peer does not keep to the protocol: {what}")]
    Protocol {
        /// The fault.
        what: String,
    },
    /// The server refuses an option of the negotiation.
    #[error("the NBD server refuses {option}: {reason}")]
    Refused {
        /// The option.
        option: &'static str,
        /// The server's words.
        reason: String,
    },
    /// The export lacks a metadata context.
    #[error("the NBD export '{export}' has no '{context}'")]
    NoContext {
        /// The export.
        export: String,
        /// The metadata context.
        context: String,
    },
    /// The server failed a request.
    #[error("the NBD server cannot {action} {length} bytes at {offset}{}", .message.as_deref().map(|text| format!(" ({text})")).unwrap_or_default())]
    Request {
        /// `read`, `describe`, `write`, `write zeros to` or `flush`.
        action: &'static str,
        /// Where, in bytes.
        offset: u64,
        /// How many bytes.
        length: u64,
        /// The server's words.
        message: Option<String>,
        /// The server's error.
        #[source]
        source: io::Error,
    },
    /// It cannot be written.
    #[error("the NBD export is for reading only, or takes no ranges of zeros or no flush")]
    NotWritable,
    /// The caller wants bytes behind the end of the disk.
    #[error("bytes {offset} to {end} are not on a disk of {bytes} bytes")]
    Outside {
        /// The first.
        offset: u64,
        /// Behind the last.
        end: u64,
        /// The length of the disk.
        bytes: u64,
    },
}

impl NbdError {
    pub(crate) fn protocol(what: impl Into<String>) -> NbdError {
        NbdError::Protocol { what: what.into() }
    }
}
