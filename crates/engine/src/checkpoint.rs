//! The verb *checkpoint*: one exact state of a running VM into the repository.
//!
//! A capture that fails at any step leaves the VM running and the repository as it was; what was
//! written since the last *committed* checkpoint stays pending, so that the next one is complete.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use serde::Serialize;
use stillframe_page::bitmap::DirtyBitmap;
use stillframe_page::hash::ContentHasher;
use stillframe_qemu::device_state::{self, DeviceStateError};
use stillframe_qemu::monitor::MonitorError;
use stillframe_qemu::record::VmRecord;
use stillframe_repo::table::TableEditor;
use stillframe_repo::{Manifest, PageCounts, RamTable, RepoError, Repository, Writer};
use stillframe_sys::affinity::{Confined, Processors};
use stillframe_sys::memfd::{Access, Memfd, MemfdError};
use thiserror::Error;

use crate::attach::{Parent, Vm};
use crate::capture::block::{BlockError, PAGE_BYTES};
use crate::capture::ingest::{BATCH_PAGES, Ingest, Page};
use crate::capture::pause::{Pause, PauseError};
use crate::capture::stage::Stage;
use crate::capture::tracker::{self, Collected, TrackerError};
use crate::capture::{DowntimeRecord, aside};
use crate::verify::{Image, VerifyError, VerifyReport};
use crate::{Progress, ProgressSink};

/// Device state is some hundred KiB; a stream beyond this is not one. In bytes.
pub(crate) const DEVICE_STATE_BYTES_MAX: u64 = 1 << 30;
/// Room on the stage beyond what the last pause needed, in pages.
const RESERVE_PAGES: u64 = 1024;
/// Rounds of pre-copy. Each costs a scan of all memory, about 1 ms a GiB.
const ROUNDS_MAX: u32 = 4;
/// So few pages are copied in the pause while QEMU saves its device state, and lengthen it little.
const FEW_PAGES: u64 = 512;
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
    /// Pages: in all, looked at, stored, found in the repository already, zero.
    pub pages: PageCounts,
    /// Pages copied while the guest ran, and while it stood still.
    pub copied: Copied,
    /// What this checkpoint added to the repository, in bytes.
    pub bytes_stored: u64,
    /// From the call to the durable checkpoint, in microseconds.
    pub total_us: u64,
    /// Packs that the repository has lost: older checkpoints may need them, this one does not.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing_packs: Vec<String>,
    /// The comparison, where `--verify` asked for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verify: Option<VerifyReport>,
}

