//! A process as a stable identity: pid, pidfd and `/proc` directory, opened together.
//!
//! Both descriptors stay bound to the process they were opened for. When it ends and its number is
//! given away, they answer with an error; they never speak of the newcomer.

mod mapping;

pub use mapping::{AddressRange, Mapping};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Why a process could not be opened or queried.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// No living process has this pid (a zombie is not living).
    #[error("there is no running process with pid {pid}")]
    NotFound {
        /// The requested pid.
        pid: i32,
    },
    /// The process has ended since it was opened.
    #[error("process {pid} has ended")]
    Gone {
        /// Its pid while it lived.
        pid: i32,
    },
    /// The kernel does not let us.
    #[error(
        "not permitted to {action} of process {pid}: run as its user or as root (CAP_SYS_PTRACE)"
    )]
    Permission {
        /// The process.
        pid: i32,
        /// The action that failed, as the end of "not permitted to".
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The process has no such descriptor.
    #[error("process {pid} has no open file descriptor {fd}")]
    NoSuchFd {
        /// The process.
        pid: i32,
        /// The requested descriptor.
        fd: i32,
    },
    /// The mapping was removed or replaced since the list of mappings was read.
    #[error("process {pid} no longer maps this file at {range}: read its mappings again")]
    MappingGone {
        /// The process.
        pid: i32,
        /// Where the mapping was.
        range: AddressRange,
    },
    /// Anonymous memory has no file.
    #[error("the mapping {range} of process {pid} is anonymous memory: there is no file to open")]
    NoFile {
        /// The process.
        pid: i32,
        /// The mapping.
        range: AddressRange,
    },
    /// A file in `/proc` did not look as proc(5) says.
    #[error("/proc/{pid}/{file} is not understood: {line:?}")]
    Malformed {
        /// The process.
        pid: i32,
        /// The file in its `/proc` directory.
        file: &'static str,
        /// The unreadable line.
        line: String,
    },
    /// Anything else the kernel said.
    #[error("cannot {action} of process {pid}")]
    Io {
        /// The process.
        pid: i32,
        /// The action that failed, as the end of "cannot".
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

/// One process, for as long as the value lives. Cloning is cheap and shares the descriptors.
#[derive(Clone)]
pub struct Process {
    inner: Arc<Inner>,
}

struct Inner {
    pid: i32,
    pidfd: OwnedFd,
    /// `/proc/PID`, opened once: lookups below it fail with ESRCH after the process has ended.
    directory: OwnedFd,
    start_time: u64,
}

impl std::fmt::Debug for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Process")
            .field("pid", &self.inner.pid)
            .field("start_time", &self.inner.start_time)
            .finish_non_exhaustive()
    }
}

impl Process {
    /// Opens the living process with this pid (a process, not a thread of one).
    ///
    /// # Errors
    /// [`ProcessError::NotFound`] when there is none or it is a zombie; [`ProcessError::Permission`].
    pub fn open(pid: i32) -> Result<Process, ProcessError> {
        let not_found = || ProcessError::NotFound { pid };
        // Pid::from_raw panics on negative numbers.
        let number = Some(pid).filter(|pid| *pid > 0).and_then(Pid::from_raw);
        let number = number.ok_or_else(not_found)?;
        let pidfd = match rustix::process::pidfd_open(number, PidfdFlags::empty()) {
            Ok(fd) => fd,
            // EINVAL or ENOENT: the number of a thread that does not lead a process.
            Err(rustix::io::Errno::SRCH | rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => {
                return Err(not_found());
            }
            Err(errno) => return Err(failed(pid, "open a descriptor", errno.into())),
        };
        let directory = rustix::fs::open(
            format!("/proc/{pid}"),
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|errno| match errno {
            rustix::io::Errno::NOENT => not_found(),
            errno => failed(pid, "open the /proc directory", errno.into()),
        })?;
        let mut inner = Inner {
            pid,
            pidfd,
            directory,
            start_time: 0,
        };
        inner.start_time = stat_field(pid, &inner.stat()?, 22)?;
        // The process of the pidfd lives *now*. That proves that the directory, opened after the pidfd, is its
        // directory too: its number was never free in between.
        if !inner.is_alive() {
            return Err(not_found());
        }
        Ok(Process {
            inner: Arc::new(inner),
        })
    }

    /// The pid. Fit for messages and logs; act through this value instead.
    pub fn pid(&self) -> i32 {
        self.inner.pid
    }

    /// When the process started, in clock ticks since boot (`/proc/PID/stat`, field 22, proc(5)).
    pub fn start_time(&self) -> u64 {
        self.inner.start_time
    }

    /// Whether the process still runs (a zombie does not).
    pub fn is_alive(&self) -> bool {
        self.inner.is_alive()
    }

    /// Waits until the process has ended, at most `timeout`; says whether it has.
    pub fn wait_exit(&self, timeout: Duration) -> bool {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            // One poll lasts at most a minute, so that no duration overflows poll(2)'s timespec.
            let slice = left.unwrap_or(timeout).min(Duration::from_secs(60));
            if self.inner.has_ended_within(slice) {
                return true;
            }
            if left.is_some_and(|left| left.is_zero()) {
                return false;
            }
        }
    }

