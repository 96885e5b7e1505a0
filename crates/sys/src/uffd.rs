//! userfaultfd, typed: write protection (asynchronous for dirty tracking, synchronous for
//! copy-on-write) and missing pages (lazy restore).
//!
//! The descriptor usually belongs to another process' address space (see [`crate::infect`]); every
//! address below is one of that process. Closing the last copy of the descriptor lifts every
//! protection and wakes every waiter: when the engine dies, the guest runs on.
//!
//! Source: linux, Documentation/admin-guide/mm/userfaultfd.rst; ioctl_userfaultfd(2).

mod error;

pub use error::UffdError;

use crate::process::AddressRange;
use linux_raw_sys::general as kernel;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

const UFFDIO_API: u64 = 0xc018_aa3f;
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
const UFFDIO_UNREGISTER: u64 = 0x8010_aa01;
const UFFDIO_WAKE: u64 = 0x8010_aa02;
const UFFDIO_COPY: u64 = 0xc028_aa03;
const UFFDIO_ZEROPAGE: u64 = 0xc020_aa04;
const UFFDIO_WRITEPROTECT: u64 = 0xc018_aa06;

/// linux-raw-sys lacks it: it is an enum-like define inside `struct uffd_msg`'s comment block.
const FAULT_FLAG_WRITE: u64 = 1;
const FAULT_FLAG_WP: u64 = 2;
const EVENT_PAGEFAULT: u8 = 0x12;
const WRITEPROTECT_MODE_WP: u64 = 1;

/// `_IOC(direction, 0xAA, number, size)`: the kernel's formula (asm-generic/ioctl.h).
const fn number(direction: u64, number: u32, bytes: usize) -> u64 {
    direction << 30 | (bytes as u64) << 16 | (kernel::UFFDIO as u64) << 8 | number as u64
}

const _: () = {
    const READ_WRITE: u64 = 3;
    const READ: u64 = 2;
    assert!(size_of::<kernel::uffdio_api>() == 24);
    assert!(size_of::<kernel::uffdio_range>() == 16);
    assert!(size_of::<kernel::uffdio_register>() == 32);
    assert!(size_of::<kernel::uffdio_copy>() == 40);
    assert!(size_of::<kernel::uffdio_zeropage>() == 32);
    assert!(size_of::<kernel::uffdio_writeprotect>() == 24);
    assert!(size_of::<kernel::uffd_msg>() == 32);
    assert!(UFFDIO_API == number(READ_WRITE, kernel::_UFFDIO_API, 24));
    assert!(UFFDIO_REGISTER == number(READ_WRITE, kernel::_UFFDIO_REGISTER, 32));
    assert!(UFFDIO_UNREGISTER == number(READ, kernel::_UFFDIO_UNREGISTER, 16));
    assert!(UFFDIO_WAKE == number(READ, kernel::_UFFDIO_WAKE, 16));
    assert!(UFFDIO_COPY == number(READ_WRITE, kernel::_UFFDIO_COPY, 40));
    assert!(UFFDIO_ZEROPAGE == number(READ_WRITE, kernel::_UFFDIO_ZEROPAGE, 32));
    assert!(UFFDIO_WRITEPROTECT == number(READ_WRITE, kernel::_UFFDIO_WRITEPROTECT, 24));
};

/// A set of userfaultfd features (`UFFD_FEATURE_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features(pub u64);

impl Features {
    /// Write faults on protected pages are reported as such (Linux 5.7).
    pub const PAGEFAULT_FLAG_WP: Features = Features(1);
    /// Missing pages of hugetlbfs can be handled (4.11).
    pub const MISSING_HUGETLBFS: Features = Features(1 << 4);
    /// Missing pages of shared memory can be handled (4.11).
    pub const MISSING_SHMEM: Features = Features(1 << 5);
    /// Write protection of hugetlbfs and shared memory (5.19).
    pub const WP_HUGETLBFS_SHMEM: Features = Features(1 << 12);
    /// Write protection holds for anonymous pages that do not exist yet (6.4).
    pub const WP_UNPOPULATED: Features = Features(1 << 13);
    /// The kernel lifts the protection itself at the first write (6.7).
    pub const WP_ASYNC: Features = Features(1 << 15);

