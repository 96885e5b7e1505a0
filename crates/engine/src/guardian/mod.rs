//! The guardian: a small process that does the work during which an engine must not die.
//!
//! 1. It injects system calls into QEMU. A tracer that is killed half-way would leave QEMU's main thread with
//!    foreign registers. `kill -9` of the engine never hits the tracer, because the tracer is this other process.
//! 2. It resumes the VM ([`resume`]) each time a pause overruns its limit (watchdog), and when the engine died
//!    inside a pause. It learns of a pause *before* the engine stops the VM. It has a copy of the pipe that holds
//!    QEMU, and of the engine's QMP connection, so that it needs no free monitor.
//! 3. Where threads of the VM wait for the engine (copy-on-write, lazy restore), it expects heartbeats
//!    ([`heartbeat`]). It kills an engine that sends none, such as one stopped by a signal.
//! 4. With copy-on-write it has a copy of the userfaultfd and the registered address ranges, and unregisters them
//!    when the engine is gone or was killed. An engine with a thread in uninterruptible sleep (hung storage) does
//!    not die of `kill -9`: its descriptors stay open, and the VM would wait.
//! 5. It carries out the on-disconnect action ([`OnDisconnect`]) when the engine is gone. It ends a QEMU that was
//!    started for a restore and has not run yet. It pauses a QEMU that runs while its memory is populated.
//!    It deflates a balloon that the engine inflated.
//!
//! With asynchronous tracking it never has the userfaultfd: no thread of the VM ever waits for the engine, and
//! tracking ends with the engine's copy. QEMU itself keeps no copy. So the VM runs on when engine and guardian die
//! together: the last copy closes.
//!
//! The guardian does no storage I/O. It is the engine's own executable, started with [`SUBCOMMAND`] from
//! `/proc/self/exe`, so that it is the same program even if the file was replaced or deleted since. A binary that
//! links the engine must call [`run`] for it.

#[cfg(test)]
pub(crate) mod fake;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod heartbeat;
mod process;
mod resume;
mod wire;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use stillframe_sys::infect::InjectedUffd;
use stillframe_sys::process::{AddressRange, Process};
use thiserror::Error;

#[cfg(test)]
pub(crate) use heartbeat::LET_GO;
pub use heartbeat::{Beating, HEARTBEAT, Heartbeat};
pub use process::run;
pub use wire::{COPY, OnDisconnect, WayBack, copy_name};
use wire::{Injection, Reply, Request};

/// The hidden subcommand under which the executable acts as guardian.
pub const SUBCOMMAND: &str = "guardian";

/// The running program, whatever became of the file that it was started from.
const EXECUTABLE: &str = "/proc/self/exe";
/// Variables of the environment that the guardian does not inherit: passwords are among them.
const PRIVATE_PREFIX: &str = "STILLFRAME_";

/// The guardian answers at once, except for an injection; silence this long means it is gone.
const REPLY_LIMIT: Duration = Duration::from_secs(10);
/// Bound for one injection into QEMU; 0.1 ms is usual.
const INJECTION_LIMIT: Duration = Duration::from_secs(3);
/// The same where pages are discarded in a QEMU that does not run yet: a host that is busy may take its time.
const DISCARD_LIMIT: Duration = Duration::from_secs(8);
/// Ranges that are discarded with one injection.
const DISCARDED_MAX: usize = 2048;
/// The engine gets this much longer to deflate the balloon.
const GIVE_BACK_AFTER: Duration = Duration::from_secs(2);
/// Time for the guardian to end with its engine.
const END_LIMIT: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_micros(500);

