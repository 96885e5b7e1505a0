//! The verb *checkpoint*: one exact state of a running VM into the repository.
//!
//! ```text
//!   Vm::capture               guest, QEMU   rounds, pause: pages in a staging buffer, device state   --> Captured
//!   CheckpointWriter::store   repository    encodings, deltas, packs, manifest                       --> Stored
//!   Vm::settle                tracking      committed, or rolled back
//! ```
//!
//! The halves share nothing, so that one checkpoint may be stored while the next is captured. Pages that exceed
//! the staging buffer are streamed into the repository before the capture (streaming pre-copy, `streaming`): all
//! of memory for a first checkpoint, else the written pages.
//!
//! What fails at any step leaves the VM running and the repository as it was; what was written since
//! the last *committed* checkpoint stays pending, so that the next one is complete.

mod capture;
mod store;
mod streaming;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::Serialize;
use stillframe_qemu::monitor::MonitorError;
use stillframe_repo::{Note, PageCounts, RepoError, Repository, Tags};
use thiserror::Error;

use crate::ProgressSink;
use crate::attach::Vm;
use crate::balloon::{BalloonError, BalloonReport};
use crate::capture::device_state::StateError;
use crate::capture::devices::DevicesError;
use crate::capture::downtime::DowntimeRecord;
use crate::capture::pause::PauseError;
use crate::capture::schedule::ScheduleError;
use crate::capture::staging::StagingError;
use crate::disks::{DiskChoice, DiskSchedule, DisksError, LeftDisk};
use crate::free_pages::{FreePagesError, FreePagesReport};
use crate::memory::block::BlockError;
use crate::post_restore::ClockReport;
use crate::streaming::{Iteration, StreamingError};
use crate::tracking::error::TrackerError;
use crate::verify::{VerifyError, VerifyReport};

pub use crate::capture::schedule::{Copied, Plan, Prediction, ScheduleChoice, ScheduleKind};
pub use capture::Captured;
pub use store::{CheckpointWriter, Stored};

/// The name of the device state among a manifest's streams.
pub const DEVICE_STATE: &str = "device-state";

/// How to take a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointOptions {
    /// The watchdog resumes the VM when a pause takes longer.
    pub pause_limit: Duration,
    /// How long to wait for another process' exclusive lock on the repository.
    pub lock_wait: Duration,
    /// Compare all of memory, in the pause, with what the checkpoint holds. The pause lasts as long
    /// as reading all of memory takes.
    pub verify: bool,
    /// Budget of the delta cache, in bytes: of a page found there only the changes are
    /// stored. 0 stores pages as a whole, always.
    pub delta_cache_bytes: u64,
    /// Do not store pages that the repository has.
    pub dedup: bool,
    /// Do not store pages that an indexed image has, but refer to it.
    pub images: bool,
    /// Leave the guest's clock behind by what pauses take from it.
    pub keep_guest_clock: bool,
    /// Memory for captured pages, in bytes: half of it for those being stored, half for those being
    /// captured meanwhile.
    pub copy_buffer_bytes: u64,
    /// What the checkpoint has of each disk.
    pub disks: DiskChoice,
    /// Query the guest's agent for its free pages, and keep these as zeros ([`crate::free_pages`]).
    pub free_pages: bool,
    /// Before a checkpoint of all memory, have the guest give back what it does not need, for up to this long
    /// ([`crate::balloon`]).
    pub balloon: Option<Duration>,
    /// The words by which people find the checkpoint.
    pub tags: Tags,
    /// What people say about the checkpoint.
    pub note: Option<Note>,
}

impl Default for CheckpointOptions {
    /// As suits most VMs.
    fn default() -> CheckpointOptions {
        CheckpointOptions {
            pause_limit: Duration::from_secs(3),
            lock_wait: Duration::from_secs(10),
            verify: false,
            delta_cache_bytes: 256 << 20,
            dedup: true,
            images: true,
            keep_guest_clock: false,
            copy_buffer_bytes: 1 << 30,
            disks: DiskChoice::default(),
            free_pages: false,
            balloon: None,
            tags: Tags::default(),
            note: None,
        }
    }
}

