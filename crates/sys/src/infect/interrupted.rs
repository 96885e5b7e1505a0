//! What the thread was doing when it was stopped, and how it goes on so that it notices nothing.
//!
//! Stopping a thread makes the system call it waits in return early. Most calls return one of the
//! kernel's own ERESTART codes, which never reach a program: on the way back to it the kernel either
//! restarts the call or, when a signal handler is to run, makes it an EINTR. All that is done right
//! by putting back `rax` and `orig_rax` at a stop inside the kernel's signal handling. Two cases are
//! left, in which we *rewind*: let the thread make its call again from the start.
//!
//! 1. Some calls return a plain EINTR (signal(7), "Interruption of system calls by stop signals").
//!    They have done nothing yet, so making them again is right; a relative time limit of the call
//!    starts anew.
//! 2. A call such as ppoll(2) had put another signal mask in place. To block signals we had to
//!    restore the thread's own mask, so a signal may be due now that the call would have kept out.
//!    Its handler has to run *before* the call, not interrupt it.
//!
//! Rewinding is always a history that could have happened: the thread was just about to call.

use super::tracee::Registers;

// Codes of include/linux/errno.h, never seen by programs.
const ERESTARTSYS: i64 = -512;
const ERESTARTNOINTR: i64 = -513;
const ERESTARTNOHAND: i64 = -514;
const ERESTART_RESTARTBLOCK: i64 = -516;
const EINTR: i64 = -(libc::EINTR as i64);

/// Not in the libc crate for x86_64.
const SYS_IO_PGETEVENTS: libc::c_long = 333;

/// `0f 05`.
pub(super) const SYSCALL_INSTRUCTION: [u8; 2] = [0x0f, 0x05];

/// Calls that return EINTR when the thread is stopped, having done nothing.
const PLAIN_EINTR: [libc::c_long; 21] = [
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_io_getevents,
    SYS_IO_PGETEVENTS,
    libc::SYS_io_uring_enter,
    // The calls below only on sockets with a time limit (SO_RCVTIMEO, SO_SNDTIMEO).
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_recvmmsg,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_sendmmsg,
];

/// The state of the thread when it was stopped.
#[derive(Clone, Copy, Debug)]
pub(super) struct Interrupted {
    /// Its registers.
    pub(super) registers: Registers,
    /// Its own signal mask.
    pub(super) own_mask: u64,
    /// The mask in force: its own, or that of the call it waits in.
    pub(super) call_mask: u64,
    /// Signals with a handler that the program itself has set, and that another could send it.
    pub(super) handlers: u64,
    /// Whether the thread has a seccomp filter.
    pub(super) filtered: bool,
    /// Whether the instruction before RIP is `syscall`.
    pub(super) behind_syscall: bool,
}

impl Interrupted {
    /// Whether the thread, which will make its call again, has to be seen into it: because a handler
    /// could run first, or because the kernel resumes the call by restart_syscall(2) and a seccomp
    /// filter may not know that.
    pub(super) fn needs_company(&self) -> bool {
        let code = self.code();
        let by_block = code == Some(ERESTART_RESTARTBLOCK);
        let plain = matches!(code, Some(ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND));
        let may_be_handled = self.handlers & !(self.own_mask & self.call_mask) != 0;
        self.behind_syscall
            && (plain || by_block || self.has_plain_eintr())
            && (may_be_handled || by_block && self.filtered)
    }

    /// The registers to go on with, when these signals (signal 1 in bit 0) are pending and have a
    /// handler. Others end no call: those that are ignored reach a thread only while it is traced.
    pub(super) fn resumption(&self, handled: u64) -> Registers {
        let deliverable = handled & !self.own_mask;
        // A signal that interrupts the call by right: its EINTR has to stay.
        let by_right = deliverable & !self.call_mask != 0;
        let rewind = match self.code() {
            Some(ERESTARTNOHAND) => deliverable != 0 && !by_right,
            _ => self.has_plain_eintr() && !by_right,
        };
        let mut registers = self.registers;
        if self.behind_syscall && rewind {
            registers.rip -= SYSCALL_INSTRUCTION.len() as u64;
            registers.rax = registers.orig_rax;
            registers.orig_rax = u64::MAX;
        }
        registers
    }

    fn has_plain_eintr(&self) -> bool {
        self.code() == Some(EINTR)
            && PLAIN_EINTR
                .iter()
                .any(|call| self.registers.orig_rax == *call as u64)
    }

    /// What the system call returned that the thread is in, if it is in one.
    fn code(&self) -> Option<i64> {
        in_syscall(&self.registers).then_some(self.registers.rax as i64)
    }
}

/// Whether the thread is on its way out of a system call (and not of an interrupt or fault).
pub(super) fn in_syscall(registers: &Registers) -> bool {
    registers.orig_rax as i64 >= 0
}
