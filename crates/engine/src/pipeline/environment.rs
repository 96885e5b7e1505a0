//! The environment of a pipeline: the VM, the sink of captures, the queue before it, and the world around.

use std::io;
use std::time::{Duration, Instant};

use super::AttemptError;
use crate::attach::{AnewError, AttachError};
use crate::capture::schedule::{ScheduleChoice, ScheduleKind};
use crate::checkpoint::CheckpointError;

/// Why a capture was not stored.
#[derive(Debug)]
pub enum Failure {
    /// It failed.
    Checkpoint(CheckpointError),
    /// The user gave it up.
    Interrupted,
}

/// The result of storing.
pub type Outcome<T> = Result<T, Failure>;

/// A VM with write tracking on. Captures are settled in the order in which they were marked as in flight.
pub trait PipelineVm {
    /// One state of the VM, in memory.
    type Capture;
    /// The value that the sink makes of a stored capture.
    type Stored;
    /// The report on a checkpoint.
    type Report;

    /// The schedule that the VM should be attached to anew for.
    fn wants(&self) -> Option<ScheduleKind>;

    /// Whether a capture may begin while others are in flight.
    fn overlaps(&self) -> bool;

    /// Captures the writes since the last capture in flight.
    ///
    /// # Errors
    /// The writes stay to be captured.
    fn capture(&mut self) -> Result<Self::Capture, CheckpointError>;

    /// Memory that a capture takes, in bytes.
    fn bytes(capture: &Self::Capture) -> u64;

    /// The last capture goes to the sink, behind the captures in flight.
    fn mark_in_flight(&mut self);

    /// The oldest capture in flight is committed, or rolled back together with all behind it.
    ///
    /// # Errors
    /// That of storing it.
    fn settle(
        &mut self,
        capture: Self::Capture,
        stored: Result<Self::Stored, CheckpointError>,
    ) -> Result<Self::Report, CheckpointError>;

    /// A capture is not needed: it was not marked, or one before it was rolled back.
    fn discard(&mut self, capture: Self::Capture);
}

/// Where captures go, one after the other, each an increment of the one before.
pub trait CaptureSink<V: PipelineVm> {
    /// Whether an increment can be stored.
    fn has_base(&self) -> bool;

    /// The next checkpoint has nothing to follow.
    fn forget_base(&mut self);

    /// Stores an increment; durable when this returns.
    ///
    /// # Errors
    /// Nothing is stored then.
    fn store(&mut self, capture: &V::Capture) -> Outcome<V::Stored>;

    /// Captures and stores by streaming pre-copy: all of memory, or the written pages that exceed the staging buffer.
    ///
    /// # Errors
    /// Nothing is stored then.
    fn whole(&mut self, vm: &mut V) -> Outcome<V::Report>;

    /// Whether more captures are expected at once. Until then locks may be kept.
    fn expect_more(&mut self, more: bool);
}

/// A capture that the sink is done with.
#[derive(Debug)]
pub struct Completion<V: PipelineVm> {
    /// The capture.
    pub capture: V::Capture,
    /// The outcome of the capture. `None`: an earlier capture was not stored, so this one was not stored either.
    pub outcome: Option<Outcome<V::Stored>>,
}

/// Stores captures in their order, while the pipeline continues.
pub trait StoreQueue<V: PipelineVm, S> {
    /// Has a capture stored behind those before.
    fn push(&mut self, capture: V::Capture);

    /// The oldest capture, if it is complete.
    fn complete(&mut self) -> Option<Completion<V>>;

    /// Waits until the oldest capture is complete; `None` where nothing stores any more.
    fn wait(&mut self) -> Option<Completion<V>>;

    /// The sink, once everything is stored.
    fn finish(self) -> S;
}

/// The events of a pipeline.
#[derive(Debug)]
pub enum Event<'e, R> {
    /// A checkpoint is durable.
    Taken(&'e R),
    /// The interval could not be kept.
    Late {
        /// The lateness.
        by: Duration,
    },
    /// The checkpoint before is gone: the next one reads all of memory.
    ParentGone(&'e CheckpointError),
    /// Another program migrates the VM; checkpoints continue if it does not succeed.
    Migrating(&'e CheckpointError),
    /// Another schedule needs other tracking.
    AttachingAnew {
        /// The schedule.
        schedule: ScheduleKind,
    },
    /// No checkpoint this time.
    Failed(&'e AttemptError),
    /// The wait for the next capture is over; sent where [`Event::Waiting`] was.
    WaitOver,
    /// The time until the next capture; sent ten times a second.
    Waiting {
        /// Checkpoints so far.
        taken: u64,
        /// The time left.
        left: Duration,
    },
}

/// What became of a VM that was to be migrated.
#[derive(Debug)]
pub enum Moved<V, E> {
    /// The VM runs at the destination, and its QEMU here has ended.
    Away,
    /// The migration did not begin: the VM is attached as before.
    Attached(V),
    /// The migration failed: the VM runs on here, and is detached.
    Here,
    /// The VM is detached, and may run at the destination. The error says what to do.
    Unclear(E),
}

/// The world around a pipeline.
pub trait Environment {
    /// The VM.
    type Vm: PipelineVm;
    /// The sink.
    type Sink: CaptureSink<Self::Vm>;
    /// The queue.
    type Queue: StoreQueue<Self::Vm, Self::Sink>;
    /// Why the pipeline cannot go on: an event cannot be reported, or it is unclear where the VM runs.
    type Error;

    /// The time.
    fn now(&self) -> Instant;

    /// Waits up to `limit` for the VM's end; whether it has ended.
    fn wait_for_exit(&mut self, limit: Duration) -> bool;

    /// Whether the user wants an end.
    fn should_stop(&self) -> bool;

    /// Whether the user wants the VM migrated now.
    fn wants_migration(&self) -> bool;

    /// Migrates the VM. No capture is in flight, and the sink holds no lock: the destination may read the last
    /// checkpoint.
    fn migrate(&mut self, vm: Self::Vm, sink: &mut Self::Sink) -> Moved<Self::Vm, Self::Error>;

    /// Attaches to the same VM once more.
    ///
    /// # Errors
    /// The VM runs on as before.
    fn attach_again(&mut self, schedule: ScheduleChoice) -> Result<Self::Vm, AttachError>;

    /// Ends tracking and begins anew, as another schedule needs it.
    ///
    /// # Errors
    /// The VM is detached, and runs on.
    fn attach_anew(&mut self, vm: Self::Vm, schedule: ScheduleKind) -> Result<Self::Vm, AnewError>;

    /// Ends tracking.
    fn release(&mut self, vm: Self::Vm);

    /// Starts the queue that stores captures.
    ///
    /// # Errors
    /// No thread can be had.
    fn start_queue(&mut self, sink: Self::Sink) -> io::Result<Self::Queue>;

    /// Reports an event.
    ///
    /// # Errors
    /// Ends the pipeline.
    fn report(
        &mut self,
        event: Event<'_, <Self::Vm as PipelineVm>::Report>,
    ) -> Result<(), Self::Error>;
}
