//! The storage of a repository: a local directory, its locks, and the rate limit of writes.

pub(crate) mod local;
pub mod lock;
pub(crate) mod rate_limiter;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::error::RepoError;

/// Fills `into` from `offset` on. A file that is too short is damaged; any other failure is an I/O error.
pub(crate) fn read_exact_at(
    file: &File,
    into: &mut [u8],
    offset: u64,
    label: &str,
) -> Result<(), RepoError> {
    file.read_exact_at(into, offset)
        .map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => RepoError::Damaged {
                file: label.into(),
                what: "it is too short".into(),
            },
            _ => RepoError::io("read", label.as_ref(), error),
        })
}
