//! The verb *clone*: several new QEMUs, all in the state of one checkpoint, that share its memory as long as
//! they do not write it.
//!
//! ```text
//!   repository ── base (files, made once) ──┬── QEMU 1: private view ── device state ── cont
//!                                           ├── QEMU 2: ...
//! ```

use std::time::Instant;

use serde::Serialize;
use stillframe_qemu::launch::{self, CloneMemory, CloneOptions, LaunchOptions, LaunchPlan};
use stillframe_repo::{CheckpointId, Manifest, PageMap, RamTable, Repository};
use thiserror::Error;

use crate::guardian::Guardian;
use crate::populate::base::{Base, BaseError, BaseOptions, KeptTemplate};
use crate::restore::{
    self, Job, LazyEvent, LazySink, PhaseClock, RestoreError, RestoreOptions, RestoreReport,
};

/// How to clone.
#[derive(Debug, Clone)]
pub struct ClonesOptions {
    /// How each is restored; `lazy` has no meaning here.
    pub restore: RestoreOptions,
    /// The host's ends of each: its monitor and so on, and which it is.
    pub each: Vec<(LaunchOptions, CloneOptions)>,
    /// Where the memory that they share is kept.
    pub base: BaseOptions,
}

/// What was done for one of them.
#[derive(Debug, Clone, Serialize)]
pub struct CloneReport {
    /// Which it is.
    pub clone: u32,
    /// How long making the memory that they share took, in microseconds; 0 where it was there.
    pub base_us: u64,
    /// The VM.
    #[serde(flatten)]
    pub restored: RestoreReport,
}

/// Why there are no clones, or no more of them. Those that were told of are there.
#[derive(Debug, Error)]
pub enum CloneError {
    /// Starting one failed.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// Their memory could not be made.
    #[error(transparent)]
    Base(#[from] BaseError),
}

/// Starts them, one after the other; `done` is told of each as soon as it runs.
pub fn clones(
    repository: &mut Repository,
    (id, manifest): (&CheckpointId, &Manifest),
    options: &ClonesOptions,
    events: LazySink<'_>,
    done: &mut dyn FnMut(CloneReport),
) -> Result<(), CloneError> {
    let record = restore::vm_record(id, manifest)?;
    let backed = launch::memory_blocks(&record);
    let tables: Vec<&RamTable> = manifest
        .ram
        .iter()
        .filter(|table| backed.contains(&table.name))
        .collect();
    let hasher = repository.hasher();
    let repository_id = repository.id().to_string();
    let reader = repository
        .reader(options.restore.lock_wait)
        .map_err(RestoreError::from)?;
    let state = restore::device_state(id, manifest, &record, &reader)?;
    let key = KeptTemplate::name_of(&repository_id, &id.to_string());
    let memory = options.base.memory(&key, &tables);
    // All that can be refused is, before a byte of the guest's memory lies anywhere.
    for each in &options.each {
        restore::plan(id, manifest, &planned(each, &memory))?;
    }
    let begin = Instant::now();
    let mut progress = |progress| events(LazyEvent::Progress(progress));
    let base = Base::of(&key, &tables, &reader, &options.base, &mut progress)?;
    let mut base_us = match base.made {
        true => restore::micros(begin.elapsed()),
        false => 0,
    };
    // Opening the repository is part of the first one's time.
    let mut asked_at = options.restore.asked_at;
    let mut start = |each: &(LaunchOptions, CloneOptions)| -> Result<(), RestoreError> {
        // Disks and monitors may have changed since: planned once more.
        let launch = planned(each, &memory);
        let plan = restore::plan(id, manifest, &launch)?;
        let mut restore = options.restore.clone();
        restore.launch = launch;
        let job = Job {
            id,
            manifest,
            reader: &reader,
            repository: repository_id.clone(),
            options: &restore,
            state: &state,
            hasher: hasher.clone(),
            working_set: None,
            agent: restore::agent(&plan, &restore),
            base: Some(&base),
        };
        let clock = PhaseClock::new(asked_at);
        let restored = one(&job, &plan, clock, events)?;
        asked_at = Instant::now();
        done(CloneReport {
            clone: each.1.number,
            base_us: std::mem::take(&mut base_us),
            restored,
        });
        Ok(())
    };
    for (number, each) in options.each.iter().enumerate() {
        if let Err(error) = start(each) {
            if number == 0 {
                // The error that is told is the first; what is left is removed with the next template.
                let _ = base.discard();
            }
            return Err(error.into());
        }
    }
    Ok(base.release()?)
}

/// The host's ends of a clone, with the memory that it begins with.
fn planned(
    (launch, clone): &(LaunchOptions, CloneOptions),
    memory: &[CloneMemory],
) -> LaunchOptions {
    LaunchOptions {
        clone: Some(CloneOptions {
            memory: memory.to_vec(),
            ..clone.clone()
        }),
        ..launch.clone()
    }
}

fn one(
    job: &Job<'_>,
    plan: &LaunchPlan,
    mut clock: PhaseClock,
    events: LazySink<'_>,
) -> Result<RestoreReport, RestoreError> {
    let guardian = Guardian::start()?;
    let mut starting = restore::start(plan, job.options, &guardian)?;
    starting.go();
    let tables = job.manifest.ram.iter();
    let maps = tables
        .map(|table| PageMap::open(job.reader, table))
        .collect::<Result<_, _>>()?;
    clock.phases.repository = clock.lap();
    let launched = starting.wait(restore::START_LIMIT)?;
    clock.phases.qemu = clock.lap();
    let asked_at = clock.asked_at;
    let done = job.run_eagerly(launched, &guardian, maps, clock, events)?;
    Ok(job.report(done, plan, asked_at))
}