/// Where the copies of one checkpoint were made, in pages.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Copied {
    /// In the full pass, the guest running; 0 for an increment.
    pub full_pass: u64,
    /// In the pre-copy rounds, the guest running.
    pub pre_copy: u64,
    /// In the pause.
    pub pause: u64,
    /// Hot pages left open after the pause: the next checkpoint copies them whether they are
    /// written or not, and writing them costs the guest no fault.
    pub left_open: u64,
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
    /// No memory file for the device state.
    #[error("cannot make room for the device state")]
    Memfd(#[from] MemfdError),
    /// What QEMU saved is no device state.
    #[error("QEMU saved a device state that cannot be restored")]
    DeviceState(#[from] DeviceStateError),
    /// The comparison could not be made.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// The record could not be written as JSON.
    #[error("cannot encode the VM's record")]
    Encode(#[source] serde_json::Error),
}

/// What is collected on the way to a manifest.
struct Draft {
    record: VmRecord,
    parent: Option<Parent>,
    hasher: ContentHasher,
    tables: Vec<TableEditor>,
    counts: PageCounts,
    /// In a first checkpoint, the pages that its full pass has stored, by block.
    seen: Vec<DirtyBitmap>,
    /// Where storing runs.
    aside: Processors,
    missing_packs: Vec<String>,
    copied: Copied,
}

/// What the pause brought home.
struct Paused {
    downtime: DowntimeRecord,
    time: jiff::Timestamp,
    device_state: Vec<u8>,
    image: Option<Image>,
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
        let hasher = repository.hasher();
        let mut writer = repository.begin(options.lock_wait)?;
        self.expect_same_ram()?;
        let mut draft = self.draft(&writer, hasher, &repository_id)?;
        // The stage is lent out, so that the rest of `self` stays free; it returns on every path.
        let mut stage = std::mem::take(&mut self.stage);
        let captured = self.capture(&mut writer, &mut draft, &mut stage, options, progress);
        self.stage = stage;
        let paused = captured?;
        self.expect_same_ram()?;
        let aside = Confined::to(&draft.aside);
        let manifest = draft.manifest(self, &mut writer, &paused)?;
        let roots = manifest.ram.iter().map(|table| table.root).collect();
        let committed = writer.commit(manifest.clone())?;
        drop(aside);
        self.tracker.committed();
        self.parent = Some(Parent {
            id: committed.id,
            repository: repository_id,
            roots,
            missing_packs: draft.missing_packs.clone(),
        });
        let verify = match &paused.image {
            Some(image) => {
                let mut reader = repository.reader(options.lock_wait)?;
                Some(image.compare(&mut reader, &manifest.ram, progress)?)
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
            total_us: u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX),
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

    /// Decides whether this is an increment. The writer's lock keeps the parent from being pruned
    /// from here on; but the parent must not need what the repository has lost since.
    fn draft(
        &mut self,
        writer: &Writer<'_>,
        hasher: ContentHasher,
        repository_id: &str,
    ) -> Result<Draft, CheckpointError> {
        let record = VmRecord::take(&self.target, &mut self.monitor)?;
        let missing_packs = writer.missing_packs();
        let parent = match self.parent.clone() {
            Some(parent)
                if parent.repository == repository_id
                    && missing_packs
                        .iter()
                        .all(|pack| parent.missing_packs.contains(pack))
                    && writer.has_manifest(&parent.id)? =>
            {
                Some(parent)
            }
            _ => None,
        };
        // A full pass forgets what was pending against the old parent, so it can be none any more,
        // not even when the full pass fails.
        self.parent = parent.clone();
        let blocks = self.tracker.blocks().iter().enumerate();
        let tables = blocks
            .map(|(index, tracked)| match &parent {
                Some(parent) => {
                    TableEditor::from_root(writer, parent.roots[index], tracked.block.pages())
                }
                None => Ok(TableEditor::new(tracked.block.pages())),
            })
            .collect::<Result<Vec<_>, _>>()?;
        let counts = PageCounts {
            total: self.tracker.pages(),
            ..PageCounts::default()
        };
        // An increment's pages come from the stage, which holds each of them once.
        let seen = match &parent {
            Some(_) => Vec::new(),
            None => self
                .tracker
                .blocks()
                .iter()
                .map(|tracked| DirtyBitmap::new(tracked.block.pages()))
                .collect(),
        };
        Ok(Draft {
            record,
            parent,
            hasher,
            tables,
            counts,
            seen,
            aside: aside::processors(&self.target.process),
            missing_packs,
            copied: Copied::default(),
        })
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
        stage.reset(self.tracker.blocks().len());
        if draft.parent.is_none() {
            self.full_pass(writer, draft, progress)?;
        } else {
            // Left over from captures that failed.
            let pending = self.tracker.pending();
            draft.copied.pre_copy += tracker::count(&pending);
            stage.reserve(tracker::count(&pending));
            let found = Collected::written(pending);
            stage.capture_all(&self.tracker, &found)?;
        }
        draft.copied.pre_copy += self.pre_copy(stage)?;
        let paused = self.pause(draft, stage, options)?;
        self.ingest(writer, draft, stage, progress)?;
        Ok(paused)
    }

    /// Reads every page that may have content straight into the repository, a batch at a time, so
    /// that memory stays bounded however large the guest is.
    fn full_pass(
        &mut self,
        writer: &mut Writer<'_>,
        draft: &mut Draft,
        progress: ProgressSink<'_>,
    ) -> Result<(), CheckpointError> {
        let _aside = Confined::to(&draft.aside);
        // What was written before this pass is read by it.
        self.tracker.drop_pending();
        let populated = self.tracker.populated()?;
        let total = tracker::count(&populated);
        let mut buffer = vec![0u8; BATCH_PAGES * PAGE_BYTES as usize];
        for (index, ranges) in populated.iter().enumerate() {
            for batch in batches(ranges) {
                let pages = batch
                    .iter()
                    .map(|range| range.end - range.start)
                    .sum::<u64>();
                let bytes = &mut buffer[..(pages * PAGE_BYTES) as usize];
                let mut into = split(bytes, &batch);
                self.tracker.blocks()[index].block.read(&mut into, &batch)?;
                let numbers = batch.iter().flat_map(Clone::clone);
                let pages: Vec<Page<'_>> = numbers
                    .zip(bytes.chunks_exact(PAGE_BYTES as usize))
                    .collect();
                draft.store(&mut self.tracker, writer, index, &pages)?;
                draft.copied.full_pass += pages.len() as u64;
                progress(Progress::FullPass {
                    done: draft.copied.full_pass,
                    total,
                });
            }
        }
        Ok(())
    }

    /// Copies what was written while the guest goes on, then what it wrote during that, and so on,
    /// as long as it gets fewer. What is left is for the pause. How many pages were copied.
    fn pre_copy(&mut self, stage: &mut Stage) -> Result<u64, CheckpointError> {
        let mut copied = 0;
        let mut last = u64::MAX;
        for _ in 0..ROUNDS_MAX {
            let found = self.tracker.collect()?;
            let pages = found.pages();
            stage.reserve(pages);
            stage.capture_all(&self.tracker, &found)?;
            copied += pages;
            if pages <= FEW_PAGES || pages > last / 2 {
                break;
            }
            last = pages;
        }
        Ok(copied)
    }

    fn pause(
        &mut self,
        draft: &mut Draft,
        stage: &mut Stage,
        options: &CheckpointOptions,
    ) -> Result<Paused, CheckpointError> {
        let memfd = Memfd::create("stillframe-device-state")?;
        let into = memfd.reopen(Access::Write)?;
        let state_file = self.monitor.begin_device_state(into.as_fd())?;
        stage.reserve(2 * self.pause_pages_last + RESERVE_PAGES);
        let hasher = &draft.hasher;
        let mut image = None;
        let mut look = |tracker: &tracker::Tracker| {
            let blocks = tracker.blocks().iter().map(|tracked| &tracked.block);
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
            state_file: &state_file,
            limit: options.pause_limit,
            running,
            // What the guest writes to a disk after this changes the disk, by the restore's account.
            beside: &mut || record.look_at_disks_again(),
            before_resume: options.verify.then_some(&mut look),
        };
        let ran = pause.run();
        // Taken back even after a failure, so that repeated failures do not fill QEMU with
        // descriptors; but the failure itself is the better error.
        let ended = self.monitor.end_device_state(state_file);
        let (downtime, pages) = ran?;
        ended?;
        self.pause_pages_last = pages;
        draft.copied.pause = pages;
        draft.copied.left_open = self.tracker.leave_hot_open();
        let device_state = memfd.read_all(DEVICE_STATE_BYTES_MAX)?;
        device_state::validate(&device_state)?;
        Ok(Paused {
            downtime,
            time,
            device_state,
            image,
        })
    }

    fn ingest(
        &mut self,
        writer: &mut Writer<'_>,
        draft: &mut Draft,
        stage: &Stage,
        progress: ProgressSink<'_>,
    ) -> Result<(), CheckpointError> {
        let _aside = Confined::to(&draft.aside);
        let total = stage.pages();
        let mut done = 0;
        for index in 0..self.tracker.blocks().len() {
            let mut pages = stage.pages_of(index).peekable();
            while pages.peek().is_some() {
                let batch: Vec<Page<'_>> = pages.by_ref().take(BATCH_PAGES).collect();
                draft.store(&mut self.tracker, writer, index, &batch)?;
                done += batch.len() as u64;
                progress(Progress::Storing { done, total });
            }
        }
        Ok(())
    }
}

impl Draft {
    fn store(
        &mut self,
        tracker: &mut tracker::Tracker,
        writer: &mut Writer<'_>,
        block: usize,
        pages: &[Page<'_>],
    ) -> Result<(), RepoError> {
        Ingest {
            writer,
            tables: &mut self.tables,
            counts: &mut self.counts,
            seen: &mut self.seen,
            tracker,
            hasher: &self.hasher,
        }
        .batch(block, pages)
    }

    /// Stores the page tables and the device state, and describes it all.
    fn manifest(
        &mut self,
        vm: &Vm,
        writer: &mut Writer<'_>,
        paused: &Paused,
    ) -> Result<Manifest, CheckpointError> {
        let mut ram = Vec::with_capacity(self.tables.len());
        for (tracked, table) in vm.tracker.blocks().iter().zip(self.tables.drain(..)) {
            ram.push(RamTable {
                name: tracked.block.name().to_owned(),
                page_bytes: PAGE_BYTES as u32,
                pages: tracked.block.pages(),
                root: table.finish(writer)?,
            });
        }
        let stream = writer.put_whole_stream(&paused.device_state)?;
        Ok(Manifest {
            vm: self.record.label.clone(),
            time: paused.time,
            parent: self.parent.as_ref().map(|parent| parent.id),
            ram,
            streams: BTreeMap::from([(DEVICE_STATE.to_owned(), stream)]),
            pages: self.counts,
            bytes_stored: writer.bytes_stored(),
            vm_record: serde_json::to_value(&self.record).map_err(CheckpointError::Encode)?,
            downtime_us: serde_json::to_value(paused.downtime).map_err(CheckpointError::Encode)?,
        })
    }
}

/// Cuts ranges into batches of at most [`BATCH_PAGES`] pages.
fn batches(ranges: &[Range<u64>]) -> Vec<Vec<Range<u64>>> {
    let mut all = Vec::new();
    let mut batch: Vec<Range<u64>> = Vec::new();
    let mut room = BATCH_PAGES as u64;
    for range in ranges {
        let mut next = range.start;
        while next < range.end {
            let end = range.end.min(next + room);
            batch.push(next..end);
            room -= end - next;
            next = end;
            if room == 0 {
                all.push(std::mem::take(&mut batch));
                room = BATCH_PAGES as u64;
            }
        }
    }
    if !batch.is_empty() {
        all.push(batch);
    }
    all
}

/// Divides a buffer among ranges of pages.
fn split<'b>(bytes: &'b mut [u8], ranges: &[Range<u64>]) -> Vec<&'b mut [u8]> {
    let mut rest = bytes;
    let mut parts = Vec::with_capacity(ranges.len());
    for range in ranges {
        let (part, tail) = rest.split_at_mut(((range.end - range.start) * PAGE_BYTES) as usize);
        parts.push(part);
        rest = tail;
    }
    parts
}
