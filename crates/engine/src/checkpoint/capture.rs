//! The capturing half: rounds, the pause, and its result.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use stillframe_page::PAGE_BYTES;
use stillframe_page::hash::ContentHasher;
use stillframe_qemu::monitor::RunState;
use stillframe_qemu::record::VmRecord;
use stillframe_sys::affinity::Processors;

use super::{CheckpointError, CheckpointOptions, Copied, ScheduleKind};
use crate::attach::Vm;
use crate::balloon::BalloonReport;
use crate::capture::device_state::StateStream;
use crate::capture::devices::DevicesError;
use crate::capture::downtime::DowntimeRecord;
use crate::capture::downtime::us;
use crate::capture::pause::{Pause, PauseError};
use crate::capture::schedule::{
    Auto, Bursts, CopyOnWrite, Plan, PreCopy, Sample, Schedule, StopCopy, Work,
};
use crate::capture::staging::StagingBuffer;
use crate::disks::{DiskView, DisksError, LeftDisk, PreparedDisks};
use crate::free_pages::FreePagesReport;
use crate::memory::BlockShape;
use crate::memory::ranges::{PageRanges, count};
use crate::placement;
use crate::streaming::Iteration;
use crate::tracking::error::TrackerError;
use crate::tracking::tracker::Tracker;
use crate::verify::Image;

/// Room in the staging buffer beyond what the last pause needed, in pages.
const RESERVE_PAGES: u64 = 1024;

/// Staging buffers whose memory is kept for the next captures: one that fills, one that is being stored.
const STAGES_KEPT: usize = 2;
/// Staging buffers of which some memory is kept. More are needed only after long waits, so the next such time is
/// far.
const STAGES_MAX: usize = 6;

/// Captures begun anew because a device came or went in the middle.
const PLUGS_MAX: u32 = 3;

/// One state of a VM, on its way into the repository.
#[derive(Debug)]
pub struct Captured {
    pub(crate) begin: Instant,
    pub(crate) schedule: ScheduleKind,
    /// What was tried first, and failed.
    pub(crate) instead_of: Option<ScheduleKind>,
    /// With `auto`: why this schedule.
    pub(crate) plan: Option<Plan>,
    pub(crate) staging: StagingBuffer,
    pub(crate) record: VmRecord,
    pub(crate) blocks: Vec<BlockShape>,
    pub(crate) copied: Copied,
    /// Time spent copying while the guest ran, in microseconds.
    pub(crate) copying: u64,
    pub(crate) downtime: DowntimeRecord,
    pub(crate) time: jiff::Timestamp,
    pub(crate) device_state: Vec<u8>,
    pub(crate) image: Option<Image>,
    /// Pages that the guest calls free: they are to be stored as zeros.
    pub(crate) left_out: PageRanges,
    /// What came of the question for them.
    pub(crate) free_pages: Option<FreePagesReport>,
    /// What the balloon did before.
    pub(crate) balloon: Option<BalloonReport>,
    /// The disks as they were, if they are stored, too. QEMU keeps them until this capture is settled.
    pub(crate) disks: Mutex<Vec<DiskView>>,
    /// Memory that copies of them take, in bytes.
    pub(crate) disk_bytes: u64,
    /// Whether QEMU has snapshots for it. Captures without may be in flight beside it.
    pub(crate) has_snapshots: bool,
    /// Those that cannot be, although the choice was left to the engine.
    pub(crate) disks_left_out: Vec<LeftDisk>,
    /// How much of each the guest may overwrite meanwhile, in bytes.
    pub(crate) disk_limit: u64,
    /// Where it is to be stored.
    pub(crate) spare: Processors,
}

impl Captured {
    /// Memory that its pages take, those of disks, and the image to compare them with, in bytes.
    pub fn bytes(&self) -> u64 {
        let image = self.image.as_ref().map_or(0, Image::bytes);
        self.staging.pages() * PAGE_BYTES + self.disk_bytes + image
    }
}

impl Vm {
    /// Captures what was written since the last [`Vm::mark_in_flight`], or, after a failure, since the last
    /// committed checkpoint. Earlier captures may still be in flight; if one of them is rolled back,
    /// this one is worthless, and goes to [`Vm::discard`].
    pub fn capture(
        &mut self,
        hasher: &ContentHasher,
        options: &CheckpointOptions,
    ) -> Result<Captured, CheckpointError> {
        let begin = Instant::now();
        if options.free_pages {
            self.find_free_pages(Iteration::Written)?;
        }
        let mut captured = self.capture_kept(hasher, options)?;
        // The question belongs to it.
        captured.begin = begin;
        Ok(captured)
    }

