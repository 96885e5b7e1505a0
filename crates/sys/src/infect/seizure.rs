//! The time during which the victim's main thread is held.

use super::error::InfectError;
use super::interrupted::{Interrupted, in_syscall};
use super::tracee::{Registers, Run, Stop, Syscall, Tracee};
use super::watch::{Status, await_interrupt, await_progress, await_stop, run_time_ns, seize};
use super::{gadget, timeout};
use crate::memory::RemoteMemory;
use crate::process::{AddressRange, Process};
use libc::{c_int, c_long, siginfo_t};
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// The code segment of 64-bit programs (linux: arch/x86/include/asm/segment.h, `__USER_CS`).
const USER_CODE_64: u64 = 0x33;

/// Signals that the kernel raises for a thread's own actions. Blocked ones would kill it on the
/// spot; open ones can be kept from it.
const OF_FAULTS: u64 = bit(libc::SIGSEGV)
    | bit(libc::SIGBUS)
    | bit(libc::SIGILL)
    | bit(libc::SIGFPE)
    | bit(libc::SIGTRAP)
    | bit(libc::SIGSYS);

/// Signals that glibc keeps to itself, to cancel threads and to change user ids.
const OF_THE_C_LIBRARY: u64 = bit(32) | bit(33);

/// Time for which a thread that has been put back is seen on its way, on a crowded machine.
const COMPANY: Duration = Duration::from_secs(10);

const fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

/// The state of the descriptor that was opened in the victim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    Nothing,
    TheUserfaultfd,
}

/// A userfaultfd of the victim.
pub(super) struct Opened {
    pub(super) fd: OwnedFd,
    /// Its number in the victim.
    pub(super) remote: c_int,
    /// The victim was only allowed one for faults of user mode.
    pub(super) limited: bool,
}

/// The main thread of a process, stopped by us. [`Seizure::release`], or a drop, restores and releases it.
pub(super) struct Seizure<'a> {
    process: &'a Process,
    memory: RemoteMemory,
    tracee: Tracee,
    since: Instant,
    deadline: Instant,
    limit: Duration,
    /// The stop the thread is in.
    at: Stop,
    interrupted: Interrupted,
    /// Address of a `syscall` instruction, if one was found.
    gadget: Option<u64>,
    /// Signals kept from the thread, to be sent again.
    held: Vec<(c_int, siginfo_t)>,
    /// It stops when asked, but does not run.
    frozen: bool,
    released: bool,
}