    const WRITE_PROTECT: Features =
        Features(Self::PAGEFAULT_FLAG_WP.0 | Self::WP_HUGETLBFS_SHMEM.0 | Self::WP_UNPOPULATED.0);
    const MISSING: Features = Features(Self::MISSING_HUGETLBFS.0 | Self::MISSING_SHMEM.0);

    /// The features with the kernel version that brought each of them.
    const VERSIONS: [(Features, &'static str, &'static str); 6] = [
        (Self::PAGEFAULT_FLAG_WP, "PAGEFAULT_FLAG_WP", "5.7"),
        (Self::MISSING_HUGETLBFS, "MISSING_HUGETLBFS", "4.11"),
        (Self::MISSING_SHMEM, "MISSING_SHMEM", "4.11"),
        (Self::WP_HUGETLBFS_SHMEM, "WP_HUGETLBFS_SHMEM", "5.19"),
        (Self::WP_UNPOPULATED, "WP_UNPOPULATED", "6.4"),
        (Self::WP_ASYNC, "WP_ASYNC", "6.7"),
    ];
}

const _: () = {
    assert!(Features::PAGEFAULT_FLAG_WP.0 == kernel::UFFD_FEATURE_PAGEFAULT_FLAG_WP as u64);
    assert!(Features::MISSING_HUGETLBFS.0 == kernel::UFFD_FEATURE_MISSING_HUGETLBFS as u64);
    assert!(Features::MISSING_SHMEM.0 == kernel::UFFD_FEATURE_MISSING_SHMEM as u64);
    assert!(Features::WP_HUGETLBFS_SHMEM.0 == kernel::UFFD_FEATURE_WP_HUGETLBFS_SHMEM as u64);
    assert!(Features::WP_UNPOPULATED.0 == kernel::UFFD_FEATURE_WP_UNPOPULATED as u64);
    assert!(Features::WP_ASYNC.0 == kernel::UFFD_FEATURE_WP_ASYNC as u64);
};

/// The kernel's action at the first write to a protected page. Chosen once for a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteProtectMode {
    /// The writer waits until we have lifted the protection ([`Uffd::next_event`]).
    Sync,
    /// The kernel lifts the protection and remembers the write ([`crate::pagemap`]).
    Async,
}

/// The events to report in a registered range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Track {
    /// Writes to protected pages.
    WriteProtect,
    /// Accesses to pages that do not exist.
    Missing,
}

/// What happens to threads that wait for a page that is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiters {
    /// They continue.
    Wake,
    /// They wait on, until they are woken.
    Leave,
}

/// Something a thread of the process waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A page fault.
    Fault {
        /// The first address of the page.
        address: u64,
        /// Whether it was a write.
        write: bool,
        /// Whether the page exists and is write-protected; otherwise it is missing.
        protected: bool,
    },
}

/// A userfaultfd after its handshake.
#[derive(Debug)]
pub struct Uffd {
    file: File,
}

impl Uffd {
    /// Takes a fresh userfaultfd into use for write protection.
    ///
    /// # Errors
    /// [`UffdError::MissingFeatures`] names what this kernel lacks. The descriptor is closed then.
    pub fn handshake(fd: OwnedFd, mode: WriteProtectMode) -> Result<Uffd, UffdError> {
        let extra = match mode {
            WriteProtectMode::Sync => 0,
            WriteProtectMode::Async => Features::WP_ASYNC.0,
        };
        Self::start(fd, Features(Features::WRITE_PROTECT.0 | extra))
    }

    /// Takes a fresh userfaultfd into use for serving missing pages.
    ///
    /// A page that was filled and then discarded (by a balloon, say) is missing again, and is reported
    /// once more: its content is zero then.
    ///
    /// # Errors
    /// The errors of [`Uffd::handshake`].
    pub fn handshake_missing(fd: OwnedFd) -> Result<Uffd, UffdError> {
        Self::start(fd, Features::MISSING)
    }

