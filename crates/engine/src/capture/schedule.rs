//! Schedules decide which pages are copied before the pause, in it, and after it.
//!
//! | | guest runs | guest stopped | guest runs again |
//! | --- | --- | --- | --- |
//! | stop-copy | | scan, copy all | |
//! | pre-copy | rounds of scan and copy | scan, copy the rest | |
//! | copy-on-write | scan and protect | scan, protect pages written since | copy, or save when written |
//!
//! (Copy-on-write checkpointing, chapter 4. There is no fourth way: a page is copied before the instant
//! of the checkpoint, at it, or kept from changing until it is.)

use std::fmt;
use std::str::FromStr;
use std::time::Instant;

use serde::Serialize;
use stillframe_qemu::monitor::Monitor;
use thiserror::Error;

use crate::capture::downtime::{DowntimeRecord, us};
use crate::capture::staging::{StagingBuffer, StagingError};
use crate::memory::block::Guest;
use crate::memory::ranges::{count, subtract_all};
use crate::tracking::error::TrackerError;
use crate::tracking::tracker::{Collected, Tracker};

mod auto;
mod bursts;
mod copy_on_write;

pub use auto::{Auto, Plan, Prediction, Sample};
pub use bursts::Bursts;
pub use copy_on_write::CopyOnWrite;

/// Rounds before the pause. Each costs a scan of all memory, about 1 ms a GiB.
const ROUNDS_MAX: u32 = 4;
/// Pages that lengthen the pause little: they are copied or protected while QEMU saves its device state.
const FEW_PAGES: u64 = 512;

/// The kind of schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleKind {
    /// Everything in the pause.
    StopCopy,
    /// Copies as much as possible before the pause.
    PreCopy,
    /// Copies as much as possible after the pause.
    CopyOnWrite,
}

impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ScheduleKind::StopCopy => "stop-copy",
            ScheduleKind::PreCopy => "pre-copy",
            ScheduleKind::CopyOnWrite => "copy-on-write",
        })
    }
}

/// How the schedule is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScheduleChoice {
    /// The schedule that suits the VM, by the measurements of its last checkpoints: see [`Auto`].
    Auto,
    /// This one.
    Always(ScheduleKind),
}

/// No such schedule.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("there is no schedule '{0}': auto, stop-copy, pre-copy or copy-on-write")]
pub struct UnknownSchedule(String);

impl FromStr for ScheduleChoice {
    type Err = UnknownSchedule;

    fn from_str(name: &str) -> Result<ScheduleChoice, UnknownSchedule> {
        if name == "auto" {
            return Ok(ScheduleChoice::Auto);
        }
        let all = [
            ScheduleKind::StopCopy,
            ScheduleKind::PreCopy,
            ScheduleKind::CopyOnWrite,
        ];
        all.into_iter()
            .find(|kind| kind.to_string() == name)
            .map(ScheduleChoice::Always)
            .ok_or_else(|| UnknownSchedule(name.to_owned()))
    }
}

/// Where the copies of one checkpoint were made, in pages.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Copied {
    /// Pages streamed by streaming pre-copy while the guest runs; 0 without it.
    pub full_pass: u64,
    /// In the pre-copy rounds, the guest running.
    pub pre_copy: u64,
    /// In the pause.
    pub pause: u64,
    /// After the pause, the guest running.
    pub after: u64,
    /// After the pause, because the guest was about to write them and waited for it.
    pub on_fault: u64,
    /// Writes that the guest waited with since the capture before, for whatever page (copy-on-write).
    pub faults: u64,
    /// Write-hot pages left unprotected after the pause or their copy. The next checkpoint copies them whether they
    /// are written or not, and writing them costs the guest no fault.
    pub left_unprotected: u64,
}

