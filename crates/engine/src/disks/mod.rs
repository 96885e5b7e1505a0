//! Disks in a checkpoint: their content at the moment of the pause, read while the guest goes on.
//!
//! ```text
//!   before the pause    a new bitmap records writes; filters, NBD server          DiskHistory::begin
//!   pause               the filters go below the devices                          capture/pause
//!   after it            the old bitmap is frozen; views, a connection to each     DiskSnapshots::open
//!   storing             what the old bitmap has of the views -> repository        view
//!   settled             all taken away: the devices have their images again       DiskHistory::settle
//! ```
//!
//! Where little was written there is no filter: what was written is copied in [`rounds`], and what is left of it in the pause.
//!
//! What the guest's writes replace is copied first, into memory with a limit. Beyond it QEMU gives the
//! view up, and with it the checkpoint.

pub mod choice;
mod copy;
pub mod fill;
pub mod history;
pub mod images;
pub mod lazy;
pub mod rounds;
pub mod server;
pub mod view;

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use stillframe_nbd::{Client, NbdError};
use stillframe_qemu::monitor::{DiskDevice, DiskSnapshot, Monitor, MonitorError};
use stillframe_sys::memfd::{Memfd, MemfdError};
use thiserror::Error;

use crate::guardian::GuardianError;
pub use choice::{DiskChoice, DiskMode, DiskSchedule, LeftDisk};
pub use history::DiskHistory;
pub use rounds::{DiskRounds, RoundsError};
use server::ServerError;
use view::{Content, Snapshot};
pub use view::{DiskView, ReadDisk};

/// How long QEMU's NBD server may be silent. A storage that hangs holds it up.
pub(crate) const SILENCE_LIMIT: Duration = Duration::from_secs(60);

/// Why the disks of a VM cannot be captured. The VM runs on.
#[derive(Debug, Error)]
pub enum DisksError {
    /// A thread for disks.
    #[error(
        "the VM has I/O threads (-object iothread), and capturing such disks is not possible yet; take checkpoints with --disks reference"
    )]
    IoThreads,
    /// A lazy restore goes on.
    #[error(
        "disk {device} is still being restored from a checkpoint, lazily; capture it when that is complete, or take checkpoints with --disks none"
    )]
    Incomplete {
        /// The disk.
        device: String,
    },
    /// No disk at all.
    #[error("the VM has no disk that it can write to; take checkpoints without --disks capture")]
    NoDisk,
    /// A page table has no room for it.
    #[error(
        "disk {device} has more than {limit_tib} TiB, which a checkpoint cannot hold; take checkpoints with --disks reference"
    )]
    TooLong {
        /// The disk.
        device: String,
        /// The limit.
        limit_tib: u64,
    },
    /// It is not among the VM's disks.
    #[error("the VM has no disk {device}; it has: {known}")]
    Unknown {
        /// The name.
        device: String,
        /// The names that there are.
        known: String,
    },
    /// The guest cannot write to it.
    #[error(
        "disk {device} cannot be captured: the guest cannot write to it, or it can be taken out, or it is flash memory; take checkpoints with --disks {device}=reference"
    )]
    NotWritable {
        /// The disk.
        device: String,
    },
    /// The system has no random numbers.
    #[error("the system gives no random number for the name of a bitmap")]
    Random(#[source] getrandom::Error),
    /// No server.
    #[error("cannot read the VM's disks")]
    Server(#[from] ServerError),
    /// QEMU refuses a step.
    #[error("QEMU does not take a snapshot of the VM's disks")]
    Monitor(#[from] MonitorError),
    /// It must know what to take away.
    #[error("cannot tell the guardian what to take away from QEMU if this process ends")]
    Guardian(#[from] GuardianError),
    /// No memory file.
    #[error("no memory for what the guest overwrites on its disks")]
    Memory(#[from] MemfdError),
    /// The guest overwrote too much.
    #[error(
        "the guest overwrote more than {limit_mib} MiB of disk {device} before that was stored; this checkpoint is discarded. Allow more with --copy-buffer"
    )]
    Overwritten {
        /// The disk.
        device: String,
        /// The limit.
        limit_mib: u64,
    },
    /// Another client gave the device another image.
    #[error(
        "disk {device} got another image while a checkpoint began, by a snapshot or a block job of another client; this checkpoint is discarded"
    )]
    Exchanged {
        /// The disk.
        device: String,
    },
    /// It was made shorter while a checkpoint began.
    #[error(
        "disk {device} was made shorter while a checkpoint began; this checkpoint is discarded"
    )]
    Shortened {
        /// The disk.
        device: String,
    },
    /// Not in rounds.
    #[error(
        "the VM's disks cannot be copied without a filter; this checkpoint is discarded. Take it with --disk-schedule filter"
    )]
    Rounds(#[from] RoundsError),
    /// A copy cannot be read.
    #[error("cannot read the copy of disk {device}; this checkpoint is discarded")]
    Copy {
        /// The disk.
        device: String,
        /// Why not.
        #[source]
        source: std::io::Error,
    },
    /// It cannot be read.
    #[error("cannot read disk {device}; this checkpoint is discarded")]
    Read {
        /// The disk.
        device: String,
        /// Why not.
        #[source]
        source: NbdError,
    },
}

