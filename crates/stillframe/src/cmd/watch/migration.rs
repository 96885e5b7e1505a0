//! Migrates the watched VM for a client, and reports the outcome to the client and to the user of the watch.

use stillframe_engine::attach::Vm;
use stillframe_engine::checkpoint::ScheduleKind;
use stillframe_engine::migration::{LastCheckpoint, MigrateReport};
use stillframe_engine::pipeline::Moved;

use super::requests::Job;
use crate::cmd::migrate::message::Answer;
use crate::cmd::migrate::perform::{Migration, Notice, is_unclear};
use crate::cmd::migrate::words;
use crate::cmd::{Context, capture, short};
use crate::interrupt::Interrupts;
use crate::output;
use crate::table::printable;

/// A watch that migrates its VM.
pub struct Mover<'m> {
    /// Where the outcome is reported.
    pub context: &'m Context,
    /// The second signal cancels the migration.
    pub interrupts: &'m Interrupts,
    /// The last checkpoint of this attachment. The tracker knows what was written since.
    pub base: Option<LastCheckpoint>,
}

impl Mover<'_> {
    /// Migrates the VM as a client requests it.
    pub fn migrate(&self, vm: Vm, mut job: Job) -> Moved<Vm, anyhow::Error> {
        let console = self.context.console;
        self.announce(&vm, &job);
        job.answer(&Answer::Begun);
        let (migrated, vm) = self.perform(vm, &mut job);
        let error = match migrated {
            Ok(report) => {
                console.note(&words(&report));
                job.answer(&Answer::Report(report));
                return Moved::Away;
            }
            Err(error) => error,
        };
        // Before the client goes away, because it has its answer.
        let cancelled = job.cancellation.is_cancelled();
        job.fail(&error);
        if vm.is_none() && is_unclear(&error) {
            return Moved::Unclear(error);
        }
        let why = match (cancelled, self.interrupts.aborts()) {
            (false, _) => output::chain(error.chain()),
            (true, true) => "interrupted".to_owned(),
            (true, false) => format!("process {}, which requested it, has ended", job.client),
        };
        console.warn(&format!("the VM was not migrated: {why}"));
        vm.map_or(Moved::Here, Moved::Attached)
    }

    fn announce(&self, vm: &Vm, job: &Job) {
        let base = match self.base(vm) {
            Some(last) => format!(
                "its last checkpoint is {}",
                short(&last.base.checkpoint.to_hex())
            ),
            None => "all of it is sent".to_owned(),
        };
        self.context.console.note(&format!(
            "migrating the VM to {}, as process {} requests; {base}",
            printable(&job.request.to),
            job.client,
        ));
    }

    /// The checkpoint that the migration may send the increment of.
    fn base(&self, vm: &Vm) -> Option<&LastCheckpoint> {
        self.base.as_ref().filter(|_| !waits_at_writes(vm))
    }

    /// Returns the VM too if it is attached as before.
    fn perform(&self, vm: Vm, job: &mut Job) -> (anyhow::Result<MigrateReport>, Option<Vm>) {
        let migration = Migration::new(&job.request);
        let connected = migration.and_then(|migration| Ok((migration.connect()?, migration)));
        let (wire, migration) = match connected {
            Ok(connected) => connected,
            Err(error) => return (Err(error), Some(vm)),
        };
        let migration = migration.with_base(self.base(&vm).cloned());
        let mut vm = match waits_at_writes(&vm) {
            false => vm,
            true => match vm.attach_anew(ScheduleKind::PreCopy) {
                Ok(vm) => vm,
                Err(error) => return (Err(error.into()), None),
            },
        };
        let cancellation = job.cancellation.clone();
        let cancelled = || cancellation.is_cancelled();
        let migrated = migration.perform(&mut vm, wire, &cancelled, &mut |notice| {
            match notice {
                Notice::Connected(wire) => cancellation.cover(wire),
                Notice::Event(event) => job.answer(&Answer::Event(event)),
                Notice::Rehearsed => job.answer(&Answer::Rehearsed),
            }
            if self.interrupts.aborts() {
                cancellation.cancel();
            }
        });
        cancellation.end();
        if migrated.is_err() {
            capture::detach(self.context, vm);
        }
        (migrated, None)
    }
}

/// Whether first writes of the guest wait for this process, which the rounds of a migration do not expect.
fn waits_at_writes(vm: &Vm) -> bool {
    vm.tracked_for() == ScheduleKind::CopyOnWrite
}
