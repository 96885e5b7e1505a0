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
const ERESTARTNOHAND: i64 = -514;
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
    /// Whether the instruction before RIP is `syscall`.
    pub(super) behind_syscall: bool,
}

impl Interrupted {
    /// Whether it depends on the pending signals how the thread goes on.
    pub(super) fn depends_on_signals(&self) -> bool {
        self.has_plain_eintr()
            || (self.code() == Some(ERESTARTNOHAND) && self.call_mask != self.own_mask)
    }

    /// The registers to go on with, when these signals are pending.
    pub(super) fn resumption(&self, pending: u64) -> Registers {
        let deliverable = pending & !self.own_mask;
        // A signal that interrupts the call by right: its EINTR has to stay.
        let by_right = deliverable & !self.call_mask != 0;
        let plain = self.has_plain_eintr() && !by_right;
        let kept_out = self.code() == Some(ERESTARTNOHAND) && deliverable != 0 && !by_right;
        let mut registers = self.registers;
        if self.behind_syscall && (plain || kept_out) {
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
