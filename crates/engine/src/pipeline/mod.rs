//! The checkpoint pipeline: a VM is captured at intervals, and captures are stored meanwhile, in order.
//!
//! ```text
//!   attach ── first checkpoint ── capture ── wait ── capture ── wait ...    ends: count, stop, VM gone,
//!     ^                              │                  │                         migrated, failures
//!     │ RAM changed,                 └─ in flight ──> store, commit ──> settle
//!     │ connection lost,                (a few, back-pressure)
//!     │ other tracking wanted,
//!     └ a migration failed
//! ```
//!
//! Each capture is an increment of the one before. So when a capture cannot be stored, the captures behind it are
//! discarded, and their pages are captured again. No write of the guest is lost, only the moments are.
//!
//! A VM with checkpoints can be migrated by the process that is attached to it only. So the pipeline hands the VM to its
//! environment for that, between two captures. If the migration fails, the VM is attached again.
//!
//! The pipeline knows no repository, no thread and no terminal: these are behind [`Environment`]. A slow sink shows
//! as back-pressure ([`in_flight`]). First the interval is kept and captures queue up, then the interval gets
//! longer.

mod environment;
mod in_flight;
mod queue;
mod repository;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use thiserror::Error;

use crate::attach::{AnewError, AttachError};
use crate::capture::schedule::{ScheduleChoice, ScheduleKind};
use crate::checkpoint::CheckpointError;

pub use environment::{
    CaptureSink, Completion, Environment, Event, Failure, Moved, Outcome, PipelineVm, StoreQueue,
};
pub use queue::ThreadQueue;
pub use repository::{Interrupted, RepositorySink, WatchedVm, WorkControl};

use in_flight::InFlight;

/// Consecutive failures after which the pipeline ends.
const FAILURES_MAX: u32 = 10;
/// How often a waiting pipeline looks for an end, and reports the time left.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A QEMU that closed its monitor may need this long to be gone.
const EXIT_GRACE: Duration = Duration::from_millis(500);

/// Options of a pipeline.
#[derive(Debug, Clone)]
pub struct PipelineOptions {
    /// Time from the begin of one capture to the begin of the next.
    pub every: Duration,
    /// Checkpoints after which it ends; without, it continues until something else ends it.
    pub count: Option<u64>,
    /// How pages are captured.
    pub schedule: ScheduleChoice,
    /// Upper bound on the memory of captures in flight, in bytes; a single capture may exceed it.
    pub in_flight_bytes: u64,
}

/// Why a pipeline ended, when it did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// All checkpoints that were wanted are taken.
    Count,
    /// The user wants it.
    Stopped,
    /// The VM has ended.
    VmGone,
    /// The environment has migrated the VM.
    Migrated,
    /// Another program has migrated the VM away.
    MigratedAway,
}

/// The totals of a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Why it ended.
    pub why: End,
    /// Checkpoints that are durable.
    pub taken: u64,
}

