//! The verb *restore*: a new QEMU in exactly the state of a checkpoint.
//!
//! ```text
//!   plan (refusals) ── start QEMU, waiting ── populate ── [verify] ── load device state ── cont
//!                            └──── any error, or our death: this new QEMU is ended ────┘
//! ```
//!
//! [`lazy`] lets the guest run before its memory is there.

mod disk_streams;
mod disks;
mod eager;
mod events;
pub mod filling_record;
mod job;
mod lazy;
mod supervisor;
#[cfg(test)]
mod tests;

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use stillframe_fault::{self as fault, Point};
use stillframe_qemu::device_state::{self, DeviceStateError};
use stillframe_qemu::guest_agent::AgentChannels;
use stillframe_qemu::launch::{self, LaunchError, LaunchOptions, LaunchPlan, Starting};
use stillframe_qemu::monitor::MonitorError;
use stillframe_qemu::record::VmRecord;
use stillframe_repo::{CheckpointId, Lease, Manifest, PageMap, Reader, RepoError, Repository};
use stillframe_sys::affinity;
use stillframe_sys::process::Process;
use thiserror::Error;

use crate::capture::device_state::BYTES_MAX;
use crate::checkpoint::DEVICE_STATE;
use crate::disks::fill::FillError;
use crate::disks::images::ImageError;
use crate::guardian::{Guardian, GuardianError, OnDisconnect};
use crate::memory::block::BlockError;
use crate::populate::eager::PopulateError;
use crate::populate::lazy::prefetch::{self, Prefetched};
use crate::populate::lazy::supervision::ReleaseError;
use crate::post_restore::ClockReport;
use crate::restore::filling_record::{Files, FillingRecord, RecordError};
use crate::runtime;
use crate::verify::{VerifyError, VerifyReport};
use disks::NewDisks;
pub use disks::{RestoredDisk, empty_images, lazy_images, new_images};
pub use events::{LazyEvent, LazyReport, LazySink};
pub(crate) use job::{Job, PhaseClock, micros};
use lazy::Unfinished;

/// Time for QEMU to open its monitor.
pub(crate) const START_LIMIT: Duration = Duration::from_secs(30);
/// Time for QEMU to load a device state; usually milliseconds.
pub(crate) const LOAD_LIMIT: Duration = Duration::from_secs(60);

/// How to restore.
#[derive(Debug, Clone)]
pub struct RestoreOptions {
    /// When the user gave the command: times count from here.
    pub requested_at: Instant,
    /// How the new QEMU is started.
    pub launch: LaunchOptions,
    /// Leave new images empty: the guest finds zeros on its disks, and its memory as it was.
    pub empty_disks: bool,
    /// Leave the guest paused, ready to run.
    pub paused: bool,
    /// Leave the guest's clock as it was at the checkpoint.
    pub keep_clock: bool,
    /// Compare all of memory with the checkpoint before the guest runs.
    pub verify: bool,
    /// Let the guest run before its memory is there.
    pub lazy: bool,
    /// With `lazy`: rate limit of the background fill, in bytes per second.
    pub limit_fill: Option<NonZeroU64>,
    /// How long to wait for another process' exclusive lock on the repository.
    pub lock_wait: Duration,
}

impl RestoreOptions {
    /// Whether memory is read while QEMU starts: not where that would take the processor that QEMU
    /// starts on.
    fn reads_ahead(&self) -> bool {
        self.lazy && self.limit_fill.is_none() && affinity::of_this_thread().len() > 1
    }
}

/// The report on a restore.
#[derive(Debug, Clone, Serialize)]
pub struct RestoreReport {
    /// The checkpoint.
    pub checkpoint: String,
    /// The VM's name.
    pub vm: String,
    /// The new QEMU.
    pub pid: i32,
    /// Its monitor.
    pub qmp: PathBuf,
    /// Whether the guest runs (or is ready, paused).
    pub running: bool,
    /// Whether it is suspended to RAM, as it was at the checkpoint.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub suspended: bool,
    /// Pages written; all others are zero.
    pub pages: u64,
    /// The disks that were written into new images.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<RestoredDisk>,
    /// Time from the call to the running guest with all its memory, in microseconds.
    pub total_us: u64,
    /// The phases of the time until the guest was there.
    pub phases_us: RestorePhases,
    /// The differences from the recorded command line, in words.
    pub changes: Vec<String>,
    /// The further work of a lazy restore.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lazy: Option<LazyReport>,
    /// The result of setting the guest's clock, if the VM has a channel for an agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clock: Option<ClockReport>,
    /// The comparison, with `--verify`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verify: Option<VerifyReport>,
}

