//! The pause: the one stretch of time in which the guest stands still.
//!
//! ```text
//!   guardian told ─ stop ─┬─ save device state (QEMU) ──────────┬─ cont ─ guardian told
//!                         └─ scan ─ copy (this thread, beside) ─┘
//! ```
//!
//! QEMU takes 0.2 ms to read a command, with a thread that may have to wait for a processor (ours, while
//! we scan). So each is sent as early as it can: saving when the vCPUs stand still and QEMU still drains
//! its disks, `cont` when everything is copied. QEMU carries them out one after the other.
//!
//! Ways back to a running guest, each of them written down before `stop` is sent:
//! - every error in here passes through `resume`;
//! - the guardian resumes when the limit passes, or when this process dies.
//!
//! A guest that was resumed by anyone else before the copies were complete makes the capture
//! worthless: `RESUME` events inside the pause are counted, and the pause fails. So it does when the VM
//! is reset meanwhile, which QEMU does to one that stands still, too.

use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;
use stillframe_qemu::monitor::{Monitor, MonitorError, StateFile};
use stillframe_qemu::qmp::{QmpError, Ticket};
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
    /// QEMU saving its device state, from the answer to `stop` to the one to this.
    pub device_state: u64,
    /// Waiting for the device state with nothing else to do: after scan and copy, mostly.
    pub wait: u64,
    /// Looking at all of memory, when `--verify` asked for it.
    pub verify: u64,
    /// `cont`, once all else is done.
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
    /// Reset in the pause.
    #[error(
        "the VM was reset during the pause; this checkpoint is discarded, the next one holds all of it"
    )]
    Reset,
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

/// Who resumes the VM, and how far that is.
#[derive(Debug)]
enum Resume {
    /// It was somebody else who paused it.
    Others,
    /// We: nothing is sent yet.
    Due,
    /// We: QEMU has been told, and does it when it is done with what it was told before.
    Sent(Ticket),
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
            let saving = self.monitor.send_save_device_state(self.state_file)?;
            let _apart = aside::apart_from(self.qemu, &own);
            self.capture(&mut record, &own, saving, &mut Resume::Others)?;
            self.undisturbed(0)?;
            return Ok(record);
        }
        self.guardian.pausing(self.limit)?;
        let begin = Instant::now();
        let mut resume = Resume::Due;
        let captured = self.stopped(&mut record, &own, &mut resume);
        let expected = usize::from(!matches!(resume, Resume::Others));
        let resumed = self.resume(&mut record, resume);
        record.total = us(begin);
        if self.guardian.resumed()? {
            return Err(PauseError::Overrun {
                limit_ms: self.limit.as_millis(),
            });
        }
        captured?;
        resumed?;
        self.undisturbed(expected)?;
        Ok(record)
    }

    /// Stops the VM and captures.
    fn stopped(
        &mut self,
        record: &mut DowntimeRecord,
        own: &Processors,
        resume: &mut Resume,
    ) -> Result<(), PauseError> {
        let begin = Instant::now();
        let limit = self.limit + ANSWER_GRACE;
        let client = self.monitor.client();
        let stopping = client.send("stop", Value::Null)?;
        // Not before the vCPUs stand still: they may need the processor that QEMU reads with.
        client.await_event("STOP", &stopping, limit)?;
        // From here on the vCPUs' processors are free, and QEMU's main thread has much to do.
        let _apart = aside::apart_from(self.qemu, own);
        let saving = self.monitor.send_save_device_state(self.state_file)?;
        let client = self.monitor.client();
        client.wait(stopping, limit)?;
        record.stop = us(begin);
        // QEMU queues the event before the answer, so it has been read with it. Without one, somebody
        // paused the VM in the instant before: then it is theirs to resume.
        if !client.has_event("STOP") {
            *resume = Resume::Others;
        }
        self.capture(record, own, saving, resume)
    }

    fn resume(&mut self, record: &mut DowntimeRecord, resume: Resume) -> Result<(), PauseError> {
        let begin = Instant::now();
        let client = self.monitor.client();
        let ticket = match resume {
            Resume::Others => return Ok(()),
            Resume::Due => client.send("cont", Value::Null)?,
            Resume::Sent(ticket) => ticket,
        };
        client.wait(ticket, self.limit + ANSWER_GRACE)?;
        record.resume = us(begin);
        Ok(())
    }

    /// Device state, scan and copy; the guest stands still. Sends `cont` when nothing but the device
    /// state is missing.
    fn capture(
        &mut self,
        record: &mut DowntimeRecord,
        own: &Processors,
        saving: Ticket,
        resume: &mut Resume,
    ) -> Result<(), PauseError> {
        let limit = self.limit + ANSWER_GRACE;
        let state_begin = Instant::now();
        let mut saving = Some(saving);
        if self.state_first {
            self.saved(record, saving.take(), state_begin, limit)?;
        }
        let copied = self.schedule.stopped(&mut self.work, record);
        (self.beside)();
        if copied.is_ok() && self.before_resume.is_none() && matches!(resume, Resume::Due) {
            *resume = Resume::Sent(self.monitor.client().send("cont", Value::Null)?);
        }
        // Awaited even when the copy failed: QEMU answers in order, and `cont` comes next.
        self.saved(record, saving, state_begin, limit)?;
        copied?;
        if let Some(look) = self.before_resume.as_mut() {
            // It takes long, and all the processors there are.
            let _anywhere = Confined::to(own);
            let begin = Instant::now();
            look(self.work.tracker)?;
            record.verify = us(begin);
        }
        Ok(())
    }

    /// Waits for the device state, where that is not done yet.
    fn saved(
        &mut self,
        record: &mut DowntimeRecord,
        saving: Option<Ticket>,
        state_begin: Instant,
        limit: Duration,
    ) -> Result<(), PauseError> {
        let Some(ticket) = saving else {
            return Ok(());
        };
        let begin = Instant::now();
        let saved = self.monitor.wait_device_state(ticket, limit);
        record.wait = us(begin);
        record.device_state = us(state_begin);
        Ok(saved?)
    }

    /// Whether nobody else touched the VM during the pause. Events and answers come in one order, so
    /// after the answer to `cont` none of the pause is outstanding.
    fn undisturbed(&mut self, resumed: usize) -> Result<(), PauseError> {
        let events = self.monitor.client().take_events()?;
        let names: Vec<&str> = events.iter().map(|event| event.name.as_str()).collect();
        judge(&names, resumed)
    }
}