    /// Continues with a userfaultfd that another process took into use, with its registered ranges.
    pub fn adopt(fd: OwnedFd) -> Uffd {
        Uffd {
            file: File::from(fd),
        }
    }

    fn start(fd: OwnedFd, wanted: Features) -> Result<Uffd, UffdError> {
        let uffd = Uffd {
            file: File::from(fd),
        };
        let mut flags = rustix::fs::fcntl_getfl(&uffd.file)
            .map_err(|errno| UffdError::Handshake(errno.into()))?;
        flags.insert(rustix::fs::OFlags::NONBLOCK);
        rustix::fs::fcntl_setfl(&uffd.file, flags)
            .map_err(|errno| UffdError::Handshake(errno.into()))?;
        match uffd.negotiate(wanted) {
            Ok(_) => Ok(uffd),
            Err(source) if source.raw_os_error() == Some(libc::EINVAL) => {
                Err(refused(wanted, offered().unwrap_or(wanted), source))
            }
            Err(source) => Err(UffdError::Handshake(source)),
        }
    }

    /// UFFDIO_API: requests features, and learns which there are.
    fn negotiate(&self, wanted: Features) -> io::Result<Features> {
        let mut argument = kernel::uffdio_api {
            api: u64::from(kernel::UFFD_API),
            features: wanted.0,
            ioctls: 0,
        };
        // SAFETY: UFFDIO_API reads and writes one `uffdio_api`.
        unsafe { self.ioctl(UFFDIO_API, &mut argument) }?;
        Ok(Features(argument.features))
    }

    /// Starts watching a range: whole pages, mapped all along.
    ///
    /// # Errors
    /// [`UffdError::Busy`] when another userfaultfd watches part of it, [`UffdError::Unsupported`]
    /// for memory that cannot be watched (or a crooked range), [`UffdError::Gone`].
    pub fn register(&self, range: AddressRange, track: Track) -> Result<(), UffdError> {
        let (mode, needed) = match track {
            Track::WriteProtect => (
                kernel::UFFDIO_REGISTER_MODE_WP,
                1_u64 << kernel::_UFFDIO_WRITEPROTECT,
            ),
            Track::Missing => (
                kernel::UFFDIO_REGISTER_MODE_MISSING,
                1 << kernel::_UFFDIO_COPY,
            ),
        };
        let mut argument = kernel::uffdio_register {
            range: bounds(range),
            mode: u64::from(mode),
            ioctls: 0,
        };
        // SAFETY: UFFDIO_REGISTER reads and writes one `uffdio_register`.
        unsafe { self.ioctl(UFFDIO_REGISTER, &mut argument) }
            .map_err(|source| UffdError::of("register", range, source))?;
        if argument.ioctls & needed == needed {
            return Ok(());
        }
        self.unregister(range)?;
        Err(UffdError::Unsupported {
            range,
            source: io::Error::from(rustix::io::Errno::OPNOTSUPP),
        })
    }

    /// Stops watching a range, lifts its protection and wakes its waiters.
    pub fn unregister(&self, range: AddressRange) -> Result<(), UffdError> {
        // SAFETY: UFFDIO_UNREGISTER reads one `uffdio_range`.
        unsafe { self.ioctl(UFFDIO_UNREGISTER, &mut bounds(range)) }
            .map_err(|source| UffdError::of("unregister", range, source))?;
        // The kernel wakes only threads that wait for a missing page (mm/userfaultfd.c).
        self.wake(range)
    }

    /// Write-protects every page of a registered range, also those that do not exist yet.
    pub fn protect(&self, range: AddressRange) -> Result<(), UffdError> {
        self.write_protect(range, WRITEPROTECT_MODE_WP)
            .map_err(|source| UffdError::of("write-protect", range, source))
    }

