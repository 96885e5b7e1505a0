//! Why a VM did not move.

use stillframe_qemu::monitor::MonitorError;
use thiserror::Error;

use super::commit::CommitError;
use super::record::RecordError;
use crate::capture::device_state::StateError;
use crate::capture::devices::DevicesError;
use crate::capture::paused_vm::PausedError;
use crate::checkpoint::CheckpointError;
use crate::connection::ConnectionError;
use crate::guardian::GuardianError;
use crate::memory::block::BlockError;
use crate::streaming::StreamingError;
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
    /// The guest writes too much.
    #[error(
        "the guest writes faster than its pages are sent: it would be stopped for about {expected_ms} ms, and --pause-limit allows {limit_ms} ms. It runs on here. Migrate it when it writes less, over a faster connection, or with a higher limit"
    )]
    DoesNotConverge {
        /// How long it would be stopped.
        expected_ms: u128,
        /// How long it may be.
        limit_ms: u128,
    },
    /// The hand-over did not come off.
    #[error(transparent)]
    Commit(#[from] CommitError),
}

impl<E: Into<MigrateError>> From<StreamingError<E>> for MigrateError {
    fn from(error: StreamingError<E>) -> MigrateError {
        match error {
            StreamingError::Monitor(error) => error.into(),
            StreamingError::Tracker(error) => error.into(),
            StreamingError::Block(error) => error.into(),
            StreamingError::Sink(error) => error.into(),
        }
    }
}
