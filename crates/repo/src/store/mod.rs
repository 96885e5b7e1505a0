//! Where the files of a repository lie: a local directory, its locks, and the limit on its writes.

pub(crate) mod local;
pub mod lock;
pub(crate) mod rate_limiter;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::error::RepoError;

/// Reads exactly, telling a file that is too short from one that cannot be read.
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