    /// Lifts the protection and wakes the writers that wait for it.
    pub fn unprotect(&self, range: AddressRange) -> Result<(), UffdError> {
        self.write_protect(range, 0)
            .map_err(|source| UffdError::of("lift the write protection of", range, source))
    }

    fn write_protect(&self, range: AddressRange, mode: u64) -> io::Result<()> {
        let mut argument = kernel::uffdio_writeprotect {
            range: bounds(range),
            mode,
        };
        again_while_changing(|| {
            // SAFETY: UFFDIO_WRITEPROTECT reads one `uffdio_writeprotect`.
            unsafe { self.ioctl(UFFDIO_WRITEPROTECT, &mut argument) }
        })
    }

    /// Fills missing pages from `to` on with these bytes (whole pages), and wakes their waiters or leaves that
    /// to a later [`Uffd::wake`].
    ///
    /// # Errors
    /// [`UffdError::Exists`] when a page is there already; the pages before it are filled.
    pub fn copy(&self, to: u64, from: &[u8], waiters: Waiters) -> Result<(), UffdError> {
        let mode = match waiters {
            Waiters::Wake => 0,
            Waiters::Leave => kernel::UFFDIO_COPY_MODE_DONTWAKE.into(),
        };
        let end = to.saturating_add(from.len() as u64);
        let mut done = 0;
        while done < from.len() {
            let rest = &from[done..];
            let left = AddressRange {
                start: to.saturating_add(done as u64),
                end,
            };
            let mut argument = kernel::uffdio_copy {
                dst: left.start,
                src: rest.as_ptr() as u64,
                len: rest.len() as u64,
                mode,
                copy: 0,
            };
            // SAFETY: UFFDIO_COPY reads and writes one `uffdio_copy`, and reads `len` bytes at
            // `src`, which `rest` keeps valid.
            let result = unsafe { self.ioctl(UFFDIO_COPY, &mut argument) };
            done += progress(result, argument.copy)
                .map_err(|source| UffdError::of("fill", left, source))?
                as usize;
        }
        Ok(())
    }

    /// Fills missing pages of the range with zeroes and wakes their waiters.
    ///
    /// # Errors
    /// The errors of [`Uffd::copy`].
    pub fn zero(&self, range: AddressRange) -> Result<(), UffdError> {
        let mut left = range;
        while !left.is_empty() {
            let mut argument = kernel::uffdio_zeropage {
                range: bounds(left),
                mode: 0,
                zeropage: 0,
            };
            // SAFETY: UFFDIO_ZEROPAGE reads and writes one `uffdio_zeropage`.
            let result = unsafe { self.ioctl(UFFDIO_ZEROPAGE, &mut argument) };
            left.start += progress(result, argument.zeropage)
                .map_err(|source| UffdError::of("fill", left, source))?;
        }
        Ok(())
    }

    /// Wakes the threads that wait for a page of the range; they try again.
    pub fn wake(&self, range: AddressRange) -> Result<(), UffdError> {
        // SAFETY: UFFDIO_WAKE reads one `uffdio_range`.
        unsafe { self.ioctl(UFFDIO_WAKE, &mut bounds(range)) }
            .map_err(|source| UffdError::of("wake the waiters of", range, source))
    }

