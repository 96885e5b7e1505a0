//! `watch`: stays attached and takes checkpoints at an interval. The engine's pipeline does the work; this command
//! reports its events. It also migrates the VM when `migrate` requests it ([`requests`], [`migration`]): no other process
//! can be attached.

mod migration;
mod report;
mod requests;

use std::time::{Duration, Instant};

use anyhow::Context as _;
use stillframe_engine::attach::{AnewError, AttachError, Vm};
use stillframe_engine::checkpoint::{
    CheckpointOptions, CheckpointReport, CheckpointWriter, ScheduleChoice, ScheduleKind,
};
use stillframe_engine::migration::{Base, LastCheckpoint};
use stillframe_engine::pipeline::{
    End, Ended, Environment, Event, Moved, Pipeline, PipelineError, PipelineOptions,
    RepositorySink, ThreadQueue, WatchedVm,
};
use stillframe_engine::{ContentHasher, Process};

use self::migration::Mover;
use self::report::Reporter;
use self::requests::Requests;
use super::{Context, capture};
use crate::args::WatchArgs;
use crate::error::CommandError;
use crate::interrupt::Interrupts;
use crate::output;
use crate::table;

struct Watch<'a> {
    context: &'a Context,
    options: CheckpointOptions,
    interrupts: Interrupts,
    hasher: ContentHasher,
    process: Process,
    reporter: Reporter<'a>,
    /// `None` if there is no control socket.
    requests: Option<Requests>,
}

/// Takes checkpoints until the count is reached, the VM ends, or a signal arrives.
pub fn run(context: &Context, args: &WatchArgs) -> anyhow::Result<()> {
    let selector = capture::selector(&args.vm)?;
    let options = capture::options(&args.capture)?;
    let repository = context.open()?;
    repository.limit_writes(args.capture.limit_write);
    let first = "interrupted: finishing the current checkpoint, then detaching (again: discard it)";
    let interrupts = context.listen(2, first)?;
    let vm = capture::attach(context, &selector, args.capture.schedule)?;
    // A separate handle on the process, which outlives an attachment.
    let process =
        Process::open(vm.pid()).context("the VM ended while stillframe attached to it")?;
    let watch = Watch {
        context,
        options: options.clone(),
        interrupts: interrupts.clone(),
        hasher: repository.hasher(),
        requests: requests(context, &process),
        process,
        reporter: Reporter::new(context, args.every),
    };
    let pipeline = PipelineOptions {
        every: args.every,
        count: args.count,
        schedule: args.capture.schedule,
        // The other half is for the capture in progress.
        in_flight_bytes: options.copy_buffer_bytes / 2,
    };
    let sink = RepositorySink {
        repository,
        checkpoints: CheckpointWriter::default(),
        options,
        control: capture::Control::new(context, interrupts),
    };
    let vm = watch.watched(vm);
    let ended = Pipeline::new(watch, vm, sink, pipeline).run();
    finish(context, args.count, ended)
}

/// Listens to clients that want the VM migrated. A watch without is of use all the same.
fn requests(context: &Context, process: &Process) -> Option<Requests> {
    let listening = Requests::listen(process).map_err(|error| {
        let chain = output::chain(anyhow::Error::new(error).chain());
        context.console.warn(&format!(
            "`stillframe migrate` cannot reach this process: {chain}; to migrate the VM, end this process first"
        ));
    });
    listening.ok()
}

fn finish(
    context: &Context,
    count: Option<u64>,
    ended: Result<Ended, PipelineError<anyhow::Error>>,
) -> anyhow::Result<()> {
    let Ended { why, taken } = ended.map_err(|error| match error {
        PipelineError::Environment(error) => error,
        PipelineError::TooManyFailures(count) => CommandError::TooManyFailures(count).into(),
        PipelineError::Queue(error) => {
            anyhow::Error::new(error).context("cannot start a thread to store checkpoints")
        }
    })?;
    let why = match why {
        End::Count => return Ok(()),
        End::Stopped => "interrupted",
        End::VmGone => "the VM ended",
        End::Migrated => "the VM was migrated",
        End::MigratedAway => "the VM was migrated away by another client of QEMU",
    };
    if let Some(count) = count {
        return Err(CommandError::CountNotReached { why, taken, count }.into());
    }
    let taken = table::count(taken, "checkpoint");
    context.console.note(&format!("{why}; {taken} taken"));
    Ok(())
}

impl Watch<'_> {
    fn watched(&self, vm: Vm) -> WatchedVm {
        WatchedVm {
            vm,
            hasher: self.hasher.clone(),
            options: self.options.clone(),
        }
    }
}

impl Environment for Watch<'_> {
    type Vm = WatchedVm;
    type Sink = RepositorySink<capture::Control>;
    type Queue = ThreadQueue<WatchedVm, Self::Sink>;
    type Error = anyhow::Error;

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn wait_for_exit(&mut self, limit: Duration) -> bool {
        self.process.wait_exit(limit)
    }

    fn should_stop(&self) -> bool {
        self.interrupts.any()
    }

    fn wants_migration(&self) -> bool {
        self.requests.as_ref().is_some_and(Requests::is_waiting)
    }

    fn migrate(
        &mut self,
        watched: WatchedVm,
        sink: &mut Self::Sink,
    ) -> Moved<WatchedVm, anyhow::Error> {
        let Some(job) = self.requests.as_ref().and_then(Requests::take) else {
            // The client has gone away.
            return Moved::Attached(watched);
        };
        let contents = sink.checkpoints.lend_contents();
        let last = sink.checkpoints.parent();
        let mover = Mover {
            context: self.context,
            interrupts: &self.interrupts,
            base: last.map(|(checkpoint, repository)| LastCheckpoint {
                base: Base {
                    repository: repository.to_owned(),
                    checkpoint,
                },
                contents: contents.clone(),
            }),
        };
        let moved = mover.migrate(watched.vm, job);
        drop(mover);
        sink.checkpoints.take_back(contents);
        match moved {
            Moved::Away => Moved::Away,
            Moved::Attached(vm) => Moved::Attached(self.watched(vm)),
            Moved::Here => Moved::Here,
            Moved::Unclear(error) => Moved::Unclear(error),
        }
    }

    fn attach_again(&mut self, schedule: ScheduleChoice) -> Result<WatchedVm, AttachError> {
        let vm = capture::attach_again(self.context, self.process.pid(), schedule)?;
        Ok(self.watched(vm))
    }

    fn attach_anew(&mut self, vm: WatchedVm, to: ScheduleKind) -> Result<WatchedVm, AnewError> {
        Ok(self.watched(vm.vm.attach_anew(to)?))
    }

    fn release(&mut self, vm: WatchedVm) {
        capture::detach(self.context, vm.vm);
    }

    fn start_queue(&mut self, sink: Self::Sink) -> std::io::Result<Self::Queue> {
        ThreadQueue::start(sink)
    }

    fn report(&mut self, event: Event<'_, CheckpointReport>) -> anyhow::Result<()> {
        self.reporter.report(event)
    }
}
