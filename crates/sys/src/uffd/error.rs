//! Refusals of a userfaultfd, and their reasons.

use crate::process::AddressRange;
use std::io;

/// Why a userfaultfd could not be used.
#[derive(Debug, thiserror::Error)]
pub enum UffdError {
    /// The kernel lacks features.
    #[error("this kernel's userfaultfd lacks {names}: Linux {version} or newer is needed")]
    MissingFeatures {
        /// Their names, without `UFFD_FEATURE_`.
        names: String,
        /// The kernel version that has them all.
        version: &'static str,
    },
    /// The descriptor is no fresh userfaultfd.
    #[error("the handshake with the userfaultfd failed")]
    Handshake(#[source] io::Error),
    /// Another userfaultfd watches the range.
    #[error(
        "{range} is watched by another userfaultfd: a post-copy migration, a background snapshot \
         or another engine holds it"
    )]
    Busy {
        /// The range.
        range: AddressRange,
    },
    /// This kind of memory cannot be watched.
    #[error("{range} cannot be watched: it is not memory of a kind that userfaultfd supports")]
    Unsupported {
        /// The range.
        range: AddressRange,
        /// The kernel's error.
        source: io::Error,
    },
    /// The range is not registered, or not mapped any more.
    #[error("{range} is not registered with this userfaultfd, or no longer mapped")]
    NotRegistered {
        /// The range.
        range: AddressRange,
    },
    /// The process has ended.
    #[error("the process that the userfaultfd belongs to has ended")]
    Gone,
    /// A page to be filled is there already.
    #[error("a page in {range} exists already")]
    Exists {
        /// From the page that exists up to the end of the requested range.
        range: AddressRange,
    },
    /// An event other than a page fault was reported, though no other was requested.
    #[error("the userfaultfd reports an event of unknown kind {code:#x}")]
    UnknownEvent {
        /// `uffd_msg.event`.
        code: u8,
    },
    /// Events could not be read.
    #[error("cannot read the events of the userfaultfd")]
    Events(#[source] io::Error),
    /// Anything else the kernel said.
    #[error("cannot {action} {range}")]
    Io {
        /// The action that failed.
        action: &'static str,
        /// Where.
        range: AddressRange,
        /// The kernel's error.
        source: io::Error,
    },
}

impl UffdError {
    /// The meaning of an errno of a UFFDIO ioctl on a range.
    pub(super) fn of(action: &'static str, range: AddressRange, source: io::Error) -> UffdError {
        match source.raw_os_error() {
            Some(libc::EBUSY) => UffdError::Busy { range },
            Some(libc::EEXIST) => UffdError::Exists { range },
            Some(libc::ENOENT) => UffdError::NotRegistered { range },
            Some(libc::ESRCH) => UffdError::Gone,
            // Registering is answered with ENOMEM when the address space is gone.
            Some(libc::ENOMEM) if action == "register" => UffdError::Gone,
            Some(libc::EINVAL | libc::EPERM) => UffdError::Unsupported { range, source },
            _ => UffdError::Io {
                action,
                range,
                source,
            },
        }
    }
}
