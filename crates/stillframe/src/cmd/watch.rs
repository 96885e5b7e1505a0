//! `watch`: stays attached and takes a checkpoint every so often.
//!
//! ```text
//!   attach -- first checkpoint -- capture -- wait -- capture -- wait ...     ends: count reached, signal,
//!     ^                              |                  |                    VM gone, reader gone,
//!     | RAM changed,                 +- store, commit   +- store, commit     failures in a row
//!     +- connection lost,               beside the rest
//!     +- other tracking wanted
//! ```
//!
//! One checkpoint is stored while the guest runs on and the next is captured; there are never more than
//! one stored and one captured at a time, so a slow repository lengthens the interval.

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use stillframe_engine::attach::Vm;
use stillframe_engine::capture::aside;
use stillframe_engine::capture::device_state::StateError;
use stillframe_engine::capture::pause::PauseError;
use stillframe_engine::capture::tracker::TrackerError;
use stillframe_engine::checkpoint::{
    Captured, CheckpointError, CheckpointOptions, CheckpointReport, ScheduleChoice, ScheduleKind,
    Shelf, Stored,
};
use stillframe_engine::{ContentHasher, Process};
use stillframe_repo::Repository;

use super::{CommandError, Context, capture};
use crate::args::WatchArgs;
use crate::durations;
use crate::interrupt::{Interrupted, Interrupts};
use crate::output;
use crate::progress::Status;
use crate::table;

/// Consecutive failures after which the watch ends.
const FAILURES_MAX: u32 = 10;
/// How often a waiting watch looks for signals; also how often its countdown moves.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A QEMU that closed its monitor may need this long to be gone.
const EXIT_GRACE: Duration = Duration::from_millis(500);
/// What may happen at every checkpoint is told of this often.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// Why a watch ended, when it did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Count,
    Signal,
    VmGone,
}

/// The repository, and what storing knows; in the hands of a thread while a checkpoint is stored.
struct Shore {
    repository: Repository,
    shelf: Shelf,
}

/// What the thread that stores a checkpoint gives back.
struct Landing {
    shore: Shore,
    captured: Captured,
    stored: Result<Result<Stored, CheckpointError>, Interrupted>,
}

struct Watch<'a> {
    context: &'a Context,
    args: &'a WatchArgs,
    options: CheckpointOptions,
    interrupts: Interrupts,
    hasher: ContentHasher,
    process: Process,
    /// `None` between a lost connection and the next attempt.
    vm: Option<Vm>,
    /// `None` while a checkpoint is under way.
    shore: Option<Shore>,
    flight: Option<JoinHandle<Landing>>,
    taken: u64,
    failures: u32,
    late: Late,
    /// What `--schedule` says; without `auto` once that failed.
    choice: ScheduleChoice,
    /// The schedule last told of, and when.
    told_schedule: Option<(ScheduleKind, Instant)>,
}

/// Intervals that were not kept.
#[derive(Default)]
struct Late {
    count: u64,
    told: Option<Instant>,
}

/// Takes checkpoints until told otherwise.
pub fn run(context: &Context, args: &WatchArgs) -> anyhow::Result<()> {
    let selector = capture::selector(&args.vm)?;
    let repository = context.open()?;
    repository.limit_writes(args.capture.limit_write);
    let first = "interrupted: finishing the running checkpoint, then letting the VM go (once more: give it up)";
    let interrupts = context.listen(2, first)?;
    let vm = capture::attach(context, &selector, args.capture.schedule)?;
    // A name of our own for the process, which outlives an attachment.
    let process = Process::open(vm.pid()).context("the VM ended while it was attached to")?;
    let mut watch = Watch {
        context,
        args,
        options: capture::options(&args.capture),
        interrupts,
        hasher: repository.hasher(),
        process,
        vm: Some(vm),
        shore: Some(Shore {
            repository,
            shelf: Shelf::default(),
        }),
        flight: None,
        taken: 0,
        failures: 0,
        late: Late::default(),
        choice: args.capture.schedule,
        told_schedule: None,
    };
    let ended = watch.until_the_end();
    let landed = watch.land();
    if let Some(vm) = watch.vm.take() {
        capture::detach(context, vm);
    }
    landed?;
    watch.judge(ended?)
}

