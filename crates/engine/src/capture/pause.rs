//! The pause: the interval in which the guest is stopped.
//!
//! ```text
//!   guardian armed ─┬─ QEMU: stop, drain ─┬─ save device state ────────── resume ─┬─ guardian disarmed
//!                   └─ (one command)      └─ scan ─ copy (this thread, meanwhile) ┘
//! ```
//!
//! Stopping, saving and resuming are one command of QEMU's, held open by a pipe (see
//! [`crate::capture::device_state`]). Therefore no `stop`, `cont`, reset or migration of another client can fall
//! into the pause: QEMU carries it out before or after.
//!
//! Ways back to a running guest, each of them written down before the command is sent:
//! - Every error in here releases QEMU, by reading the pipe or by closing it.
//! - The guardian has the pipe too, and reads it when the limit passes or when this process dies.
//! - When both die, the pipe is closed, QEMU's write fails, and QEMU resumes the VM.
//!
//! With disks in the checkpoint there are more commands: stop, filters below the disks, save, resume. QEMU gets all of them
//! in one piece before the first is carried out, and keeps the connection open by itself until the last. So the ways back
//! are the same ([`Monitor::send_pause_with_disks`]).
//!
//! Disks that are copied in rounds have a hold in place of the filters: QEMU waits for a socket, and serves the disks to us meanwhile
//! ([`Monitor::send_held_pause`]). Every error releases it; the guardian has it too; and it ends with its last process.
//!
//! A guest that is suspended to RAM is the exception: QEMU stops it and does not resume it. So `cont` is sent
//! afterwards, by the guardian if need be.

use std::time::{Duration, Instant};

use stillframe_fault::{self as fault, Point};
use stillframe_qemu::device_state;
use stillframe_qemu::monitor::{Monitor, MonitorError, RunState};
use stillframe_qemu::qmp::{QmpError, Ticket};
use stillframe_sys::affinity::{self, AffinityGuard, Processors};
use stillframe_sys::process::Process;
use thiserror::Error;

use crate::capture::device_state::{Saved, StateError, StateStream};
use crate::capture::downtime::{DowntimeRecord, us};
use crate::capture::paused_vm::{PausedError, PausedVm};
use crate::capture::schedule::{Schedule, ScheduleError, Work};
use crate::capture::staging::StagingError;
use crate::disks::{DiskRounds, PreparedDisks, RoundsError};
use crate::guardian::{Guardian, GuardianError};
use crate::placement;
use crate::tracking::error::TrackerError;
use crate::tracking::tracker::Tracker;

/// How long past the watchdog's limit an answer of QEMU is awaited: QEMU may be inside a slow flush,
/// and giving up on the connection would lose the answer.
const ANSWER_GRACE: Duration = Duration::from_secs(30);

/// How long a look for QEMU in its hold lasts.
const LOOK: Duration = Duration::from_millis(2);
/// QEMU's word for a VM that it has stopped to save it.
const SAVING: &str = "save-vm";

