//! QEMU's device state, and with it the pause. QEMU saves the state into a pipe, and is held for as long as the
//! pipe is full.
//!
//! ```text
//!   QEMU   stop, drain │ save ─ save ─ save ─ (pipe full) ......................... save │ resume
//!   pipe   [ padding   │▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓]
//!   engine             └ first byte: the guest is stopped ─ scan ─ copy ─ read all ┘
//! ```
//!
//! One command stops the VM, saves its devices and resumes it. QEMU carries out nothing else meanwhile: a `stop`, a
//! `cont`, a reset or a migration of another client comes before it or after it. The command cannot end before the
//! engine has read the pipe. If the engine ends instead, the write fails, and QEMU resumes the VM all the same.
//!
//! The pipe is filled beforehand, up to a little less than the last device states took. So QEMU does nearly all of
//! its work while the engine does its own. If the state turns out smaller than the space that was left, QEMU was
//! not held, and the capture is discarded ([`Saved::held`]).

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use stillframe_qemu::device_state::{self, DeviceStateError};
use stillframe_qemu::monitor::{Monitor, MonitorError, StateFile};
use stillframe_qemu::qmp::{QmpError, Ticket};
use stillframe_sys::process::Process;
use thiserror::Error;

use crate::guardian::{Guardian, GuardianError};

/// Device state is some hundred KiB; a stream beyond this is not one. In bytes.
pub const BYTES_MAX: u64 = 1 << 30;

/// Unit in which a pipe's space is counted: a page, in bytes.
const SLOT: usize = 4096;
/// Margin by which a device state may be smaller than the smallest of the last ones without ending
/// the pause too early, in bytes.
const SLACK: usize = 8 << 10;
/// The largest pipe that is requested, in bytes: what any user may have (`pipe-max-size`).
const PIPE_MAX: usize = 1 << 20;
/// Sizes that are remembered.
const SIZES_KEPT: usize = 8;
/// Longest sleep of a thread that waits for QEMU. The kernel wakes it when a write has ended. It does not wake it
/// when a write waits for space in a pipe that was not empty (`anon_pipe_write` in the kernel's fs/pipe.c).
const LOOK: Duration = Duration::from_micros(100);
/// Bytes read with one call.
const READ_BYTES: usize = 64 << 10;

