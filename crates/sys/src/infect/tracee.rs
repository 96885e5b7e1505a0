//! One traced thread: the ptrace(2) requests, typed.
//!
//! Only `PTRACE_SEIZE` is used, never `PTRACE_ATTACH`: nothing here ever sends the victim a signal,
//! and the end of the tracing thread detaches in every state.

use libc::{c_int, c_long, c_uint, c_void, siginfo_t, user_regs_struct};
use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr;

/// General registers, in the kernel's order.
pub(super) type Registers = user_regs_struct;

const _: () = {
    assert!(size_of::<Registers>() == 27 * 8);
    assert!(size_of::<libc::ptrace_rseq_configuration>() == 24);
    assert!(size_of::<siginfo_t>() == 128);
    // struct ptrace_syscall_info: 24 bytes, then the largest of its three variants.
    assert!(size_of::<libc::ptrace_syscall_info>() == 24 + 64);
    assert!(libc::PTRACE_SEIZE == 0x4206 && libc::PTRACE_INTERRUPT == 0x4207);
    assert!(libc::PTRACE_GETSIGMASK == 0x420a && libc::PTRACE_SETSIGMASK == 0x420b);
    assert!(libc::PTRACE_GET_SYSCALL_INFO == 0x420e);
    assert!(libc::PTRACE_GET_RSEQ_CONFIGURATION == 0x420f);
};

/// Filters of the victim do not apply to it while this option stands (needs CAP_SYS_ADMIN).
const PTRACE_O_SUSPEND_SECCOMP: c_int = 1 << 21;

/// Why the thread has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The stop that [`Tracee::interrupt`] requested, inside the kernel's signal handling.
    Interrupt,
    /// The whole process is stopped by a signal such as SIGSTOP.
    Group,
    /// At the entry or the exit of a system call.
    Syscall,
    /// This signal is about to be delivered.
    Signal(c_int),
}

/// Where a [`Stop::Syscall`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Syscall {
    /// Before it runs.
    Entry { number: u64 },
    /// After it ran.
    Exit { result: i64 },
}

/// How far a thread runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Run {
    /// Runs until a signal or an interrupt stops it.
    Freely,
    /// Stops at the next entry or exit of a system call, too.
    ToSyscall,
}

/// A thread traced by the current thread. Dropping it does nothing: the kernel detaches when the
/// tracing thread ends, whatever the traced one is doing then.
#[derive(Debug)]
pub(super) struct Tracee {
    tid: c_int,
    /// ptrace requests are refused from any thread but the tracer.
    not_send: PhantomData<*const ()>,
}

impl Tracee {
    /// Starts tracing without stopping.
    pub(super) fn seize(tid: c_int) -> io::Result<Tracee> {
        let tracee = Tracee {
            tid,
            not_send: PhantomData,
        };
        // SAFETY: PTRACE_SEIZE takes two numbers.
        unsafe { tracee.request(libc::PTRACE_SEIZE, 0, libc::PTRACE_O_TRACESYSGOOD as usize) }?;
        Ok(tracee)
    }

    /// Requests a stop of the thread; does not wait for it.
    pub(super) fn interrupt(&self) -> io::Result<()> {
        // SAFETY: PTRACE_INTERRUPT takes no memory.
        unsafe { self.request(libc::PTRACE_INTERRUPT, 0, 0) }
    }

    /// Switches the seccomp filters of the stopped thread off, for as long as it is traced.
    pub(super) fn suspend_seccomp(&self) -> io::Result<()> {
        self.set_options(libc::PTRACE_O_TRACESYSGOOD | PTRACE_O_SUSPEND_SECCOMP)
    }

    /// Switches them on again.
    pub(super) fn apply_seccomp(&self) -> io::Result<()> {
        self.set_options(libc::PTRACE_O_TRACESYSGOOD)
    }

    fn set_options(&self, options: c_int) -> io::Result<()> {
        // SAFETY: PTRACE_SETOPTIONS takes a number.
        unsafe { self.request(libc::PTRACE_SETOPTIONS, 0, options as usize) }
    }