    /// The pages that have content.
    fn populated(&mut self) -> Result<PageRanges, CheckpointError> {
        let found = self.tracker.populated()?;
        Ok(found.drained(&mut self.monitor)?.written)
    }

    /// Has the guest give back memory that it does not need, for a moment.
    pub(super) fn squeeze(&mut self, limit: Duration) -> Result<BalloonReport, CheckpointError> {
        let stored_bytes = count(&self.populated()?) * PAGE_BYTES;
        let report = self.balloon.squeeze(
            &mut self.monitor,
            &self.guardian,
            &self.target.process,
            stored_bytes,
            limit,
        )?;
        if report.taken_bytes > 0 {
            // A hole is not protected, and looks written until it is. What is found is not needed: all of memory follows.
            let _ = self.tracker.collect_running()?;
        }
        Ok(report)
    }

    /// Queries the guest which of the pages of an iteration are free. They are left out from here on, until they are written.
    pub(super) fn find_free_pages(&mut self, iteration: Iteration) -> Result<(), CheckpointError> {
        let wanted = match iteration {
            Iteration::Bulk => self.populated()?,
            Iteration::Written => {
                // They are pending from here on, and not read before the schedule has drained the disks.
                let _ = self.tracker.collect_running()?;
                self.tracker.pending()
            }
        };
        let free = self
            .free_pages
            .among(&self.tracker, &mut self.monitor, &wanted)?;
        self.tracker.call_free(&free);
        Ok(())
    }

    /// [`Vm::capture`], with the free pages that are known.
    pub(super) fn capture_kept(
        &mut self,
        hasher: &ContentHasher,
        options: &CheckpointOptions,
    ) -> Result<Captured, CheckpointError> {
        for _ in 0..PLUGS_MAX {
            match self.capture_once(hasher, options) {
                Err(CheckpointError::Devices(DevicesError::Changed)) => {}
                other => return other,
            }
        }
        self.capture_once(hasher, options)
    }

    fn capture_once(
        &mut self,
        hasher: &ContentHasher,
        options: &CheckpointOptions,
    ) -> Result<Captured, CheckpointError> {
        let (schedule, plan) = match &self.auto {
            Some(auto) => auto.next(),
            None => (self.schedule, None),
        };
        let begin = Instant::now();
        let mut record = self.record()?;
        options.disks.mark(&mut record.disks)?;
        let mut captured = Captured {
            begin,
            schedule,
            instead_of: None,
            plan,
            staging: self.staging_buffers.pop().unwrap_or_default(),
            record,
            blocks: self.tracker.shape(),
            copied: Copied::default(),
            copying: 0,
            downtime: DowntimeRecord::default(),
            time: jiff::Timestamp::now(),
            device_state: Vec::new(),
            image: None,
            left_out: PageRanges::new(),
            free_pages: options.free_pages.then(|| self.free_pages.report()),
            balloon: None,
            disks: Mutex::default(),
            disk_bytes: 0,
            has_snapshots: false,
            disks_left_out: Vec::new(),
            disk_limit: options.copy_buffer_bytes,
            spare: placement::processors(&self.target.process),
        };
        match self.fill_in_some_way(&mut captured, hasher, options) {
            Ok(()) => {
                self.observe(&captured);
                Ok(captured)
            }
            Err(error) => {
                self.discard(captured);
                Err(error)
            }
        }
    }