    /// Sends a signal (a number of signal(7), or 0 to send nothing) to the whole process.
    ///
    /// # Errors
    /// [`ProcessError::Gone`], [`ProcessError::Permission`], or EINVAL for a number that is no signal.
    pub fn signal(&self, signal: i32) -> Result<(), ProcessError> {
        // rustix takes named signals only, and QEMU's own (SIGRTMIN+n) are not among them.
        // SAFETY: pidfd_send_signal(2) reads no memory of ours when `info` is null.
        let result = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.inner.pidfd.as_raw_fd(),
                signal,
                std::ptr::null::<libc::siginfo_t>(),
                0,
            )
        };
        if result == 0 {
            return Ok(());
        }
        Err(self.failed(
            "send a signal to the main thread",
            io::Error::last_os_error(),
        ))
    }

    /// Copies a descriptor of the process into ours, close-on-exec (pidfd_getfd(2)).
    ///
    /// # Errors
    /// [`ProcessError::NoSuchFd`], [`ProcessError::Gone`], [`ProcessError::Permission`].
    pub fn fetch_fd(&self, remote_fd: i32) -> Result<OwnedFd, ProcessError> {
        let fetched = rustix::process::pidfd_getfd(
            &self.inner.pidfd,
            remote_fd as RawFd,
            PidfdGetfdFlags::empty(),
        );
        fetched.map_err(|errno| match errno {
            rustix::io::Errno::BADF => ProcessError::NoSuchFd {
                pid: self.pid(),
                fd: remote_fd,
            },
            errno => self.failed("copy a file descriptor", errno.into()),
        })
    }

    /// Whether a descriptor of the process is open, and a userfaultfd.
    pub fn has_userfaultfd(&self, remote_fd: i32) -> Result<bool, ProcessError> {
        let name = format!("fd/{remote_fd}");
        match rustix::fs::readlinkat(&self.inner.directory, name, Vec::new()) {
            Ok(target) => Ok(target.as_bytes() == b"anon_inode:[userfaultfd]"),
            Err(rustix::io::Errno::NOENT) => Ok(false),
            Err(errno) => Err(self.failed("inspect a file descriptor", errno.into())),
        }
    }

    /// The running program. As proc(5) says, ` (deleted)` is appended when the file was replaced.
    pub fn exe(&self) -> Result<PathBuf, ProcessError> {
        self.read_link("exe", "read the program path")
    }

    /// The working directory, with the same note as [`Process::exe`].
    pub fn cwd(&self) -> Result<PathBuf, ProcessError> {
        self.read_link("cwd", "read the working directory")
    }

    /// The arguments, program name included, as the process was started with them.
    pub fn command_line(&self) -> Result<Vec<OsString>, ProcessError> {
        let mut bytes = self.read_file("cmdline", "read the command line")?;
        if bytes.last() == Some(&0) {
            bytes.pop();
        } else if bytes.is_empty() {
            return Ok(Vec::new());
        }
        Ok(bytes
            .split(|byte| *byte == 0)
            .map(|part| OsStr::from_bytes(part).to_owned())
            .collect())
    }

    /// The effective user id.
    pub fn uid(&self) -> Result<u32, ProcessError> {
        let text = self.read_text("status", "read the status")?;
        let line = status_line(&text, "Uid:");
        line.and_then(|line| line.split_ascii_whitespace().nth(1)?.parse().ok())
            .ok_or_else(|| ProcessError::Malformed {
                pid: self.pid(),
                file: "status",
                line: line.unwrap_or("no line Uid").to_owned(),
            })
    }

    /// The state letter of the main thread: `R`, `S`, `D`, `T` (stopped), `t` (traced), `Z`... (proc(5)).
    pub fn run_state(&self) -> Result<char, ProcessError> {
        stat_field(self.pid(), &self.inner.stat()?, 3)
    }

    /// The processor that the main thread is on, or was on when it last ran (proc(5)).
    pub fn main_processor(&self) -> Result<usize, ProcessError> {
        stat_field(self.pid(), &self.inner.stat()?, 39)
    }

    /// Bytes of its memory that are in RAM, give or take a few pages for each processor (proc(5), `rss`).
    pub fn resident_bytes(&self) -> Result<u64, ProcessError> {
        let pages: u64 = stat_field(self.pid(), &self.inner.stat()?, 24)?;
        Ok(pages * rustix::param::page_size() as u64)
    }

    /// How long all threads of the process have run together, to the nanosecond (clock_getcpuclockid(3)). `None` where
    /// the kernel does not say, and once the process has ended.
    pub fn processor_time(&self) -> Option<Duration> {
        let mut clock = 0;
        // SAFETY: the pointer is to a clock id of ours, which the call writes.
        let known = unsafe { libc::clock_getcpuclockid(self.pid(), &raw mut clock) };
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the pointer is to a timespec of ours, which the call writes.
        let read = known == 0 && unsafe { libc::clock_gettime(clock, &raw mut time) } == 0;
        // Only now is it certain that the pid still named our process.
        if !read || !self.is_alive() {
            return None;
        }
        let seconds = u64::try_from(time.tv_sec).ok()?;
        Some(Duration::new(seconds, u32::try_from(time.tv_nsec).ok()?))
    }

    /// Everything the process has mapped, in address order (`/proc/PID/maps`).
    pub fn mappings(&self) -> Result<Vec<Mapping>, ProcessError> {
        let bytes = self.read_file("maps", "read the mappings")?;
        let lines = bytes
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty());
        lines
            .map(|line| {
                Mapping::parse(line).ok_or_else(|| ProcessError::Malformed {
                    pid: self.pid(),
                    file: "maps",
                    line: String::from_utf8_lossy(line).into_owned(),
                })
            })
            .collect()
    }

    /// Opens the file behind a mapping itself, even when it is unlinked or a memfd. The result is a
    /// new open file description with its own offset.
    ///
    /// # Errors
    /// [`ProcessError::MappingGone`] when the process has mapped something else there since,
    /// [`ProcessError::NoFile`] for anonymous memory.
    pub fn open_mapping(&self, mapping: &Mapping, writable: bool) -> Result<File, ProcessError> {
        if mapping.inode == 0 {
            return Err(ProcessError::NoFile {
                pid: self.pid(),
                range: mapping.range,
            });
        }
        let name = format!(
            "map_files/{:x}-{:x}",
            mapping.range.start, mapping.range.end
        );
        let file = match self.open_below(&name, writable) {
            Ok(file) => file,
            // Following these links needs CAP_CHECKPOINT_RESTORE; a descriptor, if the process
            // still has one of the same file, does not.
            Err(rustix::io::Errno::PERM | rustix::io::Errno::ACCESS) => {
                self.open_same_file(mapping, writable)?
            }
            Err(rustix::io::Errno::NOENT) => {
                return Err(ProcessError::MappingGone {
                    pid: self.pid(),
                    range: mapping.range,
                });
            }
            Err(errno) => return Err(self.failed("open a mapped file", errno.into())),
        };
        let metadata =
            rustix::fs::fstat(&file).map_err(|e| self.failed("examine a mapped file", e.into()))?;
        if metadata.st_ino != mapping.inode {
            return Err(ProcessError::MappingGone {
                pid: self.pid(),
                range: mapping.range,
            });
        }
        Ok(file)
    }

    /// Finds a descriptor of the process that refers to the mapped file and opens its file anew.
    fn open_same_file(&self, mapping: &Mapping, writable: bool) -> Result<File, ProcessError> {
        let action = "open a mapped file";
        let fail = |errno: rustix::io::Errno| self.failed(action, errno.into());
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let listing = rustix::fs::openat(&self.inner.directory, "fd", flags, Mode::empty());
        let entries = rustix::fs::Dir::new(listing.map_err(fail)?).map_err(fail)?;
        for entry in entries {
            let name = format!("fd/{}", entry.map_err(fail)?.file_name().to_string_lossy());
            let found = rustix::fs::statat(&self.inner.directory, &name, AtFlags::empty());
            if found.is_ok_and(|found| {
                let device = (
                    rustix::fs::major(found.st_dev),
                    rustix::fs::minor(found.st_dev),
                );
                found.st_ino == mapping.inode && device == mapping.device
            }) {
                return self.open_below(&name, writable).map_err(fail);
            }
        }
        Err(ProcessError::Permission {
            pid: self.pid(),
            action: "open a mapped file (CAP_CHECKPOINT_RESTORE)",
            source: io::Error::from(rustix::io::Errno::PERM),
        })
    }

    fn open_below(&self, name: &str, writable: bool) -> rustix::io::Result<File> {
        let access = if writable {
            OFlags::RDWR
        } else {
            OFlags::RDONLY
        };
        let flags = access | OFlags::CLOEXEC;
        rustix::fs::openat(&self.inner.directory, name, flags, Mode::empty()).map(File::from)
    }

    fn read_link(&self, name: &str, action: &'static str) -> Result<PathBuf, ProcessError> {
        rustix::fs::readlinkat(&self.inner.directory, name, Vec::new())
            .map(|path| PathBuf::from(OsString::from_vec(path.into_bytes())))
            .map_err(|errno| self.failed(action, errno.into()))
    }

    pub(crate) fn read_file(
        &self,
        name: &str,
        action: &'static str,
    ) -> Result<Vec<u8>, ProcessError> {
        self.inner.read_file(name, action)
    }

    pub(crate) fn read_text(
        &self,
        name: &str,
        action: &'static str,
    ) -> Result<String, ProcessError> {
        Ok(String::from_utf8_lossy(&self.read_file(name, action)?).into_owned())
    }

    /// Opens `/proc/PID/NAME` for reading.
    pub(crate) fn open_file(&self, name: &str, action: &'static str) -> Result<File, ProcessError> {
        self.open_below(name, false)
            .map_err(|errno| self.failed(action, errno.into()))
    }

    fn failed(&self, action: &'static str, source: io::Error) -> ProcessError {
        failed(self.pid(), action, source)
    }
}

