//! The verb *clone*: several new QEMUs, all in the state of one checkpoint, that share its memory as long as
//! they do not write it.
//!
//! ```text
//!   repository ── template (files, made once) ──┬── QEMU 1: private view ── device state ── cont
//!                                               ├── QEMU 2: ...
//! ```

use std::time::{Duration, Instant};

use serde::Serialize;
use stillframe_page::hash::ContentHasher;
use stillframe_qemu::launch::{self, CloneMemory, CloneOptions, LaunchOptions, LaunchPlan};
use stillframe_qemu::record::VmRecord;
use stillframe_repo::{BlockTable, Manifest, PageMap, Reader, Repository};
use thiserror::Error;

use crate::guardian::Guardian;
use crate::restore::{
    self, Checkpoint, Job, LazyEvent, LazySink, PhaseClock, RestoreError, RestoreOptions,
    RestoreReport,
};
use crate::template::{KeptTemplate, MemoryTemplate, TemplateError, TemplateOptions};

/// A clone that is started later than this after all were planned is planned once more.
const PLAN_AGE_MAX: Duration = Duration::from_secs(1);

/// How to clone.
#[derive(Debug, Clone)]
pub struct ClonesOptions {
    /// How each is restored; `lazy` has no meaning here.
    pub restore: RestoreOptions,
    /// The clones.
    pub each: Vec<EachClone>,
    /// Where memory templates are kept.
    pub template: TemplateOptions,
}

/// One clone.
#[derive(Debug, Clone)]
pub struct EachClone {
    /// Which it is.
    pub number: u32,
    /// The host's ends of it: its monitor and so on. `clone` is set when its memory is known.
    pub launch: LaunchOptions,
}

/// The report on one clone.
#[derive(Debug, Clone, Serialize)]
pub struct CloneReport {
    /// The number of the clone.
    pub clone: u32,
    /// How long the making of the memory template took, in microseconds; 0 where it was there.
    pub template_us: u64,
    /// The VM.
    #[serde(flatten)]
    pub restored: RestoreReport,
}

/// The error for which there are no clones, or no more of them. Clones that were reported are there.
#[derive(Debug, Error)]
pub enum CloneError {
    /// Starting one failed.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// Their memory template could not be made.
    #[error(transparent)]
    MemoryTemplate(#[from] TemplateError),
}

/// Starts the clones, one after the other; calls `done` for each running clone. Returns whether their memory
/// template is kept for the next call.
pub fn clones(
    repository: &mut Repository,
    Checkpoint { id, manifest }: Checkpoint<'_>,
    options: &ClonesOptions,
    events: LazySink<'_>,
    done: &mut dyn FnMut(CloneReport),
) -> Result<bool, CloneError> {
    let record = restore::vm_record(id, manifest)?;
    let tables = shared_tables(&record, manifest);
    let hasher = repository.hasher();
    let repository_id = repository.id().to_string();
    let reader = repository
        .reader(options.restore.lock_wait)
        .map_err(RestoreError::from)?;
    let state = restore::device_state(id, manifest, &record, &reader)?;
    let key = KeptTemplate::name_of(&repository_id, &id.to_string());
    let memory = options.template.memory(&key, &tables);
    // All that can be refused is, before a byte of the guest's memory lies anywhere.
    let plan = |each| restore::plan(id, manifest, &planned(each, &memory));
    let plans = options
        .each
        .iter()
        .map(plan)
        .collect::<Result<Vec<_>, _>>()?;
    let begin = Instant::now();
    let mut progress = |progress| events(LazyEvent::Progress(progress));
    let template = MemoryTemplate::of(&key, &tables, &reader, &options.template, &mut progress)?;
    let mut template_us = match template.made {
        true => restore::micros(begin.elapsed()),
        false => 0,
    };
    // Opening the repository is part of the first one's time.
    let mut requested_at = options.restore.requested_at;
    let batch = Batch {
        of: Checkpoint { id, manifest },
        reader: &reader,
        repository: repository_id,
        options,
        state: &state,
        hasher,
        template: &template,
        memory,
        planned_at: begin,
    };
    let mut start = |each: &EachClone, plan| -> Result<(), RestoreError> {
        let restored = batch.start(each, plan, requested_at, events)?;
        requested_at = Instant::now();
        done(CloneReport {
            clone: each.number,
            template_us: std::mem::take(&mut template_us),
            restored,
        });
        Ok(())
    };
    let mut started = 0;
    let mut each = options.each.iter().zip(plans);
    let all = each.try_for_each(|(each, plan)| start(each, plan).inspect(|()| started += 1));
    match (all, started) {
        (Ok(()), _) => Ok(template.release()?),
        (Err(error), 0) => {
            // The first error is reported; anything left is dropped with the next template.
            let _ = template.discard();
            Err(error.into())
        }
        (Err(error), _) => Err(error.into()),
    }
}

/// The state that all clones of one call share.
struct Batch<'b> {
    of: Checkpoint<'b>,
    reader: &'b Reader<'b>,
    repository: String,
    options: &'b ClonesOptions,
    state: &'b [u8],
    hasher: ContentHasher,
    template: &'b MemoryTemplate,
    memory: Vec<CloneMemory>,
    planned_at: Instant,
}

impl Batch<'_> {
    fn start(
        &self,
        each: &EachClone,
        plan: LaunchPlan,
        requested_at: Instant,
        events: LazySink<'_>,
    ) -> Result<RestoreReport, RestoreError> {
        let Checkpoint { id, manifest } = self.of;
        let launch = planned(each, &self.memory);
        // Disks and monitors may have changed meanwhile.
        let plan = match self.planned_at.elapsed() < PLAN_AGE_MAX {
            true => plan,
            false => restore::plan(id, manifest, &launch)?,
        };
        let mut restore = self.options.restore.clone();
        restore.launch = launch;
        let job = Job {
            id,
            manifest,
            reader: self.reader,
            repository: self.repository.clone(),
            options: &restore,
            state: self.state,
            hasher: self.hasher.clone(),
            working_set: None,
            agent: restore::agent(&plan, &restore),
            template: Some(self.template),
        };
        one(&job, &plan, PhaseClock::new(requested_at), events)
    }
}

/// The blocks whose memory clones can share.
fn shared_tables<'m>(record: &VmRecord, manifest: &'m Manifest) -> Vec<&'m BlockTable> {
    let backed = launch::memory_blocks(record);
    let tables = manifest.ram.iter();
    tables
        .filter(|table| backed.contains(&table.name))
        .collect()
}

/// The host's ends of a clone, with the memory that it begins with.
fn planned(each: &EachClone, memory: &[CloneMemory]) -> LaunchOptions {
    LaunchOptions {
        clone: Some(CloneOptions {
            number: each.number,
            memory: memory.to_vec(),
        }),
        ..each.launch.clone()
    }
}

fn one(
    job: &Job<'_>,
    plan: &LaunchPlan,
    mut clock: PhaseClock,
    events: LazySink<'_>,
) -> Result<RestoreReport, RestoreError> {
    let guardian = Guardian::start()?;
    let mut starting = restore::start(plan, &job.options.launch, &guardian)?;
    starting.go();
    let tables = job.manifest.ram.iter();
    let maps = tables
        .map(|table| PageMap::open(job.reader, table))
        .collect::<Result<_, _>>()?;
    clock.phases.repository = clock.lap();
    let launched = starting.wait(restore::START_LIMIT)?;
    clock.phases.qemu = clock.lap();
    let requested_at = clock.requested_at;
    let done = job.run_eagerly(launched, &guardian, maps, clock, events)?;
    Ok(job.report(done, plan, requested_at))
}
