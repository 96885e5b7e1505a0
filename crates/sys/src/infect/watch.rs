//! Getting hold of a process: what `/proc` says of it, seizing it, waiting for its stops.

use super::error::InfectError;
use super::timeout;
use super::tracee::{Run, Stop, Tracee};
use crate::process::{Process, ProcessError, status_line};
use std::io;
use std::time::{Duration, Instant};

/// Time for which a stop is awaited without giving the processor away.
const SPIN: Duration = Duration::from_micros(300);
/// And between two looks after that, at most.
const NAP_MAX: Duration = Duration::from_millis(1);

/// How often an EPERM that cannot be explained is taken for a tracer that has just left.
const SEIZE_TRIES: u32 = 4;

/// CAP_SYS_ADMIN as a bit of a capability set (linux/capability.h).
const SYS_ADMIN: u64 = 1 << 21;

/// The content of `/proc/PID/status` for the main thread. Signals are one bit each, signal 1 in bit 0.
pub(super) struct Status {
    /// The tracing process, unless 0.
    tracer: i32,
    /// Whether it has a seccomp filter.
    pub(super) filtered: bool,
    /// Signals pending for the thread or the process.
    pub(super) pending: u64,
    /// Signals blocked right now.
    pub(super) blocked: u64,
    /// Signals that have a handler.
    pub(super) caught: u64,
}

impl Status {
    pub(super) fn of(process: &Process) -> Result<Status, InfectError> {
        let text = process.read_text("status", "read the status")?;
        let set = |key: &str| hexadecimal(&text, key).ok_or_else(|| malformed(process, key));
        let number = |key: &str| {
            let value = status_line(&text, key).and_then(|value| value.parse().ok());
            value.ok_or_else(|| malformed(process, key))
        };
        Ok(Status {
            tracer: number("TracerPid:")?,
            // The line is missing when the kernel knows no seccomp.
            filtered: number("Seccomp:").is_ok_and(|mode| mode != 0),
            pending: set("SigPnd:")? | set("ShdPnd:")?,
            blocked: set("SigBlk:")?,
            caught: set("SigCgt:")?,
        })
    }
}

fn hexadecimal(status: &str, key: &str) -> Option<u64> {
    u64::from_str_radix(status_line(status, key)?, 16).ok()
}

fn malformed(process: &Process, key: &str) -> InfectError {
    InfectError::Process(ProcessError::Malformed {
        pid: process.pid(),
        file: "status",
        line: key.to_owned(),
    })
}

/// Refuses what `/proc` already shows to be hopeless, without touching the process.
fn refuse_unfit(process: &Process) -> Result<(), InfectError> {
    let pid = process.pid();
    let status = Status::of(process)?;
    if status.tracer != 0 {
        return Err(InfectError::Traced {
            pid,
            tracer: status.tracer,
        });
    }
    match process.run_state()? {
        'T' => return Err(InfectError::Stopped { pid }),
        'Z' | 'X' | 'x' => return Err(InfectError::Gone { pid }),
        _ => {}
    }
    // Even a stop can kill a filtered process: the kernel resumes its sleep by a call that the filter may not know.
    // Therefore the filter has to be suspended, or the process left alone.
    if status.filtered && !may_suspend_seccomp() {
        let source = io::Error::from(rustix::io::Errno::PERM);
        return Err(InfectError::Sandboxed { pid, source });
    }
    Ok(())
}

/// Whether this thread has what PTRACE_O_SUSPEND_SECCOMP requires: CAP_SYS_ADMIN, and no filter of its own. If that
/// cannot be found out here, the kernel's answer shows it a little later.
fn may_suspend_seccomp() -> bool {
    let Ok(text) = std::fs::read_to_string("/proc/thread-self/status") else {
        return true;
    };
    let capable = hexadecimal(&text, "CapEff:").is_none_or(|set| set & SYS_ADMIN != 0);
    capable && status_line(&text, "Seccomp:").is_none_or(|mode| mode == "0")
}

