//! Memory that a process shares through a file, mapped into ours as well.

use super::MemoryError;
use rustix::fs::SeekFrom;
use rustix::mm::{MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;

/// `statfs(2)`: TMPFS_MAGIC.
const TMPFS: i64 = 0x0102_1994;
/// The unit of `st_blocks` (stat(3type)).
const BLOCK_BYTES: u64 = 512;

/// A stretch of a shared file mapped into this process.
///
/// The guest reads and writes the same memory at any time, so there is no way to borrow it. Bytes are copied in or
/// out, and a copy made while the guest writes holds some mixture of old and new. If another process shrinks the
/// file meanwhile, an access ends in SIGBUS; QEMU never shrinks it.
#[derive(Debug)]
pub struct SharedMapping {
    base: NonNull<u8>,
    bytes: usize,
    writable: bool,
}

// SAFETY: the mapping is plain memory of the process, bound to no thread; it is unmapped on drop only.
unsafe impl Send for SharedMapping {}
// SAFETY: through a shared reference bytes are only copied, by the C library, between this memory and buffers of
// the caller. Other writers (the guest) exist anyway.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps `bytes` of the file from `offset` (a multiple of the page size) on. Nothing is read yet,
    /// and holes stay holes until they are touched.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`] when the file is shorter; EINVAL for a crooked offset.
    pub fn map(
        file: &File,
        offset: u64,
        bytes: u64,
        writable: bool,
    ) -> Result<SharedMapping, MemoryError> {
        let size = file
            .metadata()
            .map_err(|e| failed("examine a shared memory file", e))?
            .len();
        let out_of_range = MemoryError::OutOfRange {
            offset,
            bytes,
            size_bytes: size,
        };
        let end = offset.checked_add(bytes);
        if bytes == 0 || end.is_none_or(|end| end > size) {
            return Err(out_of_range);
        }
        let length = usize::try_from(bytes).map_err(|_| out_of_range)?;
        let access = if writable {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                access,
                MapFlags::SHARED,
                file,
                offset,
            )
        }
        .map_err(|errno| failed("map a shared memory file", errno.into()))?;
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| failed("map a shared memory file", io::Error::other("address 0")))?;
        Ok(SharedMapping {
            base,
            bytes: length,
            writable,
        })
    }

    /// Its size in bytes.
    pub fn len(&self) -> u64 {
        self.bytes as u64
    }

    /// Never true: an empty mapping cannot be made.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Copies out, from `offset` within the mapping on. Reading a hole allocates its page.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryError> {
        let from = self.address(offset, into.len())?;
        // SAFETY: `address` has checked that all of it lies in the mapping, which lives as long as `self`. `into`
        // is a buffer of ours and cannot overlap it. The guest may write meanwhile: memcpy of the C library then
        // yields a mixture of bytes, every one of which is a valid u8.
        unsafe { libc::memcpy(into.as_mut_ptr().cast(), from.cast(), into.len()) };
        Ok(())
    }

    /// Copies in, at `offset` within the mapping.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`]; EACCES when the mapping is not writable.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), MemoryError> {
        if !self.writable {
            let source = io::Error::from(rustix::io::Errno::ACCESS);
            return Err(failed("write a mapping made for reading", source));
        }
        let to = self.address(offset, from.len())?;
        // SAFETY: as in `read`, the other way round; the mapping is writable (checked above).
        unsafe { libc::memcpy(to.cast(), from.as_ptr().cast(), from.len()) };
        Ok(())
    }

    fn address(&self, offset: u64, bytes: usize) -> Result<*mut u8, MemoryError> {
        let out_of_range = MemoryError::OutOfRange {
            offset,
            bytes: bytes as u64,
            size_bytes: self.len(),
        };
        if offset
            .checked_add(bytes as u64)
            .is_none_or(|end| end > self.len())
        {
            return Err(out_of_range);
        }
        // SAFETY: `offset` is at most the size of the mapping, so the result points into it or just
        // behind its end.
        Ok(unsafe { self.base.as_ptr().add(offset as usize) })
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this address and length, and no copy is running: `self` is
        // borrowed by none. It can fail only for addresses that are not a mapping.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// The stretches of the file that hold data, within `bytes` from `offset` on and relative to
/// `offset`, sorted; the rest reads as zero. A file system that cannot tell reports data.
///
/// Moves the offset of the open file description.
pub fn data_extents(file: &File, offset: u64, bytes: u64) -> Result<Vec<Range<u64>>, MemoryError> {
    let action = "look for holes in a file";
    let end = offset.checked_add(bytes).ok_or(MemoryError::OutOfRange {
        offset,
        bytes,
        size_bytes: u64::MAX,
    })?;
    let mut extents = Vec::new();
    let mut at = offset;
    while at < end {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            // Nothing but a hole up to the end of the file, or `at` lies behind the end.
            Err(rustix::io::Errno::NXIO) => break,
            Err(errno) => return Err(failed(action, errno.into())),
        };
        if start >= end {
            break;
        }
        let stop = match rustix::fs::seek(file, SeekFrom::Hole(start)) {
            Ok(stop) => stop,
            // The file was cut off, or the stretch discarded, since the first question.
            Err(rustix::io::Errno::NXIO) => break,
            Err(errno) => return Err(failed(action, errno.into())),
        };
        if stop > start {
            extents.push(start - offset..stop.min(end) - offset);
        }
        // A stretch that was discarded between both questions is a hole at `start`: move on.
        at = stop.max(at + 1);
    }
    Ok(extents)
}

/// Whether the file is in memory (tmpfs, as the kernel calls it, which includes memfd).
///
/// # Errors
/// The errors of fstatfs(2).
pub fn is_in_tmpfs(file: &File) -> io::Result<bool> {
    Ok(rustix::fs::fstatfs(file)?.f_type == TMPFS)
}

/// The bytes that a file of tmpfs has pages for, those in swap included. Pages that were reserved and never touched are
/// among them, although [`data_extents`] has them as holes. `None` for files elsewhere: other file systems count
/// metadata, too.
///
/// # Errors
/// The errors of fstatfs(2) and fstat(2).
pub fn allocated_bytes(file: &File) -> Result<Option<u64>, MemoryError> {
    let action = "count the pages of a file";
    match is_in_tmpfs(file).map_err(|source| failed(action, source))? {
        true => {
            let status = file.metadata().map_err(|source| failed(action, source))?;
            Ok(Some(status.blocks() * BLOCK_BYTES))
        }
        false => Ok(None),
    }
}

fn failed(action: &'static str, source: io::Error) -> MemoryError {
    MemoryError::Io { action, source }
}
