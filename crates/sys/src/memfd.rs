//! A file that lives in memory only, handed to other processes by descriptor.

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};

/// Why a memory file could not be made or used.
#[derive(Debug, thiserror::Error)]
pub enum MemfdError {
    /// More was written into it than expected.
    #[error("the memory file holds {bytes} bytes, more than the {limit_bytes} expected at most")]
    TooLarge {
        /// Its length.
        bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// Anything the kernel said.
    #[error("cannot {action} a memory file")]
    Io {
        /// The action that failed.
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

/// How a new descriptor of the file may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// O_RDONLY.
    Read,
    /// O_WRONLY.
    Write,
    /// O_RDWR.
    ReadWrite,
}

/// An anonymous file in memory, freed when its last descriptor is closed.
#[derive(Debug)]
pub struct Memfd {
    file: File,
}

impl Memfd {
    /// Creates an empty one; the name shows up in `/proc` only.
    pub fn create(name: &str) -> Result<Self, MemfdError> {
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)
            .map_err(|errno| failed("create", errno.into()))?;
        Ok(Memfd {
            file: File::from(fd),
        })
    }

    /// Creates one of this length without any memory in it, whose writes can be stopped ([`Memfd::refuse_writes`]).
    pub fn sparse(name: &str, bytes: u64) -> Result<Self, MemfdError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(name, flags)
            .map_err(|errno| failed("create", errno.into()))?;
        let file = File::from(fd);
        file.set_len(bytes)
            .map_err(|source| failed("extend", source))?;
        Ok(Memfd { file })
    }

    /// The memory that it takes, in bytes: holes take none.
    pub fn used_bytes(&self) -> Result<u64, MemfdError> {
        /// The unit of `st_blocks` (stat(2)).
        const BLOCK_BYTES: u64 = 512;
        let metadata = self.file.metadata();
        let metadata = metadata.map_err(|source| failed("examine", source))?;
        Ok(metadata.blocks() * BLOCK_BYTES)
    }

    /// From here on each write(2) fails, through any descriptor of any process (`F_SEAL_FUTURE_WRITE`, fcntl(2)).
    pub fn refuse_writes(&self) -> Result<(), MemfdError> {
        rustix::fs::fcntl_add_seals(&self.file, SealFlags::FUTURE_WRITE)
            .map_err(|errno| failed("seal", errno.into()))
    }

    /// A new open file description at offset 0 with exactly this access mode: QEMU takes a
    /// descriptor from a set only when its mode is the one it would have opened with.
    pub fn reopen(&self, access: Access) -> Result<OwnedFd, MemfdError> {
        let mode = match access {
            Access::Read => OFlags::RDONLY,
            Access::Write => OFlags::WRONLY,
            Access::ReadWrite => OFlags::RDWR,
        };
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        rustix::fs::open(path, mode | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| failed("reopen", errno.into()))
    }

    /// Everything in the file.
    ///
    /// # Errors
    /// [`MemfdError::TooLarge`] when it holds more than `limit_bytes`.
    pub fn read_all(&self, limit_bytes: u64) -> Result<Vec<u8>, MemfdError> {
        let bytes = self
            .file
            .metadata()
            .map_err(|source| failed("examine", source))?
            .len();
        let too_large = MemfdError::TooLarge { bytes, limit_bytes };
        if bytes > limit_bytes {
            return Err(too_large);
        }
        let mut content = vec![0; usize::try_from(bytes).map_err(|_| too_large)?];
        self.file
            .read_exact_at(&mut content, 0)
            .map_err(|source| failed("read", source))?;
        Ok(content)
    }

    /// Makes the file hold exactly these bytes.
    pub fn write_all(&self, bytes: &[u8]) -> Result<(), MemfdError> {
        self.file
            .set_len(0)
            .map_err(|source| failed("empty", source))?;
        self.file
            .write_all_at(bytes, 0)
            .map_err(|source| failed("write", source))
    }
}

impl AsFd for Memfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn failed(action: &'static str, source: io::Error) -> MemfdError {
    MemfdError::Io { action, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn holds_exactly_what_was_written_last() {
        let memfd = Memfd::create("test").unwrap();
        assert_eq!(memfd.read_all(0).unwrap(), b"");
        memfd.write_all(b"something longer").unwrap();
        memfd.write_all(b"short").unwrap();
        assert_eq!(memfd.read_all(5).unwrap(), b"short");
        let result = memfd.read_all(4);
        assert!(matches!(
            result,
            Err(MemfdError::TooLarge {
                bytes: 5,
                limit_bytes: 4
            })
        ));
    }

    #[test]
    fn a_sparse_file_takes_memory_until_writes_are_refused() {
        let memfd = Memfd::sparse("test", 1 << 40).unwrap();
        let file = File::from(memfd.reopen(Access::ReadWrite).unwrap());
        assert_eq!(memfd.used_bytes().unwrap(), 0);
        file.write_all_at(&[1; 8192], 1 << 39).unwrap();
        assert_eq!(memfd.used_bytes().unwrap(), 8192);
        memfd.refuse_writes().unwrap();
        assert!(file.write_all_at(&[2; 1], 0).is_err());
        let mut byte = [0];
        file.read_exact_at(&mut byte, 1 << 39).unwrap();
        assert_eq!(byte, [1]);
    }

    #[test]
    fn reopened_descriptors_do_one_thing_from_the_start() {
        let memfd = Memfd::create("test").unwrap();
        let mut writer = File::from(memfd.reopen(Access::Write).unwrap());
        writer.write_all(b"hello").unwrap();
        let mut reader = File::from(memfd.reopen(Access::Read).unwrap());
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello");
        assert!(reader.write_all(b"x").is_err() && writer.read(&mut [0]).is_err());
        let mode = |file: &File| rustix::fs::fcntl_getfl(file).unwrap() & OFlags::ACCMODE;
        assert_eq!(
            (mode(&writer), mode(&reader)),
            (OFlags::WRONLY, OFlags::RDONLY)
        );
    }
}
