//! The verb *restore*: a new QEMU in exactly the state of a checkpoint.
//!
//! ```text
//!   plan (refusals) ── start QEMU, waiting ── populate ── [verify] ── load device state ── cont
//!                            └──── any error, or our death: this new QEMU is ended ────┘
//! ```
//!
//! [`lazy`] lets the guest run before its memory is there.

mod lazy;

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use stillframe_qemu::device_state::{self, DeviceStateError};
use stillframe_qemu::launch::{self, LaunchError, LaunchOptions, LaunchPlan, Launched};
use stillframe_qemu::monitor::MonitorError;
use stillframe_qemu::record::VmRecord;
use stillframe_repo::{CheckpointId, Manifest, PageMap, Reader, RepoError, Repository};
use stillframe_sys::process::Process;
use thiserror::Error;

use crate::capture::block::{Block, BlockError};
use crate::capture::device_state::BYTES_MAX;
use crate::checkpoint::DEVICE_STATE;
use crate::guardian::{Guardian, GuardianError, LastDuty};
use crate::populate::eager::{self, PopulateError};
use crate::populate::lazy::record::{Files, RecordError};
use crate::verify::{Image, VerifyError, VerifyReport};
use lazy::Job;
pub use lazy::{LazyEvent, LazyReport, LazySink};

/// For QEMU to open its monitor.
const START_LIMIT: Duration = Duration::from_secs(30);
/// For QEMU to load a device state; usually milliseconds.
const LOAD_LIMIT: Duration = Duration::from_secs(60);

/// How to restore.
#[derive(Debug, Clone)]
pub struct RestoreOptions {
    /// When the user asked for it: times count from here.
    pub asked_at: Instant,
    /// How the new QEMU is started.
    pub launch: LaunchOptions,
    /// Leave the guest paused, ready to run.
    pub paused: bool,
    /// Compare all of memory with the checkpoint before the guest runs.
    pub verify: bool,
    /// Let the guest run before its memory is there.
    pub lazy: bool,
    /// With `lazy`: fill no more than so many bytes a second that the guest does not ask for.
    pub limit_fill: Option<NonZeroU64>,
    /// How long to wait for another process' exclusive lock on the repository.
    pub lock_wait: Duration,
}

/// What was done.
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
    /// Pages written; all others are zero.
    pub pages: u64,
    /// From the call to the running guest with all its memory, in microseconds.
    pub total_us: u64,
    /// What the time until the guest was there went into.
    pub phases_us: RestorePhases,
    /// What differs from the recorded command line, in words.
    pub changes: Vec<String>,
    /// What a lazy restore did besides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lazy: Option<LazyReport>,
    /// The comparison, where `--verify` asked for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verify: Option<VerifyReport>,
}

/// What the time until the guest was there went into, one after the other, in microseconds.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct RestorePhases {
    /// Until QEMU was started: opening the repository, finding the checkpoint, planning.
    pub before: u64,
    /// Reading from the repository while QEMU started.
    pub repository: u64,
    /// What more QEMU took until its monitor answered.
    pub qemu: u64,
    /// Memory: all of it, or, lazily, what cannot wait.
    pub memory: u64,
    /// Loading the device state.
    pub device_state: u64,
    /// Resuming, if so asked.
    pub cont: u64,
}

/// Measures them.
struct PhaseClock {
    phases: RestorePhases,
    asked_at: Instant,
    lap: Instant,
}

impl PhaseClock {
    /// What has passed since the user asked is the first phase.
    fn new(asked_at: Instant) -> PhaseClock {
        let mut clock = PhaseClock {
            phases: RestorePhases::default(),
            asked_at,
            lap: asked_at,
        };
        clock.phases.before = clock.lap();
        clock
    }

