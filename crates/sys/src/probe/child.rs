//! The process that abilities are tried on: a fork of ours that writes to the addresses it receives.

use crate::pagemap::HOST_PAGE_BYTES;
use crate::process::{AddressRange, Process};
use rustix::mm::{MapFlags, ProtFlags};
use std::error::Error;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

/// How many pages of either kind the child has.
pub(super) const PAGES: u64 = 4;

/// The bytes that a whole page table maps, and the size of a huge page.
pub(super) const LARGE: u64 = 2 << 20;

/// Sent with an address: the child writes every page of the [`LARGE`] bytes there.
const FILL: u64 = 1;
/// Sent with an address: the child discards the [`LARGE`] bytes there.
const DISCARD: u64 = 2;

/// A child with some private and some shared memory. Killed and reaped on drop.
pub(super) struct Child {
    pub(super) process: Process,
    /// Private anonymous memory, never touched.
    pub(super) private: AddressRange,
    /// Memory shared through a memfd, never touched.
    pub(super) shared: AddressRange,
    /// Private anonymous memory, [`LARGE`] bytes aligned to as much, never touched.
    pub(super) large: AddressRange,
    orders: File,
    answers: File,
}

impl Child {
    /// Forks it; `filtered` gives it a seccomp filter that allows everything.
    pub(super) fn start(filtered: bool) -> Result<Child, Box<dyn Error>> {
        let bytes = (PAGES * HOST_PAGE_BYTES) as usize;
        let memfd = rustix::fs::memfd_create("stillframe-probe", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&memfd, PAGES * HOST_PAGE_BYTES)?;
        let (orders_in, orders) = std::io::pipe()?;
        let (answers, answers_out) = std::io::pipe()?;
        let memory = Memory::map(&memfd, bytes)?;
        let parent = std::process::id().cast_signed();
        // SAFETY: the child runs `serve` alone, which neither allocates nor takes a lock. So it does not matter
        // which locks other threads held in the moment of the fork.
        let pid = unsafe { libc::fork() };
        match pid {
            -1 => return Err(io::Error::last_os_error().into()),
            0 => serve(
                parent,
                orders_in.as_raw_fd(),
                answers_out.as_raw_fd(),
                filtered,
            ),
            _ => {}
        }
        let process = Process::open(pid).inspect_err(|_| end(pid))?;
        let range = |start: *mut libc::c_void| {
            let start = start as u64;
            AddressRange {
                start,
                end: start + PAGES * HOST_PAGE_BYTES,
            }
        };
        let child = Child {
            process,
            private: range(memory.private),
            shared: range(memory.shared),
            large: memory.large_part(),
            orders: File::from(OwnedFd::from(orders)),
            answers: File::from(OwnedFd::from(answers)),
        };
        // It says so when it has its filter.
        child.await_answer(super::LIMIT)?;
        Ok(child)
    }

    /// Has it write one byte at this address; does not wait until it has.
    pub(super) fn write(&self, address: u64) -> io::Result<()> {
        (&self.orders).write_all(&address.to_ne_bytes())
    }

    /// Has it write every page of [`Child::large`]; does not wait until it has.
    pub(super) fn fill_large(&self) -> io::Result<()> {
        self.write(self.large.start | FILL)
    }

    /// Has it discard [`Child::large`]; does not wait until it has.
    pub(super) fn discard_large(&self) -> io::Result<()> {
        self.write(self.large.start | DISCARD)
    }

    /// Waits until it has carried out the last command.
    pub(super) fn await_answer(&self, limit: Duration) -> io::Result<()> {
        await_readable(&self.answers, limit)?;
        (&self.answers).read_exact(&mut [0])
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        end(self.process.pid());
    }
}

/// Kills and reaps a child of ours: until it is reaped, no other process can have its number.
fn end(pid: i32) {
    // SAFETY: both calls take numbers only, and a null pointer for a status that is not needed.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        while libc::waitpid(pid, std::ptr::null_mut(), 0) < 0
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
    }
}

