//! The verb *clone*: several new QEMUs, all in the state of one checkpoint, that share its memory as long as
//! they do not write it.
//!
//! ```text
//!   repository ── templates (files, made once) ──┬── QEMU 1: private view, overlays ── device state ── cont
//!                                                ├── QEMU 2: ...
//! ```

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Serialize;
use stillframe_page::hash::ContentHasher;
use stillframe_qemu::launch::{
    self, CloneMemory, CloneOptions, LaunchOptions, LaunchPlan, NewImage,
};
use stillframe_qemu::record::VmRecord;
use stillframe_repo::{BlockTable, CheckpointId, DiskTable, Manifest, PageMap, Reader, Repository};
use thiserror::Error;

use crate::ProgressSink;
use crate::guardian::Guardian;
use crate::restore::{
    self, Checkpoint, Job, LazyEvent, LazySink, PhaseClock, RestoreError, RestoreOptions,
    RestoreReport,
};
use crate::template::{DiskTemplate, KeptTemplate, MemoryTemplate, TemplateError, TemplateOptions};

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
    /// Where the images of the checkpoint's disks are kept; none if the clones have the disks that were recorded.
    pub disks: Option<PathBuf>,
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
    /// The same of the images of the disks.
    pub disks_us: u64,
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
    repository
        .require_images(manifest)
        .map_err(RestoreError::from)?;
    let reader = repository
        .reader(options.restore.lock_wait)
        .map_err(RestoreError::from)?;
    let state = restore::device_state(id, manifest, &record, &reader)?;
    let key = KeptTemplate::name_of(&repository_id, &id.to_string());
    let shared = Shared {
        memory: options.template.memory(&key, &tables),
        images: images(id, manifest, &key, options)?,
    };
    // All that can be refused is, before a byte of the guest's lies anywhere.
    let plan = |each| restore::plan(id, manifest, &shared.launch(each));
    let plans = options.each.iter().map(plan);
    let plans = plans.collect::<Result<Vec<_>, _>>()?;
    let planned_at = Instant::now();
    let mut progress = |progress| events(LazyEvent::Progress(progress));
    let contents = (&*tables, &*manifest.disks);
    let mut templates = Templates::of(&key, contents, (&reader, options), &mut progress)?;
    // Opening the repository is part of the first one's time.
    let mut requested_at = options.restore.requested_at;
    let batch = Batch {
        of: Checkpoint { id, manifest },
        reader: &reader,
        repository: repository_id,
        options,
        state: &state,
        hasher,
        template: &templates.memory,
        shared,
        planned_at,
    };
    let mut start = |each: &EachClone, plan| -> Result<(), RestoreError> {
        let restored = batch.start(each, plan, requested_at, events)?;
        requested_at = Instant::now();
        let [template_us, disks_us] = std::mem::take(&mut templates.making_us);
        done(CloneReport {
            clone: each.number,
            template_us,
            disks_us,
            restored,
        });
        Ok(())
    };
    let mut started = 0;
    let mut each = options.each.iter().zip(plans);
    let all = each.try_for_each(|(each, plan)| start(each, plan).inspect(|()| started += 1));
    match (all, started) {
        (Ok(()), _) => Ok(templates.memory.release()?),
        (Err(error), 0) => {
            templates.discard();
            Err(error.into())
        }
        (Err(error), _) => Err(error.into()),
    }
}

/// The images of the disks that the clones are to have.
fn images(
    id: &CheckpointId,
    manifest: &Manifest,
    key: &str,
    options: &ClonesOptions,
) -> Result<Vec<NewImage>, RestoreError> {
    match &options.disks {
        None => Ok(Vec::new()),
        Some(_) if manifest.disks.is_empty() => Err(RestoreError::NoDisks {
            checkpoint: id.to_string(),
        }),
        Some(folder) => Ok(DiskTemplate::images(folder, key, &manifest.disks)),
    }
}

/// What clones share, as files.
struct Templates {
    memory: MemoryTemplate,
    disks: Option<DiskTemplate>,
    /// How long it took to make them, in microseconds; 0 where they were there.
    making_us: [u64; 2],
}

impl Templates {
    fn of(
        key: &str,
        (blocks, disks): (&[&BlockTable], &[DiskTable]),
        (reader, options): (&Reader<'_>, &ClonesOptions),
        progress: ProgressSink<'_>,
    ) -> Result<Templates, TemplateError> {
        let time = |begin: Instant, is_new| match is_new {
            true => restore::micros(begin.elapsed()),
            false => 0,
        };
        let begin = Instant::now();
        let disks = options.disks.as_deref().map(|folder| {
            let from = (reader, &options.template);
            DiskTemplate::of(folder, key, disks, from, progress)
        });
        let disks = disks.transpose()?;
        let disks_us = time(begin, disks.as_ref().is_some_and(DiskTemplate::is_new));
        let begin = Instant::now();
        let memory = MemoryTemplate::of(key, blocks, reader, &options.template, progress)?;
        let making_us = [time(begin, memory.is_new()), disks_us];
        Ok(Templates {
            memory,
            disks,
            making_us,
        })
    }

    /// No clone was made of them. Anything left is dropped with the next template.
    fn discard(self) {
        let _ = self.memory.discard();
        let _ = self.disks.map(DiskTemplate::discard);
    }
}

/// What all clones begin with.
struct Shared {
    memory: Vec<CloneMemory>,
    images: Vec<NewImage>,
}

impl Shared {
    /// The host's ends of a clone, with what it begins with.
    fn launch(&self, each: &EachClone) -> LaunchOptions {
        LaunchOptions {
            clone: Some(CloneOptions {
                number: each.number,
                memory: self.memory.clone(),
            }),
            images: self.images.clone(),
            ..each.launch.clone()
        }
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
    shared: Shared,
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
        let launch = self.shared.launch(each);
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
            agents: restore::agents(&plan, &restore),
            lazy_disks: None,
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