/// Starts tracing the main thread, without stopping it.
pub(super) fn seize(process: &Process) -> Result<Tracee, InfectError> {
    let pid = process.pid();
    refuse_unfit(process)?;
    let mut tries = 0..SEIZE_TRIES;
    let tracee = loop {
        let last = tries.next().is_none();
        match Tracee::seize(pid) {
            Ok(tracee) => break tracee,
            Err(source) if source.raw_os_error() == Some(libc::EPERM) => {
                // EPERM has three meanings, two of which show in /proc, unless they have passed.
                refuse_unfit(process)?;
                if last {
                    return Err(InfectError::Permission { pid, source });
                }
            }
            Err(source) => return Err(InfectError::ptrace(process, source)),
        }
    };
    // If the pid had been given to another process before it was seized, our process would be gone now. The other
    // process has not been stopped, and is released with the end of this thread.
    if process.is_alive() {
        Ok(tracee)
    } else {
        Err(InfectError::Gone { pid })
    }
}

/// Waits until the thread stops as requested. Signals and system calls pass as if it were not traced.
pub(super) fn await_interrupt(
    process: &Process,
    tracee: &Tracee,
    deadline: Instant,
    limit: Duration,
) -> Result<(), InfectError> {
    loop {
        let stop = await_stop(process, tracee, Some(deadline))?;
        let deliver = match stop {
            None => return Err(timeout(process, limit)),
            Some(Stop::Interrupt) => return Ok(()),
            Some(Stop::Group) => {
                // It was stopped since we looked. Detaching leaves it so.
                return Err(InfectError::Stopped { pid: process.pid() });
            }
            Some(Stop::Signal(signal)) => signal,
            Some(Stop::Syscall) => 0,
        };
        tracee
            .resume(Run::Freely, deliver)
            .map_err(|source| InfectError::ptrace(process, source))?;
    }
}

/// Waits for the next stop; `None` when the deadline passes first.
pub(super) fn await_stop(
    process: &Process,
    tracee: &Tracee,
    deadline: Option<Instant>,
) -> Result<Option<Stop>, InfectError> {
    let gone = || InfectError::Gone { pid: process.pid() };
    let started = Instant::now();
    let mut nap = Duration::from_micros(20);
    loop {
        match tracee.stopped() {
            Ok(Some(stop)) => return Ok(Some(stop)),
            Ok(None) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            // Not traced by us any more: another thread of the process has called execve(2).
            Err(error) if error.raw_os_error() == Some(libc::ECHILD) => return Err(gone()),
            Err(source) => return Err(InfectError::ptrace(process, source)),
        }
        let now = Instant::now();
        if now.duration_since(started) < SPIN {
            // The victim may need this very processor to get to its stop.
            std::thread::yield_now();
            continue;
        }
        if has_ended(process) {
            return Err(gone());
        }
        if deadline.is_some_and(|deadline| now >= deadline) {
            return Ok(None);
        }
        std::thread::sleep(nap);
        nap = NAP_MAX.min(nap * 2);
    }
}

/// How long the main thread has run, in nanoseconds (`/proc/PID/schedstat`), as of late: the kernel
/// adds to it at every tick and every switch.
pub(super) fn run_time_ns(process: &Process) -> Option<u64> {
    let text = process.read_text("schedstat", "read the run time").ok()?;
    text.split_ascii_whitespace().next()?.parse().ok()
}

/// Waits until the main thread, just resumed, sleeps, stops, or has run for some time.
pub(super) fn await_progress(process: &Process, ran_before_ns: Option<u64>, limit: Duration) {
    /// Longer than it takes to enter a system call, however slow the machine.
    const ENOUGH_NS: u64 = 200_000;
    let started = Instant::now();
    while started.elapsed() < limit && matches!(process.run_state(), Ok('R')) {
        if let (Some(before), Some(now)) = (ran_before_ns, run_time_ns(process))
            && now.saturating_sub(before) > ENOUGH_NS
        {
            return;
        }
        std::thread::yield_now();
    }
}

/// Whether the main thread has ended, perhaps before the other threads: a pidfd alone would not tell.
/// A failed check is no answer: a victim must not be given up half way for that.
fn has_ended(process: &Process) -> bool {
    let state = process.run_state();
    !process.is_alive() || matches!(state, Ok('Z' | 'X' | 'x') | Err(ProcessError::Gone { .. }))
}