/// Why there is no device state.
#[derive(Debug, Error)]
pub enum StateError {
    /// The pipe failed.
    #[error("cannot {action} the pipe for the device state")]
    Pipe {
        /// The action that failed.
        action: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// QEMU refused it.
    #[error("QEMU does not save its device state into our pipe")]
    Monitor(#[from] MonitorError),
    /// The guardian is gone.
    #[error("QEMU is not held without a guardian")]
    Guardian(#[from] GuardianError),
    /// The connection failed.
    #[error("the connection to QEMU failed while it saved its device state")]
    Qmp(#[from] QmpError),
    /// It takes too long.
    #[error("QEMU did not {what} within {limit_ms} ms")]
    Timeout {
        /// The awaited event.
        what: &'static str,
        /// The limit.
        limit_ms: u128,
    },
    /// It never ends.
    #[error("QEMU's device state is longer than {limit_bytes} bytes")]
    TooLong {
        /// The limit.
        limit_bytes: u64,
    },
    /// The data that QEMU saved is no device state.
    #[error("QEMU saved a device state that cannot be restored")]
    Invalid(#[from] DeviceStateError),
}

/// The device state that QEMU saved.
#[derive(Debug)]
pub struct Saved {
    /// The device state, not validated yet ([`device_state::validate`]).
    pub bytes: Vec<u8>,
    /// Bytes of it that were in the pipe when [`StateStream::finish`] was called.
    pub written_before: u64,
}

impl Saved {
    /// Whether QEMU was still waiting for us when [`StateStream::finish`] was called: only then the
    /// guest was stopped until that moment.
    pub fn held(&self) -> bool {
        self.written_before < self.bytes.len() as u64
    }
}

/// The pipe, lent to QEMU for as long as we are attached.
#[derive(Debug)]
pub struct StateStream {
    read: OwnedFd,
    write: OwnedFd,
    /// Wakes at the end of each write of QEMU's into the pipe, and while its monitor has something to say.
    wakes: OwnedFd,
    lent: StateFile,
    /// Sizes of the last device states, in bytes.
    sizes: VecDeque<usize>,
    /// Bytes of padding in the pipe before the device state.
    padding: usize,
}

impl StateStream {
    /// The pipe that was lent before, or a new one, which the guardian gets too.
    pub fn lent<'s>(
        slot: &'s mut Option<StateStream>,
        monitor: &mut Monitor,
        qemu: &Process,
        guardian: &Guardian,
    ) -> Result<&'s mut StateStream, StateError> {
        match slot {
            Some(stream) => Ok(stream),
            none => {
                let stream = StateStream::lend(monitor, qemu)?;
                guardian.stream(stream.reading_end())?;
                Ok(none.insert(stream))
            }
        }
    }

    /// Makes the pipe and lends it to this QEMU.
    fn lend(monitor: &mut Monitor, qemu: &Process) -> Result<StateStream, StateError> {
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(failed("make"))?;
        rustix::io::ioctl_fionbio(&read, true).map_err(failed("configure"))?;
        give_to(qemu, &write)?;
        let wakes = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed("watch"))?;
        let edges = EventFlags::IN | EventFlags::ET;
        epoll::add(&wakes, &read, EventData::new_u64(0), edges).map_err(failed("watch"))?;
        let socket = monitor.client().socket();
        epoll::add(&wakes, socket, EventData::new_u64(1), EventFlags::IN)
            .map_err(failed("watch"))?;
        let lent = monitor.begin_device_state(write.as_fd())?;
        Ok(StateStream {
            read,
            write,
            wakes,
            lent,
            sizes: VecDeque::new(),
            padding: 0,
        })
    }

    /// How QEMU calls it.
    pub fn file(&self) -> &StateFile {
        &self.lent
    }

    /// The end that holds QEMU; reading it releases the VM.
    pub fn reading_end(&self) -> BorrowedFd<'_> {
        self.read.as_fd()
    }

    /// Forgets how long device states were: the next one is held at its beginning, which is certain.
    pub fn forget_sizes(&mut self) {
        self.sizes.clear();
    }

    /// Has the pipe empty but for padding, which leaves space for a little less than QEMU will write.
    /// To be called while QEMU does not write.
    pub fn prepare(&mut self) -> Result<(), StateError> {
        self.read_now(&mut Vec::new())?;
        let room = room(self.sizes.iter().copied().min().unwrap_or(0));
        let capacity = room.next_power_of_two();
        rustix::pipe::fcntl_setpipe_size(&self.write, capacity).map_err(failed("resize"))?;
        self.padding = 0;
        let page = [0; SLOT];
        while self.padding < capacity - room {
            self.padding += rustix::io::write(&self.write, &page).map_err(failed("fill"))?;
        }
        // The padding has woken QEMU's thread.
        self.sleep(Duration::ZERO)
    }

    /// Waits until QEMU writes, or has answered without having written.
    pub fn await_stopped(
        &mut self,
        monitor: &mut Monitor,
        ticket: &Ticket,
        limit: Duration,
    ) -> Result<(), StateError> {
        let deadline = Instant::now() + limit;
        while self.written()? == 0 && !monitor.client().has_reply(ticket)? {
            self.sleep_until(deadline, "stop the VM", limit)?;
        }
        Ok(())
    }

    /// Waits until the pipe is full: QEMU has then done all that it can do before its release.
    pub fn await_full(
        &mut self,
        monitor: &mut Monitor,
        ticket: &Ticket,
        limit: Duration,
    ) -> Result<(), StateError> {
        let deadline = Instant::now() + limit;
        while self.has_room()? && !monitor.client().has_reply(ticket)? {
            self.sleep_until(deadline, "save its devices", limit)?;
        }
        Ok(())
    }

    /// Lets QEMU continue, and returns the state when it has answered.
    pub fn finish(
        &mut self,
        monitor: &mut Monitor,
        ticket: Ticket,
        limit: Duration,
    ) -> Result<Saved, StateError> {
        let written_before = self.written()?;
        let mut bytes = Vec::new();
        self.read_all(monitor, ticket, limit, &mut bytes, &mut |_| ())?;
        bytes.drain(..self.padding.min(bytes.len()));
        self.padding = 0;
        if self.sizes.len() == SIZES_KEPT {
            self.sizes.pop_front();
        }
        self.sizes.push_back(bytes.len());
        Ok(Saved {
            bytes,
            written_before,
        })
    }

    /// Saves the state of a VM that is stopped anyway.
    pub fn save(&mut self, monitor: &mut Monitor, limit: Duration) -> Result<Vec<u8>, StateError> {
        let ticket = self.begin_save(monitor)?;
        self.finish_save(monitor, ticket, limit, &mut |_| Ok(()))
    }

    /// Has QEMU begin to save the state of a VM that is stopped anyway. What it saves has to be read, also after an
    /// error ([`StateStream::abandon`]): QEMU waits where the pipe is full, and resumes nothing then.
    pub fn begin_save(&mut self, monitor: &mut Monitor) -> Result<Ticket, StateError> {
        self.read_now(&mut Vec::new())?;
        self.padding = 0;
        // QEMU is not to be held, and its monitors with it.
        rustix::pipe::fcntl_setpipe_size(&self.write, PIPE_MAX).map_err(failed("resize"))?;
        Ok(monitor.send_save_device_state(&self.lent)?)
    }

    /// Reads what QEMU saves. `take` gets each piece as it comes; after an error of its own it gets no more.
    pub fn finish_save<E: From<StateError>>(
        &mut self,
        monitor: &mut Monitor,
        ticket: Ticket,
        limit: Duration,
        take: &mut dyn FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<Vec<u8>, E> {
        let (mut bytes, mut taken, mut error) = (Vec::new(), 0, None);
        self.read_all(monitor, ticket, limit, &mut bytes, &mut |bytes| {
            if error.is_none() {
                error = take(&bytes[taken..]).err();
            }
            taken = bytes.len();
        })?;
        if let Some(error) = error {
            return Err(error);
        }
        device_state::validate(&bytes).map_err(StateError::from)?;
        Ok(bytes)
    }

    /// Reads what QEMU saves, which is of no use any more.
    pub fn abandon(&mut self, monitor: &mut Monitor, ticket: Ticket, limit: Duration) {
        // The error that led here is the one to report.
        let _ = self.read_all(monitor, ticket, limit, &mut Vec::new(), &mut |_| ());
    }

    /// Reads until QEMU has answered; shows all bytes so far whenever there are more.
    fn read_all(
        &mut self,
        monitor: &mut Monitor,
        ticket: Ticket,
        limit: Duration,
        bytes: &mut Vec<u8>,
        more: &mut dyn FnMut(&[u8]),
    ) -> Result<(), StateError> {
        let deadline = Instant::now() + limit;
        loop {
            // When the answer has come, the pipe contains the whole state.
            let answered = monitor.client().has_reply(&ticket)?;
            let before = bytes.len();
            self.read_now(bytes)?;
            if bytes.len() > before {
                more(bytes);
            }
            if answered {
                break;
            }
            self.sleep_until(deadline, "save its devices", limit)?;
        }
        Ok(monitor.wait_device_state(ticket, limit)?)
    }

    /// Takes it back from QEMU.
    pub fn take_back(self, monitor: &mut Monitor) -> Result<(), MonitorError> {
        monitor.end_device_state(self.lent)
    }

    /// Whether a write would not wait. Bytes do not tell: a page of the pipe may be taken by a few.
    fn has_room(&self) -> Result<bool, StateError> {
        let mut waited = [PollFd::new(&self.write, PollFlags::OUT)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        match poll(&mut waited, Some(&now)) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(true),
            Err(errno) => Err(failed("examine")(errno)),
        }
    }

    /// Bytes of device state that lie in the pipe.
    fn written(&self) -> Result<u64, StateError> {
        let there = rustix::io::ioctl_fionread(&self.read).map_err(failed("examine"))?;
        Ok(there.saturating_sub(self.padding as u64))
    }

    fn read_now(&self, into: &mut Vec<u8>) -> Result<(), StateError> {
        let mut piece = vec![0; READ_BYTES];
        loop {
            match rustix::io::read(&self.read, &mut piece[..]) {
                Ok(0) | Err(Errno::AGAIN) => return Ok(()),
                Ok(read) => into.extend_from_slice(&piece[..read]),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(failed("read")(errno)),
            }
            if into.len() as u64 > BYTES_MAX {
                return Err(StateError::TooLong {
                    limit_bytes: BYTES_MAX,
                });
            }
        }
    }

    fn sleep_until(
        &self,
        deadline: Instant,
        what: &'static str,
        limit: Duration,
    ) -> Result<(), StateError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(StateError::Timeout {
                what,
                limit_ms: limit.as_millis(),
            });
        }
        self.sleep(left.min(LOOK))
    }