impl Watch<'_> {
    fn until_the_end(&mut self) -> anyhow::Result<End> {
        let mut next = Instant::now();
        loop {
            if let Some(end) = self.attempt()? {
                return Ok(end);
            }
            next += self.args.every;
            let now = Instant::now();
            if now > next {
                self.tell_late(now - next);
                next = now;
            }
            if let Some(end) = self.wait(next)? {
                return Ok(end);
            }
        }
    }

    /// One checkpoint, after attaching again where that is needed: a first one, or the capture of
    /// another, which is stored while the watch goes on.
    fn attempt(&mut self) -> anyhow::Result<Option<End>> {
        if self.vm.is_none()
            && let Err(error) = self.attach_again()
        {
            return self.failed(error);
        }
        if let Some(schedule) = self.vm.as_ref().and_then(Vm::wants) {
            if let Some(end) = self.land()? {
                return Ok(Some(end));
            }
            if let Err(error) = self.attach_anew(schedule) {
                return self.failed(error);
            }
        }
        let first = match &self.shore {
            Some(shore) => !shore.shelf.has_parent(),
            None => false,
        };
        match first {
            true => self.whole(),
            false => self.next(),
        }
    }

    fn attach_again(&mut self) -> anyhow::Result<()> {
        let pid = self.process.pid();
        let vm = capture::attach_again(self.context, pid, self.choice)?;
        self.attached(vm);
        Ok(())
    }

    /// `auto` found a schedule that takes other tracking.
    fn attach_anew(&mut self, schedule: ScheduleKind) -> anyhow::Result<()> {
        let Some(vm) = self.vm.take() else {
            return Ok(());
        };
        self.context.console.note(&format!(
            "attaching anew for {schedule}: the next checkpoint looks at all of memory"
        ));
        // Should this fail it would again.
        self.choice = ScheduleChoice::Always(ScheduleKind::PreCopy);
        let vm = vm.attach_anew(schedule)?;
        self.choice = self.args.capture.schedule;
        self.attached(vm);
        Ok(())
    }

    fn attached(&mut self, vm: Vm) {
        // What it knows is of another attachment.
        if let Some(shore) = &mut self.shore {
            shore.shelf.forget_parent();
        }
        self.vm = Some(vm);
    }

    /// One checkpoint from capture to commit: a first one, or one of more than is held in memory.
    fn whole(&mut self) -> anyhow::Result<Option<End>> {
        let (Some(vm), Some(shore)) = (&mut self.vm, &mut self.shore) else {
            return Ok(None);
        };
        let taken = capture::take(
            self.context,
            &self.interrupts,
            vm,
            &mut shore.shelf,
            &mut shore.repository,
            &self.options,
        );
        self.came_to(taken)
    }

    fn next(&mut self) -> anyhow::Result<Option<End>> {
        let Some(vm) = &mut self.vm else {
            return Ok(None);
        };
        let captured = vm.capture(&self.hasher, &self.options);
        // The one before must be settled first.
        let taken = self.taken;
        let under_way = self.flight.is_some();
        let landed = self.land();
        let captured = match captured {
            Ok(captured) => captured,
            Err(error) => {
                return match landed? {
                    Some(end) => Ok(Some(end)),
                    None if error.is_too_much() => self.whole(),
                    None => self.came_to(Ok(Err(error))),
                };
            }
        };
        let arrived = !under_way || self.taken > taken;
        match (&mut self.vm, self.shore.take()) {
            (Some(vm), Some(shore)) if arrived && matches!(landed, Ok(None)) => {
                vm.launch();
                self.flight = Some(self.store(shore, captured)?);
                match self.args.count == Some(self.taken + 1) {
                    true => self.land(),
                    false => Ok(None),
                }
            }
            (vm, shore) => {
                self.shore = shore;
                if let Some(vm) = vm {
                    vm.discard(captured);
                }
                landed
            }
        }
    }

    /// Has a capture stored by a thread of its own.
    fn store(&self, mut shore: Shore, captured: Captured) -> anyhow::Result<JoinHandle<Landing>> {
        let options = self.options.clone();
        let interrupts = self.interrupts.clone();
        let work = move || {
            aside::step_back();
            let Shore { repository, shelf } = &mut shore;
            let stored = interrupts.interruptible(|| {
                shelf.store(&captured, repository, &options, &mut |_| interrupts.step())
            });
            Landing {
                shore,
                captured,
                stored,
            }
        };
        thread::Builder::new()
            .name("store".to_owned())
            .spawn(work)
            .context("cannot start a thread to store checkpoints")
    }

    /// Waits for the checkpoint under way, if there is one, and tells of it.
    fn land(&mut self) -> anyhow::Result<Option<End>> {
        let Some(flight) = self.flight.take() else {
            return Ok(None);
        };
        let landing = flight
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        self.shore = Some(landing.shore);
        let Some(vm) = &mut self.vm else {
            return Ok(None);
        };
        let taken = match landing.stored {
            Ok(stored) => Ok(vm.settle(landing.captured, stored)),
            Err(interrupted) => Err(interrupted),
        };
        self.came_to(taken)
    }

    /// Counts and tells what a checkpoint came to.
    fn came_to(
        &mut self,
        taken: Result<Result<CheckpointReport, CheckpointError>, Interrupted>,
    ) -> anyhow::Result<Option<End>> {
        match taken {
            Ok(Ok(report)) => {
                self.failures = 0;
                self.taken += 1;
                self.tell_schedule(&report);
                capture::tell(self.context, &report)?;
                Ok((self.args.count == Some(self.taken)).then_some(End::Count))
            }
            Ok(Err(CheckpointError::ParentGone)) => {
                let error = CheckpointError::ParentGone;
                self.context.console.note(&error.to_string());
                Ok(None)
            }
            Ok(Err(error)) => {
                if needs_attaching(&error)
                    && let Some(vm) = self.vm.take()
                {
                    capture::detach(self.context, vm);
                }
                self.failed(error.into())
            }
            Err(Interrupted) => Ok(Some(End::Signal)),
        }
    }

    fn failed(&mut self, error: anyhow::Error) -> anyhow::Result<Option<End>> {
        if self.vm_is_gone() {
            return Ok(Some(End::VmGone));
        }
        self.failures += 1;
        let chain = output::chain(error.chain());
        self.context
            .console
            .warn(&format!("no checkpoint this time: {chain}"));
        match self.failures {
            FAILURES_MAX => Err(CommandError::TooManyFailures(self.failures).into()),
            _ => Ok(None),
        }
    }

    fn vm_is_gone(&self) -> bool {
        // An attachment that was kept has a monitor that answers.
        let grace = if self.vm.is_none() {
            EXIT_GRACE
        } else {
            Duration::ZERO
        };
        self.process.wait_exit(grace)
    }

    /// What `auto` chose, when it is not what it chose before.
    fn tell_schedule(&mut self, report: &CheckpointReport) {
        let Some(plan) = &report.plan else {
            return;
        };
        let known = self
            .told_schedule
            .is_some_and(|(kind, told)| kind == report.schedule || told.elapsed() < TELL_EVERY);
        if !known {
            self.context
                .console
                .note(&capture::why(report.schedule, plan));
            self.told_schedule = Some((report.schedule, Instant::now()));
        }
    }

    fn tell_late(&mut self, late: Duration) {
        self.late.count += 1;
        if self
            .late
            .told
            .is_some_and(|told| told.elapsed() < TELL_EVERY)
        {
            return;
        }
        let every = durations::human(self.args.every);
        let took = durations::human(self.args.every + late);
        let times = match self.late.count {
            1 => String::new(),
            count => format!(" ({count} times since this was last told)"),
        };
        self.context.console.note(&format!(
            "the interval of {every} could not be kept{times}: this one took {took}; the next starts now"
        ));
        self.late = Late {
            count: 0,
            told: Some(Instant::now()),
        };
    }

    /// Waits for the next start, and tells of the checkpoint under way when it has arrived.
    fn wait(&mut self, next: Instant) -> anyhow::Result<Option<End>> {
        let mut status = Status::new(self.context.console);
        loop {
            if self.interrupts.any() {
                return Ok(Some(End::Signal));
            }
            let left = next.saturating_duration_since(Instant::now());
            // Also asked when no time is left, so that an overrun interval sees the VM's end.
            if self.process.wait_exit(left.min(LOOK_EVERY)) {
                return Ok(Some(End::VmGone));
            }
            if self.flight.as_ref().is_some_and(JoinHandle::is_finished)
                && let Some(end) = self.land()?
            {
                return Ok(Some(end));
            }
            if left <= LOOK_EVERY {
                return Ok(None);
            }
            let taken = table::count(self.taken, "checkpoint");
            status.show(format!("{taken}, the next in {:.1} s", left.as_secs_f64()));
        }
    }

    fn judge(&self, end: End) -> anyhow::Result<()> {
        let why = match end {
            End::Count => return Ok(()),
            End::Signal => "interrupted",
            End::VmGone => "the VM ended",
        };
        match self.args.count {
            Some(count) => Err(CommandError::CountNotReached {
                why,
                taken: self.taken,
                count,
            }
            .into()),
            None => {
                let taken = table::count(self.taken, "checkpoint");
                self.context.console.note(&format!("{why}; {taken} taken"));
                Ok(())
            }
        }
    }
}