/// The phases of the time until the guest was there, one after the other, in microseconds.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct RestorePhases {
    /// Time until QEMU was started: opening the repository, finding the checkpoint, planning.
    pub before: u64,
    /// Reading from the repository while QEMU started.
    pub repository: u64,
    /// The further time that QEMU took until its monitor answered.
    pub qemu: u64,
    /// Writing the content of disks into new images.
    pub disks: u64,
    /// Memory: all of it, or, lazily, what cannot wait.
    pub memory: u64,
    /// Loading the device state.
    pub device_state: u64,
    /// Resuming, unless the guest stays paused.
    pub cont: u64,
}

/// Why nothing was restored. Unless it says otherwise, no QEMU is left behind.
#[derive(Debug, Error)]
pub enum RestoreError {
    /// The repository failed.
    #[error(transparent)]
    Repo(#[from] RepoError),
    /// QEMU could not be started or did not take the device state.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// Its memory could not be populated.
    #[error(transparent)]
    Populate(#[from] PopulateError),
    /// Its memory could not be read.
    #[error("cannot read the new VM's memory")]
    Block(#[from] BlockError),
    /// QEMU failed a command.
    #[error("the new QEMU failed a command")]
    Monitor(#[from] MonitorError),
    /// No guardian.
    #[error(transparent)]
    Guardian(#[from] GuardianError),
    /// The VM, whose memory is complete, keeps something of this process.
    #[error(transparent)]
    Release(#[from] ReleaseError),
    /// The record that a lazy restore leaves for a successor cannot be read or written.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The kernel's faults in QEMU cannot be handled: QEMU lacks the right.
    #[error(
        "the new QEMU may not serve page faults of the kernel, so its memory cannot be filled while it runs: restore without --lazy, or set vm.unprivileged_userfaultfd=1"
    )]
    Unprivileged,
    /// The VM whose lazy restore was to continue has ended.
    #[error("the VM of {qmp} (process {pid}) has ended: restore it again")]
    Ended {
        /// Its monitor.
        qmp: PathBuf,
        /// Its process.
        pid: i32,
    },
    /// The VM has ended while its memory was populated.
    #[error("the VM (process {pid}) ended before its memory was complete")]
    EndedMeanwhile {
        /// Its process.
        pid: i32,
    },
    /// The same, but nothing of its disks is lost.
    #[error(
        "the VM (process {pid}) has ended before all of it was restored; its disks are complete now, with what it wrote: {images}"
    )]
    EndedComplete {
        /// Its process.
        pid: i32,
        /// The images.
        images: String,
    },
    /// The VM has ended, and an image lacks content.
    #[error(
        "the VM has ended, and its disk {image} is not complete: {why}. Mend that, and run `restore --resume` with its --qmp; until then the image is of no use"
    )]
    Incomplete {
        /// The image.
        image: PathBuf,
        /// Why not.
        why: String,
    },
    /// QEMU cannot reach the content of disks.
    #[error(
        "cannot make the socket {path}, through which QEMU reads what its disks lack: name a directory with a shorter path, or restore with --disks new=DIR"
    )]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// No thread.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// Another repository than that of the checkpoint.
    #[error("the VM of {qmp} is filled from repository {wanted}, not from this one ({found})")]
    OtherRepository {
        /// Its monitor.
        qmp: PathBuf,
        /// The repository's id.
        wanted: String,
        /// The id of the one given.
        found: String,
    },
    /// The stored device state is none.
    #[error("the checkpoint's device state cannot be loaded")]
    DeviceState(#[from] DeviceStateError),
    /// A disk has no new image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A new image could not be written.
    #[error(transparent)]
    Fill(#[from] FillError),
    /// The checkpoint has no content of disks.
    #[error("checkpoint {checkpoint} does not hold the content of the VM's disks")]
    NoDisks {
        /// The checkpoint.
        checkpoint: String,
    },
    /// The manifest lacks what this version needs.
    #[error("checkpoint {checkpoint} cannot be restored by this version: {what}")]
    Manifest {
        /// The checkpoint.
        checkpoint: String,
        /// The missing thing.
        what: String,
    },
    /// A fault that a test injected.
    #[error("a step of the restore failed")]
    Injected(#[from] std::io::Error),
    /// The comparison could not be made.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// The comparison found differences.
    #[error(
        "{differing} pages of the restored memory differ from the checkpoint (first: {first}); the new VM was ended before it ran"
    )]
    Differs {
        /// How many.
        differing: u64,
        /// The first of them.
        first: String,
    },
}

/// A checkpoint of the repository.
#[derive(Debug, Clone, Copy)]
pub struct Checkpoint<'c> {
    /// Its id.
    pub id: &'c CheckpointId,
    /// Its manifest.
    pub manifest: &'c Manifest,
}

