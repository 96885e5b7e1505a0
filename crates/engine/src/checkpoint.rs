//! The verb *checkpoint*: one exact state of a running VM into the repository.
//!
//! A capture that fails at any step leaves the VM running and the repository as it was; what was
//! written since the last *committed* checkpoint stays pending, so that the next one is complete.

mod draft;
mod passes;

use std::time::{Duration, Instant};

use serde::Serialize;
use stillframe_qemu::monitor::MonitorError;
use stillframe_repo::{PageCounts, RepoError, Repository, Writer};
use stillframe_sys::affinity::Confined;
use thiserror::Error;

use crate::ProgressSink;
use crate::attach::{Parent, Vm};
use crate::capture::DowntimeRecord;
use crate::capture::block::BlockError;
use crate::capture::device_state::{StateBuffer, StateError};
use crate::capture::pause::{Pause, PauseError, us};
use crate::capture::schedule::{CopyOnWrite, PreCopy, Schedule, StopCopy};
use crate::capture::stage::Stage;
use crate::capture::tracker::{self, TrackerError};
use crate::verify::{Image, VerifyError, VerifyReport};
use draft::{Draft, Paused};

pub use crate::capture::schedule::{Copied, ScheduleKind};

/// Room on the stage beyond what the last pause needed, in pages.
const RESERVE_PAGES: u64 = 1024;
/// The name of the device state among a manifest's streams.
pub const DEVICE_STATE: &str = "device-state";

/// How to take a checkpoint.
#[derive(Debug, Clone)]
pub struct CheckpointOptions {
    /// The watchdog resumes the VM when a pause takes longer.
    pub pause_limit: Duration,
    /// How long to wait for another process' exclusive lock on the repository.
    pub lock_wait: Duration,
    /// Compare all of memory, in the pause, with what the checkpoint holds. The pause lasts as long
    /// as reading all of memory takes.
    pub verify: bool,
    /// Memory for what pages held before, in bytes: of a page found there only what changed is
    /// stored. 0 stores pages as a whole, always.
    pub delta_cache_bytes: u64,
    /// Do not store pages that the repository has.
    pub dedup: bool,
}

/// What was done.
#[derive(Debug, Clone, Serialize)]
pub struct CheckpointReport {
    /// The new checkpoint.
    pub checkpoint: String,
    /// The VM's name.
    pub vm: String,
    /// When the guest stood still.
    pub time: jiff::Timestamp,
    /// The checkpoint this one is the increment of.
    pub parent: Option<String>,
    /// The pause and its phases.
    pub downtime_us: DowntimeRecord,
    /// Pages, by what they turned out to hold.
    pub pages: PageCounts,
    /// Pages copied while the guest ran, and while it stood still.
    pub copied: Copied,
    /// What this checkpoint added to the repository, in bytes.
    pub bytes_stored: u64,
    /// From the call to the durable checkpoint, in microseconds.
    pub total_us: u64,
    /// Where that time went.
    pub phases_us: Phases,
    /// Packs that the repository has lost: older checkpoints may need them, this one does not.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing_packs: Vec<String>,
    /// The comparison, where `--verify` asked for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verify: Option<VerifyReport>,
}

/// How long the steps of one checkpoint took, in microseconds; the pause has its own record
/// ([`DowntimeRecord`]). `judge` and `write` are times of the thread that hands pages over: hashing,
/// comparing and making deltas run on several threads within `judge`, compressing and encrypting on
/// others beside both.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Phases {
    /// Copying while the guest ran.
    pub copy: u64,
    /// Finding out what each page is to be stored as.
    pub judge: u64,
    /// Handing pages and deltas over to the repository, and waiting for it.
    pub write: u64,
    /// Page tables, layers, index and manifest, until all is on disk.
    pub commit: u64,
}