/// Why a pause failed. The VM runs again in every case, or QEMU is gone.
#[derive(Debug, Error)]
pub enum PauseError {
    /// Limit overrun.
    #[error(
        "the pause overran its limit of {limit_ms} ms and the watchdog resumed the VM; this checkpoint is discarded. Allow longer with --pause-limit, or find out what is slow (often the host's disk, which QEMU flushes at every stop)"
    )]
    Overrun {
        /// The limit.
        limit_ms: u128,
    },
    /// QEMU was done before we were.
    #[error(
        "the VM's device state became smaller ({bytes} bytes), so the VM ran on before its memory was copied; this checkpoint is discarded"
    )]
    NotHeld {
        /// How long it is now.
        bytes: usize,
    },
    /// Something else stopped the VM for good in the instant before.
    #[error("the VM became {status} just before the pause; this checkpoint is discarded")]
    StateChanged {
        /// QEMU's word for it.
        status: String,
    },
    /// The disks are not in the snapshot.
    #[error(
        "QEMU did not put the snapshot of a disk in place; the VM was resumed, and this checkpoint is discarded"
    )]
    Disks(#[source] QmpError),
    /// What was left of the disks could not be read. A filter may do.
    #[error(
        "cannot read in the pause what is left of the disks; the VM was resumed, and this checkpoint is discarded. Take it with --disk-schedule filter"
    )]
    Rounds(#[from] RoundsError),
    /// Another client resumed or stopped the VM between the commands of a pause with disks.
    #[error(
        "another client of QEMU stopped or resumed the VM in the pause; this checkpoint is discarded"
    )]
    Interfered,
    /// QEMU did not carry out a command.
    #[error("QEMU failed a command of the pause; the VM was resumed")]
    Monitor(#[from] MonitorError),
    /// The connection failed.
    #[error("the connection to QEMU failed in the pause")]
    Qmp(#[from] QmpError),
    /// No device state.
    #[error(transparent)]
    State(#[from] StateError),
    /// Tracking failed.
    #[error("reading the written pages failed in the pause; the VM was resumed")]
    Tracker(#[from] TrackerError),
    /// The pages cannot be staged.
    #[error("reading the written pages failed in the pause; the VM was resumed")]
    StagingBuffer(#[from] StagingError),
    /// The guardian is gone.
    #[error("no pause without a guardian")]
    Guardian(#[from] GuardianError),
    /// A fault that a test injected.
    #[error("a step of the pause failed; the VM was resumed")]
    Injected(#[from] std::io::Error),
}

impl From<PausedError> for PauseError {
    fn from(error: PausedError) -> PauseError {
        match error {
            PausedError::Guardian(error) => error.into(),
            PausedError::Monitor(error) => error.into(),
            PausedError::Overrun { limit_ms } => PauseError::Overrun { limit_ms },
        }
    }
}

impl From<ScheduleError> for PauseError {
    fn from(error: ScheduleError) -> PauseError {
        match error {
            ScheduleError::Tracker(error) => error.into(),
            ScheduleError::StagingBuffer(error) => error.into(),
        }
    }
}

/// A function that reads all of memory while the guest is stopped.
pub type Look<'l> = dyn FnMut(&Tracker) -> Result<(), TrackerError> + 'l;

/// The inputs of a pause.
pub struct Pause<'a> {
    /// The process of QEMU.
    pub qemu: &'a Process,
    /// CPU placement: processors that its vCPUs need least, for the thread that waits for QEMU.
    pub spare: &'a Processors,
    /// The pages; the staging buffer has space for the expected ones.
    pub work: Work<'a>,
    /// The schedule that copies or protects them.
    pub schedule: &'a mut dyn Schedule,
    /// Where QEMU writes its device state; the guardian has it too.
    pub state: &'a mut StateStream,
    /// Nothing is done while the device state is saved, to measure how long that takes by itself.
    pub state_first: bool,
    /// The disks whose filters are put in place, or of which the rest is read.
    pub disks: &'a mut PreparedDisks,
    /// The VM is resumed after this.
    pub limit: Duration,
    /// The run state of the VM just before.
    pub before: RunState,
    /// Runs while the device state is saved, after the copies: what else must be inspected while
    /// the guest is stopped.
    pub beside: &'a mut dyn FnMut(),
    /// Runs last in the pause, with everything copied (`--verify`).
    pub before_resume: Option<&'a mut Look<'a>>,
}

/// The result of a pause.
#[derive(Debug)]
pub struct Paused {
    /// Its phases.
    pub downtime: DowntimeRecord,
    /// The device state.
    pub device_state: Vec<u8>,
    /// The names of its sections, in their order.
    pub sections: Vec<String>,
    /// Whether the VM ran before, and so runs again.
    pub running: bool,
}

impl Pause<'_> {
    /// Stops the VM, captures, lets it continue.
    ///
    /// # Errors
    /// The VM runs again, or QEMU is gone.
    pub fn run(mut self, monitor: &mut Monitor, guardian: &Guardian) -> Result<Paused, PauseError> {
        let mut record = DowntimeRecord::default();
        // The thread that waits for QEMU's answer stays off the vCPUs' processors: a resumed vCPU would keep it
        // from seeing the answer.
        let own = affinity::of_this_thread();
        let _placement = AffinityGuard::to(self.spare);
        monitor.client().take_events()?;
        self.state.prepare()?;
        // With disks, `cont` is one of the commands.
        let suspended = self.before.is_suspended() && !self.disks.is_some();
        if let PreparedDisks::Rounds(rounds) = &self.disks {
            guardian.hold(rounds.hold())?;
        }
        let mut paused = PausedVm::held_by_state(monitor, guardian, self.limit, suspended)?;
        if self.disks.is_some() {
            paused.monitor().prepare_pause()?;
        }
        let begin = Instant::now();
        let saved = self.stopped(paused.monitor(), &mut record, &own);
        let woken = match suspended {
            true => back_to_sleep(paused.monitor(), &mut record),
            false => Ok(()),
        };
        record.total = us(begin);
        if let Err(PauseError::State(_)) = &saved {
            // QEMU must not wait for this, whatever it waits for.
            paused.release()?;
        }
        let injected = fault::at(Point::PauseAfterCont);
        let resumed = paused.resumed();
        if saved.is_err() && self.disks.is_some() {
            monitor.forget_pause();
        }
        resumed?;
        injected?;
        let saved = saved?;
        woken?;
        self.validated(monitor, saved, record)
    }

    /// Has QEMU stop the VM, captures, lets QEMU continue.
    fn stopped(
        &mut self,
        monitor: &mut Monitor,
        record: &mut DowntimeRecord,
        own: &Processors,
    ) -> Result<Saved, PauseError> {
        let limit = self.limit + ANSWER_GRACE;
        fault::at(Point::PauseBeforeStop)?;
        let begin = Instant::now();
        let (saving, around) = self.send(monitor)?;
        let rest = self.rest_of_disks(monitor, record, around.as_ref());
        self.state.await_stopped(monitor, &saving, limit)?;
        record.stop = us(begin) - record.disks;
        // From here on the vCPUs' processors are free, and QEMU's main thread has much to do.
        let _apart = placement::confine_away_from(self.qemu, own);
        let state_begin = Instant::now();
        let captured = rest.and_then(|()| self.capture(monitor, record, own, &saving));
        // Awaited even when the copy failed: QEMU continues when its state is read.
        let wait = Instant::now();
        let saved = self.state.finish(monitor, saving, limit)?;
        record.wait += us(wait);
        if let Some(around) = around {
            around.wait(monitor, limit)?;
        }
        if !self.state_first {
            record.device_state = us(state_begin);
        }
        captured?;
        Ok(saved)
    }

    /// Sends the commands of the pause: the one that saves the device state, and those around it.
    fn send(&mut self, monitor: &mut Monitor) -> Result<(Ticket, Option<Around>), PauseError> {
        let file = self.state.file();
        let runs = self.before.running || self.before.is_suspended();
        let sent = match &self.disks {
            PreparedDisks::None => return Ok((monitor.send_save_device_state(file)?, None)),
            PreparedDisks::Filters(disks) => {
                monitor.send_pause_with_disks(disks.snapshots(), file, runs)?
            }
            PreparedDisks::Rounds(_) => monitor.send_held_pause(file, runs)?,
        };
        let around = Around {
            before: sent.before,
            hold: sent.hold,
            resuming: sent.resuming,
        };
        Ok((sent.saving, Some(around)))
    }

    /// Waits until QEMU is held, reads what is left of the disks, and releases it.
    fn rest_of_disks(
        &mut self,
        monitor: &mut Monitor,
        record: &mut DowntimeRecord,
        around: Option<&Around>,
    ) -> Result<(), PauseError> {
        let held = around.and_then(|around| around.hold.as_ref());
        let (PreparedDisks::Rounds(rounds), Some(held)) = (&mut self.disks, held) else {
            return Ok(());
        };
        let limit = self.limit + ANSWER_GRACE;
        let read = await_held(rounds, monitor, held, limit).and_then(|()| {
            let begin = Instant::now();
            fault::at(Point::PauseHeld)?;
            rounds.rest()?;
            // An error if the guardian has released it before.
            rounds.release()?;
            record.disks = us(begin);
            Ok(())
        });
        // Also where QEMU has not come to it yet.
        read.inspect_err(|_| rounds.let_go())
    }

    /// Scan and copy; the guest is stopped.
    fn capture(
        &mut self,
        monitor: &mut Monitor,
        record: &mut DowntimeRecord,
        own: &Processors,
        saving: &Ticket,
    ) -> Result<(), PauseError> {
        fault::at(Point::PauseStopped)?;
        if self.state_first {
            let begin = Instant::now();
            let limit = self.limit + ANSWER_GRACE;
            self.state.await_full(monitor, saving, limit)?;
            record.device_state = us(begin);
            record.wait = us(begin);
        }
        self.schedule.stopped(&mut self.work, record)?;
        (self.beside)();
        if let Some(look) = self.before_resume.as_mut() {
            // It takes long, and all the processors there are.
            let _anywhere = AffinityGuard::to(own);
            let begin = Instant::now();
            look(self.work.tracker)?;
            record.verify = us(begin);
        }
        fault::at(Point::PauseBeforeCont)?;
        Ok(())
    }

    /// Whether all of it is of one moment, by what QEMU said.
    fn validated(
        &mut self,
        monitor: &mut Monitor,
        saved: Saved,
        mut record: DowntimeRecord,
    ) -> Result<Paused, PauseError> {
        if !saved.held() {
            self.state.forget_sizes();
            return Err(PauseError::NotHeld {
                bytes: saved.bytes.len(),
            });
        }
        let sections = device_state::validate(&saved.bytes)
            .map_err(StateError::from)?
            .sections;
        let events = monitor.client().take_events()?;
        let names: Vec<&str> = events.iter().map(|event| event.name.as_str()).collect();
        let running = stopped_and_resumed(&names);
        if self.disks.is_some() && names.iter().filter(|name| **name == "STOP").count() > 1 {
            return Err(PauseError::Interfered);
        }
        if running != self.before.running && !self.before.is_suspended() {
            // A `stop` or `cont` of another client came just before; or a migration that took the VM away.
            let state = monitor.run_state()?;
            if !matches!(state.status.as_str(), "running" | "paused") && !state.is_suspended() {
                let status = state.status;
                return Err(PauseError::StateChanged { status });
            }
        }
        if !running {
            record.total = 0;
        }
        Ok(Paused {
            downtime: record,
            device_state: saved.bytes,
            sections,
            running,
        })
    }
}

/// Waits until QEMU, which was sent this command, is held.
fn await_held(
    rounds: &mut DiskRounds,
    monitor: &mut Monitor,
    held: &Ticket,
    limit: Duration,
) -> Result<(), PauseError> {
    let deadline = Instant::now() + limit;
    while !rounds.is_held(LOOK)? {
        // It may refuse the command before it comes to the socket.
        if monitor.client().has_reply(held)? || Instant::now() > deadline {
            return Err(RoundsError::NotHeld(None).into());
        }
    }
    Ok(())
}

/// The commands before and behind the one that saves the device state.
struct Around {
    before: Vec<Ticket>,
    /// The last of those before, which waits for us.
    hold: Option<Ticket>,
    resuming: Option<Ticket>,
}

impl Around {
    /// Awaits their replies; the device state is saved.
    fn wait(self, monitor: &mut Monitor, limit: Duration) -> Result<(), PauseError> {
        let client = monitor.client();
        let before = self
            .before
            .into_iter()
            .map(|ticket| client.wait(ticket, limit));
        let before: Vec<_> = before.collect();
        let held = self.hold.map(|ticket| client.wait(ticket, limit));
        let resumed = self.resuming.map(|ticket| client.wait(ticket, limit));
        // First of all the guest.
        if let Some(Err(error)) = resumed {
            if monitor.run_state()?.status == "paused" {
                monitor.cont()?;
            }
            return Err(error.into());
        }
        for reply in before {
            reply.map_err(PauseError::Disks)?;
        }
        if let Some(held) = held {
            held.map_err(PauseError::Disks)?;
        }
        Ok(())
    }
}

/// QEMU leaves a guest that was suspended as stopped, so that it could not wake up: `cont` makes it suspended
/// again.
fn back_to_sleep(monitor: &mut Monitor, record: &mut DowntimeRecord) -> Result<(), PauseError> {
    let begin = Instant::now();
    if monitor.run_state()?.status == SAVING {
        monitor.cont()?;
    }
    record.resume = us(begin);
    Ok(())
}

/// Whether QEMU stopped and resumed the VM, by the events since its command was sent.
fn stopped_and_resumed(events: &[&str]) -> bool {
    let stop = events.iter().position(|&name| name == "STOP");
    stop.is_some_and(|stop| events[stop..].contains(&"RESUME"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_that_was_resumed_was_stopped_before() {
        for ran in [
            &["STOP", "RESUME"][..],
            &["RESUME", "STOP", "RTC_CHANGE", "RESUME"],
            &["STOP", "RESUME", "STOP"],
        ] {
            assert!(stopped_and_resumed(ran), "{ran:?}");
        }
        for stood in [&[][..], &["RESUME"], &["STOP"], &["RESUME", "STOP"]] {
            assert!(!stopped_and_resumed(stood), "{stood:?}");
        }
    }
}