/// The VM's record inside a manifest.
pub fn vm_record(id: &CheckpointId, manifest: &Manifest) -> Result<VmRecord, RestoreError> {
    serde_json::from_value(manifest.vm_record.clone()).map_err(|error| RestoreError::Manifest {
        checkpoint: id.to_string(),
        what: error.to_string(),
    })
}

/// The plan of a [`restore`], which starts nothing.
pub fn plan(
    id: &CheckpointId,
    manifest: &Manifest,
    options: &LaunchOptions,
) -> Result<LaunchPlan, RestoreError> {
    Ok(launch::plan(&vm_record(id, manifest)?, options)?)
}

/// Restores a checkpoint into a new QEMU as planned. The VM runs independently when this returns.
pub fn restore(
    repository: &mut Repository,
    checkpoint: Checkpoint<'_>,
    plan: &LaunchPlan,
    options: &RestoreOptions,
    events: LazySink<'_>,
) -> Result<RestoreReport, RestoreError> {
    let Checkpoint { id, manifest } = checkpoint;
    let record = vm_record(id, manifest)?;
    if options.lazy {
        // Before there are images: those of a VM that has ended may have had the same names, and be gone.
        Files::of(&options.launch.qmp)?.expect_ended()?;
    }
    repository.require_images(manifest)?;
    let guardian = Guardian::start()?;
    let mut disks = NewDisks::make(&record, manifest, options)?;
    let mut clock = PhaseClock::new(options.requested_at);
    let mut starting = start(plan, &options.launch, &guardian)?;
    starting.go();
    // Reads that can be done while QEMU starts.
    let hasher = repository.hasher();
    let repository_id = repository.id().to_string();
    // A hint: `check` reports a working set that cannot be read.
    let working_set = repository.working_set(id).unwrap_or_default();
    let reader = repository.reader(options.lock_wait)?;
    let state = device_state(id, manifest, &record, &reader)?;
    let served = disks.open(&id.to_string(), &reader)?;
    clock.phases.repository = clock.lap();
    let job = Job {
        id,
        manifest,
        reader: &reader,
        repository: repository_id,
        options,
        state: &state,
        hasher,
        working_set,
        agents: agents(plan, options),
        lazy_disks: served.as_ref(),
        template: None,
    };
    thread::scope(|scope| {
        // QEMU reads from it as soon as it opens its images.
        let serving = served.as_ref().map(|disks| disks.serve(scope));
        let _serving = serving.transpose().map_err(RestoreError::Thread)?;
        restore_into(
            starting,
            guardian,
            (&job, plan, &record),
            disks,
            clock,
            events,
        )
    })
}