/// Waits until something can be read.
pub(super) fn await_readable(from: impl AsFd, limit: Duration) -> io::Result<()> {
    let mut set = [rustix::event::PollFd::new(
        &from,
        rustix::event::PollFlags::IN,
    )];
    let timeout = rustix::event::Timespec::try_from(limit).map_err(io::Error::other)?;
    match rustix::event::poll(&mut set, Some(&timeout)) {
        Ok(0) => Err(io::Error::from(io::ErrorKind::TimedOut)),
        Ok(_) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// The memory that the child inherits; the parent's own mappings go on drop.
struct Memory {
    private: *mut libc::c_void,
    shared: *mut libc::c_void,
    bytes: usize,
    /// Twice [`LARGE`] bytes.
    large: *mut libc::c_void,
}

impl Memory {
    fn map(memfd: &OwnedFd, bytes: usize) -> io::Result<Memory> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let anywhere = std::ptr::null_mut();
        // SAFETY: new mappings at addresses of the kernel's choice replace nothing.
        let (private, shared, large) = unsafe {
            (
                rustix::mm::mmap_anonymous(anywhere, bytes, access, MapFlags::PRIVATE)?,
                rustix::mm::mmap(anywhere, bytes, access, MapFlags::SHARED, memfd, 0)?,
                rustix::mm::mmap_anonymous(
                    anywhere,
                    2 * LARGE as usize,
                    access,
                    MapFlags::PRIVATE,
                )?,
            )
        };
        Ok(Memory {
            private,
            shared,
            bytes,
            large,
        })
    }

    fn large_part(&self) -> AddressRange {
        let start = (self.large as u64).next_multiple_of(LARGE);
        AddressRange {
            start,
            end: start + LARGE,
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with these lengths, and never accessed by this process.
        unsafe {
            let _ = rustix::mm::munmap(self.large, 2 * LARGE as usize);
            let _ = rustix::mm::munmap(self.private, self.bytes);
            let _ = rustix::mm::munmap(self.shared, self.bytes);
        }
    }
}

/// The whole life of the child: reads addresses, writes there or does what their low bits say, answers with
/// a byte. It ends with `parent`.
fn serve(parent: i32, orders: i32, answers: i32, filtered: bool) -> ! {
    // SAFETY: only async-signal-safe calls, on descriptors and buffers that stay valid; the addresses
    // come from the parent and are those of the three mappings.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        // A parent that was killed before that sends no signal.
        if libc::getppid() != parent {
            libc::_exit(0);
        }
        // It stands for a QEMU of this user, which may be traced; this program itself may not
        // (`system::forbid_dumps`), and a fork inherits that.
        libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0);
        if filtered {
            let mut allow = [libc::sock_filter {
                code: (libc::BPF_RET | libc::BPF_K) as u16,
                jt: 0,
                jf: 0,
                k: libc::SECCOMP_RET_ALLOW,
            }];
            let program = libc::sock_fprog {
                len: 1,
                filter: allow.as_mut_ptr(),
            };
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            if libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program,
            ) != 0
            {
                libc::_exit(1);
            }
        }
        loop {
            if libc::write(answers, b"!".as_ptr().cast(), 1) != 1 {
                libc::_exit(0);
            }
            let mut address = 0_u64;
            if libc::read(orders, (&raw mut address).cast(), 8) != 8 {
                libc::_exit(0);
            }
            let start = address & !(HOST_PAGE_BYTES - 1);
            match address & (HOST_PAGE_BYTES - 1) {
                FILL => {
                    // As QEMU does with guest memory; small pages where there are no huge ones.
                    libc::madvise(
                        start as *mut libc::c_void,
                        LARGE as usize,
                        libc::MADV_HUGEPAGE,
                    );
                    let mut page = start;
                    while page < start + LARGE {
                        (page as *mut u8).write_volatile(1);
                        page += HOST_PAGE_BYTES;
                    }
                }
                DISCARD => {
                    libc::madvise(
                        start as *mut libc::c_void,
                        LARGE as usize,
                        libc::MADV_DONTNEED,
                    );
                }
                _ => (address as *mut u8).write_volatile(1),
            }
        }
    }
}
