//! The bytes of another process: by address, or through a file both map.

mod shared;
#[cfg(test)]
mod tests;

pub use shared::{SharedMapping, allocated_bytes, data_extents, is_in_tmpfs};

use crate::process::{AddressRange, Process};
use std::io;

/// How many pieces one process_vm_readv(2) takes on either side (UIO_MAXIOV).
const PIECES_MAX: usize = 1024;

/// Why memory could not be read, written or mapped.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The process has ended; nothing that was read may be used.
    #[error("process {pid} has ended")]
    Gone {
        /// Its pid while it lived.
        pid: i32,
    },
    /// The process has nothing (or nothing we may touch) at this address.
    #[error("process {pid} has no {access} memory at {address:#x}")]
    NotMapped {
        /// The process.
        pid: i32,
        /// `readable` or `writable`.
        access: &'static str,
        /// The first address that could not be transferred.
        address: u64,
    },
    /// The two sides of a vectored transfer differ in length: a mistake of the caller.
    #[error("a transfer of {local_bytes} bytes here and {remote_bytes} bytes there does not fit")]
    LengthMismatch {
        /// Bytes on our side.
        local_bytes: u64,
        /// Bytes in the other process.
        remote_bytes: u64,
    },
    /// The kernel does not let us.
    #[error(
        "not permitted to access the memory of process {pid}: run as its user or as root \
         (CAP_SYS_PTRACE)"
    )]
    Permission {
        /// The process.
        pid: i32,
        /// The kernel's error.
        source: io::Error,
    },
    /// Outside of the mapping, or of the file behind it.
    #[error("{bytes} bytes at {offset:#x} lie outside of a file or mapping of {size_bytes} bytes")]
    OutOfRange {
        /// Where the access would begin.
        offset: u64,
        /// How long it would be.
        bytes: u64,
        /// The available bytes.
        size_bytes: u64,
    },
    /// Anything else the kernel said.
    #[error("cannot {action}")]
    Io {
        /// The action that failed.
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

/// Reads and writes the private or shared memory of a process, swapped pages included
/// (process_vm_readv(2)).
#[derive(Debug)]
pub struct RemoteMemory {
    process: Process,
}

#[derive(Clone, Copy)]
enum Direction {
    Read,
    Write,
}

impl RemoteMemory {
    /// Memory of this process. Nothing is opened or checked yet.
    pub fn open(process: &Process) -> RemoteMemory {
        RemoteMemory {
            process: process.clone(),
        }
    }

    /// Fills `into` from `address` on.
    ///
    /// # Errors
    /// All or an error; then the content of `into` is unspecified.
    pub fn read(&self, address: u64, into: &mut [u8]) -> Result<(), MemoryError> {
        let range = self.range_at(address, into.len())?;
        self.read_vectored(&mut [into], &[range])
    }

    /// Fills the buffers, one after the other, from the ranges, one after the other. Lengths need
    /// to be equal in total only. Any number of pieces.
    ///
    /// # Errors
    /// The errors of [`RemoteMemory::read`]; [`MemoryError::LengthMismatch`].
    pub fn read_vectored(
        &self,
        into: &mut [&mut [u8]],
        from: &[AddressRange],
    ) -> Result<(), MemoryError> {
        let local = into.iter_mut().map(|part| Piece {
            address: part.as_mut_ptr() as u64,
            bytes: part.len() as u64,
        });
        // SAFETY: the pieces are exactly the buffers of `into`, exclusively borrowed until return.
        unsafe { self.transfer(Direction::Read, local.collect(), from) }?;
        // Only now is it certain that the pid still named our process while the kernel read.
        self.check_alive()
    }

    /// Writes all of `from` at `address`.
    ///
    /// # Errors
    /// After an error part of it may have been written.
    pub fn write(&self, address: u64, from: &[u8]) -> Result<(), MemoryError> {
        let range = self.range_at(address, from.len())?;
        self.write_vectored(&[from], &[range])
    }

    /// Writes the buffers, one after the other, to the ranges, one after the other.
    ///
    /// # Errors
    /// The errors of [`RemoteMemory::write`]; [`MemoryError::LengthMismatch`].
    pub fn write_vectored(&self, from: &[&[u8]], to: &[AddressRange]) -> Result<(), MemoryError> {
        self.check_alive()?;
        let local = from.iter().map(|part| Piece {
            address: part.as_ptr() as u64,
            bytes: part.len() as u64,
        });
        // SAFETY: the pieces are exactly the buffers of `from`, borrowed until return, and the
        // kernel only reads them.
        unsafe { self.transfer(Direction::Write, local.collect(), to) }?;
        self.check_alive()
    }

    fn range_at(&self, address: u64, bytes: usize) -> Result<AddressRange, MemoryError> {
        let end = address.checked_add(bytes as u64);
        let end = end.ok_or_else(|| self.not_mapped(Direction::Read, address))?;
        Ok(AddressRange {
            start: address,
            end,
        })
    }

    /// Moves every byte between the local pieces and the remote ranges.
    ///
    /// # Safety
    /// The local pieces must be memory of this process that stays valid during the call. For [`Direction::Read`] no
    /// other code may use it meanwhile.
    unsafe fn transfer(
        &self,
        direction: Direction,
        local: Vec<Piece>,
        remote: &[AddressRange],
    ) -> Result<(), MemoryError> {
        let remote: Vec<Piece> = remote
            .iter()
            .map(|range| Piece {
                address: range.start,
                bytes: range.len(),
            })
            .collect();
        let local_bytes = total(&local);
        let remote_bytes = total(&remote);
        if local_bytes != remote_bytes || local_bytes.is_none() {
            return Err(MemoryError::LengthMismatch {
                local_bytes: local_bytes.unwrap_or(u64::MAX),
                remote_bytes: remote_bytes.unwrap_or(u64::MAX),
            });
        }
        let mut local = Cursor::new(local);
        let mut remote = Cursor::new(remote);
        while let Some(address) = remote.address() {
            let (near, far) = (local.window(), remote.window());
            // SAFETY: `near` lies within the caller's pieces (see above); `far` is interpreted in
            // the other process, where the kernel checks every address.
            let moved = unsafe { self.call(direction, &near, &far) };
            match moved {
                // The kernel gives up at the first bad page; bytes before it are reported as moved.
                Ok(0) => return Err(self.not_mapped(direction, address)),
                Ok(bytes) => {
                    local.advance(bytes);
                    remote.advance(bytes);
                }
                Err(source) => match source.raw_os_error() {
                    Some(libc::EINTR) => {}
                    _ => return Err(self.failed(direction, address, source)),
                },
            }
        }
        Ok(())
    }

    /// One system call.
    ///
    /// # Safety
    /// As [`RemoteMemory::transfer`], for `near`.
    unsafe fn call(
        &self,
        direction: Direction,
        near: &[libc::iovec],
        far: &[libc::iovec],
    ) -> io::Result<u64> {
        let pid = self.process.pid();
        // At most PIECES_MAX each, so the casts of the lengths are exact.
        let (near_count, far_count) = (near.len() as u64, far.len() as u64);
        // SAFETY: both arrays are valid for their lengths; the memory is the caller's promise.
        let moved = unsafe {
            match direction {
                Direction::Read => libc::process_vm_readv(
                    pid,
                    near.as_ptr(),
                    near_count,
                    far.as_ptr(),
                    far_count,
                    0,
                ),
                Direction::Write => libc::process_vm_writev(
                    pid,
                    near.as_ptr(),
                    near_count,
                    far.as_ptr(),
                    far_count,
                    0,
                ),
            }
        };
        u64::try_from(moved).map_err(|_| io::Error::last_os_error())
    }

    fn failed(&self, direction: Direction, address: u64, source: io::Error) -> MemoryError {
        let pid = self.process.pid();
        match source.raw_os_error() {
            _ if !self.process.is_alive() => MemoryError::Gone { pid },
            Some(libc::ESRCH) => MemoryError::Gone { pid },
            Some(libc::EFAULT) => self.not_mapped(direction, address),
            Some(libc::EPERM) => MemoryError::Permission { pid, source },
            _ => MemoryError::Io {
                action: "transfer memory of another process",
                source,
            },
        }
    }

    fn not_mapped(&self, direction: Direction, address: u64) -> MemoryError {
        let access = match direction {
            Direction::Read => "readable",
            Direction::Write => "writable",
        };
        MemoryError::NotMapped {
            pid: self.process.pid(),
            access,
            address,
        }
    }

    fn check_alive(&self) -> Result<(), MemoryError> {
        if self.process.is_alive() {
            return Ok(());
        }
        Err(MemoryError::Gone {
            pid: self.process.pid(),
        })
    }
}

/// A stretch of memory, here or there.
#[derive(Clone, Copy)]
struct Piece {
    address: u64,
    bytes: u64,
}

fn total(pieces: &[Piece]) -> Option<u64> {
    pieces
        .iter()
        .try_fold(0_u64, |sum, piece| sum.checked_add(piece.bytes))
}

/// The rest of a list of pieces.
struct Cursor {
    pieces: Vec<Piece>,
    next: usize,
    /// How much of the next piece is done.
    done: u64,
}

impl Cursor {
    fn new(mut pieces: Vec<Piece>) -> Cursor {
        // An empty piece would look like an end.
        pieces.retain(|piece| piece.bytes > 0);
        Cursor {
            pieces,
            next: 0,
            done: 0,
        }
    }

    /// The next address, unless all is done.
    fn address(&self) -> Option<u64> {
        self.pieces
            .get(self.next)
            .map(|piece| piece.address + self.done)
    }

    /// Returns as much of the rest as one call takes.
    fn window(&self) -> Vec<libc::iovec> {
        let rest = self
            .pieces
            .iter()
            .skip(self.next)
            .take(PIECES_MAX)
            .enumerate();
        rest.map(|(index, piece)| {
            let done = if index == 0 { self.done } else { 0 };
            libc::iovec {
                iov_base: (piece.address + done) as *mut libc::c_void,
                iov_len: (piece.bytes - done) as usize,
            }
        })
        .collect()
    }

    fn advance(&mut self, mut bytes: u64) {
        while bytes > 0 {
            let Some(piece) = self.pieces.get(self.next) else {
                return;
            };
            let step = bytes.min(piece.bytes - self.done);
            self.done += step;
            bytes -= step;
            if self.done == piece.bytes {
                self.next += 1;
                self.done = 0;
            }
        }
    }
}