/// Restores into a QEMU that is starting.
fn restore_into(
    starting: Starting,
    guardian: Guardian,
    (job, plan, record): (&Job<'_>, &LaunchPlan, &VmRecord),
    new_disks: NewDisks,
    mut clock: PhaseClock,
    events: LazySink<'_>,
) -> Result<RestoreReport, RestoreError> {
    let (options, reader) = (job.options, job.reader);
    let tables = job.manifest.ram.iter();
    let maps = tables.map(|table| PageMap::open(reader, table));
    let maps = maps.collect::<Result<Vec<_>, _>>()?;
    clock.phases.repository += clock.lap();
    let wait = || starting.wait(START_LIMIT);
    let (launched, prefetched) = match options.reads_ahead() {
        true => {
            let known = job::known_pages(job.working_set.as_ref());
            prefetch::while_waiting(wait, &maps, known)
        }
        false => (wait(), Prefetched::default()),
    };
    let mut launched = launched?;
    let lease = match options.lazy {
        true => lease(reader, job.id, &launched.process, events)?,
        false => None,
    };
    clock.phases.qemu = clock.lap();
    let mut disks = new_disks.fill(record, &mut launched, reader, events)?;
    clock.phases.disks = clock.lap();
    let process = launched.process.clone();
    let done = match options.lazy {
        true => job.run(launched, guardian, maps, prefetched, clock, events),
        false => job.run_eagerly(launched, &guardian, maps, clock, events),
    };
    disks.extend(new_disks.restored(job.lazy_disks));
    // A VM that is paused with a part of its memory needs them. One that has ended has written to them.
    let is_needed = matches!(
        done,
        Ok(_) | Err(RestoreError::EndedComplete { .. } | RestoreError::Incomplete { .. })
    );
    if is_needed || process.is_alive() {
        new_disks.keep();
    }
    let done = done?;
    lease.map_or(Ok(()), Lease::end)?;
    Ok(RestoreReport {
        disks,
        ..job.report(done, plan, options.requested_at)
    })
}

/// Keeps the checkpoint from being removed while a VM has only part of it; warns where that cannot be.
fn lease(
    reader: &Reader<'_>,
    id: &CheckpointId,
    process: &Process,
    events: LazySink<'_>,
) -> Result<Option<Lease>, RestoreError> {
    // Pids are positive.
    let lease = reader.lease(id, process.pid().unsigned_abs(), process.start_time());
    match lease {
        Ok(lease) => Ok(Some(lease)),
        Err(error @ (RepoError::ReadOnly { .. } | RepoError::NoSpace { .. })) => {
            let reason = error.to_string();
            events(LazyEvent::NotLeased { reason });
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// Where to set the guest's clock, if it is to be set.
pub(crate) fn agents(plan: &LaunchPlan, options: &RestoreOptions) -> AgentChannels {
    match options.paused || options.keep_clock {
        true => AgentChannels::default(),
        false => plan.guest_agents(),
    }
}

/// Starts the new QEMU, as far as its process; from here on any error ends it, and so does our end.
pub(crate) fn start(
    plan: &LaunchPlan,
    options: &LaunchOptions,
    guardian: &Guardian,
) -> Result<Starting, RestoreError> {
    if options.log.starts_with(runtime::directory()) {
        runtime::open().map_err(RecordError::from)?;
    }
    let starting = launch::start(plan, options)?;
    guardian.on_disconnect(OnDisconnect::End {
        pid: starting.process.pid(),
        start_time: starting.process.start_time(),
    })?;
    fault::at(Point::RestoreLaunched)?;
    Ok(starting)
}

/// Takes up the lease of a VM whose restore was killed. The VM waits, so the restore continues even without a lease.
fn lease_again(reader: &Reader<'_>, record: &FillingRecord, events: LazySink<'_>) -> Option<Lease> {
    let lease = reader.lease(
        &record.checkpoint,
        record.pid.unsigned_abs(),
        record.start_time,
    );
    lease
        .inspect_err(|error| {
            let reason = error.to_string();
            events(LazyEvent::NotLeased { reason });
        })
        .ok()
}

/// Continues with the lazy restore of the VM with this monitor, whose process was killed. Returns when the
/// VM's memory is complete.
pub fn resume(
    repository: &mut Repository,
    qmp: &Path,
    lock_wait: Duration,
    limit_fill: Option<NonZeroU64>,
    events: LazySink<'_>,
) -> Result<RestoreReport, RestoreError> {
    let clock = PhaseClock::new(Instant::now());
    let files = Files::of(qmp)?;
    let record = files.read()?;
    let found = repository.id().to_string();
    if record.repository != found {
        return Err(RestoreError::OtherRepository {
            qmp: qmp.to_owned(),
            wanted: record.repository,
            found,
        });
    }
    let reader = repository.reader(lock_wait)?;
    let (checkpoint, vm) = (record.checkpoint.to_string(), record.vm.clone());
    let running = record.running;
    let begin = clock.requested_at;
    let lease = lease_again(&reader, &record, events);
    let unfinished = Unfinished {
        record,
        files,
        qmp,
        limit_fill,
    };
    let done = lazy::resume(unfinished, &reader, clock, events)?;
    lease.map_or(Ok(()), Lease::end)?;
    Ok(RestoreReport {
        checkpoint,
        vm,
        pid: done.process.pid(),
        qmp: qmp.to_owned(),
        running: running && !done.suspended,
        suspended: done.suspended,
        pages: done.pages,
        disks: Vec::new(),
        total_us: micros(begin.elapsed()),
        phases_us: done.phases,
        changes: Vec::new(),
        lazy: done.lazy,
        clock: done.clock,
        verify: None,
    })
}

/// The device state of a checkpoint, as a stream that QEMU loads.
pub(crate) fn device_state(
    id: &CheckpointId,
    manifest: &Manifest,
    record: &VmRecord,
    reader: &Reader<'_>,
) -> Result<Vec<u8>, RestoreError> {
    let raw = raw_device_state(id, manifest, reader)?;
    Ok(device_state::wrap(&raw, &record.identity.machine)?)
}

/// The names of the sections that the device state of a checkpoint consists of.
pub(crate) fn device_sections(
    id: &CheckpointId,
    manifest: &Manifest,
    reader: &Reader<'_>,
) -> Result<Vec<String>, RestoreError> {
    let raw = raw_device_state(id, manifest, reader)?;
    Ok(device_state::validate(&raw)?.sections)
}

/// The device state as QEMU saved it.
pub(crate) fn raw_device_state(
    id: &CheckpointId,
    manifest: &Manifest,
    reader: &Reader<'_>,
) -> Result<Vec<u8>, RestoreError> {
    let stream = manifest
        .streams
        .get(DEVICE_STATE)
        .ok_or_else(|| RestoreError::Manifest {
            checkpoint: id.to_string(),
            what: "it has no device state".to_owned(),
        })?;
    Ok(reader.read_stream(stream, BYTES_MAX)?)
}
