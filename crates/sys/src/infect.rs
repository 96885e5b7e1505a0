//! Making a system call inside another process.
//!
//! A userfaultfd watches the address space of the process that *created* it, so the one call
//! `userfaultfd(2)` has to be made by QEMU itself. Its main thread is stopped for about a tenth of a
//! millisecond and made to execute a `syscall` instruction that it has anyway:
//!
//! ```text
//!  running ──SEIZE, INTERRUPT──▶ stopped ──block signals, set registers──▶ call 1 ─▶ exit
//!     ▲  │                         │                                 userfaultfd     │ pidfd_getfd
//!     │  └─ timeout: give up       └─ group stop: give up, it stays stopped          ▼
//!     │                                                                     call 2: close, exit
//!     └── let go ◀── settle ◀── stopped ◀── INTERRUPT ◀── registers and mask back ◀──┘
//! ```
//!
//! - Once the first call has begun, every path leads through "registers and mask back".
//! - "Stopped" lies inside the kernel's signal handling, which restarts the interrupted call. The thread is
//!   released only when it is in that call again: see `Seizure::settle`.
//! - Signals sent meanwhile stay pending in the kernel. The few that cannot wait (signals of faults, which would
//!   kill when blocked) are held back and sent again.
//! - All of it runs on a thread of its own, whose end detaches in every state. A caller whose limit has passed can
//!   leave; a victim that is stuck in the call is still attended.

mod error;
mod gadget;
mod interrupted;
mod seizure;
mod tracee;
mod watch;

pub use error::InfectError;

use crate::process::{AddressRange, Process, status_line};
use seizure::{Left, Seizure};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How much longer than its limit a caller waits for the tracing thread to speak itself.
const GRACE: Duration = Duration::from_millis(100);

/// A userfaultfd of another process' address space.
#[derive(Debug)]
pub struct InjectedUffd {
    /// Close-on-exec, non-blocking, before its handshake ([`crate::uffd::Uffd::handshake`]). When
    /// its last copy is closed, every protection is lifted and missing pages become zero.
    pub fd: OwnedFd,
    /// The number of the process' own copy; none is open after [`inject_userfaultfd`].
    pub remote_fd: i32,
    /// The process was not allowed a full one (EPERM): faults that the *kernel* takes on watched
    /// memory fail instead of waiting for us. Asynchronous write protection is not affected; the
    /// synchronous mode and missing pages must not be used on guest memory.
    pub user_mode_only: bool,
    /// How long the main thread of the process was held, in microseconds.
    pub stopped_us: u64,
}

/// Opens a userfaultfd that belongs to `process`' address space, fetches it and closes the victim's copy. Only the
/// main thread is stopped, for about 0.1 ms.
///
/// When the process is a child of ours, no other thread may wait for it meanwhile: a waitpid(2) would take away the
/// stops that are waited for here.
///
/// # Errors
/// The process is left as it was in every case; see [`InfectError`]. This returns a tenth of a second after `limit`
/// at the latest.
pub fn inject_userfaultfd(process: &Process, limit: Duration) -> Result<InjectedUffd, InfectError> {
    open_userfaultfd(process, limit, Left::Nothing)
}

/// Injects as [`inject_userfaultfd`], but the process keeps a copy. If all others are closed, a thread that touches
/// a missing page waits until a process has fetched that copy and handles its faults. (Without it, that page
/// would become zero.) [`close_fd`] closes it.
///
/// # Errors
/// The errors of [`inject_userfaultfd`].
pub fn duplicate_userfaultfd(
    process: &Process,
    limit: Duration,
) -> Result<InjectedUffd, InfectError> {
    open_userfaultfd(process, limit, Left::TheUserfaultfd)
}

/// Has the process close one of its descriptors. The rest is as with [`inject_userfaultfd`].
///
/// # Errors
/// The errors of [`inject_userfaultfd`]; [`InfectError::Refused`] with EBADF when there is no such descriptor.
pub fn close_fd(process: &Process, remote_fd: i32, limit: Duration) -> Result<(), InfectError> {
    hold(process, limit, move |seizure| seizure.close(remote_fd)).map(|((), _)| ())
}