/// Whether an attachment is of no more use after this. Attaching again costs reading all memory
/// once, so everything that leaves tracking and the connection intact keeps it.
fn needs_attaching(error: &CheckpointError) -> bool {
    match error {
        CheckpointError::Tracker(TrackerError::NotSaved) => false,
        error if error.is_too_much() => false,
        CheckpointError::RamChanged
        | CheckpointError::Monitor(_)
        | CheckpointError::Tracker(_)
        | CheckpointError::Block(_) => true,
        CheckpointError::Pause(error) => match error {
            PauseError::Overrun { .. } | PauseError::ResumedByOthers | PauseError::Reset => false,
            PauseError::Monitor(_)
            | PauseError::Qmp(_)
            | PauseError::Tracker(_)
            | PauseError::Guardian(_) => true,
        },
        CheckpointError::State(error) => matches!(error, StateError::Monitor(_)),
        CheckpointError::Repo(_)
        | CheckpointError::ParentGone
        | CheckpointError::Verify(_)
        | CheckpointError::Encode(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use stillframe_repo::RepoError;

    use super::*;

    #[test]
    fn only_what_broke_the_attachment_ends_it() {
        assert!(needs_attaching(&CheckpointError::RamChanged));
        let overrun = PauseError::Overrun { limit_ms: 3000 };
        assert!(!needs_attaching(&CheckpointError::Pause(overrun)));
        let full = RepoError::NoSpace { path: "/r".into() };
        assert!(!needs_attaching(&CheckpointError::Repo(full)));
    }
}
