//! One VM that is being restored: what both kinds of restore share.

use std::time::{Duration, Instant};

use stillframe_page::GuestPage;
use stillframe_page::hash::ContentHasher;
use stillframe_qemu::guest_agent::AgentChannels;
use stillframe_qemu::launch::LaunchPlan;
use stillframe_repo::{CheckpointId, Manifest, Reader, WorkingSet};
use stillframe_sys::process::Process;

use super::{
    LazyEvent, LazyReport, LazySink, RestoreError, RestoreOptions, RestorePhases, RestoreReport,
};
use crate::disks::lazy::LazyDisks;
use crate::memory::block::Block;
use crate::post_restore::{self, ClockReport};
use crate::template::MemoryTemplate;
use crate::verify::{Image, VerifyReport};

/// Measures the phases.
pub(crate) struct PhaseClock {
    pub(crate) phases: RestorePhases,
    pub(crate) requested_at: Instant,
    lap: Instant,
}

impl PhaseClock {
    /// The first phase is the time since the user's command.
    pub(crate) fn new(requested_at: Instant) -> PhaseClock {
        let mut clock = PhaseClock {
            phases: RestorePhases::default(),
            requested_at,
            lap: requested_at,
        };
        clock.phases.before = clock.lap();
        clock
    }

    /// The time since the last lap.
    pub(crate) fn lap(&mut self) -> u64 {
        let now = Instant::now();
        let lap = now.duration_since(self.lap);
        self.lap = now;
        micros(lap)
    }
}

pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// The outcome of a VM.
pub(crate) struct Done {
    pub(super) process: Process,
    /// Pages with content that were populated.
    pub(super) pages: u64,
    pub(super) phases: RestorePhases,
    pub(super) lazy: Option<LazyReport>,
    /// Whether the guest is suspended to RAM.
    pub(super) suspended: bool,
    pub(super) clock: Option<ClockReport>,
    pub(super) verify: Option<VerifyReport>,
}

/// The pages of a working set, if one was recorded.
pub(super) fn known_pages(working_set: Option<&WorkingSet>) -> &[GuestPage] {
    working_set.map_or(&[], |set| &set.pages)
}

/// A restore to carry out.
pub(crate) struct Job<'j> {
    pub(crate) id: &'j CheckpointId,
    pub(crate) manifest: &'j Manifest,
    pub(crate) reader: &'j Reader<'j>,
    pub(crate) repository: String,
    pub(crate) options: &'j RestoreOptions,
    pub(crate) state: &'j [u8],
    pub(crate) hasher: ContentHasher,
    /// The pages that the VM accessed first when it was last restored from this checkpoint.
    pub(crate) working_set: Option<WorkingSet>,
    /// Through which the guest's clock is set, if it is to be.
    pub(crate) agents: AgentChannels,
    /// The server of the disks whose images lack content.
    pub(crate) lazy_disks: Option<&'j LazyDisks<'j>>,
    /// For a clone: its memory template.
    pub(crate) template: Option<&'j MemoryTemplate>,
}

impl Job<'_> {
    /// Sets the clock of the guest. The agent of a suspended one does not answer; when it wakes, it takes the time from
    /// the machine's clock, which is right.
    pub(super) fn set_clock(&self, suspended: bool) -> Option<ClockReport> {
        match suspended {
            true => None,
            false => post_restore::set_clock(&self.agents),
        }
    }

    /// Compares all of memory with the checkpoint; an error if it differs.
    pub(super) fn verify(
        &self,
        blocks: &[&Block],
        events: LazySink<'_>,
    ) -> Result<VerifyReport, RestoreError> {
        let image = Image::take(blocks.iter().copied(), &self.hasher)?;
        let report = image.compare(self.reader, &self.manifest.ram, &mut |progress| {
            events(LazyEvent::Progress(progress));
        })?;
        match report.differing {
            0 => Ok(report),
            differing => Err(RestoreError::Differs {
                differing,
                first: report.first.join(", "),
            }),
        }
    }

    /// The report of the restore.
    pub(crate) fn report(
        &self,
        done: Done,
        plan: &LaunchPlan,
        requested_at: Instant,
    ) -> RestoreReport {
        RestoreReport {
            checkpoint: self.id.to_string(),
            vm: self.manifest.vm.clone(),
            pid: done.process.pid(),
            qmp: self.options.launch.qmp.clone(),
            running: !self.options.paused && !done.suspended,
            suspended: done.suspended,
            pages: done.pages,
            disks: Vec::new(),
            total_us: micros(requested_at.elapsed()),
            phases_us: done.phases,
            changes: plan.changes.clone(),
            lazy: done.lazy,
            clock: done.clock,
            verify: done.verify,
        }
    }
}
