//! The verb *restore*: a new QEMU in exactly the state of a checkpoint.
//!
//! ```text
//!   plan (refusals) ── start QEMU, waiting ── populate ── load device state ── [verify] ── cont
//!                            └────────── any error: this new QEMU is ended ──────┘
//! ```

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Serialize;
use stillframe_qemu::device_state::{self, DeviceStateError};
use stillframe_qemu::launch::{self, LaunchError, LaunchOptions, LaunchPlan, Launched};
use stillframe_qemu::monitor::MonitorError;
use stillframe_qemu::record::VmRecord;
use stillframe_repo::{CheckpointId, Manifest, Reader, RepoError, Repository};
use thiserror::Error;

use crate::ProgressSink;
use crate::capture::block::BlockError;
use crate::capture::device_state::BYTES_MAX;
use crate::checkpoint::DEVICE_STATE;
use crate::populate::eager::{self, PopulateError};
use crate::verify::{Image, VerifyError, VerifyReport};

/// For QEMU to open its monitor.
const START_LIMIT: Duration = Duration::from_secs(30);
/// For QEMU to load a device state; usually milliseconds.
const LOAD_LIMIT: Duration = Duration::from_secs(60);

/// How to restore.
#[derive(Debug, Clone)]
pub struct RestoreOptions {
    /// How the new QEMU is started.
    pub launch: LaunchOptions,
    /// Leave the guest paused, ready to run.
    pub paused: bool,
    /// Compare all of memory with the checkpoint before the guest runs.
    pub verify: bool,
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
    /// From the call to the running guest, in microseconds.
    pub total_us: u64,
    /// What differs from the recorded command line, in words.
    pub changes: Vec<String>,
    /// The comparison, where `--verify` asked for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verify: Option<VerifyReport>,
}

/// Why nothing was restored. No QEMU is left behind.
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

/// Restores `id` into a new QEMU, which goes on by itself when this returns.
pub fn restore(
    repository: &mut Repository,
    id: &CheckpointId,
    options: &RestoreOptions,
    progress: ProgressSink<'_>,
) -> Result<RestoreReport, RestoreError> {
    let begin = Instant::now();
    let hasher = repository.hasher();
    let mut reader = repository.reader(options.lock_wait)?;
    let manifest = reader.manifest(id)?;
    let record = vm_record(id, &manifest)?;
    let state = device_state(id, &manifest, &record, &reader)?;
    let plan = launch::plan(&record, &options.launch)?;
    let mut launched = launch::start(&plan, &options.launch, START_LIMIT)?;
    // Dropped on an error, it ends the new QEMU.
    let (pages, verify) = fill(
        &mut launched,
        &manifest,
        &state,
        &mut reader,
        options,
        &hasher,
        progress,
    )?;
    let (process, _) = launched.keep();
    Ok(RestoreReport {
        checkpoint: id.to_string(),
        vm: manifest.vm,
        pid: process.pid(),
        qmp: options.launch.qmp.clone(),
        running: !options.paused,
        pages,
        total_us: u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX),
        changes: plan.changes,
        verify,
    })
}

fn device_state(
    id: &CheckpointId,
    manifest: &Manifest,
    record: &VmRecord,
    reader: &Reader<'_>,
) -> Result<Vec<u8>, RestoreError> {
    let stream = manifest
        .streams
        .get(DEVICE_STATE)
        .ok_or_else(|| RestoreError::Manifest {
            checkpoint: id.to_string(),
            what: "it has no device state".to_owned(),
        })?;
    let raw = reader.read_stream(stream, BYTES_MAX)?;
    Ok(device_state::wrap(&raw, &record.identity.machine)?)
}

fn fill(
    launched: &mut Launched,
    manifest: &Manifest,
    state: &[u8],
    reader: &mut Reader<'_>,
    options: &RestoreOptions,
    hasher: &stillframe_page::hash::ContentHasher,
    progress: ProgressSink<'_>,
) -> Result<(u64, Option<VerifyReport>), RestoreError> {
    let ram = launched.monitor.ram_blocks()?;
    let blocks = eager::open_blocks(&launched.process, &ram, &manifest.ram)?;
    let pages = eager::populate(&launched.process, &blocks, &manifest.ram, reader, progress)?;
    // Before the device state, because loading it may rightly change memory: KVM writes each vCPU's
    // paravirtual clock anew when QEMU hands it the clock's address.
    let verify = match options.verify {
        true => {
            Some(Image::take(blocks.iter(), hasher)?.compare(&*reader, &manifest.ram, progress)?)
        }
        false => None,
    };
    if let Some(report) = verify.as_ref().filter(|report| report.differing > 0) {
        return Err(RestoreError::Differs {
            differing: report.differing,
            first: report.first.join(", "),
        });
    }
    launch::load_device_state(launched, state, LOAD_LIMIT)?;
    if !options.paused {
        launched.monitor.cont()?;
    }
    Ok((pages, verify))
}
