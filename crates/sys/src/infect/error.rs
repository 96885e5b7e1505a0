//! Errors that keep a system call from being made inside a process.

use crate::process::{Process, ProcessError};
use std::io;

/// Why a process could not be infected. In every case it continues as if nothing had happened.
#[derive(Debug, thiserror::Error)]
pub enum InfectError {
    /// A debugger, or another engine, holds the process.
    #[error("process {pid} is traced by process {tracer}: end that debugger or engine first")]
    Traced {
        /// The process.
        pid: i32,
        /// The tracing process.
        tracer: i32,
    },
    /// The process is stopped and stays so.
    #[error("process {pid} is stopped (SIGSTOP, or its terminal): continue it first (SIGCONT)")]
    Stopped {
        /// The process.
        pid: i32,
    },
    /// The main thread did not stop in time.
    #[error(
        "the main thread of process {pid} did not stop within {limit_ms} ms (state {state}): it \
         sleeps in the kernel, on a slow disk for instance; try again"
    )]
    Timeout {
        /// The process.
        pid: i32,
        /// The limit.
        limit_ms: u64,
        /// The main thread's state letter in `/proc`, `?` if unknown.
        state: char,
    },
    /// The process or its main thread has ended, or is ending.
    #[error("process {pid} has ended")]
    Gone {
        /// Its pid while it lived.
        pid: i32,
    },
    /// We may not trace the process.
    #[error(
        "not permitted to trace process {pid}: run as root (CAP_SYS_PTRACE), and check \
         /proc/sys/kernel/yama/ptrace_scope and the security module"
    )]
    Permission {
        /// The process.
        pid: i32,
        /// The kernel's error.
        source: io::Error,
    },
    /// The process has a seccomp filter, and a call it does not allow could kill it.
    #[error(
        "process {pid} has a seccomp filter (QEMU: -sandbox on), which only a tracer with \
         CAP_SYS_ADMIN can suspend: run as root"
    )]
    Sandboxed {
        /// The process.
        pid: i32,
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel answered the call inside the process with an error.
    #[error("{call} inside process {pid} was refused")]
    Refused {
        /// The process.
        pid: i32,
        /// The system call.
        call: &'static str,
        /// The answer.
        source: io::Error,
    },
    /// The call inside the process raised a signal (never delivered to it).
    #[error("a system call inside process {pid} raised signal {signal}; it was not delivered")]
    Faulted {
        /// The process.
        pid: i32,
        /// SIGSYS: something in the process intercepts system calls; SIGSEGV: its code moved away.
        signal: i32,
    },
    /// This kind of process cannot be infected.
    #[error("process {pid} {why}")]
    Unsupported {
        /// The process.
        pid: i32,
        /// Why, as the end of the sentence "process N".
        why: &'static str,
    },
    /// Asking the process, or copying the descriptor out of it, failed.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// A ptrace request failed unexpectedly.
    #[error("cannot {action} process {pid}")]
    Io {
        /// The process.
        pid: i32,
        /// The action that failed.
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl InfectError {
    pub(super) fn unsupported(process: &Process, why: &'static str) -> InfectError {
        InfectError::Unsupported {
            pid: process.pid(),
            why,
        }
    }

    /// The meaning of the answer to a ptrace request.
    pub(super) fn ptrace(process: &Process, source: io::Error) -> InfectError {
        let pid = process.pid();
        match source.raw_os_error() {
            // Every request is answered so when the thread was killed.
            Some(libc::ESRCH) => InfectError::Gone { pid },
            _ => InfectError::Io {
                pid,
                action: "trace",
                source,
            },
        }
    }
}