    /// Lets a stopped thread run on, delivering `signal` unless it is 0.
    pub(super) fn resume(&self, how: Run, signal: c_int) -> io::Result<()> {
        let request = match how {
            Run::Freely => libc::PTRACE_CONT,
            Run::ToSyscall => libc::PTRACE_SYSCALL,
        };
        // SAFETY: both requests take a number.
        unsafe { self.request(request, 0, signal as usize) }
    }

    /// Stops tracing a stopped thread, delivering `signal` unless it is 0; it runs on, or joins the
    /// stop of its process.
    pub(super) fn detach(&self, signal: c_int) -> io::Result<()> {
        // SAFETY: PTRACE_DETACH takes a number.
        unsafe { self.request(libc::PTRACE_DETACH, 0, signal as usize) }
    }

    /// Whether the thread has stopped since it last ran, and why. Does not wait.
    ///
    /// Never takes an exit: when the victim is a child of ours, its exit status belongs to the code that started
    /// it.
    pub(super) fn stopped(&self) -> io::Result<Option<Stop>> {
        let mut info = MaybeUninit::<siginfo_t>::zeroed();
        let flags = libc::WSTOPPED | libc::WNOHANG | libc::__WALL;
        let id = self.tid as libc::id_t;
        // SAFETY: waitid(2) writes one siginfo.
        let result = unsafe { libc::waitid(libc::P_PID, id, info.as_mut_ptr(), flags) };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: zeroed above, and perhaps filled in by the kernel; every bit pattern is valid.
        let info = unsafe { info.assume_init() };
        // SAFETY: the fields si_pid and si_status are those of SIGCHLD, which waitid fills in; with
        // no child to report they are zero.
        let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
        if pid == 0 {
            return Ok(None);
        }
        let signal = status & 0xff;
        Ok(Some(match status >> 8 {
            libc::PTRACE_EVENT_STOP if signal == libc::SIGTRAP => Stop::Interrupt,
            libc::PTRACE_EVENT_STOP => Stop::Group,
            _ if signal == libc::SIGTRAP | 0x80 => Stop::Syscall,
            _ => Stop::Signal(signal),
        }))
    }

    /// The general registers of the stopped thread, `orig_rax` included.
    pub(super) fn registers(&self) -> io::Result<Registers> {
        let mut registers = MaybeUninit::<Registers>::zeroed();
        // SAFETY: PTRACE_GETREGS writes one `user_regs_struct`.
        unsafe { self.request(libc::PTRACE_GETREGS, 0, registers.as_mut_ptr() as usize) }?;
        // SAFETY: all of it are integers, zeroed and then filled in.
        Ok(unsafe { registers.assume_init() })
    }

    /// Sets them.
    pub(super) fn set_registers(&self, registers: &Registers) -> io::Result<()> {
        // SAFETY: PTRACE_SETREGS reads one `user_regs_struct`.
        unsafe { self.request(libc::PTRACE_SETREGS, 0, ptr::from_ref(registers) as usize) }
    }

    /// The thread's own signal mask: not the one that a call such as ppoll(2) has put in its place
    /// for a while.
    pub(super) fn mask(&self) -> io::Result<u64> {
        let mut mask = 0_u64;
        // SAFETY: PTRACE_GETSIGMASK writes 8 bytes, the size given.
        unsafe {
            self.request(
                libc::PTRACE_GETSIGMASK,
                8,
                ptr::from_mut(&mut mask) as usize,
            )
        }?;
        Ok(mask)
    }

    /// Sets it, and forgets a mask that a call was to put back at its end.
    pub(super) fn set_mask(&self, mask: u64) -> io::Result<()> {
        // SAFETY: PTRACE_SETSIGMASK reads 8 bytes, the size given.
        unsafe { self.request(libc::PTRACE_SETSIGMASK, 8, ptr::from_ref(&mask) as usize) }
    }