/// The reason why a schedule could not copy its pages.
#[derive(Debug, Error)]
pub enum ScheduleError {
    /// Tracking failed.
    #[error(transparent)]
    Tracker(#[from] TrackerError),
    /// The pages cannot be staged.
    #[error(transparent)]
    StagingBuffer(#[from] StagingError),
}

/// The inputs of a schedule.
pub struct Work<'a> {
    /// Finds the pages that were written.
    pub tracker: &'a mut Tracker,
    /// Where their copies go.
    pub staging: &'a mut StagingBuffer,
    /// Counts them.
    pub copied: &'a mut Copied,
    /// Waits for the end of a burst of writes.
    pub bursts: &'a mut Bursts,
}

/// Decides when each page is copied. After an error nothing is lost: pages that were not copied stay pending.
pub trait Schedule {
    /// Before the pause; the guest runs. Before pages are copied, `monitor` drains the disks.
    fn before(&mut self, work: &mut Work<'_>, monitor: &mut Monitor) -> Result<(), ScheduleError>;

    /// In the pause, while QEMU saves its device state.
    fn stopped(
        &mut self,
        work: &mut Work<'_>,
        record: &mut DowntimeRecord,
    ) -> Result<(), ScheduleError>;

    /// After the pause; the guest runs again. Where all is copied, write-hot pages are left unprotected.
    fn after(&mut self, work: &mut Work<'_>) -> Result<(), ScheduleError> {
        work.copied.left_unprotected += work.tracker.leave_hot_unprotected();
        Ok(())
    }

    /// Instead of [`Schedule::after`], when the pause failed: nothing is to be copied any more.
    fn give_up(&mut self, _tracker: &Tracker) {}
}

/// Everything in the pause.
#[derive(Debug, Default)]
pub struct StopCopy;

impl Schedule for StopCopy {
    fn before(
        &mut self,
        _work: &mut Work<'_>,
        _monitor: &mut Monitor,
    ) -> Result<(), ScheduleError> {
        Ok(())
    }

    fn stopped(
        &mut self,
        work: &mut Work<'_>,
        record: &mut DowntimeRecord,
    ) -> Result<(), ScheduleError> {
        let begin = Instant::now();
        let mut found = work.tracker.collect_stopped()?;
        // With what captures that failed have left over.
        found.written = subtract_all(&work.tracker.pending(), &found.discarded);
        record.scan = us(begin);
        copy_now(work, record, &found)
    }
}

/// Copies as much as possible before the pause.
#[derive(Debug, Default)]
pub struct PreCopy;

impl Schedule for PreCopy {
    fn before(&mut self, work: &mut Work<'_>, monitor: &mut Monitor) -> Result<(), ScheduleError> {
        rounds(work, monitor)?;
        // Copied after the burst, its pages are few in the pause.
        while work.bursts.outlast(work.tracker)? {
            let found = work.tracker.collect_running()?.drained(monitor)?;
            copy_before(work, &found)?;
        }
        Ok(())
    }

    fn stopped(
        &mut self,
        work: &mut Work<'_>,
        record: &mut DowntimeRecord,
    ) -> Result<(), ScheduleError> {
        let begin = Instant::now();
        let found = work.tracker.collect_stopped()?;
        record.scan = us(begin);
        copy_now(work, record, &found)
    }
}

/// Copies the written pages while the guest runs, then those written meanwhile, and so on, as long
/// as they get fewer. The rest is left to the pause.
fn rounds(work: &mut Work<'_>, monitor: &mut Monitor) -> Result<(), ScheduleError> {
    // Left over from captures that failed: the first round copies them too.
    let mut pending = Some(work.tracker.pending());
    let mut last = u64::MAX;
    for _ in 0..ROUNDS_MAX {
        let mut found = work.tracker.collect_running()?.drained(monitor)?;
        if pending.take().is_some_and(|pending| count(&pending) > 0) {
            found.written = subtract_all(&work.tracker.pending(), &found.discarded);
        }
        copy_before(work, &found)?;
        let pages = found.pages();
        if pages <= FEW_PAGES || pages > last / 2 {
            break;
        }
        last = pages;
    }
    Ok(())
}

/// Copies pages while the guest runs.
fn copy_before(work: &mut Work<'_>, found: &Collected) -> Result<(), ScheduleError> {
    let pages = found.pages();
    work.staging.reserve(pages);
    work.staging
        .capture_all(work.tracker, Guest::Running, found)?;
    work.copied.pre_copy += pages;
    Ok(())
}

/// Copies pages in the pause.
fn copy_now(
    work: &mut Work<'_>,
    record: &mut DowntimeRecord,
    found: &Collected,
) -> Result<(), ScheduleError> {
    let begin = Instant::now();
    work.staging
        .capture_all(work.tracker, Guest::Stopped, found)?;
    record.copy = us(begin);
    work.copied.pause += found.pages();
    Ok(())
}