impl AsFd for Process {
    /// The pidfd: becomes readable when the process has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.pidfd.as_fd()
    }
}

impl Inner {
    fn is_alive(&self) -> bool {
        !self.has_ended_within(Duration::ZERO)
    }

    /// A pidfd becomes readable when the last thread of the process has ended.
    fn has_ended_within(&self, timeout: Duration) -> bool {
        let mut set = [rustix::event::PollFd::new(
            &self.pidfd,
            rustix::event::PollFlags::IN,
        )];
        let timeout = rustix::event::Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        // An interrupted poll counts as "not ended yet": every caller polls again or may.
        matches!(rustix::event::poll(&mut set, Some(&timeout)), Ok(ready) if ready > 0)
    }

    fn stat(&self) -> Result<String, ProcessError> {
        let bytes = self.read_file("stat", "read the state")?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn read_file(&self, name: &str, action: &'static str) -> Result<Vec<u8>, ProcessError> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let mut bytes = Vec::new();
        rustix::fs::openat(&self.directory, name, flags, Mode::empty())
            .map_err(io::Error::from)
            .and_then(|fd| File::from(fd).read_to_end(&mut bytes))
            .map_err(|source| failed(self.pid, action, source))?;
        Ok(bytes)
    }
}

/// Turns the kernel's error into its meaning for a process.
fn failed(pid: i32, action: &'static str, source: io::Error) -> ProcessError {
    match source.raw_os_error() {
        // Inside an opened /proc directory, ENOENT of a well-known name means the same as ESRCH.
        Some(libc::ESRCH | libc::ENOENT) => ProcessError::Gone { pid },
        Some(libc::EPERM | libc::EACCES) => ProcessError::Permission {
            pid,
            action,
            source,
        },
        _ => ProcessError::Io {
            pid,
            action,
            source,
        },
    }
}

/// One field of `/proc/PID/stat`, counted from 1 as proc(5) does; only those behind the name.
fn stat_field<T: std::str::FromStr>(
    pid: i32,
    stat: &str,
    number: usize,
) -> Result<T, ProcessError> {
    // The second field, the program's name in parentheses, may hold blanks and parentheses itself.
    let behind_name = stat.rfind(')').and_then(|at| stat.get(at + 1..));
    let field = behind_name.and_then(|rest| rest.split_ascii_whitespace().nth(number - 3));
    field
        .and_then(|field| field.parse().ok())
        .ok_or_else(|| ProcessError::Malformed {
            pid,
            file: "stat",
            line: stat.to_owned(),
        })
}

/// The text that follows `key` in a `/proc/PID/status` text.
pub(crate) fn status_line<'a>(status: &'a str, key: &str) -> Option<&'a str> {
    status
        .lines()
        .find_map(|line| line.strip_prefix(key))
        .map(str::trim)
}