    /// What has passed since the last lap.
    fn lap(&mut self) -> u64 {
        let now = Instant::now();
        let lap = now.duration_since(self.lap);
        self.lap = now;
        micros(lap)
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
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
    /// Its memory could not be filled.
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
    /// What a lazy restore leaves for a successor cannot be read or written.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// QEMU may not have faults of the kernel served.
    #[error(
        "the new QEMU may not serve page faults of the kernel, so its memory cannot be filled while it runs: restore without --lazy, or set vm.unprivileged_userfaultfd=1"
    )]
    Unprivileged,
    /// The VM that was to be filled has ended.
    #[error("the VM of {qmp} (process {pid}) has ended: restore it again")]
    Ended {
        /// Its monitor.
        qmp: PathBuf,
        /// Its process.
        pid: i32,
    },
    /// The VM has ended while its memory was filled.
    #[error("the VM (process {pid}) ended before its memory was complete")]
    EndedMeanwhile {
        /// Its process.
        pid: i32,
    },
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
    /// The manifest does not hold what this version needs.
    #[error("checkpoint {checkpoint} cannot be restored by this version: {what}")]
    Manifest {
        /// The checkpoint.
        checkpoint: String,
        /// What is missing.
        what: String,
    },
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

/// The VM's record inside a manifest.
pub fn vm_record(id: &CheckpointId, manifest: &Manifest) -> Result<VmRecord, RestoreError> {
    serde_json::from_value(manifest.vm_record.clone()).map_err(|error| RestoreError::Manifest {
        checkpoint: id.to_string(),
        what: error.to_string(),
    })
}

/// What [`restore`] would start.
pub fn plan(
    id: &CheckpointId,
    manifest: &Manifest,
    options: &LaunchOptions,
) -> Result<LaunchPlan, RestoreError> {
    Ok(launch::plan(&vm_record(id, manifest)?, options)?)
}

/// Restores a checkpoint into a new QEMU as planned. It goes on by itself when this returns.
pub fn restore(
    repository: &mut Repository,
    (id, manifest): (&CheckpointId, &Manifest),
    plan: &LaunchPlan,
    options: &RestoreOptions,
    events: LazySink<'_>,
) -> Result<RestoreReport, RestoreError> {
    let record = vm_record(id, manifest)?;
    let guardian = Guardian::start()?;
    let mut clock = PhaseClock::new(options.asked_at);
    // From here on any error ends the new QEMU.
    let mut starting = launch::start(plan, &options.launch)?;
    guardian.last_duty(LastDuty::End {
        pid: starting.process.pid(),
        start_time: starting.process.start_time(),
    })?;
    starting.go();
    // What can be read while QEMU starts.
    let hasher = repository.hasher();
    let repository_id = repository.id().to_string();
    // A hint: `check` tells of one that cannot be read.
    let working_set = repository.working_set(id).unwrap_or_default();
    let reader = repository.reader(options.lock_wait)?;
    let state = device_state(id, manifest, &record, &reader)?;
    let tables = manifest.ram.iter();
    let maps = tables
        .map(|table| PageMap::open(&reader, table))
        .collect::<Result<_, _>>()?;
    clock.phases.repository = clock.lap();
    let launched = starting.wait(START_LIMIT)?;
    clock.phases.qemu = clock.lap();
    let job = Job {
        id,
        manifest,
        reader: &reader,
        repository: repository_id,
        options,
        state: &state,
        hasher,
        working_set,
    };
    let done = match options.lazy {
        true => job.run(launched, guardian, maps, clock, events)?,
        false => job.run_eagerly(launched, &guardian, maps, clock, events)?,
    };
    Ok(RestoreReport {
        checkpoint: id.to_string(),
        vm: manifest.vm.clone(),
        pid: done.process.pid(),
        qmp: options.launch.qmp.clone(),
        running: !options.paused,
        pages: done.pages,
        total_us: micros(options.asked_at.elapsed()),
        phases_us: done.phases,
        changes: plan.changes.clone(),
        lazy: done.lazy,
        verify: done.verify,
    })
}