    /// [`Vm::fill`], and once more in another way where that may help.
    fn fill_in_some_way(
        &mut self,
        captured: &mut Captured,
        hasher: &ContentHasher,
        options: &CheckpointOptions,
    ) -> Result<(), CheckpointError> {
        match self.fill(captured, hasher, options) {
            // The guest wrote more at the last moment, or its storage is slow.
            Err(
                CheckpointError::Disks(DisksError::Rounds(_))
                | CheckpointError::Pause(PauseError::Rounds(_)),
            ) if options.disks.schedule.is_none() => {
                self.disks.avoid_rounds();
                self.fill_in_some_way(captured, hasher, options)
            }
            // The next pause waits for the first byte of the device state, however long that is.
            Err(CheckpointError::Pause(PauseError::NotHeld { .. })) => {
                self.fill(captured, hasher, options)
            }
            // What takes protection away comes back: better a longer pause than no checkpoint.
            Err(CheckpointError::Tracker(
                TrackerError::ProtectionLost | TrackerError::NotSaved,
            )) => {
                if let Some(auto) = &mut self.auto {
                    auto.cannot_copy_on_write();
                }
                captured.instead_of = Some(captured.schedule);
                captured.schedule = ScheduleKind::PreCopy;
                self.fill(captured, hasher, options)
            }
            filled => filled,
        }
    }

    /// The last capture is in flight from now on, to a [`super::CheckpointWriter`], behind earlier ones.
    pub fn mark_in_flight(&mut self) {
        self.tracker.mark_in_flight();
    }

    /// A capture is not needed: it was not marked as in flight and its pages are still pending, or an earlier one
    /// was rolled back.
    pub fn discard(&mut self, mut captured: Captured) {
        self.settle_disks(&mut captured, false);
        let Captured { mut staging, .. } = captured;
        match self.staging_buffers.len() {
            0..STAGES_KEPT => self.staging_buffers.push(staging),
            STAGES_KEPT..STAGES_MAX => {
                staging.keep_little();
                self.staging_buffers.insert(0, staging);
            }
            _ => {}
        }
    }

    pub(crate) fn record(&mut self) -> Result<VmRecord, DevicesError> {
        let known = self.record.take();
        let mut record = self
            .devices
            .update(&self.target, &mut self.monitor, known.clone())?;
        record.find_obstacles(known.as_ref());
        self.record = Some(record.clone());
        Ok(record)
    }

    fn fill(
        &mut self,
        captured: &mut Captured,
        hasher: &ContentHasher,
        options: &CheckpointOptions,
    ) -> Result<(), CheckpointError> {
        // Before pages are copied: the guest would write more of them meanwhile, and the pause copy these.
        let (mut disks, left) = self.disks.begin(
            &options.disks,
            options.copy_buffer_bytes / 2,
            &mut self.monitor,
            &self.guardian,
        )?;
        captured.disks_left_out = left;
        captured.has_snapshots = disks.is_some();
        let begin = Instant::now();
        captured.copied = Copied::default();
        captured
            .staging
            .reset(captured.blocks.len(), options.copy_buffer_bytes / 2);
        let mut schedule: Box<dyn Schedule> = match captured.schedule {
            ScheduleKind::StopCopy => Box::new(StopCopy),
            ScheduleKind::PreCopy => Box::new(PreCopy),
            ScheduleKind::CopyOnWrite => Box::new(CopyOnWrite::default()),
        };
        self.bursts.begin(self.interval(captured));
        schedule.before(
            &mut work(&mut self.tracker, &mut self.bursts, captured),
            &mut self.monitor,
        )?;
        captured.copying = us(begin);
        let approached = self.disks.approach(&mut disks, &mut self.monitor);
        let paused = approached
            .map_err(CheckpointError::from)
            .and_then(|()| self.pause(captured, schedule.as_mut(), &mut disks, hasher, options));
        if let Err(error) = paused {
            schedule.give_up(&self.tracker);
            return Err(error);
        }
        let views = disks.open(&mut self.monitor)?;
        captured.disk_bytes = views.iter().map(DiskView::copied_bytes).sum();
        captured.disks = Mutex::new(views);
        let resumed_at = Instant::now();
        schedule.after(&mut work(&mut self.tracker, &mut self.bursts, captured))?;
        captured.copying += us(resumed_at);
        captured.left_out = self.tracker.left_out();
        if let Some(report) = &mut captured.free_pages {
            report.left_out = count(&captured.left_out);
        }
        // A block that came or went at any time since the attach shows now.
        let ram = self.monitor.ram_blocks()?;
        if !self.tracks(&ram) {
            return Err(CheckpointError::RamChanged);
        }
        // And so does a device.
        let state = &captured.device_state;
        Ok(self.devices.check(&mut self.monitor, state)?)
    }

    /// Whether QEMU has snapshots of disks for a capture that is not settled.
    pub(crate) fn has_disk_snapshots(&self) -> bool {
        self.disks.has_snapshots()
    }

