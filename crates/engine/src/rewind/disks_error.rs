//! Errors that keep the disks of a VM from going back.

use stillframe_nbd::NbdError;
use stillframe_qemu::monitor::MonitorError;
use thiserror::Error;

use crate::disks::server::ServerError;
use crate::guardian::GuardianError;

/// Why the disks cannot go back. Nothing of them was changed, or all was put back.
#[derive(Debug, Error)]
pub enum RewindDisksError {
    /// A lazy restore goes on.
    #[error(
        "disk {device} is still being restored from a checkpoint, lazily; rewind when that is complete, or leave the disks as they are (--disks-as-they-are)"
    )]
    Incomplete {
        /// The disk.
        device: String,
    },
    /// The VM has it no more.
    #[error(
        "the checkpoint has the content of disk {device}, which the VM has not any more; `stillframe restore` starts one that has, and --disks-as-they-are leaves all disks alone"
    )]
    Missing {
        /// The disk.
        device: String,
    },
    /// Threads for disks.
    #[error(
        "the VM has I/O threads (-object iothread), and disks of such a VM cannot be rewound; --disks-as-they-are leaves all disks alone"
    )]
    IoThreads,
    /// It was resized.
    #[error(
        "disk {device} had {then} bytes and has {now}; `stillframe restore --disks new=DIR` makes one as it was, and --disks-as-they-are leaves all disks alone"
    )]
    OtherSize {
        /// The disk.
        device: String,
        /// Its length at the checkpoint.
        then: u64,
        /// Its length.
        now: u64,
    },
    /// An earlier rewind was killed while it wrote the disk.
    #[error(
        "disk {device} is partly of one moment and partly of another, since a rewind was killed: rewind to a checkpoint that has its content (taken with --disks capture), without --disks-as-they-are"
    )]
    HalfRewound {
        /// The disk.
        device: String,
    },
    /// QEMU's server.
    #[error("cannot read and write the VM's disks")]
    Server(#[from] ServerError),
    /// QEMU refuses a step.
    #[error("QEMU does not let the VM's disks be rewound")]
    Monitor(#[from] MonitorError),
    /// It must know what to take away.
    #[error("cannot tell the guardian what to take away from QEMU if this process ends")]
    Guardian(#[from] GuardianError),
    /// A fault that a test injected.
    #[error("a step of the rewind failed")]
    Injected(#[from] std::io::Error),
    /// A disk cannot be read or written.
    #[error("cannot read or write disk {device}")]
    Content {
        /// The disk.
        device: String,
        /// Why not.
        #[source]
        source: NbdError,
    },
}
