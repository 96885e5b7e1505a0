//! Why a VM did not move, on both sides.

use stillframe_qemu::device_state::DeviceStateError;
use stillframe_qemu::launch::LaunchError;
use stillframe_qemu::monitor::MonitorError;
use stillframe_repo::RepoError;
use thiserror::Error;

use super::commit::CommitError;
use super::disks::{DestinationError, DiskError};
use super::image_blocks::SharedImageError;
use super::record::RecordError;
use super::serving::ServingError;
use crate::capture::device_state::StateError;
use crate::capture::devices::DevicesError;
use crate::capture::paused_vm::PausedError;
use crate::checkpoint::CheckpointError;
use crate::connection::ConnectionError;
use crate::connection::message::Base;
use crate::guardian::GuardianError;
use crate::memory::block::BlockError;
use crate::populate::eager::PopulateError;
use crate::populate::lazy::supervision::ReleaseError;
use crate::restore::RestoreError;
use crate::tracking::error::TrackerError;

/// Why the VM did not move. It runs on here, unless the error says otherwise.
#[derive(Debug, Error)]
pub enum MigrateError {
    /// The connection failed.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// The VM is not fit for it.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The VM cannot be paused.
    #[error(transparent)]
    Paused(#[from] PausedError),
    /// QEMU failed a command.
    #[error("QEMU failed a command")]
    Monitor(#[from] MonitorError),
    /// Tracking failed.
    #[error("cannot see which pages of the VM have content")]
    Tracker(#[from] TrackerError),
    /// Reading memory failed.
    #[error("cannot read the VM's memory")]
    Block(#[from] BlockError),
    /// No device state.
    #[error(transparent)]
    State(#[from] StateError),
    /// Devices came or went.
    #[error(transparent)]
    Devices(#[from] DevicesError),
    /// The guardian is gone.
    #[error("no pause without a guardian")]
    Guardian(#[from] GuardianError),
    /// The record cannot be prepared.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// No name for the migration.
    #[error("the kernel gives no random bytes")]
    Random(#[source] getrandom::Error),
    /// A shared image cannot be read.
    #[error(transparent)]
    SharedImage(#[from] SharedImageError),
    /// There is one connection, and not the others.
    #[error("cannot open a connection for pages: {why}")]
    NoMoreConnections {
        /// Why not.
        why: String,
    },
    /// The destination cannot load a device state before it has all memory.
    #[error("the migration cannot be rehearsed: {why}. Migrate it without --rehearse")]
    NoRehearsal {
        /// Why not.
        why: String,
    },
    /// The VM ran on before the destination had loaded its devices, which says nothing of them.
    #[error(
        "the destination was slow and then failed, so that the rehearsal says nothing ({why}). Rehearse again when both hosts are less busy, or migrate without --rehearse"
    )]
    RehearsedLate {
        /// Its words.
        why: String,
    },
    /// No descriptor for a socket.
    #[error("cannot prepare a connection for pages")]
    Socket(#[source] std::io::Error),
    /// No thread.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// The guest writes too much.
    #[error(
        "the guest writes faster than its pages are sent: it would be stopped for about {expected_ms} ms, and --pause-limit allows {limit_ms} ms. It runs on here. Migrate it when it writes less, over a faster connection, with a higher limit, or with --mode hybrid"
    )]
    DoesNotConverge {
        /// How long it would be stopped.
        expected_ms: u128,
        /// How long it may be.
        limit_ms: u128,
    },
    /// The destination cannot fetch pages.
    #[error(transparent)]
    Serving(#[from] ServingError),
    /// The destination's memory cannot be populated while the VM runs.
    #[error(
        "the destination cannot run the VM before it has all its memory: {why}. Migrate it with --mode pre-copy"
    )]
    NoPostCopy {
        /// Why not.
        why: String,
    },
    /// The disks cannot be copied.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The hand-over did not come off.
    #[error(transparent)]
    Commit(#[from] CommitError),
}

impl ReceiveError {
    /// [`ReceiveError::NoBase`] of this one.
    pub(super) fn no_base(base: &Base) -> ReceiveError {
        ReceiveError::NoBase {
            checkpoint: base.checkpoint.to_hex(),
            repository: base.repository.clone(),
        }
    }
}

/// Why no VM was received. The new QEMU was ended.
#[derive(Debug, Error)]
pub enum ReceiveError {
    /// The QEMU can be used once only.
    #[error(
        "a QEMU that another program has started takes a VM once: to rehearse, let `receive` start one (without --into)"
    )]
    NoRehearsal,
    /// Devices may differ.
    #[error(
        "the VM ran under QEMU {recorded}, and this host has the newer {found}, which takes it only after a rehearsal: migrate it with --rehearse"
    )]
    NotRehearsed {
        /// The version here.
        found: String,
        /// The one at the source.
        recorded: String,
    },
    /// No thread.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// The connection failed.
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    /// QEMU could not be started or did not take the device state.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// QEMU could not be started.
    #[error(transparent)]
    Start(#[from] RestoreError),
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
    /// The connections for pages did not come.
    #[error("the source has opened {came} of {wanted} connections for pages")]
    TooFewConnections {
        /// Those that came.
        came: usize,
        /// Those that the source announced.
        wanted: usize,
    },
    /// A connection cannot be closed from another thread.
    #[error("cannot prepare a connection for pages")]
    Socket(#[source] std::io::Error),
    /// What is on record cannot be read or written.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The VM does not run here.
    #[error("the VM does not run here: {why}")]
    NotHere {
        /// Why not.
        why: String,
    },
    /// QEMU has not answered.
    #[error(
        "it is not known whether the VM runs here: {why}. `receive --resume` looks again, and answers the source"
    )]
    Unclear {
        /// Why not.
        why: String,
    },
    /// It runs here, and pages are at the source only.
    #[error(
        "the VM is here and lacks pages that only the source has: {why}. It is paused when it needs one. `receive --resume` here and `migrate --resume` at the source go on; if the source's QEMU or host is lost, so is this VM: end it"
    )]
    Lacks {
        /// Why they do not come.
        why: String,
    },
    /// What this process left in a VM that has all its memory.
    #[error(transparent)]
    Release(#[from] ReleaseError),
    /// Its memory cannot be populated while it runs.
    #[error(
        "the new VM's memory {block:?} cannot be populated while it runs: migrate with --mode pre-copy"
    )]
    NotLazy {
        /// The block.
        block: String,
    },
    /// The disks cannot be copied.
    #[error(transparent)]
    Image(#[from] DestinationError),
    /// No checkpoint of the VM can be looked for.
    #[error("cannot look for a checkpoint of the VM; without --seed it comes whole")]
    NoSeed(#[from] RepoError),
    /// The rest of the VM is in a checkpoint that was not named.
    #[error(
        "the VM is here and lacks pages, which are in checkpoint {checkpoint} of repository {repository}: name that repository with --repository, and --seed"
    )]
    NoBase {
        /// The checkpoint.
        checkpoint: String,
        /// The id of the repository.
        repository: String,
    },
    /// The rest of its memory cannot be read.
    #[error(
        "the VM runs here and lacks pages that are in the repository only: {why}. It is paused when it needs one. `receive --resume` goes on"
    )]
    LacksStored {
        /// Why not.
        why: String,
    },
    /// A checkpoint of the VM cannot be read.
    #[error("cannot begin with a checkpoint of the VM; without --seed it comes whole")]
    Seed(#[source] PopulateError),
    /// The received data is no device state.
    #[error("the device state that was sent cannot be loaded")]
    DeviceState(#[from] DeviceStateError),
    /// A device came or went.
    #[error("the VM's devices, disks or memory changed while it was sent: send it again")]
    Changed,
    /// The comparison found differences.
    #[error("{differing} pages of the new VM's memory differ from the source's (first: {first})")]
    Differs {
        /// How many.
        differing: u64,
        /// The first of them.
        first: String,
    },
}
