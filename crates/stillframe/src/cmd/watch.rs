//! `watch`: stays attached and takes a checkpoint every so often.
//!
//! ```text
//!   attach ── checkpoint ── wait for the interval ──┐      ends: count reached, signal, VM gone,
//!     ^           │ ^                               │            reader gone, failures in a row
//!     │ RAM changed,└───────────────────────────────┘
//!     └─ connection lost
//! ```

use std::time::{Duration, Instant};

use anyhow::Context as _;
use stillframe_engine::Process;
use stillframe_engine::attach::Vm;
use stillframe_engine::capture::device_state::StateError;
use stillframe_engine::capture::pause::PauseError;
use stillframe_engine::checkpoint::{CheckpointError, CheckpointReport};
use stillframe_repo::Repository;

use super::{CommandError, Context, capture};
use crate::args::WatchArgs;
use crate::durations;
use crate::interrupt::Interrupts;
use crate::output;
use crate::progress::Status;
use crate::table;

/// Consecutive failures after which the watch ends.
const FAILURES_MAX: u32 = 10;
/// How often a waiting watch looks for signals; also how often its countdown moves.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A QEMU that closed its monitor may need this long to be gone.
const EXIT_GRACE: Duration = Duration::from_millis(500);

/// Why a watch ended, when it did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Count,
    Signal,
    VmGone,
}

/// What one attempt came to.
enum Attempt {
    Taken(Box<CheckpointReport>),
    Failed(anyhow::Error),
    GivenUp,
}

struct Watch<'a> {
    context: &'a Context,
    args: &'a WatchArgs,
    interrupts: Interrupts,
    repository: Repository,
    process: Process,
    /// `None` between a lost connection and the next attempt.
    vm: Option<Vm>,
    taken: u64,
}

/// Takes checkpoints until told otherwise.
pub fn run(context: &Context, args: &WatchArgs) -> anyhow::Result<()> {
    let selector = capture::selector(&args.vm)?;
    let repository = context.open()?;
    let first = "interrupted: finishing the running checkpoint, then letting the VM go (once more: give it up)";
    let interrupts = context.listen(2, first)?;
    let vm = capture::attach(context, &selector, args.capture.schedule)?;
    // A name of our own for the process, which outlives an attachment.
    let process = Process::open(vm.pid()).context("the VM ended while it was attached to")?;
    let mut watch = Watch {
        context,
        args,
        interrupts,
        repository,
        process,
        vm: Some(vm),
        taken: 0,
    };
    let ended = watch.until_the_end();
    if let Some(vm) = watch.vm.take() {
        capture::detach(context, vm);
    }
    watch.judge(ended?)
}

impl Watch<'_> {
    fn until_the_end(&mut self) -> anyhow::Result<End> {
        let mut failures = 0;
        loop {
            let begin = Instant::now();
            match self.attempt() {
                Attempt::Taken(report) => {
                    failures = 0;
                    self.taken += 1;
                    capture::tell(self.context, &report)?;
                    if self.args.count == Some(self.taken) {
                        return Ok(End::Count);
                    }
                }
                Attempt::Failed(_) if self.vm_is_gone() => return Ok(End::VmGone),
                Attempt::Failed(error) => {
                    failures += 1;
                    let chain = output::chain(error.chain());
                    self.context
                        .console
                        .warn(&format!("no checkpoint this time: {chain}"));
                    if failures == FAILURES_MAX {
                        return Err(CommandError::TooManyFailures(failures).into());
                    }
                }
                Attempt::GivenUp => return Ok(End::Signal),
            }
            if let Some(end) = self.wait(begin) {
                return Ok(end);
            }
        }
    }

    /// One checkpoint, after attaching again where that is needed.
    fn attempt(&mut self) -> Attempt {
        let mut vm = match self.vm.take() {
            Some(vm) => vm,
            None => match capture::attach_again(
                self.context,
                self.process.pid(),
                self.args.capture.schedule,
            ) {
                Ok(vm) => vm,
                Err(error) => return Attempt::Failed(error.into()),
            },
        };
        let capture_args = &self.args.capture;
        let taken = capture::take(
            self.context,
            &self.interrupts,
            &mut vm,
            &mut self.repository,
            capture_args,
        );
        match &taken {
            Ok(Err(error)) if needs_attaching(error) => capture::detach(self.context, vm),
            _ => self.vm = Some(vm),
        }
        match taken {
            Ok(Ok(report)) => Attempt::Taken(Box::new(report)),
            Ok(Err(error)) => Attempt::Failed(error.into()),
            Err(_) => Attempt::GivenUp,
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

    /// Waits for the next start: an interval after `begin`, or now when that has passed.
    fn wait(&self, begin: Instant) -> Option<End> {
        let every = self.args.every;
        let took = begin.elapsed();
        if took > every {
            self.context.console.note(&format!(
                "the interval of {} could not be kept: this one took {}; the next starts now",
                durations::human(every),
                durations::human(took)
            ));
        }
        let mut status = Status::new(self.context.console);
        loop {
            if self.interrupts.any() {
                return Some(End::Signal);
            }
            let left = every.saturating_sub(begin.elapsed());
            // Also asked when no time is left, so that an overrun interval sees the VM's end.
            if self.process.wait_exit(left.min(LOOK_EVERY)) {
                return Some(End::VmGone);
            }
            if left <= LOOK_EVERY {
                return None;
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
        CheckpointError::RamChanged
        | CheckpointError::Monitor(_)
        | CheckpointError::Tracker(_)
        | CheckpointError::Block(_) => true,
        CheckpointError::Pause(error) => match error {
            PauseError::Overrun { .. } | PauseError::ResumedByOthers => false,
            PauseError::Monitor(_)
            | PauseError::Qmp(_)
            | PauseError::Tracker(_)
            | PauseError::Guardian(_) => true,
        },
        CheckpointError::State(error) => matches!(error, StateError::Monitor(_)),
        CheckpointError::Repo(_) | CheckpointError::Verify(_) | CheckpointError::Encode(_) => false,
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