/// Goes on with the lazy restore of the VM with this monitor, whose process was killed. Returns when the
/// VM's memory is complete.
pub fn resume(
    repository: &mut Repository,
    qmp: &Path,
    lock_wait: Duration,
    limit_fill: Option<NonZeroU64>,
    events: LazySink<'_>,
) -> Result<RestoreReport, RestoreError> {
    let clock = PhaseClock::new(Instant::now());
    let files = Files::beside(qmp);
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
    let begin = clock.asked_at;
    let done = lazy::resume(record, files, qmp, &reader, limit_fill, clock, events)?;
    Ok(RestoreReport {
        checkpoint,
        vm,
        pid: done.process.pid(),
        qmp: qmp.to_owned(),
        running,
        pages: done.pages,
        total_us: micros(begin.elapsed()),
        phases_us: done.phases,
        changes: Vec::new(),
        lazy: done.lazy,
        verify: None,
    })
}

/// What became of a VM.
struct Done {
    process: Process,
    /// Pages with content that were filled.
    pages: u64,
    phases: RestorePhases,
    lazy: Option<LazyReport>,
    verify: Option<VerifyReport>,
}

/// The device state of a checkpoint, as a stream that QEMU loads.
pub(crate) fn device_state(
    id: &CheckpointId,
    manifest: &Manifest,
    record: &VmRecord,
    reader: &Reader<'_>,
) -> Result<Vec<u8>, RestoreError> {
    let raw = saved_device_state(id, manifest, reader)?;
    Ok(device_state::wrap(&raw, &record.identity.machine)?)
}

/// The names of the sections that the device state of a checkpoint consists of.
pub(crate) fn device_sections(
    id: &CheckpointId,
    manifest: &Manifest,
    reader: &Reader<'_>,
) -> Result<Vec<String>, RestoreError> {
    let raw = saved_device_state(id, manifest, reader)?;
    Ok(device_state::validate(&raw)?.sections)
}

fn saved_device_state(
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

impl Job<'_> {
    /// Fills all memory before the guest runs.
    fn run_eagerly(
        &self,
        mut launched: Launched,
        guardian: &Guardian,
        maps: Vec<PageMap<'_>>,
        mut clock: PhaseClock,
        events: LazySink<'_>,
    ) -> Result<Done, RestoreError> {
        let ram = launched.monitor.ram_blocks()?;
        let blocks = eager::open_blocks(&launched.process, &ram, &self.manifest.ram)?;
        let blocks: Vec<&Block> = blocks.iter().collect();
        let progress = &mut |progress| events(LazyEvent::Progress(progress));
        let pages = eager::populate(&launched.process, &blocks, maps, progress)?;
        // Before the device state, because loading it may rightly change memory: KVM writes each vCPU's
        // paravirtual clock anew when QEMU hands it the clock's address.
        let verify = match self.options.verify {
            true => Some(self.verify(&blocks, events)?),
            false => None,
        };
        clock.phases.memory = clock.lap();
        launch::load_device_state(&mut launched, self.state, LOAD_LIMIT)?;
        clock.phases.device_state = clock.lap();
        // Before it runs: a VM that has run is nobody's to end.
        guardian.last_duty(LastDuty::Nothing)?;
        if !self.options.paused {
            launched.monitor.cont()?;
        }
        clock.phases.cont = clock.lap();
        let (process, _) = launched.keep();
        Ok(Done {
            process,
            pages,
            phases: clock.phases,
            lazy: None,
            verify,
        })
    }

    /// Compares all of memory with the checkpoint; an error if it differs.
    fn verify(
        &self,
        blocks: &[&Block],
        events: LazySink<'_>,
    ) -> Result<VerifyReport, RestoreError> {
        let image = Image::take(blocks.iter().copied(), &self.hasher)?;
        let report = image.compare(self.reader, &self.manifest.ram, &mut |progress| {
            events(LazyEvent::Progress(progress));
        })?;
        match report.differing {
            0 => Ok(report),
            differing => Err(RestoreError::Differs {
                differing,
                first: report.first.join(", "),
            }),
        }
    }
}