impl<'a> Seizure<'a> {
    /// Stops the main thread. Nothing is changed yet.
    pub(super) fn begin(
        process: &'a Process,
        deadline: Instant,
        limit: Duration,
    ) -> Result<Seizure<'a>, InfectError> {
        // Searched before the stop: a QEMU has hundreds of mappings.
        let memory = RemoteMemory::open(process);
        let gadget = gadget::find(process, &memory)?;
        let tracee = seize(process)?;
        let since = Instant::now();
        tracee
            .interrupt()
            .map_err(|source| InfectError::ptrace(process, source))?;
        await_interrupt(process, &tracee, deadline, limit)?;
        let registers = tracee
            .registers()
            .map_err(|source| InfectError::ptrace(process, source))?;
        let behind_syscall =
            in_syscall(&registers) && gadget::is_at(&memory, registers.rip.wrapping_sub(2));
        let status = Status::of(process)?;
        let interrupted = Interrupted {
            registers,
            own_mask: tracee
                .mask()
                .map_err(|source| InfectError::ptrace(process, source))?,
            call_mask: status.blocked,
            handlers: status.caught & !OF_FAULTS & !OF_THE_C_LIBRARY,
            behind_syscall,
            filtered: status.filtered,
        };
        Ok(Seizure {
            process,
            memory,
            tracee,
            since,
            deadline,
            limit,
            at: Stop::Interrupt,
            interrupted,
            gadget,
            held: Vec::new(),
            frozen: false,
            released: false,
        })
    }

    /// Makes sure that the thread can be made to do a system call, and that it does no harm.
    pub(super) fn prepare(&mut self) -> Result<(), InfectError> {
        if self.interrupted.registers.cs != USER_CODE_64 {
            return Err(InfectError::unsupported(
                self.process,
                "is not a 64-bit program",
            ));
        }
        if self.interrupted.behind_syscall {
            self.gadget = Some(self.interrupted.registers.rip.wrapping_sub(2));
        }
        // The one found before the stop may be gone: the program may have been replaced.
        if !self
            .gadget
            .is_some_and(|address| gadget::is_at(&self.memory, address))
        {
            return Err(InfectError::unsupported(
                self.process,
                "has no system call instruction",
            ));
        }
        self.suspend_seccomp()?;
        self.leave_critical_section()
    }

    /// Sees to it that no seccomp filter can kill the victim for our calls.
    fn suspend_seccomp(&self) -> Result<(), InfectError> {
        let Err(source) = self.tracee.suspend_seccomp() else {
            return Ok(());
        };
        if !self.interrupted.filtered {
            return Ok(());
        }
        Err(InfectError::Sandboxed {
            pid: self.process.pid(),
            source,
        })
    }

    /// A restartable sequence (rseq(2)) has to be aborted when its thread is preempted. The kernel
    /// decides that by RIP, which our call moves out of the sequence: do as it would have done.
    fn leave_critical_section(&mut self) -> Result<(), InfectError> {
        let area = self
            .tracee
            .rseq_address()
            .map_err(|source| self.failed(source))?;
        if area == 0 {
            return Ok(());
        }
        let word = |address: u64| {
            let mut bytes = [0; 8];
            self.memory.read(address, &mut bytes).ok()?;
            Some(u64::from_ne_bytes(bytes))
        };
        // struct rseq: u32 cpu_id_start, u32 cpu_id, u64 rseq_cs. struct rseq_cs: u32 version,
        // u32 flags, u64 start_ip, u64 post_commit_offset, u64 abort_ip (linux/rseq.h).
        let section = area
            .checked_add(8)
            .and_then(word)
            .filter(|address| *address != 0);
        let field = |at: u64| {
            section
                .and_then(|address| address.checked_add(at))
                .and_then(word)
        };
        if let (Some(start), Some(bytes), Some(abort)) = (field(8), field(16), field(24))
            && self.interrupted.registers.rip.wrapping_sub(start) < bytes
        {
            self.interrupted.registers.rip = abort;
        }
        Ok(())
    }

    /// Opens a userfaultfd in the victim, copies it out and closes the victim's if nothing is to be
    /// left there.
    pub(super) fn open_and_fetch(&mut self, left: Left) -> Result<Opened, InfectError> {
        self.block_signals()?;
        let name = "userfaultfd";
        let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
        let user_mode_only = u64::from(linux_raw_sys::general::UFFD_USER_MODE_ONLY);
        let full = self.call(name, libc::SYS_userfaultfd, [flags, 0, 0]);
        let (opened, limited) = match full {
            Err(InfectError::Refused { source, .. })
                if source.raw_os_error() == Some(libc::EPERM) =>
            {
                (
                    self.call(name, libc::SYS_userfaultfd, [flags | user_mode_only, 0, 0]),
                    true,
                )
            }
            other => (other, false),
        };
        let remote = c_int::try_from(opened?)
            .map_err(|_| InfectError::unsupported(self.process, "returned no file descriptor"))?;
        let fetched = self.process.fetch_fd(remote);
        if left == Left::Nothing || fetched.is_err() {
            self.call("close", libc::SYS_close, [remote as u64, 0, 0])?;
        }
        Ok(Opened {
            fd: fetched?,
            remote,
            limited,
        })
    }

    /// Closes a descriptor of the victim.
    pub(super) fn close(&mut self, remote: c_int) -> Result<(), InfectError> {
        self.block_signals()?;
        let number = u64::try_from(remote).unwrap_or(u64::MAX);
        self.call("close", libc::SYS_close, [number, 0, 0])
            .map(drop)
    }

    /// Discards private memory of the victim.
    pub(super) fn discard(&mut self, ranges: &[AddressRange]) -> Result<(), InfectError> {
        self.block_signals()?;
        ranges.iter().try_for_each(|range| {
            let arguments = [
                range.start,
                range.end - range.start,
                libc::MADV_DONTNEED as u64,
            ];
            self.call("madvise", libc::SYS_madvise, arguments).map(drop)
        })
    }

    /// A fault's signal that the victim blocks stays blocked: it could be pending.
    fn block_signals(&self) -> Result<(), InfectError> {
        self.set_mask(!OF_FAULTS | self.interrupted.own_mask)
    }

    /// Has the victim make one system call and returns its result.
    ///
    /// A thread that does not get to the call in time (its cgroup is frozen) is put back. Inside of
    /// the call it is awaited without a limit: it cannot be put back before it is out.
    fn call(
        &mut self,
        name: &'static str,
        number: c_long,
        [first, second, third]: [u64; 3],
    ) -> Result<u64, InfectError> {
        let registers = Registers {
            rip: self.gadget.unwrap_or(self.interrupted.registers.rip),
            rax: number as u64,
            // Not in a system call: nothing to restart on the way to user mode.
            orig_rax: u64::MAX,
            rdi: first,
            rsi: second,
            rdx: third,
            ..self.interrupted.registers
        };
        self.set_registers(&registers)?;
        let mut deliver = 0;
        let mut deadline = Some(self.deadline);
        loop {
            if !self.run(Run::ToSyscall, deliver, deadline)? {
                deadline = None;
                self.tracee
                    .interrupt()
                    .map_err(|source| self.failed(source))?;
                self.await_next(None)?;
                if matches!(self.at, Stop::Interrupt | Stop::Group) {
                    self.frozen = true;
                    return Err(timeout(self.process, self.limit));
                }
            }
            deliver = 0;
            match self.at {
                Stop::Syscall => {
                    let syscall = self
                        .tracee
                        .syscall()
                        .map_err(|source| self.failed(source))?;
                    if let Some(Syscall::Exit { result }) = syscall {
                        return self.checked(name, result);
                    }
                    deadline = None;
                }
                // The process is being stopped, or continued. Our thread may run on meanwhile, and joins the stop
                // when it is released.
                Stop::Interrupt | Stop::Group => {}
                // Cannot be blocked. The kernel has to see it now, so that a SIGCONT sent after it
                // takes it back.
                Stop::Signal(libc::SIGSTOP) => deliver = libc::SIGSTOP,
                Stop::Signal(signal) => self.hold(signal)?,
            }
        }
    }

    fn checked(&self, name: &'static str, result: i64) -> Result<u64, InfectError> {
        u64::try_from(result).map_err(|_| InfectError::Refused {
            pid: self.process.pid(),
            call: name,
            source: io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EIO)),
        })
    }

    /// Keeps a signal from the victim: for good if our call has raised it, for a while if not.
    fn hold(&mut self, signal: c_int) -> Result<(), InfectError> {
        let info = self
            .tracee
            .signal_info()
            .map_err(|source| self.failed(source))?;
        let raised_by_kernel = info.si_code > 0;
        if raised_by_kernel && OF_FAULTS & bit(signal) != 0 {
            return Err(InfectError::Faulted {
                pid: self.process.pid(),
                signal,
            });
        }
        self.held.push((signal, info));
        Ok(())
    }

    /// Lets the thread run to its next stop. Says whether it got there before the deadline; if not
    /// it still runs.
    fn run(
        &mut self,
        how: Run,
        signal: c_int,
        deadline: Option<Instant>,
    ) -> Result<bool, InfectError> {
        self.tracee
            .resume(how, signal)
            .map_err(|source| self.failed(source))?;
        self.await_next(deadline)
    }

    fn await_next(&mut self, deadline: Option<Instant>) -> Result<bool, InfectError> {
        let stop = await_stop(self.process, &self.tracee, deadline)?;
        if let Some(stop) = stop {
            self.at = stop;
        }
        Ok(stop.is_some())
    }

    /// Puts everything back and lets the thread continue; says how long it was held, in microseconds.
    pub(super) fn release(mut self) -> u64 {
        self.put_back();
        u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// An error below has one meaning: the victim is dead, and there is nothing to put back.
    fn put_back(&mut self) {
        self.released = true;
        let _ = self.restore().and_then(|()| self.settle());
    }

    /// Registers and mask back, then to a stop inside the kernel's signal handling.
    fn restore(&mut self) -> Result<(), InfectError> {
        let Interrupted {
            registers,
            own_mask,
            ..
        } = self.interrupted;
        self.set_registers(&registers)?;
        self.set_mask(own_mask)?;
        // The exit of a system call is too late a stop: an ERESTART code put back there would reach the program.
        // Another round through the signal handling is needed. There an interrupt comes before any signal, so the
        // next stop is the requested one.
        while !matches!(self.at, Stop::Interrupt | Stop::Group) {
            self.tracee
                .interrupt()
                .map_err(|source| self.failed(source))?;
            self.run(Run::Freely, 0, None)?;
            if let Stop::Signal(signal) = self.at {
                self.hold(signal)?;
            }
        }
        Ok(())
    }

    /// At the last stop: releases the thread, so that its interrupted call continues rightly.
    ///
    /// Detaching is enough when no handler can run. But a signal may come after the kernel has rewound the thread
    /// and before the thread is back in its call. It would be handled without ending the call: a pause(2) would
    /// miss it. Therefore the thread is traced into its call again, and the first signal, whichever it is, finds it
    /// as it was interrupted.
    fn settle(&mut self) -> Result<(), InfectError> {
        for (signal, info) in std::mem::take(&mut self.held) {
            self.tracee.send_again(self.process.pid(), signal, &info);
        }
        self.set_registers(&self.interrupted.resumption(0))?;
        if self.frozen || !self.interrupted.needs_company() {
            return self.detach(0);
        }
        let mut deliver = 0;
        loop {
            let patience = Instant::now() + COMPANY;
            if !self.run(Run::ToSyscall, deliver, Some(patience))? {
                // Everything is put back, but it does not run any more.
                return Ok(());
            }
            match self.at {
                Stop::Interrupt | Stop::Group => deliver = 0,
                Stop::Syscall => return self.leave_in_call(),
                Stop::Signal(signal) => {
                    let (handled, has_handler) = self.handled_with(signal);
                    self.set_registers(&self.interrupted.resumption(handled))?;
                    if has_handler {
                        return self.detach(signal);
                    }
                    // Without a handler the thread ignores it, stops or dies: it may still get to
                    // its call.
                    deliver = signal;
                }
            }
        }
    }

    /// The pending signals that have a handler, when `signal` is about to be delivered, and whether
    /// that has one. If `/proc` cannot be asked any more, it is taken to have.
    fn handled_with(&self, signal: c_int) -> (u64, bool) {
        match Status::of(self.process) {
            Ok(status) => {
                let handled = (status.pending | bit(signal)) & status.caught;
                (handled, status.caught & bit(signal) != 0)
            }
            Err(_) => (bit(signal), true),
        }
    }

    /// At the entry of its own call: lets the thread into it, still traced. Detaching here would
    /// wake it up and end the call once more; the end of this thread detaches without a trace.
    /// (An ignored signal in between may end a call that returns a plain EINTR. Its caller has to
    /// expect that: it has a handler for some signal.)
    fn leave_in_call(&self) -> Result<(), InfectError> {
        let syscall = self
            .tracee
            .syscall()
            .map_err(|source| self.failed(source))?;
        // Its filter has allowed this very call before. Only restart_syscall(2), which the kernel
        // has put in its place, may be unknown to the filter: that has to be past it when we end.
        let restart = libc::SYS_restart_syscall as u64;
        let is_restart = matches!(syscall, Some(Syscall::Entry { number }) if number == restart);
        if !is_restart {
            self.tracee
                .apply_seccomp()
                .map_err(|source| self.failed(source))?;
        }
        let ran_before_ns = run_time_ns(self.process);
        self.tracee
            .resume(Run::Freely, 0)
            .map_err(|source| self.failed(source))?;
        if is_restart && self.interrupted.filtered {
            await_progress(self.process, ran_before_ns, COMPANY);
        }
        Ok(())
    }

    fn set_registers(&self, registers: &Registers) -> Result<(), InfectError> {
        self.tracee
            .set_registers(registers)
            .map_err(|source| self.failed(source))
    }

    fn set_mask(&self, mask: u64) -> Result<(), InfectError> {
        self.tracee
            .set_mask(mask)
            .map_err(|source| self.failed(source))
    }

    fn detach(&self, signal: c_int) -> Result<(), InfectError> {
        self.tracee
            .detach(signal)
            .map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> InfectError {
        InfectError::ptrace(self.process, source)
    }
}

impl Drop for Seizure<'_> {
    fn drop(&mut self) {
        if !self.released {
            self.put_back();
        }
    }
}