/// Has the process discard private memory of its own: it is missing then, and zero when it is touched. A range takes
/// about ten microseconds. The rest is as with [`inject_userfaultfd`].
///
/// # Errors
/// The errors of [`inject_userfaultfd`]; [`InfectError::Refused`] where memory is locked, or not mapped. Some ranges may
/// have been discarded.
pub fn discard(
    process: &Process,
    ranges: Vec<AddressRange>,
    limit: Duration,
) -> Result<(), InfectError> {
    hold(process, limit, move |seizure| seizure.discard(&ranges)).map(|((), _)| ())
}

fn open_userfaultfd(
    process: &Process,
    limit: Duration,
    left: Left,
) -> Result<InjectedUffd, InfectError> {
    let (opened, stopped_us) = hold(process, limit, move |seizure| seizure.open_and_fetch(left))?;
    Ok(InjectedUffd {
        fd: opened.fd,
        remote_fd: opened.remote,
        user_mode_only: opened.limited,
        stopped_us,
    })
}

/// Does something while the main thread is held, on a thread of its own; also says how long it was
/// held, in microseconds.
fn hold<T: Send + 'static>(
    process: &Process,
    limit: Duration,
    what: impl FnOnce(&mut Seizure<'_>) -> Result<T, InfectError> + Send + 'static,
) -> Result<(T, u64), InfectError> {
    let started = Instant::now();
    // A limit that the clock cannot hold is replaced by a day.
    let deadline = started
        .checked_add(limit)
        .unwrap_or(started + Duration::from_secs(86_400));
    let (to_caller, outcome) = mpsc::channel();
    let target = process.clone();
    let thread = std::thread::Builder::new()
        .name("infect".into())
        .spawn(move || {
            let result = trace(&target, deadline, limit, what);
            // A caller that has left drops the descriptor, which is all the tidying it needs.
            let _ = to_caller.send((rustix::thread::gettid(), result));
        })
        .map_err(|source| failed(process, "start a thread to trace", source))?;
    let patience = deadline.saturating_duration_since(Instant::now()) + GRACE;
    match outcome.recv_timeout(patience) {
        Ok((tracer, result)) => {
            let ended = thread.join();
            await_detached(process, tracer.as_raw_pid());
            ended.map_err(|_| failed(process, "trace", io::Error::other("a panic")))?;
            result
        }
        Err(RecvTimeoutError::Timeout) => Err(timeout(process, limit)),
        Err(RecvTimeoutError::Disconnected) => Err(failed(
            process,
            "trace",
            io::Error::other("the tracing thread ended early"),
        )),
    }
}

/// Waits until the kernel has detached the ended thread `tracer`, so that the process can be traced
/// again as soon as we return. The C library calls a thread ended a little before that.
fn await_detached(process: &Process, tracer: i32) {
    while let Ok(status) = process.read_text("status", "read the status")
        && status_line(&status, "TracerPid:").is_some_and(|pid| pid == tracer.to_string())
    {
        std::thread::yield_now();
    }
}

/// The whole of it, on the tracing thread.
fn trace<T>(
    process: &Process,
    deadline: Instant,
    limit: Duration,
    what: impl FnOnce(&mut Seizure<'_>) -> Result<T, InfectError>,
) -> Result<(T, u64), InfectError> {
    let mut stranger = None;
    let mut seizure = loop {
        match Seizure::begin(process, deadline, limit) {
            // Another infection of ours, perhaps one whose caller has left, will end. A tracer that seems to be a
            // stranger is checked twice: it may have been a thread of ours.
            Err(InfectError::Traced { tracer, .. })
                if (is_own_thread(tracer) || stranger.replace(tracer) != Some(tracer))
                    && Instant::now() < deadline =>
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            other => break other?,
        }
    };
    let outcome = seizure.prepare().and_then(|()| what(&mut seizure));
    let stopped_us = seizure.release();
    Ok((outcome?, stopped_us))
}

fn is_own_thread(tid: i32) -> bool {
    std::path::Path::new(&format!("/proc/self/task/{tid}")).exists()
}

fn timeout(process: &Process, limit: Duration) -> InfectError {
    InfectError::Timeout {
        pid: process.pid(),
        limit_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
        state: process.run_state().unwrap_or('?'),
    }
}

fn failed(process: &Process, action: &'static str, source: io::Error) -> InfectError {
    InfectError::Io {
        pid: process.pid(),
        action,
        source,
    }
}