    /// The next waiting fault, if there is one; does not block. Poll the descriptor to wait.
    pub fn next_event(&self) -> Result<Option<Event>, UffdError> {
        let mut message = [0_u8; size_of::<kernel::uffd_msg>()];
        let count = loop {
            match (&self.file).read(&mut message) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(source) => return Err(UffdError::Events(source)),
                Ok(count) => break count,
            }
        };
        if count != message.len() || message[0] != EVENT_PAGEFAULT {
            return Err(UffdError::UnknownEvent { code: message[0] });
        }
        // struct uffd_msg: u8 event, 7 bytes reserved, then u64 flags, u64 address.
        let field = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&message[at..at + 8]);
            u64::from_ne_bytes(bytes)
        };
        let flags = field(8);
        Ok(Some(Event::Fault {
            address: field(16),
            write: flags & FAULT_FLAG_WRITE != 0,
            protected: flags & FAULT_FLAG_WP != 0,
        }))
    }

    /// # Safety
    /// `number` must be an ioctl that accesses exactly one `T` at its argument. Any memory of ours that `T` points
    /// to must be valid for the ioctl's use of it.
    unsafe fn ioctl<T>(&self, number: u64, argument: &mut T) -> io::Result<()> {
        // SAFETY: the caller's promise; `argument` is exclusively borrowed.
        let result =
            unsafe { libc::ioctl(self.file.as_raw_fd(), number, std::ptr::from_mut(argument)) };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn bounds(range: AddressRange) -> kernel::uffdio_range {
    kernel::uffdio_range {
        start: range.start,
        len: range.len(),
    }
}

/// EAGAIN means that the process changes its mappings right now (fork, mremap): soon over.
fn again_while_changing(mut call: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    const TRIES: u32 = 10_000;
    for _ in 0..TRIES {
        match call() {
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => std::thread::yield_now(),
            other => return other,
        }
    }
    call()
}

/// How many bytes UFFDIO_COPY or UFFDIO_ZEROPAGE has done: on EAGAIN it may have done a part, or
/// nothing while the process changes its mappings.
fn progress(result: io::Result<()>, done: i64) -> io::Result<u64> {
    match result {
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {
            std::thread::yield_now();
            Ok(u64::try_from(done).unwrap_or(0))
        }
        Err(error) => Err(error),
        Ok(()) => u64::try_from(done).map_err(|_| io::Error::other("a negative length")),
    }
}

/// The features of this kernel's userfaultfd, queried on one of our own.
fn offered() -> io::Result<Features> {
    use rustix::mm::UserfaultfdFlags;
    let flags =
        UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::from_bits_retain(kernel::UFFD_USER_MODE_ONLY);
    // SAFETY: the new descriptor watches no memory until a range is registered, and none is.
    let own = unsafe { rustix::mm::userfaultfd(flags) }?;
    Uffd {
        file: File::from(own),
    }
    .negotiate(Features(0))
}

/// Explains a handshake that was refused with EINVAL.
fn refused(wanted: Features, offered: Features, source: io::Error) -> UffdError {
    let missing = wanted.0 & !offered.0;
    let lacking = Features::VERSIONS
        .iter()
        .filter(|(one, ..)| missing & one.0 != 0);
    match lacking.clone().next_back() {
        Some((.., version)) => UffdError::MissingFeatures {
            names: lacking
                .map(|(_, name, _)| *name)
                .collect::<Vec<_>>()
                .join(", "),
            version,
        },
        None => UffdError::Handshake(source),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_handshake_names_what_is_missing() {
        let wanted = Features(Features::WRITE_PROTECT.0 | Features::WP_ASYNC.0);
        let offered = Features::PAGEFAULT_FLAG_WP;
        let refusal = || io::Error::from(rustix::io::Errno::INVAL);
        let error = refused(wanted, offered, refusal()).to_string();
        assert!(
            error.contains("WP_HUGETLBFS_SHMEM, WP_UNPOPULATED, WP_ASYNC"),
            "{error}"
        );
        assert!(error.contains("Linux 6.7"), "{error}");
        // Everything is there: something else is wrong with the descriptor.
        let error = refused(wanted, wanted, refusal());
        assert!(matches!(error, UffdError::Handshake(_)), "{error:?}");
    }

    #[test]
    fn this_kernel_offers_what_is_needed() {
        let wanted = Features::WRITE_PROTECT.0 | Features::WP_ASYNC.0 | Features::MISSING.0;
        assert_eq!(offered().unwrap().0 & wanted, wanted);
    }

    #[test]
    fn another_kind_of_descriptor_is_refused() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let result = Uffd::handshake(reader.into(), WriteProtectMode::Async);
        assert!(matches!(result, Err(UffdError::Handshake(_))), "{result:?}");
    }
}