/// What the events of a pause, which was to end with so many `RESUME`, say about it.
fn judge(events: &[&str], resumed: usize) -> Result<(), PauseError> {
    let begin = events.iter().position(|&name| name == "STOP");
    let since = &events[begin.map_or(0, |stop| stop + 1)..];
    let end = since.iter().position(|&name| name == "RESUME");
    // QEMU resets a VM that stands still, too: it writes firmware into RAM, and all devices are as new.
    if since[..end.unwrap_or(since.len())].contains(&"RESET") {
        return Err(PauseError::Reset);
    }
    match since.iter().filter(|&&name| name == "RESUME").count() {
        seen if seen == resumed => Ok(()),
        _ => Err(PauseError::ResumedByOthers),
    }
}

/// Since an instant, in microseconds.
pub fn us(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_else_touched_the_vm_is_told_by_events() {
        let fine: [(&[&str], usize); 5] = [
            (&["STOP", "RESUME"], 1),
            (&["RESET", "STOP", "RESUME"], 1),
            (&["STOP", "RESUME", "RESET"], 1),
            (&["RTC_CHANGE", "STOP", "RTC_CHANGE", "RESUME"], 1),
            (&[], 0),
        ];
        for (events, resumed) in fine {
            assert!(judge(events, resumed).is_ok(), "{events:?}");
        }
        let reset: [(&[&str], usize); 2] = [(&["STOP", "RESET", "RESUME"], 1), (&["RESET"], 0)];
        for (events, resumed) in reset {
            let judged = judge(events, resumed);
            assert!(matches!(judged, Err(PauseError::Reset)), "{events:?}");
        }
        let resumed: [(&[&str], usize); 3] = [
            (&["STOP", "RESUME", "RESUME"], 1),
            (&["RESUME"], 0),
            (&["STOP"], 1),
        ];
        for (events, resumed) in resumed {
            let judged = judge(events, resumed);
            assert!(
                matches!(judged, Err(PauseError::ResumedByOthers)),
                "{events:?}"
            );
        }
    }
}