/// Why there is no new checkpoint.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// RAM blocks came, went or changed size.
    #[error(
        "the VM's RAM blocks changed while it was tracked (hot-plug, or a reset); attach again to go on"
    )]
    RamChanged,
    /// QEMU refused something.
    #[error("QEMU failed a command")]
    Monitor(#[from] MonitorError),
    /// Tracking failed.
    #[error("cannot capture the VM's memory")]
    Tracker(#[from] TrackerError),
    /// Reading memory failed.
    #[error("cannot read the VM's memory")]
    Block(#[from] BlockError),
    /// The pause failed.
    #[error(transparent)]
    Pause(#[from] PauseError),
    /// The repository failed.
    #[error(transparent)]
    Repo(#[from] RepoError),
    /// No device state.
    #[error(transparent)]
    State(#[from] StateError),
    /// The comparison could not be made.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// The record could not be written as JSON.
    #[error("cannot encode the VM's record")]
    Encode(#[source] serde_json::Error),
}

impl Vm {
    /// Takes one checkpoint. Incremental when this `Vm` committed the one before to the same
    /// repository and it still exists there; else every page is looked at.
    pub fn checkpoint(
        &mut self,
        repository: &mut Repository,
        options: &CheckpointOptions,
        progress: ProgressSink<'_>,
    ) -> Result<CheckpointReport, CheckpointError> {
        let begin = Instant::now();
        let repository_id = repository.id().to_string();
        let mut writer = repository.begin(options.lock_wait)?;
        self.cache.set_budget(options.delta_cache_bytes);
        let mut draft = Draft::begin(self, &writer, &repository_id, options)?;
        // The stage is lent out, so that the rest of `self` stays free; it returns on every path.
        let mut stage = std::mem::take(&mut self.stage);
        let captured = self.capture(&mut writer, &mut draft, &mut stage, options, progress);
        self.stage = stage;
        let paused = captured?;
        let aside = Confined::to(&draft.aside);
        let captured_at = Instant::now();
        let manifest = draft.manifest(self.tracker.blocks(), &mut writer, &paused)?;
        let committed = writer.commit(manifest.clone())?;
        draft.phases.commit = us(captured_at);
        self.tracker.committed();
        draft.ingested.remember(&self.stage, &mut self.cache);
        drop(aside);
        self.parent = Some(Parent {
            id: committed.id,
            repository: repository_id,
            tables: manifest.ram.clone(),
            missing_packs: draft.missing_packs.clone(),
        });
        let verify = match &paused.image {
            Some(image) => {
                let reader = repository.reader(options.lock_wait)?;
                Some(image.compare(&reader, &manifest.ram, progress)?)
            }
            None => None,
        };
        Ok(CheckpointReport {
            checkpoint: committed.id.to_string(),
            vm: manifest.vm,
            time: manifest.time,
            parent: manifest.parent.map(|id| id.to_string()),
            downtime_us: paused.downtime,
            pages: manifest.pages,
            copied: draft.copied,
            bytes_stored: committed.bytes_stored,
            total_us: us(begin),
            phases_us: draft.phases(),
            missing_packs: draft.missing_packs,
            verify,
        })
    }

    fn expect_same_ram(&mut self) -> Result<(), CheckpointError> {
        let ram = self.monitor.ram_blocks()?;
        match self.tracks(&ram) {
            true => Ok(()),
            false => Err(CheckpointError::RamChanged),
        }
    }

    /// All copying, while the guest runs and in the pause, and the way of the copies into the
    /// repository.
    fn capture(
        &mut self,
        writer: &mut Writer<'_>,
        draft: &mut Draft,
        stage: &mut Stage,
        options: &CheckpointOptions,
        progress: ProgressSink<'_>,
    ) -> Result<Paused, CheckpointError> {
        let begin = Instant::now();
        stage.reset(self.tracker.blocks().len());
        if draft.parent.is_none() {
            self.full_pass(writer, draft, progress)?;
        }
        let mut schedule = self.schedule();
        schedule.before(&mut self.tracker, stage, &mut draft.copied)?;
        draft.phases.copy = us(begin);
        let paused = match self.pause(draft, stage, schedule.as_mut(), options) {
            Ok(paused) => paused,
            Err(error) => {
                schedule.give_up(&self.tracker);
                return Err(error);
            }
        };
        let resumed_at = Instant::now();
        schedule.after(&mut self.tracker, stage, &mut draft.copied)?;
        draft.phases.copy += us(resumed_at);
        // A block that came or went at any time since the attach shows now.
        self.expect_same_ram()?;
        self.ingest(writer, draft, stage, progress)?;
        Ok(paused)
    }

    fn schedule(&self) -> Box<dyn Schedule> {
        match self.schedule {
            ScheduleKind::StopCopy => Box::new(StopCopy),
            ScheduleKind::PreCopy => Box::new(PreCopy),
            ScheduleKind::CopyOnWrite => Box::new(CopyOnWrite::default()),
        }
    }

    fn pause(
        &mut self,
        draft: &mut Draft,
        stage: &mut Stage,
        schedule: &mut dyn Schedule,
        options: &CheckpointOptions,
    ) -> Result<Paused, CheckpointError> {
        let mut state = match self.state.take() {
            Some(state) => state,
            None => StateBuffer::lend(&mut self.monitor)?,
        };
        state.empty()?;
        stage.reserve(2 * self.pause_pages_last + RESERVE_PAGES);
        let hasher = draft.ingested.hasher();
        let mut image = None;
        let mut look = |tracker: &tracker::Tracker| {
            let blocks = tracker.blocks().iter().map(|tracked| &*tracked.block);
            image = Some(Image::take(blocks, hasher)?);
            Ok(())
        };
        let running = self.monitor.run_state()?.running;
        draft.record.was_running = running;
        let time = jiff::Timestamp::now();
        let record = &mut draft.record;
        let pause = Pause {
            monitor: &mut self.monitor,
            guardian: &self.guardian,
            tracker: &mut self.tracker,
            stage,
            schedule,
            copied: &mut draft.copied,
            state_file: state.file(),
            limit: options.pause_limit,
            running,
            // What the guest writes to a disk after this changes the disk, by the restore's account.
            beside: &mut || record.look_at_disks_again(),
            before_resume: options.verify.then_some(&mut look),
        };
        let ran = pause.run();
        let downtime = match ran {
            Ok(downtime) => downtime,
            Err(error) => {
                // QEMU may not be done with it. That it cannot be taken back is the lesser error.
                let _ = state.take_back(&mut self.monitor);
                return Err(error.into());
            }
        };
        self.pause_pages_last = draft.copied.pause;
        let device_state = state.read()?;
        self.state = Some(state);
        Ok(Paused {
            downtime,
            time,
            device_state,
            image,
        })
    }
}