/// What was done.
#[derive(Debug, Clone, Serialize)]
pub struct CheckpointReport {
    /// The new checkpoint.
    pub checkpoint: String,
    /// The VM's name.
    pub vm: String,
    /// When the guest was stopped.
    pub time: jiff::Timestamp,
    /// The checkpoint this one is the increment of.
    pub parent: Option<String>,
    /// How pages were copied.
    pub schedule: ScheduleKind,
    /// The schedule that was tried first: copy-on-write, when pages lost their write protection before they
    /// were copied. Its pause came before that of `downtime_us`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instead_of: Option<ScheduleKind>,
    /// Why in this way, where the choice was left to `auto` and there was something to choose by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<Plan>,
    /// The pause and its phases.
    pub downtime_us: DowntimeRecord,
    /// Pages, by what they turned out to hold.
    pub pages: PageCounts,
    /// Pages copied while the guest ran, and while it was stopped.
    pub copied: Copied,
    /// What came of the question for free pages, if it was to be put.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_pages: Option<FreePagesReport>,
    /// What the balloon did before, if it was to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balloon: Option<BalloonReport>,
    /// The disks whose content is in the checkpoint.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<StoredDisk>,
    /// Those whose content `auto` could not take.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disks_left_out: Vec<LeftDisk>,
    /// What this checkpoint added to the repository, in bytes.
    pub bytes_stored: u64,
    /// From the call to the durable checkpoint, in microseconds.
    pub total_us: u64,
    /// Where that time went.
    pub phases_us: Phases,
    /// What would stand in the way of restoring it, in words.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub obstacles: Vec<String>,
    /// What pauses have taken from the guest's clock since it was set, or since the attach, in microseconds.
    pub clock_taken_us: u64,
    /// What came of setting it, where that is since the checkpoint before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clock: Option<ClockReport>,
    /// Packs that the repository has lost: older checkpoints may need them, this one does not.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing_packs: Vec<String>,
    /// Images that are not as they were indexed: older checkpoints may need them, this one does not.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub changed_images: Vec<String>,
    /// The comparison, with `--verify`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verify: Option<VerifyReport>,
}

/// How long the steps of one checkpoint took, in microseconds; the pause has its own record
/// ([`DowntimeRecord`]). `encode` and `write` are times of the thread that hands pages over: hashing,
/// comparing and making deltas run on several threads within `encode`, compressing and encrypting on
/// other threads in parallel with both. Pages that are streamed are hashed beside all of it: `encode` has the mean of
/// these threads.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Phases {
    /// Copying while the guest ran.
    pub copy: u64,
    /// Finding out what each page is to be stored as.
    pub encode: u64,
    /// Handing pages and deltas over to the repository, and waiting for it.
    pub write: u64,
    /// Page tables, layers, index and manifest, until all is on disk.
    pub commit: u64,
}

/// A disk whose content is in a checkpoint.
#[derive(Debug, Clone, Serialize)]
pub struct StoredDisk {
    /// The drive or device.
    pub device: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// How it was captured.
    pub schedule: DiskSchedule,
    /// Bytes that were read: not those which QEMU knows to be zeros.
    pub bytes_read: u64,
    /// What its content added to the repository, in bytes.
    pub bytes_stored: u64,
    /// Its pages, by what they turned out to hold.
    pub pages: PageCounts,
}