/// Tells the guardian what to take away if this process dies: these snapshots, and whether QEMU's NBD server runs for them.
type Announce<'a> = &'a dyn Fn(&[DiskSnapshot], bool) -> Result<(), GuardianError>;

/// Snapshots of all disks of a VM. They show the moment at which the filters are put in place.
#[derive(Debug)]
pub struct DiskSnapshots {
    snapshots: Vec<DiskSnapshot>,
    memory: Vec<Memfd>,
    sockets: Vec<UnixStream>,
}

impl DiskSnapshots {
    /// Makes everything ready for a pause. Before each step the guardian knows what to take away if this process dies.
    ///
    /// # Errors
    /// QEMU refuses it, and has nothing of it.
    fn begin(
        snapshots: Vec<DiskSnapshot>,
        monitor: &mut Monitor,
        announce: Announce<'_>,
    ) -> Result<DiskSnapshots, DisksError> {
        DiskSnapshots::of(snapshots, monitor, announce).inspect_err(|_| {
            // The error that led here is the one to report. The server, if one runs, is another client's.
            let _ = monitor.end_snapshots(false);
        })
    }

    fn of(
        snapshots: Vec<DiskSnapshot>,
        monitor: &mut Monitor,
        announce: Announce<'_>,
    ) -> Result<DiskSnapshots, DisksError> {
        let mut memory = Vec::with_capacity(snapshots.len());
        for snapshot in &snapshots {
            let file = Memfd::sparse("stillframe-disk", snapshot.disk.bytes)?;
            monitor.begin_snapshot(snapshot, file.as_fd())?;
            memory.push(file);
        }
        expect_whole(snapshots.iter().map(|snapshot| &snapshot.disk), monitor)?;
        // Before the pause, because another client may have it. After the nodes, which show whose it is.
        if monitor.has_other_exports()? {
            return Err(ServerError::Taken.into());
        }
        announce(&snapshots, true)?;
        let sockets = server::start(monitor, snapshots.len());
        if sockets.is_err() {
            announce(&snapshots, false)?;
        }
        Ok(DiskSnapshots {
            sockets: sockets?,
            snapshots,
            memory,
        })
    }

    /// What the pause puts in place.
    pub fn snapshots(&self) -> &[DiskSnapshot] {
        &self.snapshots
    }

    /// Opens views of the disks as they were at that moment.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn open(self, monitor: &mut Monitor) -> Result<Vec<DiskView>, DisksError> {
        monitor.freeze_bitmaps(&self.snapshots)?;
        for snapshot in &self.snapshots {
            monitor.forbid_resize(snapshot)?;
        }
        expect_whole(
            self.snapshots.iter().map(|snapshot| &snapshot.disk),
            monitor,
        )?;
        let of_disks = self.snapshots.into_iter().zip(self.memory);
        let views = of_disks
            .zip(self.sockets)
            .map(|((snapshot, memory), socket)| {
                monitor.export_snapshot(&snapshot)?;
                let name = snapshot.number.view();
                let written = snapshot.written();
                let context = written.as_deref().unwrap_or(view::ALLOCATION);
                let client = Client::open(socket, &name, &[context], SILENCE_LIMIT);
                let DiskDevice { device, bytes, .. } = snapshot.disk;
                match client {
                    Ok(client) => Ok(DiskView {
                        device,
                        bytes,
                        content: Content::Snapshot(Snapshot { client, memory }),
                        is_increment: written.is_some(),
                        bitmap: snapshot.next,
                    }),
                    Err(source) => Err(DisksError::Read { device, source }),
                }
            });
        views.collect()
    }
}

/// Disks made ready for a pause.
#[derive(Debug)]
pub enum PreparedDisks {
    /// There are none.
    None,
    /// With filters, which the pause puts in place.
    Filters(DiskSnapshots),
    /// Copied in rounds; the pause reads what is left.
    Rounds(DiskRounds),
}

impl PreparedDisks {
    /// Whether QEMU has something for them.
    pub fn is_some(&self) -> bool {
        !matches!(self, PreparedDisks::None)
    }

    /// The pause is over: the disks as they were in it.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn open(self, monitor: &mut Monitor) -> Result<Vec<DiskView>, DisksError> {
        match self {
            PreparedDisks::None => Ok(Vec::new()),
            PreparedDisks::Filters(snapshots) => snapshots.open(monitor),
            PreparedDisks::Rounds(rounds) => rounds.end(monitor),
        }
    }
}

/// Makes sure that nothing was cut off from the disks since their ends were marked: a filter does not copy it, and a bitmap does
/// not have it.
fn expect_whole<'d>(
    disks: impl Iterator<Item = &'d DiskDevice>,
    monitor: &mut Monitor,
) -> Result<(), DisksError> {
    match monitor.shortened(disks)? {
        Some(disk) => Err(DisksError::Shortened {
            device: disk.device.clone(),
        }),
        None => Ok(()),
    }
}