    fn sleep(&self, limit: Duration) -> Result<(), StateError> {
        let timeout = Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        };
        let mut events = Vec::with_capacity(2);
        match epoll::wait(
            &self.wakes,
            rustix::buffer::spare_capacity(&mut events),
            Some(&timeout),
        ) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(failed("watch")(errno)),
        }
    }
}

/// The space that is left for a device state of this size, in bytes. It is whole slots, and at least one, because
/// an empty slot shows when QEMU begins to write.
fn room(size: usize) -> usize {
    let slots = size.saturating_sub(SLACK) / SLOT;
    slots.clamp(1, PIPE_MAX / SLOT) * SLOT
}

/// QEMU opens the pipe anew, as its own user.
fn give_to(qemu: &Process, pipe: &OwnedFd) -> Result<(), StateError> {
    let own = rustix::process::geteuid();
    match qemu.uid() {
        Ok(uid) if uid != own.as_raw() => {
            let owner = rustix::process::Uid::from_raw(uid);
            rustix::fs::fchown(pipe, Some(owner), None).map_err(failed("hand over"))
        }
        // Where the check is not possible, opening fails, and QEMU reports it.
        _ => Ok(()),
    }
}

fn failed(action: &'static str) -> impl Fn(Errno) -> StateError {
    move |errno| StateError::Pipe {
        action,
        source: errno.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_room_is_a_little_less_than_the_state() {
        assert_eq!(room(0), SLOT);
        assert_eq!(room(13_031), SLOT);
        assert_eq!(room(170_000), 39 * SLOT);
        assert_eq!(room(64 << 20), PIPE_MAX);
        for size in (SLACK + SLOT..PIPE_MAX).step_by(1111) {
            assert!(room(size) + SLACK <= size, "{size}");
        }
    }

    #[test]
    fn who_had_written_all_was_not_held() {
        let saved = |written_before| Saved {
            bytes: vec![0; 100],
            written_before,
        };
        assert!(saved(0).held() && saved(99).held());
        assert!(!saved(100).held());
    }
}
