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
//! Checkpoints are stored while the guest runs on and others are captured (`storing`). A few may be under
//! way, as long as memory allows; a repository that is slow for longer than these last lengthens the
//! interval.

mod storing;

use std::time::{Duration, Instant};

use anyhow::Context as _;
use stillframe_engine::attach::Vm;
use stillframe_engine::capture::device_state::StateError;
use stillframe_engine::capture::pause::PauseError;
use stillframe_engine::capture::tracker::TrackerError;
use stillframe_engine::checkpoint::{
    Captured, CheckpointError, CheckpointOptions, CheckpointReport, ScheduleChoice, ScheduleKind,
    Shelf,
};
use stillframe_engine::{ContentHasher, Process};

use self::storing::{Landing, Shore, Storing};
use super::{Context, capture};
use crate::args::WatchArgs;
use crate::durations;
use crate::error::CommandError;
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
    MigratedAway,
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
    /// `None` while captures are stored by another thread.
    shore: Option<Shore>,
    storing: Option<Storing>,
    taken: u64,
    failures: u32,
    /// Captures that could not be stored.
    lost: u64,
    late: Late,
    /// What `--schedule` says; without `auto` once that failed.
    choice: ScheduleChoice,
    /// When a migration was last told of.
    told_migrating: Option<Instant>,
    /// The schedule last told of, and when.
    told_schedule: Option<(ScheduleKind, Instant)>,
    /// What stands in the way of a restore, as last told.
    told_obstacles: Vec<String>,
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
        storing: None,
        taken: 0,
        failures: 0,
        lost: 0,
        late: Late::default(),
        choice: args.capture.schedule,
        told_migrating: None,
        told_schedule: None,
        told_obstacles: Vec::new(),
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
            let late = now.saturating_duration_since(next);
            if !late.is_zero() {
                self.tell_late(late);
                // A little late, this one starts at once and those after it when they were to.
                if late >= self.args.every {
                    next = now;
                }
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
        let captured = match vm.capture(&self.hasher, &self.options) {
            Ok(captured) => captured,
            // Those before must be settled first.
            Err(error) => {
                return match self.land()? {
                    Some(end) => Ok(Some(end)),
                    None if error.is_too_much() => self.whole(),
                    None => self.came_to(Ok(Err(error))),
                };
            }
        };
        let lost = self.lost;
        let landed = self.make_room(&captured);
        let arrived = matches!(landed, Ok(None)) && self.lost == lost;
        match &mut self.vm {
            Some(vm) if arrived => {
                vm.launch();
                self.store(captured)
            }
            vm => {
                if let Some(vm) = vm {
                    vm.discard(captured);
                }
                landed
            }
        }
    }

    /// Takes in what has arrived, and waits for more until one more capture may be under way.
    fn make_room(&mut self, captured: &Captured) -> anyhow::Result<Option<End>> {
        while let Some(storing) = &mut self.storing {
            let landing = match storing.arrived() {
                None if storing.has_room(captured) => break,
                None => storing.wait(),
                landing => landing,
            };
            let end = match landing {
                Some(landing) => self.take_in(landing)?,
                None => self.land()?,
            };
            if end.is_some() {
                return Ok(end);
            }
        }
        Ok(None)
    }

    /// Has a capture stored beside the rest; the last one is waited for.
    fn store(&mut self, captured: Captured) -> anyhow::Result<Option<End>> {
        if let Some(shore) = self.shore.take() {
            let storing = Storing::start(shore, &self.options, &self.interrupts);
            self.storing = Some(storing.context("cannot start a thread to store checkpoints")?);
        }
        let Some(storing) = &mut self.storing else {
            return Ok(None);
        };
        storing.store(captured);
        match self.args.count == Some(self.taken + storing.under_way()) {
            true => self.land(),
            false => Ok(None),
        }
    }

    /// Waits for the checkpoints under way and tells of them; the repository is at hand again.
    fn land(&mut self) -> anyhow::Result<Option<End>> {
        let Some(mut storing) = self.storing.take() else {
            return Ok(None);
        };
        let mut ended = Ok(None);
        while let Some(landing) = storing.wait() {
            let came_to = self.settle(landing);
            // The first end counts; the others are settled all the same.
            if matches!(ended, Ok(None)) {
                ended = came_to;
            }
        }
        self.shore = Some(storing.end());
        ended
    }

    /// Settles one that has arrived; and all others, if it failed.
    fn take_in(&mut self, landing: Landing) -> anyhow::Result<Option<End>> {
        let well = matches!(landing.stored, Some(Ok(Ok(_))));
        let end = self.settle(landing);
        match well {
            true => end,
            false => {
                self.lost += 1;
                let rest = self.land();
                end.and_then(|end| Ok(end.or(rest?)))
            }
        }
    }

    fn settle(&mut self, landing: Landing) -> anyhow::Result<Option<End>> {
        let Landing { captured, stored } = landing;
        let Some(vm) = &mut self.vm else {
            return Ok(None);
        };
        match stored {
            None => {
                vm.discard(captured);
                Ok(None)
            }
            Some(stored) => {
                let taken = stored.map(|stored| vm.settle(captured, stored));
                self.came_to(taken)
            }
        }
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
                capture::tell_obstacles(self.context, &report, &mut self.told_obstacles);
                capture::tell(self.context, &report)?;
                Ok((self.args.count == Some(self.taken)).then_some(End::Count))
            }
            Ok(Err(CheckpointError::ParentGone)) => {
                let error = CheckpointError::ParentGone;
                self.context.console.note(&error.to_string());
                Ok(None)
            }
            Ok(Err(error @ CheckpointError::Migrating { .. })) => {
                self.tell_migrating(&error);
                Ok(None)
            }
            Ok(Err(CheckpointError::MigratedAway)) => Ok(Some(End::MigratedAway)),
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

    /// No failure: the migration ends, one way or the other.
    fn tell_migrating(&mut self, error: &CheckpointError) {
        let told = self.told_migrating;
        if told.is_none_or(|told| told.elapsed() >= TELL_EVERY) {
            self.context.console.note(&error.to_string());
            self.told_migrating = Some(Instant::now());
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
            while let Some(landing) = self.storing.as_mut().and_then(Storing::arrived) {
                if let Some(end) = self.take_in(landing)? {
                    return Ok(Some(end));
                }
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
            End::MigratedAway => "the VM was migrated away by someone else",
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
        CheckpointError::Tracker(
            TrackerError::NotSaved | TrackerError::ProtectionLost | TrackerError::Injected(_),
        ) => false,
        error if error.is_too_much() => false,
        CheckpointError::RamChanged
        | CheckpointError::Monitor(_)
        | CheckpointError::Tracker(_)
        | CheckpointError::Block(_) => true,
        CheckpointError::Devices(error) => error.ends_tracking(),
        CheckpointError::Pause(error) => match error {
            PauseError::Overrun { .. }
            | PauseError::NotHeld { .. }
            | PauseError::StateChanged { .. }
            | PauseError::Injected(_) => false,
            PauseError::State(error) => !matches!(error, StateError::Invalid(_)),
            PauseError::Monitor(_)
            | PauseError::Qmp(_)
            | PauseError::Tracker(_)
            | PauseError::Guardian(_) => true,
        },
        CheckpointError::State(error) => matches!(error, StateError::Monitor(_)),
        CheckpointError::Repo(_)
        | CheckpointError::Migrating { .. }
        | CheckpointError::MigratedAway
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