/// Why there is no new checkpoint.
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// RAM blocks came, went or changed size.
    #[error(
        "the VM's RAM blocks changed while it was tracked (hot-plug, or a reset); attach again to continue"
    )]
    RamChanged,
    /// A migration by another client is active.
    #[error(
        "the VM is being migrated by someone else ({status}): no checkpoint until that has ended"
    )]
    Migrating {
        /// QEMU's word for how far it is.
        status: String,
    },
    /// A migration by another client has taken the VM away.
    #[error(
        "the VM was migrated to another host or into a file: what is left here is not the VM any more, so no checkpoint of it is taken"
    )]
    MigratedAway,
    /// Devices came or went.
    #[error(transparent)]
    Devices(#[from] DevicesError),
    /// QEMU refused something.
    #[error("QEMU failed a command")]
    Monitor(#[from] MonitorError),
    /// Tracking failed.
    #[error("cannot capture the VM's memory")]
    Tracker(#[from] TrackerError),
    /// The pages cannot be staged.
    #[error("cannot capture the VM's memory")]
    StagingBuffer(#[from] StagingError),
    /// Reading memory failed.
    #[error("cannot read the VM's memory")]
    Block(#[from] BlockError),
    /// The pause failed.
    #[error(transparent)]
    Pause(#[from] PauseError),
    /// The guest's memory could not be taken, or given back.
    #[error("cannot inflate the VM's balloon and deflate it again")]
    Balloon(#[from] BalloonError),
    /// Free pages could not be found.
    #[error("cannot find the guest's free pages")]
    FreePages(#[from] FreePagesError),
    /// The disks cannot be captured.
    #[error(transparent)]
    Disks(#[from] DisksError),
    /// Snapshots of the disks are left.
    #[error(
        "the checkpoint is stored, but QEMU keeps what it made to read the disks, and the guest's writes are slow; the next `stillframe checkpoint` takes it away"
    )]
    DisksLeft(#[source] MonitorError),
    /// The repository failed.
    #[error(transparent)]
    Repo(#[from] RepoError),
    /// No device state.
    #[error(transparent)]
    State(#[from] StateError),
    /// An increment of nothing.
    #[error(
        "the checkpoint before is gone (forgotten, or pruned): the next one scans all of memory"
    )]
    ParentGone,
    /// The comparison could not be made.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// The record could not be written as JSON.
    #[error("cannot encode the VM's record")]
    Encode(#[source] serde_json::Error),
    /// No thread.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
}

impl From<ScheduleError> for CheckpointError {
    fn from(error: ScheduleError) -> CheckpointError {
        match error {
            ScheduleError::Tracker(error) => error.into(),
            ScheduleError::StagingBuffer(error) => error.into(),
        }
    }
}

impl<E: Into<CheckpointError>> From<StreamingError<E>> for CheckpointError {
    fn from(error: StreamingError<E>) -> CheckpointError {
        match error {
            StreamingError::Tracker(error) => error.into(),
            StreamingError::Block(error) => error.into(),
            StreamingError::Thread(error) => CheckpointError::Thread(error),
            StreamingError::Sink(error) => error.into(),
        }
    }
}

impl CheckpointError {
    /// Whether more was written than the staging buffer takes. [`Vm::checkpoint`] streams it first.
    pub fn is_too_much(&self) -> bool {
        match self {
            CheckpointError::StagingBuffer(error)
            | CheckpointError::Pause(PauseError::StagingBuffer(error)) => {
                matches!(error, StagingError::Full { .. })
            }
            _ => false,
        }
    }

    /// Whether an attachment is of no more use after this. Attaching again costs reading all memory once, so
    /// everything that leaves tracking and the connection intact keeps it.
    pub fn ends_tracking(&self) -> bool {
        match self {
            CheckpointError::Tracker(
                TrackerError::NotSaved | TrackerError::ProtectionLost | TrackerError::Injected(_),
            ) => false,
            error if error.is_too_much() => false,
            CheckpointError::RamChanged
            | CheckpointError::Monitor(_)
            | CheckpointError::Tracker(_)
            | CheckpointError::StagingBuffer(_)
            | CheckpointError::Block(_)
            | CheckpointError::Balloon(_)
            | CheckpointError::FreePages(_) => true,
            CheckpointError::Devices(error) => error.ends_tracking(),
            CheckpointError::Pause(error) => match error {
                PauseError::Overrun { .. }
                | PauseError::Interfered
                | PauseError::Disks(_)
                | PauseError::Rounds(_)
                | PauseError::NotHeld { .. }
                | PauseError::StateChanged { .. }
                | PauseError::Injected(_) => false,
                PauseError::State(error) => !matches!(error, StateError::Invalid(_)),
                PauseError::Monitor(_)
                | PauseError::Qmp(_)
                | PauseError::Tracker(_)
                | PauseError::StagingBuffer(_)
                | PauseError::Guardian(_) => true,
            },
            CheckpointError::State(error) => matches!(error, StateError::Monitor(_)),
            CheckpointError::Disks(error) => matches!(error, DisksError::Monitor(_)),
            CheckpointError::Thread(_)
            | CheckpointError::Repo(_)
            | CheckpointError::DisksLeft(_)
            | CheckpointError::Migrating { .. }
            | CheckpointError::MigratedAway
            | CheckpointError::ParentGone
            | CheckpointError::Verify(_)
            | CheckpointError::Encode(_) => false,
        }
    }
}

impl Vm {
    /// Takes one checkpoint by streaming pre-copy, however much was written: an increment, when `checkpoints` knows the
    /// one before and the repository still has it; else of every page. Pages are streamed into the repository
    /// while the guest runs, and those written meanwhile captured: see [`Vm::capture`] for the quicker way.
    pub fn checkpoint(
        &mut self,
        checkpoints: &mut CheckpointWriter,
        repository: &mut Repository,
        options: &CheckpointOptions,
        progress: ProgressSink<'_>,
    ) -> Result<CheckpointReport, CheckpointError> {
        let iterate = match checkpoints.has_parent() {
            true => Iteration::Written,
            false => Iteration::Bulk,
        };
        match self.streaming(iterate, checkpoints, repository, options, progress) {
            Err(CheckpointError::ParentGone) => {
                self.streaming(Iteration::Bulk, checkpoints, repository, options, progress)
            }
            other => other,
        }
    }

    /// Commits the oldest capture in flight, or rolls all back. After an
    /// error the others are worthless, and go to [`Vm::discard`].
    pub fn settle(
        &mut self,
        mut captured: Captured,
        stored: Result<Stored, CheckpointError>,
    ) -> Result<CheckpointReport, CheckpointError> {
        self.settle_disks(&mut captured, stored.is_ok());
        self.discard(captured);
        let left = self.disks_left.take();
        match stored {
            Ok(Stored { mut report, found }) => {
                self.tracker.committed(&found);
                report.clock_taken_us = self.clock.taken().as_micros() as u64;
                report.clock = self.clock.report();
                match left {
                    Some(error) => Err(CheckpointError::DisksLeft(error)),
                    None => Ok(report),
                }
            }
            Err(error) => {
                self.tracker.rolled_back();
                Err(error)
            }
        }
    }
}