    /// Takes a capture's snapshots of disks away, if it has any. `stored`: the checkpoint is durable.
    pub(super) fn settle_disks(&mut self, captured: &mut Captured, stored: bool) {
        // QEMU waits for open connections.
        drop(std::mem::take(&mut captured.disks));
        if !std::mem::take(&mut captured.has_snapshots) {
            return;
        }
        let settled = self.disks.settle(&mut self.monitor, &self.guardian, stored);
        // The guardian tries it again when this process ends, and so does the next attachment.
        self.disks_left = settled.err();
    }

    /// In which what is captured was written.
    fn interval(&self, captured: &Captured) -> Duration {
        captured.begin.saturating_duration_since(self.captured_at)
    }

    fn observe(&mut self, captured: &Captured) {
        let interval = self.interval(captured);
        self.captured_at = captured.begin;
        if let Some(auto) = &mut self.auto {
            auto.observe(Sample {
                kind: captured.schedule,
                downtime: captured.downtime,
                copied: captured.copied,
                pages: captured.staging.pages(),
                interval_us: interval.as_micros() as u64,
            });
        }
    }

    fn pause(
        &mut self,
        captured: &mut Captured,
        schedule: &mut dyn Schedule,
        disks: &mut PreparedDisks,
        hasher: &ContentHasher,
        options: &CheckpointOptions,
    ) -> Result<(), CheckpointError> {
        let room = 2 * self.pause_pages_last + RESERVE_PAGES;
        captured.staging.reserve(room);
        let image = &mut captured.image;
        let mut look = |tracker: &Tracker| {
            let blocks = tracker.blocks().iter().map(|tracked| &*tracked.block);
            *image = Some(Image::take(blocks, hasher)?.with_free(tracker.free()));
            Ok(())
        };
        let before = self.fit_for_a_pause()?;
        captured.time = jiff::Timestamp::now();
        let was_suspended = before.is_suspended();
        let record = &mut captured.record;
        let qemu = &self.target.process;
        let state = StateStream::lent(&mut self.state, &mut self.monitor, qemu, &self.guardian)?;
        let pause = Pause {
            qemu: &self.target.process,
            spare: &captured.spare,
            work: Work {
                tracker: &mut self.tracker,
                staging: &mut captured.staging,
                copied: &mut captured.copied,
                bursts: &mut self.bursts,
            },
            schedule,
            state,
            state_first: self
                .auto
                .as_ref()
                .is_some_and(Auto::should_time_device_state),
            disks,
            limit: options.pause_limit,
            before,
            // What the guest writes to a disk after this changes the disk, by the restore's account.
            beside: &mut || record.look_at_disks_again(),
            before_resume: options.verify.then_some(&mut look),
        };
        let ran = pause.run(&mut self.monitor, &self.guardian);
        if matches!(ran, Err(PauseError::State(_) | PauseError::Overrun { .. }))
            && let Some(state) = self.state.take()
        {
            // QEMU may not be done with it: the next pause has another. That it cannot be taken back is
            // the lesser error.
            let _ = state.take_back(&mut self.monitor);
        }
        let paused = ran?;
        captured.record.was_running = paused.running && !was_suspended;
        captured.record.was_suspended = was_suspended;
        captured.downtime = paused.downtime;
        let pause = Duration::from_micros(paused.downtime.total);
        self.clock.paused(pause, options.keep_guest_clock);
        captured.device_state = paused.device_state;
        self.pause_pages_last = captured.copied.pause;
        Ok(())
    }

    /// Whether the VM is one that may be paused now; what it is.
    pub(crate) fn fit_for_a_pause(&mut self) -> Result<RunState, CheckpointError> {
        let migration = self.monitor.migration_under_way()?;
        let state = self.monitor.run_state()?;
        if state.status == "postmigrate" {
            return Err(CheckpointError::MigratedAway);
        }
        match migration {
            Some(status) => Err(CheckpointError::Migrating { status }),
            None => Ok(state),
        }
    }
}

/// What a schedule works on.
fn work<'w>(
    tracker: &'w mut Tracker,
    bursts: &'w mut Bursts,
    captured: &'w mut Captured,
) -> Work<'w> {
    Work {
        tracker,
        staging: &mut captured.staging,
        copied: &mut captured.copied,
        bursts,
    }
}