/// Why there is no checkpoint this time.
#[derive(Debug, Error)]
pub enum AttemptError {
    /// Attaching again failed.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// Attaching for another schedule failed.
    #[error(transparent)]
    Anew(#[from] AnewError),
    /// The checkpoint failed.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

/// Why a pipeline failed. The VM is detached, and runs on, unless an error of the environment says otherwise.
#[derive(Debug, Error)]
pub enum PipelineError<E> {
    /// Nothing works any more.
    #[error("{0} attempts in a row failed; giving up")]
    TooManyFailures(u32),
    /// No thread stores captures.
    #[error("cannot start a thread to store checkpoints")]
    Queue(#[source] std::io::Error),
    /// The environment does not take an event, or it is unclear where the VM runs.
    #[error(transparent)]
    Environment(E),
}

type Step<E> = Result<Option<End>, PipelineError<<E as Environment>::Error>>;

/// Why a wait is over.
enum Waited {
    /// The next capture is due.
    Due,
    /// The VM is to be migrated.
    Migrate,
    /// The pipeline ends.
    End(End),
}

/// A VM under checkpoints.
pub struct Pipeline<E: Environment> {
    environment: E,
    options: PipelineOptions,
    /// `None` between a lost connection and the next attempt.
    vm: Option<E::Vm>,
    /// `None` while the queue has it.
    sink: Option<E::Sink>,
    queue: Option<E::Queue>,
    in_flight: InFlight,
    taken: u64,
    failures: u32,
    /// Captures that could not be stored.
    lost: u64,
    /// The schedule of the options; without `auto` once that failed.
    choice: ScheduleChoice,
}

impl<E: Environment> Pipeline<E> {
    /// A pipeline for a VM that is attached to.
    pub fn new(environment: E, vm: E::Vm, sink: E::Sink, options: PipelineOptions) -> Pipeline<E> {
        Pipeline {
            environment,
            vm: Some(vm),
            sink: Some(sink),
            queue: None,
            in_flight: InFlight::new(options.in_flight_bytes),
            taken: 0,
            failures: 0,
            lost: 0,
            choice: options.schedule,
            options,
        }
    }

    /// Takes checkpoints until something ends it; then waits for the captures in flight, and detaches the VM.
    ///
    /// # Errors
    /// Too many failures in a row; the environment wants no more.
    pub fn run(mut self) -> Result<Ended, PipelineError<E::Error>> {
        let ended = self.until_the_end();
        let drained = self.drain();
        if let Some(vm) = self.vm.take() {
            self.environment.release(vm);
        }
        drained?;
        Ok(Ended {
            why: ended?,
            taken: self.taken,
        })
    }

    fn until_the_end(&mut self) -> Result<End, PipelineError<E::Error>> {
        let mut next = self.environment.now();
        loop {
            if let Some(end) = self.attempt()? {
                return Ok(end);
            }
            next += self.options.every;
            let now = self.environment.now();
            let late = now.saturating_duration_since(next);
            if !late.is_zero() {
                self.report(Event::Late { by: late })?;
                // A little late, this one starts at once and those after it when they were to.
                if late >= self.options.every {
                    next = now;
                }
            }
            if let Some(end) = self.wait(&mut next)? {
                return Ok(end);
            }
        }
    }

    /// One checkpoint, after attaching again where that is needed: a first one, or the capture of another, which
    /// is stored while the pipeline continues.
    fn attempt(&mut self) -> Step<E> {
        if self.vm.is_none() {
            match self.environment.attach_again(self.choice) {
                Ok(vm) => self.attached(vm),
                Err(error) => return self.failed(error.into()),
            }
        }
        if let Some(schedule) = self.vm.as_ref().and_then(PipelineVm::wants) {
            if let Some(end) = self.drain()? {
                return Ok(Some(end));
            }
            if let Some(end) = self.attach_anew(schedule)? {
                return Ok(Some(end));
            }
            if self.vm.is_none() {
                return Ok(None);
            }
        }
        if self.vm.as_ref().is_some_and(|vm| !vm.overlaps()) {
            // First of all, because one that fails takes the base or the attachment with it.
            if let Some(end) = self.drain()? {
                return Ok(Some(end));
            }
            if self.vm.is_none() {
                return Ok(None);
            }
        }
        match self.sink.as_ref().is_some_and(|sink| !sink.has_base()) {
            true => self.whole(),
            false => self.increment(),
        }
    }

    /// `auto` found a schedule that takes other tracking.
    fn attach_anew(&mut self, schedule: ScheduleKind) -> Step<E> {
        let Some(vm) = self.vm.take() else {
            return Ok(None);
        };
        self.report(Event::AttachingAnew { schedule })?;
        // If this failed, it would fail again.
        self.choice = ScheduleChoice::Always(ScheduleKind::PreCopy);
        match self.environment.attach_anew(vm, schedule) {
            Ok(vm) => {
                self.choice = self.options.schedule;
                self.attached(vm);
                Ok(None)
            }
            Err(error) => self.failed(error.into()),
        }
    }

    fn attached(&mut self, vm: E::Vm) {
        // The parent is of another attachment.
        if let Some(sink) = &mut self.sink {
            sink.forget_base();
        }
        self.vm = Some(vm);
    }

    /// One checkpoint from capture to commit: a first one, or one that exceeds the staging buffer.
    fn whole(&mut self) -> Step<E> {
        let (Some(vm), Some(sink)) = (&mut self.vm, &mut self.sink) else {
            return Ok(None);
        };
        let taken = sink.whole(vm);
        self.conclude(taken)
    }

    fn increment(&mut self) -> Step<E> {
        let Some(vm) = &mut self.vm else {
            return Ok(None);
        };
        let capture = match vm.capture() {
            Ok(capture) => capture,
            // The captures before it must be settled first.
            Err(error) => {
                return match self.drain()? {
                    Some(end) => Ok(Some(end)),
                    None if error.is_too_much() => self.whole(),
                    None => self.conclude(Err(Failure::Checkpoint(error))),
                };
            }
        };
        let lost = self.lost;
        let room = self.make_room(E::Vm::bytes(&capture));
        let kept = matches!(room, Ok(None)) && self.lost == lost;
        match &mut self.vm {
            Some(vm) if kept => {
                vm.mark_in_flight();
                self.store(capture)
            }
            vm => {
                if let Some(vm) = vm {
                    vm.discard(capture);
                }
                room
            }
        }
    }

    /// Back-pressure: settles complete captures, and waits for more until one more capture may be in flight.
    fn make_room(&mut self, bytes: u64) -> Step<E> {
        while let Some(queue) = &mut self.queue {
            let completion = match queue.complete() {
                None if self.in_flight.has_room(bytes, self.environment.now()) => break,
                None => queue.wait(),
                completion => completion,
            };
            let end = match completion {
                Some(completion) => self.take_in(completion)?,
                None => self.drain()?,
            };
            if end.is_some() {
                return Ok(end);
            }
        }
        Ok(None)
    }

    /// Has a capture stored while the pipeline continues; waits for the last one.
    fn store(&mut self, capture: Capture<E>) -> Step<E> {
        if let Some(sink) = self.sink.take() {
            let queue = self.environment.start_queue(sink);
            self.queue = Some(queue.map_err(PipelineError::Queue)?);
        }
        let Some(queue) = &mut self.queue else {
            return Ok(None);
        };
        self.in_flight
            .push(E::Vm::bytes(&capture), self.environment.now());
        queue.push(capture);
        match self.options.count == Some(self.taken + self.in_flight.len()) {
            true => self.drain(),
            false => Ok(None),
        }
    }

    /// Waits for the captures in flight and settles them; the sink is at hand again.
    fn drain(&mut self) -> Step<E> {
        let Some(mut queue) = self.queue.take() else {
            return Ok(None);
        };
        let mut ended = Ok(None);
        while !self.in_flight.is_empty()
            && let Some(completion) = queue.wait()
        {
            let end = self.settle(completion);
            // The first end counts; the others are settled all the same.
            if matches!(ended, Ok(None)) {
                ended = end;
            }
        }
        self.in_flight.clear();
        self.sink = Some(queue.finish());
        ended
    }

    /// Settles a capture that is complete; and all others, if it failed.
    fn take_in(&mut self, completion: Completion<E::Vm>) -> Step<E> {
        let stored = matches!(completion.outcome, Some(Ok(_)));
        let end = self.settle(completion);
        match stored {
            true => end,
            false => {
                self.lost += 1;
                let rest = self.drain();
                end.and_then(|end| Ok(end.or(rest?)))
            }
        }
    }

    fn settle(&mut self, completion: Completion<E::Vm>) -> Step<E> {
        self.in_flight.pop();
        let Completion { capture, outcome } = completion;
        let Some(vm) = &mut self.vm else {
            return Ok(None);
        };
        let settled = match outcome {
            None => {
                vm.discard(capture);
                return Ok(None);
            }
            Some(Ok(stored)) => vm.settle(capture, Ok(stored)),
            Some(Err(Failure::Checkpoint(error))) => vm.settle(capture, Err(error)),
            Some(Err(Failure::Interrupted)) => return Ok(Some(End::Stopped)),
        };
        self.conclude(settled.map_err(Failure::Checkpoint))
    }

    /// Counts and reports the outcome of a checkpoint.
    fn conclude(&mut self, taken: Outcome<Report<E>>) -> Step<E> {
        match taken {
            Ok(report) => {
                self.failures = 0;
                self.taken += 1;
                self.report(Event::Taken(&report))?;
                Ok((self.options.count == Some(self.taken)).then_some(End::Count))
            }
            Err(Failure::Interrupted) => Ok(Some(End::Stopped)),
            Err(Failure::Checkpoint(error @ CheckpointError::ParentGone)) => {
                self.report(Event::ParentGone(&error))?;
                Ok(None)
            }
            Err(Failure::Checkpoint(error @ CheckpointError::Migrating { .. })) => {
                self.report(Event::Migrating(&error))?;
                Ok(None)
            }
            Err(Failure::Checkpoint(CheckpointError::MigratedAway)) => Ok(Some(End::MigratedAway)),
            Err(Failure::Checkpoint(error)) => {
                if error.ends_tracking()
                    && let Some(vm) = self.vm.take()
                {
                    self.environment.release(vm);
                }
                self.failed(error.into())
            }
        }
    }

    fn failed(&mut self, error: AttemptError) -> Step<E> {
        // An attachment that was kept has a monitor that answers.
        let grace = match self.vm {
            None => EXIT_GRACE,
            Some(_) => Duration::ZERO,
        };
        if self.environment.wait_for_exit(grace) {
            return Ok(Some(End::VmGone));
        }
        self.failures += 1;
        self.report(Event::Failed(&error))?;
        match self.failures {
            FAILURES_MAX => Err(PipelineError::TooManyFailures(self.failures)),
            _ => Ok(None),
        }
    }

    /// Waits for the next start, and settles complete captures meanwhile. A migration may move the start.
    fn wait(&mut self, next: &mut Instant) -> Step<E> {
        loop {
            let mut reported = false;
            let waited = self.wait_until(*next, &mut reported);
            if reported {
                self.report(Event::WaitOver)?;
            }
            match waited? {
                Waited::Due => return Ok(None),
                Waited::End(end) => return Ok(Some(end)),
                Waited::Migrate => {
                    if let Some(end) = self.migrate(next)? {
                        return Ok(Some(end));
                    }
                }
            }
        }
    }

    fn wait_until(
        &mut self,
        next: Instant,
        reported: &mut bool,
    ) -> Result<Waited, PipelineError<E::Error>> {
        loop {
            if self.environment.should_stop() {
                return Ok(Waited::End(End::Stopped));
            }
            // Without an attachment the next attempt comes first.
            if self.vm.is_some() && self.environment.wants_migration() {
                return Ok(Waited::Migrate);
            }
            let left = next.saturating_duration_since(self.environment.now());
            // Also checked when no time is left, so that an overrun interval sees the VM's end.
            if self.environment.wait_for_exit(left.min(LOOK_EVERY)) {
                return Ok(Waited::End(End::VmGone));
            }
            while let Some(completion) = self.queue.as_mut().and_then(StoreQueue::complete) {
                if let Some(end) = self.take_in(completion)? {
                    return Ok(Waited::End(end));
                }
            }
            if left <= LOOK_EVERY {
                return Ok(Waited::Due);
            }
            let taken = self.taken;
            *reported = true;
            self.report(Event::Waiting { taken, left })?;
        }
    }

    /// Has the VM migrated. If that fails, the next checkpoint is due at once.
    fn migrate(&mut self, next: &mut Instant) -> Step<E> {
        if let Some(end) = self.drain()? {
            return Ok(Some(end));
        }
        let Some(sink) = &mut self.sink else {
            return Ok(None);
        };
        sink.expect_more(false);
        let Some(vm) = self.vm.take() else {
            return Ok(None);
        };
        match self.environment.migrate(vm, sink) {
            Moved::Away => Ok(Some(End::Migrated)),
            Moved::Attached(vm) => {
                self.vm = Some(vm);
                Ok(None)
            }
            Moved::Here => {
                *next = self.environment.now();
                Ok(None)
            }
            Moved::Unclear(error) => Err(PipelineError::Environment(error)),
        }
    }

    fn report(&mut self, event: Event<'_, Report<E>>) -> Result<(), PipelineError<E::Error>> {
        let reported = self.environment.report(event);
        reported.map_err(PipelineError::Environment)
    }
}

type Capture<E> = <<E as Environment>::Vm as PipelineVm>::Capture;
type Report<E> = <<E as Environment>::Vm as PipelineVm>::Report;
