//! The pause: the one stretch of time in which the guest stands still.
//!
//! ```text
//!   guardian told ─ stop ─┬─ save device state (QEMU) ──────────┬─ cont ─ guardian told
//!                         └─ scan ─ copy (this thread, beside) ─┘
//! ```
//!
//! Ways back to a running guest, each of them written down before `stop` is sent:
//! - every error in here passes through `resume`;
//! - the guardian resumes when the limit passes, or when this process dies.
//!
//! A guest that was resumed by anyone else before the copies were complete makes the capture
//! worthless: `RESUME` events inside the pause are counted, and the pause fails.

use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::json;
use stillframe_qemu::monitor::{Monitor, MonitorError, StateFile};
use stillframe_qemu::qmp::QmpError;
use stillframe_sys::affinity::{self, Confined, Processors};
use stillframe_sys::process::Process;
use thiserror::Error;

use super::aside;
use super::schedule::{Schedule, Work};
use super::tracker::{Tracker, TrackerError};
use crate::guardian::{Guardian, GuardianError};

/// How long past the watchdog's limit an answer of QEMU is awaited: QEMU may be inside a slow
/// `stop`, and giving up on the connection would lose the VM's answer to `cont`.
const ANSWER_GRACE: Duration = Duration::from_secs(30);

/// Each phase of one pause, in microseconds. `device_state` runs beside `scan` and `copy`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct DowntimeRecord {
    /// From sending `stop` to the answer to `cont`; 0 for a VM that was already paused.
    pub total: u64,
    /// `stop`: QEMU halts the vCPUs, drains and flushes its disks.
    pub stop: u64,
    /// Reading which pages were written since the last pre-copy round, and protecting them again.
    pub scan: u64,
    /// Copying them, or making ready for copying them after the pause.
    pub copy: u64,
    /// QEMU saving its device state, from the command to its answer.
    pub device_state: u64,
    /// Waiting for the device state with nothing else to do: after scan and copy, mostly.
    pub wait: u64,
    /// Looking at all of memory, when `--verify` asked for it.
    pub verify: u64,
    /// `cont`.
    pub resume: u64,
}

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
    /// Somebody else resumed the VM.
    #[error("the VM was resumed by someone else during the pause; this checkpoint is discarded")]
    ResumedByOthers,
    /// QEMU did not do as told.
    #[error("QEMU failed a command of the pause; the VM was resumed")]
    Monitor(#[from] MonitorError),
    /// The connection failed.
    #[error("the connection to QEMU failed in the pause")]
    Qmp(#[from] QmpError),
    /// Tracking failed.
    #[error("reading the written pages failed in the pause; the VM was resumed")]
    Tracker(#[from] TrackerError),
    /// The guardian is gone.
    #[error("no pause without a guardian")]
    Guardian(#[from] GuardianError),
}

/// Something that looks at all of memory while the guest stands still.
pub type Look<'l> = dyn FnMut(&Tracker) -> Result<(), TrackerError> + 'l;

/// What a pause needs.
pub struct Pause<'a> {
    /// QEMU.
    pub monitor: &'a mut Monitor,
    /// Its process.
    pub qemu: &'a Process,
    /// Processors that its vCPUs need least, where whoever waits for QEMU is in nobody's way.
    pub aside: &'a Processors,
    /// Who resumes the VM when we cannot.
    pub guardian: &'a Guardian,
    /// The pages; the stage has room for those that are expected.
    pub work: Work<'a>,
    /// What is to be done about them.
    pub schedule: &'a mut dyn Schedule,
    /// Where QEMU writes its device state.
    pub state_file: &'a StateFile,
    /// Nothing is done beside saving the device state, to learn how long it takes by itself.
    pub state_first: bool,
    /// The VM is resumed after this.
    pub limit: Duration,
    /// False for a VM that is paused already, and stays so.
    pub running: bool,
    /// Runs beside the saving of the device state, after the copies: what else must be seen while
    /// the guest stands still.
    pub beside: &'a mut dyn FnMut(),
    /// Runs last in the pause, with everything copied (`--verify`).
    pub before_resume: Option<&'a mut Look<'a>>,
}

impl Pause<'_> {
    /// Stops the VM, captures, resumes it. Returns the phases.
    pub fn run(mut self) -> Result<DowntimeRecord, PauseError> {
        let mut record = DowntimeRecord::default();
        // What waits for QEMU's answers to `stop` and `cont` stays off the vCPUs' processors: a vCPU that was
        // let go would keep it from seeing the answer.
        let own = affinity::of_this_thread();
        let _aside = Confined::to(self.aside);
        self.monitor.client().take_events()?;
        if !self.running {
            self.capture(&mut record, &own)?;
            return match self.resume_events()? {
                0 => Ok(record),
                _ => Err(PauseError::ResumedByOthers),
            };
        }
        self.guardian.pausing(self.limit)?;
        let begin = Instant::now();
        let stopped = self.stop(&mut record);
        // Somebody may have paused the VM in the instant before: then it is theirs to resume.
        let ours = !matches!(stopped, Ok(false));
        let captured = stopped.and_then(|_| self.capture(&mut record, &own));
        let resumed = if ours {
            self.resume(&mut record)
        } else {
            Ok(())
        };
        record.total = us(begin);
        if self.guardian.resumed()? {
            return Err(PauseError::Overrun {
                limit_ms: self.limit.as_millis(),
            });
        }
        captured?;
        resumed?;
        match self.resume_events()? {
            seen if seen == usize::from(ours) => Ok(record),
            _ => Err(PauseError::ResumedByOthers),
        }
    }

    /// Returns whether it was this command that stopped the VM.
    fn stop(&mut self, record: &mut DowntimeRecord) -> Result<bool, PauseError> {
        let begin = Instant::now();
        let limit = self.limit + ANSWER_GRACE;
        let client = self.monitor.client();
        let ticket = client.send("stop", json!({}))?;
        client.wait(ticket, limit)?;
        record.stop = us(begin);
        // QEMU queues the event before the answer, so it has been read with it.
        Ok(client
            .take_events()?
            .iter()
            .any(|event| event.name == "STOP"))
    }

    fn resume(&mut self, record: &mut DowntimeRecord) -> Result<(), PauseError> {
        let begin = Instant::now();
        let limit = self.limit + ANSWER_GRACE;
        let client = self.monitor.client();
        let ticket = client.send("cont", json!({}))?;
        client.wait(ticket, limit)?;
        record.resume = us(begin);
        Ok(())
    }

    /// Device state, scan and copy; the guest stands still.
    fn capture(&mut self, record: &mut DowntimeRecord, own: &Processors) -> Result<(), PauseError> {
        let _apart = aside::apart_from(self.qemu, own);
        let state_begin = Instant::now();
        let ticket = self.monitor.send_save_device_state(self.state_file)?;
        let limit = self.limit + ANSWER_GRACE;
        let saved = |record: &mut DowntimeRecord| {
            let begin = Instant::now();
            let saved = self.monitor.wait_device_state(ticket, limit);
            record.wait = us(begin);
            record.device_state = us(state_begin);
            saved
        };
        if self.state_first {
            saved(record)?;
            self.schedule.stopped(&mut self.work, record)?;
            (self.beside)();
        } else {
            let copied = self.schedule.stopped(&mut self.work, record);
            (self.beside)();
            // Awaited even when the copy failed: QEMU answers in order, and `cont` comes next.
            saved(record)?;
            copied?;
        }
        if let Some(look) = self.before_resume.as_mut() {
            // It takes long, and all the processors there are.
            let _anywhere = Confined::to(own);
            let begin = Instant::now();
            look(self.work.tracker)?;
            record.verify = us(begin);
        }
        Ok(())
    }

    /// `RESUME` events since the pause began. Events and answers come in one order, so after the
    /// answer to `cont` none of the pause is outstanding.
    fn resume_events(&mut self) -> Result<usize, PauseError> {
        let events = self.monitor.client().take_events()?;
        Ok(events.iter().filter(|event| event.name == "RESUME").count())
    }
}

/// Since an instant, in microseconds.
pub fn us(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