    /// The known details of the signal of a [`Stop::Signal`].
    pub(super) fn signal_info(&self) -> io::Result<siginfo_t> {
        let mut info = MaybeUninit::<siginfo_t>::zeroed();
        // SAFETY: PTRACE_GETSIGINFO writes one siginfo.
        unsafe { self.request(libc::PTRACE_GETSIGINFO, 0, info.as_mut_ptr() as usize) }?;
        // SAFETY: zeroed, then filled in; every bit pattern is valid.
        Ok(unsafe { info.assume_init() })
    }

    /// Where a [`Stop::Syscall`] is; nothing when the thread is not at a system call.
    pub(super) fn syscall(&self) -> io::Result<Option<Syscall>> {
        let mut info = MaybeUninit::<libc::ptrace_syscall_info>::zeroed();
        let bytes = size_of::<libc::ptrace_syscall_info>();
        let to = info.as_mut_ptr() as usize;
        // SAFETY: PTRACE_GET_SYSCALL_INFO writes at most `bytes` bytes.
        unsafe { self.request(libc::PTRACE_GET_SYSCALL_INFO, bytes, to) }?;
        // SAFETY: integers and a union of integers, zeroed and then filled in.
        let info = unsafe { info.assume_init() };
        Ok(match info.op {
            // SAFETY: `op` says which variant the kernel has written; all are integers.
            libc::PTRACE_SYSCALL_INFO_ENTRY => unsafe {
                Some(Syscall::Entry {
                    number: info.u.entry.nr,
                })
            },
            // SAFETY: as above.
            libc::PTRACE_SYSCALL_INFO_EXIT => unsafe {
                Some(Syscall::Exit {
                    result: info.u.exit.sval,
                })
            },
            _ => None,
        })
    }

    /// Where the thread keeps its `struct rseq` (rseq(2)); 0 when it has none.
    pub(super) fn rseq_address(&self) -> io::Result<u64> {
        let mut area = MaybeUninit::<libc::ptrace_rseq_configuration>::zeroed();
        let bytes = size_of::<libc::ptrace_rseq_configuration>();
        let to = area.as_mut_ptr() as usize;
        // SAFETY: PTRACE_GET_RSEQ_CONFIGURATION writes at most `bytes` bytes.
        match unsafe { self.request(libc::PTRACE_GET_RSEQ_CONFIGURATION, bytes, to) } {
            // SAFETY: integers, zeroed and then filled in.
            Ok(()) => Ok(unsafe { area.assume_init() }.rseq_abi_pointer),
            // A kernel without rseq does not know the request.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EIO | libc::EINVAL)) => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Sends a signal that was held back to the thread again, unchanged if the kernel allows that. The siginfo of
    /// kill(2) cannot be forged; such a signal then bears our pid.
    pub(super) fn send_again(&self, process: c_int, signal: c_int, info: &siginfo_t) {
        if info.si_code < 0 && info.si_code != libc::SI_TKILL {
            let number = libc::SYS_rt_tgsigqueueinfo;
            // SAFETY: rt_tgsigqueueinfo(2) reads one siginfo.
            let sent =
                unsafe { libc::syscall(number, process, self.tid, signal, ptr::from_ref(info)) };
            if sent == 0 {
                return;
            }
        }
        // SAFETY: tgkill(2) takes numbers only. It fails only when the thread is gone.
        unsafe { libc::syscall(libc::SYS_tgkill, process, self.tid, signal) };
    }

    /// # Safety
    /// `data`, if it is an address for this request, must be valid for what the request does there.
    unsafe fn request(&self, request: c_uint, address: usize, data: usize) -> io::Result<()> {
        // SAFETY: the caller's promise. glibc's wrapper has a result of its own for PEEK requests
        // only, and none is made here.
        let result: c_long = unsafe {
            libc::ptrace(
                request,
                self.tid,
                address as *mut c_void,
                data as *mut c_void,
            )
        };
        if result < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }
}
