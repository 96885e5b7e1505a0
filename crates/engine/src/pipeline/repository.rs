//! The pipeline's VM and its sink as they are at work: a QEMU, and a repository.

use stillframe_page::hash::ContentHasher;
use stillframe_repo::Repository;

use super::environment::{CaptureSink, Failure, Outcome, PipelineVm};
use crate::ProgressSink;
use crate::attach::Vm;
use crate::capture::schedule::ScheduleKind;
use crate::checkpoint::{
    Captured, CheckpointError, CheckpointOptions, CheckpointReport, CheckpointWriter, Stored,
};

/// The work was given up because the user wants an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("interrupted before it was done")]
pub struct Interrupted;

/// Lets the user give running work up.
pub trait WorkControl: Send {
    /// Runs `work`, which reports its progress on this thread now and then. `alone`: nothing else runs, so
    /// that the progress may be shown.
    ///
    /// # Errors
    /// [`Interrupted`]; everything that `work` held is dropped.
    fn run<T>(
        &self,
        alone: bool,
        work: impl FnOnce(ProgressSink<'_>) -> T,
    ) -> Result<T, Interrupted>;
}

/// A VM, and how checkpoints of it are taken.
#[derive(Debug)]
pub struct WatchedVm {
    /// The VM.
    pub vm: Vm,
    /// Makes the ids of the repository.
    pub hasher: ContentHasher,
    /// How checkpoints are taken.
    pub options: CheckpointOptions,
}

impl PipelineVm for WatchedVm {
    type Capture = Captured;
    type Stored = Stored;
    type Report = CheckpointReport;

    fn wants(&self) -> Option<ScheduleKind> {
        self.vm.wants()
    }

    fn overlaps(&self) -> bool {
        // A disk has one filter at a time.
        !self.vm.has_disk_snapshots()
    }

    fn capture(&mut self) -> Result<Captured, CheckpointError> {
        self.vm.capture(&self.hasher, &self.options)
    }

    fn bytes(capture: &Captured) -> u64 {
        capture.bytes()
    }

    fn mark_in_flight(&mut self) {
        self.vm.mark_in_flight();
    }

    fn settle(
        &mut self,
        capture: Captured,
        stored: Result<Stored, CheckpointError>,
    ) -> Result<CheckpointReport, CheckpointError> {
        self.vm.settle(capture, stored)
    }

    fn discard(&mut self, capture: Captured) {
        self.vm.discard(capture);
    }
}

/// A repository that captures are stored in.
pub struct RepositorySink<C> {
    /// The repository.
    pub repository: Repository,
    /// The state that is known of the checkpoint before.
    pub checkpoints: CheckpointWriter,
    /// How checkpoints are stored.
    pub options: CheckpointOptions,
    /// Gives work up.
    pub control: C,
}

impl<C: WorkControl> CaptureSink<WatchedVm> for RepositorySink<C> {
    fn has_base(&self) -> bool {
        self.checkpoints.has_parent()
    }

    fn forget_base(&mut self) {
        self.checkpoints.forget_parent();
    }

    fn store(&mut self, capture: &Captured) -> Outcome<Stored> {
        let (checkpoints, repository) = (&mut self.checkpoints, &mut self.repository);
        let stored = self.control.run(false, |progress| {
            checkpoints.store(capture, repository, &self.options, progress)
        });
        flatten(stored)
    }

    fn whole(&mut self, watched: &mut WatchedVm) -> Outcome<CheckpointReport> {
        let (checkpoints, repository) = (&mut self.checkpoints, &mut self.repository);
        let WatchedVm { vm, options, .. } = watched;
        let taken = self.control.run(true, |progress| {
            vm.checkpoint(checkpoints, repository, options, progress)
        });
        flatten(taken)
    }

    fn expect_more(&mut self, more: bool) {
        self.repository.keep_lock(more);
    }
}

fn flatten<T>(outcome: Result<Result<T, CheckpointError>, Interrupted>) -> Outcome<T> {
    match outcome {
        Ok(done) => done.map_err(Failure::Checkpoint),
        Err(Interrupted) => Err(Failure::Interrupted),
    }
}
