//! Errors that keep a VM from being rewound.

use stillframe_qemu::device_state::DeviceStateError;
use stillframe_qemu::launch::LaunchError;
use stillframe_qemu::monitor::MonitorError;
use stillframe_qemu::qmp::QmpError;
use stillframe_qemu::reload::ReloadError;
use stillframe_repo::RepoError;
use thiserror::Error;

use super::disks_error::RewindDisksError;
use crate::capture::device_state::StateError;
use crate::capture::devices::DevicesError;
use crate::capture::paused_vm::{PausedError, UnblockError};
use crate::disks::DisksError;
use crate::guardian::GuardianError;
use crate::inhibitor::InhibitorError;
use crate::memory::block::BlockError;
use crate::populate::eager::PopulateError;
use crate::restore::RestoreError;
use crate::tracking::error::TrackerError;
use crate::verify::VerifyError;

/// Why the VM was not rewound. Unless it says otherwise, it continues as if nothing had been.
#[derive(Debug, Error)]
pub enum RewindError {
    /// The checkpoint belongs to another VM.
    #[error(
        "checkpoint {checkpoint} is one of VM {found}, this is {vm}: name another checkpoint, or, if it is the same VM under another name, add --of-vm {found}"
    )]
    OtherVm {
        /// The checkpoint.
        checkpoint: String,
        /// Its VM.
        found: String,
        /// This one.
        vm: String,
    },
    /// Another machine.
    #[error(
        "the VM is not the one of the checkpoint: {what} is {now} and was {then}; `stillframe restore` starts one as it was"
    )]
    OtherMachine {
        /// The property that differs.
        what: &'static str,
        /// Its current value.
        now: String,
        /// Its value at the checkpoint.
        then: String,
    },
    /// Other devices.
    #[error(
        "the VM has not the devices that it had at the checkpoint ({missing} is missing); `stillframe restore` starts one that has"
    )]
    OtherDevices {
        /// The first of them.
        missing: String,
    },
    /// The VM has more devices.
    #[error(
        "the VM has a device that it had not at the checkpoint ({added}), of which the guest would know nothing; `stillframe restore` starts one without it"
    )]
    MoreDevices {
        /// The first of them.
        added: String,
    },
    /// QEMU would overwrite memory.
    #[error(
        "QEMU copies {name} into the guest's memory whenever its state is loaded, over what the guest has there: `stillframe restore` the checkpoint instead"
    )]
    RomInRam {
        /// The data that is copied.
        name: String,
    },
    /// QEMU has ended meanwhile.
    #[error(
        "the VM (process {pid}) ended while it was being rewound; the checkpoint is as it was: `stillframe restore` starts it in a new QEMU"
    )]
    VmGone {
        /// Its process.
        pid: i32,
    },
    /// A VM that cannot be resumed.
    #[error(
        "the VM is {status} and cannot be resumed like this: reset it first (`system_reset` on its monitor), then rewind it"
    )]
    Halted {
        /// QEMU's word for its state.
        status: String,
    },
    /// More pages differ than fit.
    #[error(
        "more than {limit_bytes} bytes of memory and disks differ from the checkpoint: allow more with --copy-buffer, or `stillframe restore` it"
    )]
    TooMuch {
        /// The limit.
        limit_bytes: u64,
    },
    /// A disk.
    #[error(transparent)]
    Disk(#[from] LaunchError),
    /// The disks cannot go back.
    #[error(transparent)]
    Disks(#[from] RewindDisksError),
    /// The disks cannot be read.
    #[error(transparent)]
    ReadDisks(DisksError),
    /// The pause was too long.
    #[error(
        "the pause overran its limit of {limit_ms} ms before anything was changed, and the watchdog resumed the VM: allow longer with --pause-limit"
    )]
    Overrun {
        /// The limit.
        limit_ms: u128,
    },
    /// Another client resumed the VM while its memory was exchanged.
    #[error(
        "the VM was resumed by another client while it was being rewound: its memory is undefined; it is paused, rewind it again"
    )]
    ResumedByOthers,
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Repo(#[from] RepoError),
    /// The checkpoint is malformed.
    #[error(transparent)]
    Checkpoint(#[from] RestoreError),
    /// Its memory does not match.
    #[error(transparent)]
    Populate(#[from] PopulateError),
    /// Memory cannot be read or written.
    #[error("cannot reach the VM's memory")]
    Block(#[from] BlockError),
    /// Tracking failed.
    #[error("cannot track the VM's memory")]
    Tracker(#[from] TrackerError),
    /// QEMU failed a command.
    #[error("QEMU failed a command")]
    Monitor(#[from] MonitorError),
    /// Its devices cannot be described.
    #[error(transparent)]
    Devices(#[from] DevicesError),
    /// The connection failed.
    #[error("the connection to QEMU failed")]
    Qmp(#[from] QmpError),
    /// No device state.
    #[error(transparent)]
    State(#[from] StateError),
    /// A device state is none.
    #[error("a device state cannot be used")]
    DeviceState(#[from] DeviceStateError),
    /// `cont` could not be blocked or unblocked.
    #[error(transparent)]
    Inhibitor(#[from] InhibitorError),
    /// No guardian.
    #[error(transparent)]
    Guardian(#[from] GuardianError),
    /// A fault that a test injected.
    #[error("a step of the rewind failed")]
    Injected(#[from] std::io::Error),
    /// The comparison could not be made.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// The comparison found differences.
    #[error(
        "{differing} pages differ from the checkpoint after they were written (first: {first})"
    )]
    Differs {
        /// How many.
        differing: u64,
        /// The first of them.
        first: String,
    },
    /// The device state was not taken.
    #[error(transparent)]
    Reload(#[from] ReloadError),
    /// Something failed in the middle, and so did the way back.
    #[error(
        "{what}; and what the VM was before could not be put back ({why}): it is paused, do not resume it: rewind it again, or restore the checkpoint"
    )]
    Stuck {
        /// The first failure.
        what: String,
        /// The failure that followed.
        why: String,
    },
}

impl From<PausedError> for RewindError {
    fn from(error: PausedError) -> RewindError {
        match error {
            PausedError::Guardian(error) => error.into(),
            PausedError::Monitor(error) => error.into(),
            PausedError::Overrun { limit_ms } => RewindError::Overrun { limit_ms },
        }
    }
}

impl From<UnblockError> for RewindError {
    fn from(error: UnblockError) -> RewindError {
        match error {
            UnblockError::Guardian(error) => error.into(),
            UnblockError::Inhibitor(error) => error.into(),
        }
    }
}