/// Errors between engine and guardian.
#[derive(Debug, Error)]
pub enum GuardianError {
    /// It could not be started.
    #[error("cannot start the guardian process ({executable}); without it no VM is paused")]
    Start {
        /// The executable that was tried.
        executable: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is gone or silent.
    #[error("the guardian process does not answer; no VM is paused without it: start again")]
    Silent(#[source] io::Error),
    /// It answered something that does not fit the question.
    #[error("the guardian process gave an unexpected answer: {0}")]
    Unexpected(String),
    /// A record could not be written.
    #[error("cannot write down that the VM is given up: {reason}")]
    Record {
        /// Why.
        reason: String,
    },
    /// A call inside QEMU failed.
    #[error("cannot reach into process {pid}: {reason}")]
    Injection {
        /// QEMU's process id.
        pid: i32,
        /// Cause and remedy.
        reason: String,
    },
}

/// The engine's end.
#[derive(Debug)]
pub struct Guardian {
    socket: UnixStream,
    // Reaped when dropped; the guardian exits by itself at the end of file.
    child: Option<Child>,
}

impl Guardian {
    /// Starts the guardian in a process group of its own, so that Ctrl-C does not reach it.
    pub fn start() -> Result<Guardian, GuardianError> {
        let start_error = |source| GuardianError::Start {
            executable: EXECUTABLE.to_owned(),
            source,
        };
        let (ours, theirs) = UnixStream::pair().map_err(start_error)?;
        ours.set_read_timeout(Some(REPLY_LIMIT))
            .map_err(start_error)?;
        let mut command = Command::new(EXECUTABLE);
        if let Some(name) = std::env::args_os().next() {
            command.arg0(name);
        }
        for (name, _) in std::env::vars_os() {
            if name
                .as_encoded_bytes()
                .starts_with(PRIVATE_PREFIX.as_bytes())
            {
                command.env_remove(name);
            }
        }
        let child = command
            .arg(SUBCOMMAND)
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(start_error)?;
        Ok(Guardian {
            socket: ours,
            child: Some(child),
        })
    }

    /// Gives the guardian the QMP connection on which it resumes the VM.
    pub fn watch(&self, qmp: BorrowedFd<'_>) -> Result<(), GuardianError> {
        self.expect_ok(&Request::Watch, Some(qmp))
    }

    /// Injects a `userfaultfd` call into `process`.
    pub fn inject_userfaultfd(&self, process: &Process) -> Result<InjectedUffd, GuardianError> {
        self.open_userfaultfd(process, false)
    }

    /// Injects as [`Guardian::inject_userfaultfd`], but the process keeps a copy (`infect::duplicate_userfaultfd`).
    pub fn duplicate_userfaultfd(&self, process: &Process) -> Result<InjectedUffd, GuardianError> {
        self.open_userfaultfd(process, true)
    }

    fn open_userfaultfd(
        &self,
        process: &Process,
        share: bool,
    ) -> Result<InjectedUffd, GuardianError> {
        match self.inject(process, Injection::Userfaultfd { share }, INJECTION_LIMIT)? {
            (
                Reply::Injected {
                    remote_fd,
                    user_mode_only,
                    stopped_us,
                },
                Some(fd),
            ) => Ok(InjectedUffd {
                fd,
                remote_fd,
                user_mode_only,
                stopped_us,
            }),
            (reply, _) => Err(not_done(process, reply)),
        }
    }

    /// Has `process` close one of its descriptors.
    pub fn close_fd(&self, process: &Process, fd: i32) -> Result<(), GuardianError> {
        self.inject_plain(process, Injection::Close { fd }, INJECTION_LIMIT)
    }

    /// Has `process` discard private memory of its own (`infect::discard`).
    pub fn discard(&self, process: &Process, ranges: &[AddressRange]) -> Result<(), GuardianError> {
        ranges.chunks(DISCARDED_MAX).try_for_each(|ranges| {
            let ranges = ranges.iter().map(|range| (range.start, range.end));
            let ranges = ranges.collect();
            self.inject_plain(process, Injection::Discard { ranges }, DISCARD_LIMIT)
        })
    }

    /// Makes a call that returns nothing.
    fn inject_plain(
        &self,
        process: &Process,
        call: Injection,
        limit: Duration,
    ) -> Result<(), GuardianError> {
        match self.inject(process, call, limit)? {
            (Reply::Ok, _) => Ok(()),
            (reply, _) => Err(not_done(process, reply)),
        }
    }

    fn inject(
        &self,
        process: &Process,
        call: Injection,
        limit: Duration,
    ) -> Result<(Reply, Option<OwnedFd>), GuardianError> {
        let request = Request::Inject {
            pid: process.pid(),
            start_time: process.start_time(),
            limit_ms: limit.as_millis() as u64,
            call,
        };
        self.ask(&request, &[])
    }

    /// Sets the on-disconnect action: the guardian's action if this process ends.
    pub fn on_disconnect(&self, action: OnDisconnect) -> Result<(), GuardianError> {
        self.on_disconnect_with(action, &[])
    }

    /// The same; the guardian keeps copies of these descriptors until the next action is set, or this one is done.
    pub fn on_disconnect_with(
        &self,
        action: OnDisconnect,
        kept: &[BorrowedFd<'_>],
    ) -> Result<(), GuardianError> {
        match self.ask(&Request::OnDisconnect { action }, kept)? {
            (Reply::Ok, _) => Ok(()),
            (other, _) => Err(GuardianError::Unexpected(format!("{other:?}"))),
        }
    }

    /// Must return before the balloon is inflated: from here on the guardian has the guest take back what it has now, in
    /// bytes, if this process ends, or hangs for longer than a while after `limit`.
    pub fn taking_memory(&self, bytes: u64, limit: Duration) -> Result<(), GuardianError> {
        let limit = limit.saturating_add(GIVE_BACK_AFTER);
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        self.expect_ok(&Request::TakingMemory { bytes, limit_ms }, None)
    }

    /// QEMU has the command that deflates the balloon.
    pub fn memory_given_back(&self) -> Result<(), GuardianError> {
        self.expect_ok(&Request::MemoryGivenBack, None)
    }

    /// From here on the guardian kills this process when it misses the heartbeats. `registered`: the
    /// userfaultfd that threads of the VM wait on, and its ranges, which the guardian unregisters then.
    pub fn heartbeat(
        &self,
        registered: Option<(BorrowedFd<'_>, &[AddressRange])>,
    ) -> Result<Heartbeat, GuardianError> {
        let (theirs, ours) = Heartbeat::pipe().map_err(|source| GuardianError::Start {
            executable: "a pipe to it".to_owned(),
            source,
        })?;
        let (uffd, ranges) = registered.unzip();
        let ranges = ranges.unwrap_or_default().iter();
        let request = Request::Heartbeat {
            ranges: ranges.map(|range| (range.start, range.end)).collect(),
        };
        let descriptors: Vec<_> = [theirs.as_fd()].into_iter().chain(uffd).collect();
        match self.ask(&request, &descriptors)? {
            (Reply::Ok, _) => Ok(ours),
            (other, _) => Err(GuardianError::Unexpected(format!("{other:?}"))),
        }
    }

    /// Gives the guardian the end of the pipe that holds QEMU in a pause.
    pub fn stream(&self, pipe: BorrowedFd<'_>) -> Result<(), GuardianError> {
        self.expect_ok(&Request::Stream, Some(pipe))
    }

    /// Gives the guardian our end of the socket that holds QEMU in the next pause, too.
    pub fn hold(&self, socket: BorrowedFd<'_>) -> Result<(), GuardianError> {
        self.expect_ok(&Request::Hold, Some(socket))
    }

    /// Must return before the VM is stopped; from here on the guardian will resume it.
    pub fn pausing(&self, limit: Duration, way_back: WayBack) -> Result<(), GuardianError> {
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        self.expect_ok(&Request::Pausing { limit_ms, way_back }, None)
    }

    /// Releases QEMU, whatever it still writes into the pipe.
    pub fn release(&self) -> Result<(), GuardianError> {
        self.expect_ok(&Request::Release, None)
    }

    /// The VM runs again. Returns whether the watchdog had to resume it before.
    pub fn resumed(&self) -> Result<bool, GuardianError> {
        match self.ask(&Request::Resumed, &[])? {
            (Reply::Pause { fired }, _) => Ok(fired),
            (other, _) => Err(GuardianError::Unexpected(format!("{other:?}"))),
        }
    }

    /// Renames a file in `directory`, and never resumes the VM from then on: both, or neither. Returns whether it had
    /// resumed the VM before, and then neither is done.
    pub fn give_up(
        &self,
        directory: BorrowedFd<'_>,
        from: &str,
        to: &str,
    ) -> Result<bool, GuardianError> {
        let request = Request::GiveUp {
            from: from.to_owned(),
            to: to.to_owned(),
        };
        match self.ask(&request, &[directory])? {
            (Reply::Pause { fired }, _) => Ok(fired),
            (Reply::Failed { reason }, _) => Err(GuardianError::Record { reason }),
            (other, _) => Err(GuardianError::Unexpected(format!("{other:?}"))),
        }
    }

    fn expect_ok(
        &self,
        request: &Request,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), GuardianError> {
        match self.ask(request, fd.as_slice())? {
            (Reply::Ok, _) => Ok(()),
            (other, _) => Err(GuardianError::Unexpected(format!("{other:?}"))),
        }
    }

    fn ask(
        &self,
        request: &Request,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Option<OwnedFd>), GuardianError> {
        wire::send(&self.socket, request, descriptors).map_err(GuardianError::Silent)?;
        match wire::receive(&self.socket).map_err(GuardianError::Silent)? {
            Some((reply, mut descriptors)) => Ok((reply, descriptors.pop())),
            None => Err(GuardianError::Silent(io::ErrorKind::UnexpectedEof.into())),
        }
    }
}

fn not_done(process: &Process, reply: Reply) -> GuardianError {
    match reply {
        Reply::Failed { reason } => GuardianError::Injection {
            pid: process.pid(),
            reason,
        },
        other => GuardianError::Unexpected(format!("{other:?}")),
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        // Closing our end makes the guardian finish; then reap it, so that a long-lived engine leaves no zombie
        // behind. Nothing is lost if this fails.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        let Some(mut child) = self.child.take() else {
            return;
        };
        let deadline = Instant::now() + END_LIMIT;
        while let Ok(None) = child.try_wait() {
            if Instant::now() > deadline {
                // It has work with a QEMU that does not answer, such as one that waits for a page. It does not need
                // this process for that.
                let thread = std::thread::Builder::new().name("reaper".to_owned());
                let _ = thread.spawn(move || child.wait());
                return;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}
