//! The file of an image.

use std::fmt;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use jiff::Timestamp;
use rustix::fs::OFlags;

use crate::error::RepoError;
use crate::format::image_record::ImageRecord;

/// How an image compares with what was indexed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageState {
    /// It is there, and has the length and the time of change that it had.
    Intact,
    /// It is there, but not as it was.
    Changed,
    /// It cannot be examined, for this reason.
    Missing(String),
}

impl fmt::Display for ImageState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ImageState::Intact => f.write_str("as it was indexed"),
            ImageState::Changed => f.write_str("changed since it was indexed"),
            ImageState::Missing(why) => write!(f, "missing: {why}"),
        }
    }
}

/// Compares an image with its record.
pub(crate) fn state_of(record: &ImageRecord) -> ImageState {
    match Path::new(&record.path).metadata() {
        Err(error) => ImageState::Missing(error.to_string()),
        Ok(data) if !data.is_file() => ImageState::Changed,
        Ok(data) => {
            let same = data.len() == record.bytes && modified(&data) == Some(record.modified);
            match same {
                true => ImageState::Intact,
                false => ImageState::Changed,
            }
        }
    }
}

/// When a file was last changed.
pub(crate) fn modified(data: &Metadata) -> Option<Timestamp> {
    Timestamp::try_from(data.modified().ok()?).ok()
}

/// An image that is open.
pub(crate) struct OpenImage {
    pub(crate) record: ImageRecord,
    file: File,
}

impl OpenImage {
    pub(crate) fn open(record: ImageRecord) -> Result<OpenImage, RepoError> {
        match open_regular(Path::new(&record.path)) {
            Ok(file) => Ok(OpenImage { record, file }),
            Err(error) => Err(unusable(&record.path, &error.to_string())),
        }
    }

    /// Fills `into` from `offset` on.
    pub(crate) fn read(&self, into: &mut [u8], offset: u64) -> Result<(), RepoError> {
        self.file
            .read_exact_at(into, offset)
            .map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => self.unusable("it is too short"),
                _ => self.unusable(&error.to_string()),
            })
    }

    /// The error that this image cannot be used.
    pub(crate) fn unusable(&self, what: &str) -> RepoError {
        unusable(&self.record.path, what)
    }
}

/// The error that the image at a path cannot be used.
pub(crate) fn unusable(path: &str, what: &str) -> RepoError {
    RepoError::Image {
        path: path.into(),
        what: what.into(),
    }
}

/// Opens a regular file for reading. Never waits, as for the writer of a pipe.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits() as i32)
        .open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is not a regular file")),
    }
}

/// The byte that a QEMU which may write to an image has locked (`block/file-posix.c`: its shared permissions begin
/// at byte 100, and that to write is the second).
const QEMU_WRITE_BYTE: u64 = 101;

/// Whether a QEMU of this host may write to a file, as far as the kernel's list of locks is visible.
pub(crate) fn is_being_written(data: &Metadata) -> bool {
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    let device = data.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let file = format!("{major:02x}:{minor:02x}:{}", data.ino());
    locks
        .lines()
        .any(|line| locks_byte(line, &file, QEMU_WRITE_BYTE))
}

/// Whether a line of /proc/locks (proc_locks(5)) is a lock of this file that covers a byte.
fn locks_byte(line: &str, file: &str, byte: u64) -> bool {
    let words: Vec<&str> = line.split_whitespace().collect();
    let Some(at) = words.iter().position(|word| *word == file) else {
        return false;
    };
    let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok());
    let Some(first) = number(at + 1) else {
        return false;
    };
    // The end may be the word EOF.
    (first..=number(at + 2).unwrap_or(u64::MAX)).contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_of_the_byte_is_found_among_others() {
        let line = "12: OFDLCK ADVISORY  READ  -1 08:01:4711 101 101";
        assert!(locks_byte(line, "08:01:4711", 101));
        assert!(!locks_byte(line, "08:01:4712", 101));
        assert!(!locks_byte(line, "08:01:4711", 100));
        let all = "1: POSIX ADVISORY  WRITE 77 08:01:4711 0 EOF";
        assert!(locks_byte(all, "08:01:4711", 101));
        let waiting = "3: -> OFDLCK ADVISORY  WRITE -1 08:01:4711 100 103";
        assert!(locks_byte(waiting, "08:01:4711", 101));
        assert!(!locks_byte("3: FLOCK", "08:01:4711", 101));
    }
}
