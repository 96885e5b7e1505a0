//! The activity of the thread when it was stopped, and how it continues so that it notices nothing.
//!
//! Stopping a thread makes the system call it waits in return early. Most calls return one of the kernel's own
//! ERESTART codes, which never reach a program. On the way back to the program the kernel either restarts the call
//! or, when a signal handler is to run, makes it an EINTR. All that is done right by putting back `rax` and
//! `orig_rax` at a stop inside the kernel's signal handling. In two other cases we *rewind*: the thread makes its
//! call again from the start.
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

/// The libc crate lacks it for x86_64.
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
    /// Whether the thread, which will make its call again, must be traced into it. A handler could run first, or
    /// the kernel resumes the call by restart_syscall(2), which a seccomp filter may not know.
    pub(super) fn needs_company(&self) -> bool {
        let code = self.code();
        let by_block = code == Some(ERESTART_RESTARTBLOCK);
        let plain = matches!(code, Some(ERESTARTSYS | ERESTARTNOINTR | ERESTARTNOHAND));
        let may_be_handled = self.handlers & !(self.own_mask & self.call_mask) != 0;
        self.behind_syscall
            && (plain || by_block || self.has_plain_eintr())
            && (may_be_handled || by_block && self.filtered)
    }

    /// The registers to continue with, when these signals (signal 1 in bit 0) are pending and have a
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

    /// The return value of the system call that the thread is in, if it is in one.
    fn code(&self) -> Option<i64> {
        in_syscall(&self.registers).then_some(self.registers.rax as i64)
    }
}

/// Whether the thread is on its way out of a system call (and not of an interrupt or fault).
pub(super) fn in_syscall(registers: &Registers) -> bool {
    registers.orig_rax as i64 >= 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const USR1: u64 = 1 << (libc::SIGUSR1 - 1);
    const USR2: u64 = 1 << (libc::SIGUSR2 - 1);

    fn in_call(number: libc::c_long, code: i64) -> Interrupted {
        // SAFETY: registers are integers.
        let mut registers: Registers = unsafe { std::mem::zeroed() };
        registers.rip = 0x1002;
        registers.orig_rax = number as u64;
        registers.rax = code as u64;
        Interrupted {
            registers,
            own_mask: 0,
            call_mask: 0,
            handlers: USR1 | USR2,
            filtered: false,
            behind_syscall: true,
        }
    }

    fn is_rewound(state: &Interrupted, handled: u64) -> bool {
        let now = state.resumption(handled);
        let before = state.registers;
        if (now.rip, now.rax, now.orig_rax) == (before.rip, before.rax, before.orig_rax) {
            return false;
        }
        assert_eq!(
            (now.rip, now.rax, now.orig_rax),
            (before.rip - 2, before.orig_rax, u64::MAX)
        );
        true
    }

    #[test]
    fn restart_codes_are_left_to_the_kernel() {
        for code in [
            ERESTARTSYS,
            ERESTARTNOINTR,
            ERESTARTNOHAND,
            ERESTART_RESTARTBLOCK,
        ] {
            let state = in_call(libc::SYS_ppoll, code);
            assert!(!is_rewound(&state, 0) && !is_rewound(&state, USR1));
            assert!(state.needs_company());
            assert!(
                !Interrupted {
                    handlers: 0,
                    ..state
                }
                .needs_company()
            );
        }
    }

    #[test]
    fn a_plain_eintr_stays_only_when_a_handler_runs() {
        let state = in_call(libc::SYS_epoll_wait, EINTR);
        assert!(is_rewound(&state, 0) && !is_rewound(&state, USR1));
        // A call that may have done something before its EINTR is not made again.
        assert!(!is_rewound(&in_call(libc::SYS_connect, EINTR), 0));
        // Nor is anything rewound that is not behind a syscall instruction.
        assert!(!is_rewound(
            &Interrupted {
                behind_syscall: false,
                ..state
            },
            0
        ));
    }

    #[test]
    fn a_signal_that_the_call_keeps_out_comes_before_it() {
        let state = Interrupted {
            call_mask: USR1,
            ..in_call(libc::SYS_ppoll, ERESTARTNOHAND)
        };
        assert!(is_rewound(&state, USR1));
        // With a signal that it lets in, the call ends by right. Likewise when it lets in a signal that the thread
        // itself keeps out: then the kernel makes the call again and finds it.
        assert!(!is_rewound(&state, USR1 | USR2) && !is_rewound(&state, USR2));
        let state = Interrupted {
            own_mask: USR1,
            ..in_call(libc::SYS_ppoll, ERESTARTNOHAND)
        };
        assert!(!is_rewound(&state, USR1));
    }

    #[test]
    fn only_a_filtered_sleeper_without_handlers_needs_company() {
        let sleeper = Interrupted {
            handlers: 0,
            ..in_call(libc::SYS_nanosleep, ERESTART_RESTARTBLOCK)
        };
        assert!(!sleeper.needs_company());
        assert!(
            Interrupted {
                filtered: true,
                ..sleeper
            }
            .needs_company()
        );
        let masked = Interrupted {
            own_mask: USR1 | USR2,
            call_mask: USR1 | USR2,
            ..sleeper
        };
        assert!(
            !Interrupted {
                handlers: USR1,
                ..masked
            }
            .needs_company()
        );
    }

    #[test]
    fn a_running_thread_is_in_no_call() {
        let mut state = in_call(0, 0);
        state.registers.orig_rax = u64::MAX;
        assert!(!in_syscall(&state.registers));
        assert!(!state.needs_company() && !is_rewound(&state, USR1));
    }
}
