//! Rounds: disks without a filter, as pre-copy is for memory. What was written is copied while the guest goes on, with a bitmap
//! for what it writes meanwhile; and so again, until little is left. That is copied in the pause, in which QEMU is held.
//!
//! ```text
//!   since    ├──────────────────────────┤ records until the checkpoint is settled
//!   round 1      ├─ copy what since has ─┐
//!   round 2                 ├─ copy what round 1's bitmap has ─┐
//!   pause                                       copy what round 2's bitmap has
//!   next                    ├────────── that of the last round records for the next checkpoint
//! ```
//!
//! A page is read after the bitmap of its round has begun. If the guest writes it later, it is in that bitmap, and is read once
//! more: at the last time while the guest stands still.
//!
//! With a filter a guest's first write to each 64 KiB copies these first; here its writes cost nothing. In return the pause has to
//! read what is left, from the storage if the image is opened with O_DIRECT. So [`DiskHistory`] chooses rounds where little
//! was written, and a filter else.
//!
//! [`DiskHistory`]: super::DiskHistory

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::panic::resume_unwind;
use std::thread;
use std::time::{Duration, Instant};

use stillframe_fault::{self as fault, Point};
use stillframe_nbd::{Client, Hold, NbdError};
use stillframe_page::PAGE_BYTES;
use stillframe_qemu::monitor::{
    DiskBitmap, DiskDevice, EndCommands, Monitor, MonitorError, SnapshotNumber, bitmap_context,
};
use thiserror::Error;

use super::copy::DiskCopy;
use super::server::{Server, ServerError};
use super::view::{ALLOCATION, Content, DiskView, WRITTEN, ZERO, pages_of};
use super::{DisksError, SILENCE_LIMIT, expect_whole};
use crate::guardian::GuardianError;
use crate::memory::ranges::length;

/// Rounds of one checkpoint: each has less to copy than the one before, or the guest writes too fast.
pub const ROUNDS_MAX: usize = 4;
/// What may have been written since a checkpoint if the engine is to choose rounds, in bytes: more makes the rounds long, and the
/// filter reads it beside the guest.
pub const WRITTEN_BYTES_MAX: u64 = 16 << 20;
/// How long all disks may be, for the same, in bytes: the pause looks through their whole bitmaps, 2 GiB at a time.
pub const DISKS_BYTES_MAX: u64 = 32 << 30;
/// What may be left for the pause, in bytes: some hundred microseconds of reading.
const LEFT_BYTES: u64 = 256 << 10;
/// How long reading it may take at the speed of the last round.
const LEFT_TIME: Duration = Duration::from_micros(1500);
/// What is read in the pause at most, if the guest wrote more at the last moment.
const REST_BYTES_MAX: u64 = 4 << 20;
/// How long QEMU may be silent in the pause: a storage that hangs is left to a filter.
const REST_SILENCE_LIMIT: Duration = Duration::from_millis(200);
/// Reads of one connection that QEMU carries out at once (`MAX_NBD_REQUESTS` of its nbd/server.c).
const READS_AT_ONCE: u64 = 16;
/// How long QEMU may take to open the hold.
const HOLD_LIMIT: Duration = Duration::from_secs(10);
/// Metadata contexts of a round, by their number: what it copies, and what is written meanwhile.
const COPIED: usize = 0;
const MEANWHILE: usize = 1;

/// Why disks cannot be copied in rounds. A filter can be used instead.
#[derive(Debug, Error)]
pub enum RoundsError {
    /// The guest is faster.
    #[error(
        "the guest wrote {left_kib} KiB to its disks while the last of {ROUNDS_MAX} rounds copied them"
    )]
    WrittenMeanwhile {
        /// What is left.
        left_kib: u64,
    },
    /// It does not fit into the copy buffer, or into the pause.
    #[error("{mib} MiB of disk {device} are to be copied at once, more than {limit_mib} MiB")]
    TooMuch {
        /// The disk.
        device: String,
        /// What is to be copied.
        mib: u64,
        /// What is, at most.
        limit_mib: u64,
    },
    /// QEMU is not held.
    #[error("QEMU did not wait while the rest of its disks was to be read")]
    NotHeld(#[source] Option<NbdError>),
    /// QEMU refuses a step.
    #[error("QEMU does not show what the guest writes to its disks")]
    Monitor(#[from] MonitorError),
    /// No connection.
    #[error("cannot read the VM's disks")]
    Server(#[from] ServerError),
    /// It cannot be read.
    #[error("cannot read disk {device}")]
    Read {
        /// The disk.
        device: String,
        /// Why not.
        #[source]
        source: NbdError,
    },
    /// A fault that a test injected.
    #[error("a round failed")]
    Injected(#[source] io::Error),
    /// Memory is short.
    #[error("cannot keep a copy of disk {device}")]
    Keep {
        /// The disk.
        device: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
}

/// Tells the guardian what to take away if this process dies.
type Announce<'a> = &'a dyn Fn(EndCommands) -> Result<(), GuardianError>;

/// Copies of all disks of a VM, of the moment of a pause when that is over.
#[derive(Debug)]
pub struct DiskRounds {
    disks: Vec<LiveDisk>,
    server: Server,
    hold: Hold,
    /// The bitmaps of each round. Those of the first ones record.
    bitmaps: Vec<Vec<DiskBitmap>>,
    /// Rounds that have begun.
    begun: usize,
    /// The copies show what was written since the last checkpoint, and nothing else.
    is_increment: bool,
    /// Of what one round copies.
    limit_bytes: u64,
    /// What the last round copied, and how long that took.
    last: (u64, Duration),
}

/// A disk that the guest writes to, and its copy.
#[derive(Debug)]
struct LiveDisk {
    number: SnapshotNumber,
    disk: DiskDevice,
    /// The connection of the last round.
    client: Option<Client>,
    copy: DiskCopy,
}

impl DiskRounds {
    /// Makes views of the disks. Nothing is copied yet. `announce`: tells the guardian what to take away if this process dies, and
    /// whether QEMU's NBD server runs for it.
    ///
    /// # Errors
    /// QEMU refuses it, and has nothing of it.
    pub(super) fn begin(
        bitmaps: Vec<Vec<DiskBitmap>>,
        disks: &[DiskDevice],
        limit_bytes: u64,
        monitor: &mut Monitor,
        announce: Announce<'_>,
    ) -> Result<DiskRounds, DisksError> {
        DiskRounds::of(bitmaps, disks, limit_bytes, monitor, announce).inspect_err(|_| {
            // The error that led here is the one to report. The server, if one runs, is another client's.
            let _ = monitor.end_snapshots(false);
        })
    }

    fn of(
        bitmaps: Vec<Vec<DiskBitmap>>,
        disks: &[DiskDevice],
        limit_bytes: u64,
        monitor: &mut Monitor,
        announce: Announce<'_>,
    ) -> Result<DiskRounds, DisksError> {
        let commands = |serving| EndCommands::of_live_views(disks.len(), serving);
        announce(commands(false))?;
        let mut live = Vec::with_capacity(disks.len());
        for (number, disk) in disks.iter().enumerate() {
            let number = SnapshotNumber(number);
            monitor.begin_live_view(number, disk)?;
            live.push(LiveDisk {
                number,
                disk: disk.clone(),
                client: None,
                copy: DiskCopy::new(disk.bytes)?,
            });
        }
        let hold = begin_hold(monitor)?;
        expect_whole(disks.iter(), monitor)?;
        if monitor.has_other_exports()? {
            return Err(ServerError::Taken.into());
        }
        announce(commands(true))?;
        let server = Server::start(monitor, disks.len() * ROUNDS_MAX);
        if server.is_err() {
            announce(commands(false))?;
        }
        Ok(DiskRounds {
            server: server?,
            hold,
            disks: live,
            bitmaps,
            begun: 0,
            is_increment: false,
            limit_bytes,
            last: (0, Duration::ZERO),
        })
    }

    /// The first round: copies what was written since a checkpoint, or all.
    ///
    /// # Errors
    /// QEMU refuses it, or a disk cannot be copied.
    pub(super) fn first(
        &mut self,
        since: Option<&[DiskBitmap]>,
        monitor: &mut Monitor,
    ) -> Result<(), DisksError> {
        self.is_increment = since.is_some();
        Ok(self.round(since, monitor)?)
    }

    /// Further rounds, until little enough is left for the pause. To be called right before it.
    ///
    /// # Errors
    /// The guest writes faster than a round copies, or a disk cannot be copied.
    pub(super) fn approach(&mut self, monitor: &mut Monitor) -> Result<(), DisksError> {
        loop {
            let left = self.left()?;
            if left <= LEFT_BYTES && self.time_for(left) <= LEFT_TIME {
                return expect_whole(self.disks.iter().map(|live| &live.disk), monitor);
            }
            if self.begun == ROUNDS_MAX {
                let left_kib = left >> 10;
                return Err(RoundsError::WrittenMeanwhile { left_kib }.into());
            }
            let copied = self.next().to_vec();
            self.round(Some(&copied), monitor)?;
        }
    }

    /// The bitmaps that the last round began.
    pub(super) fn next(&self) -> &[DiskBitmap] {
        &self.bitmaps[self.begun.saturating_sub(1)]
    }

    /// The socket of the hold, which releases QEMU when it is shut down.
    pub fn hold(&self) -> BorrowedFd<'_> {
        self.hold.as_fd()
    }

    /// Whether QEMU is held, or is so within `limit`.
    ///
    /// # Errors
    /// It will not be.
    pub fn is_held(&mut self, limit: Duration) -> Result<bool, RoundsError> {
        let held = self.hold.wait(limit);
        held.map_err(|error| RoundsError::NotHeld(Some(error)))
    }

    /// QEMU goes on.
    ///
    /// # Errors
    /// It went on before.
    pub fn release(&mut self) -> Result<(), RoundsError> {
        let released = self.hold.release();
        released.map_err(|error| RoundsError::NotHeld(Some(error)))
    }

    /// QEMU is held no more, whether it has come to the hold or not.
    pub fn let_go(&mut self) {
        self.hold.shut_down();
    }

    /// Reads what is left. The guest stands still, and QEMU is held.
    ///
    /// # Errors
    /// A disk cannot be read, or is not in a moment.
    pub fn rest(&mut self) -> Result<(), RoundsError> {
        for live in &mut self.disks {
            if let Some(client) = &mut live.client {
                let limited = client.limit_silence(REST_SILENCE_LIMIT);
                limited.map_err(|source| live.failed(source.into()))?;
            }
            live.copy(MEANWHILE, |flags| flags & WRITTEN != 0, REST_BYTES_MAX)?;
        }
        Ok(())
    }

    /// Takes the views away from QEMU. The copies are of the moment of the pause.
    ///
    /// # Errors
    /// QEMU refuses it, or a device has another image by now.
    pub fn end(self, monitor: &mut Monitor) -> Result<Vec<DiskView>, DisksError> {
        let disks: Vec<DiskDevice> = self.disks.iter().map(|live| live.disk.clone()).collect();
        let next = self.bitmaps.into_iter().nth(self.begun.saturating_sub(1));
        let mut next = next.unwrap_or_default().into_iter();
        let is_increment = self.is_increment;
        let views = self.disks.into_iter().map(|live| {
            let bitmap = next.next().map_or(String::new(), |bitmap| bitmap.name);
            DiskView {
                device: live.disk.device,
                bytes: live.disk.bytes,
                content: Content::Copy(live.copy),
                is_increment,
                bitmap,
            }
        });
        // QEMU waits for open connections.
        let views = views.collect();
        drop(self.hold);
        monitor.end_snapshots(true)?;
        // What is written to another image is in no bitmap of this one.
        let now = monitor.disk_devices()?;
        match disks.into_iter().find(|disk| !now.contains(disk)) {
            Some(DiskDevice { device, .. }) => Err(DisksError::Exchanged { device }),
            None => Ok(views),
        }
    }

    /// Begins to record in the next bitmaps, and copies what these have recorded, or all.
    fn round(
        &mut self,
        copied: Option<&[DiskBitmap]>,
        monitor: &mut Monitor,
    ) -> Result<(), RoundsError> {
        let round = self.begun;
        let next = &self.bitmaps[round];
        monitor.add_bitmaps(next)?;
        self.begun += 1;
        let mut bytes = 0;
        let mut took = Duration::ZERO;
        for (at, live) in self.disks.iter_mut().enumerate() {
            if let Some(last) = live.client.take() {
                // A bitmap is in one export at a time.
                drop(last);
                monitor.end_live_export(live.number, round - 1)?;
            }
            let copied = copied.map(|copied| &copied[at]);
            let shown: Vec<&DiskBitmap> = copied.into_iter().chain([&next[at]]).collect();
            let name = monitor.export_live_view(live.number, round, &shown)?;
            let copied = copied.map_or(ALLOCATION.to_owned(), |one| bitmap_context(&one.name));
            let contexts = [&*copied, &bitmap_context(&next[at].name)];
            let socket = self.server.connect()?;
            let client = Client::open(socket, &name, &contexts, SILENCE_LIMIT);
            live.client = Some(client.map_err(|source| live.failed(source))?);
            let wanted: fn(u32) -> bool = match copied == ALLOCATION {
                true => |flags| flags & ZERO == 0,
                false => |flags| flags & WRITTEN != 0,
            };
            let begin = Instant::now();
            bytes += live.copy(COPIED, wanted, self.limit_bytes - bytes)?;
            took += begin.elapsed();
        }
        self.last = (bytes, took);
        fault::at(Point::DisksRound).map_err(RoundsError::Injected)?;
        Ok(())
    }

    /// What the guest has written since the last round began, in bytes.
    fn left(&mut self) -> Result<u64, RoundsError> {
        let mut left = 0;
        for live in &mut self.disks {
            let ranges = live.ranges(MEANWHILE, |flags| flags & WRITTEN != 0)?;
            left += length(&ranges);
        }
        Ok(left)
    }

    /// How long reading this would take at the speed of the last round.
    fn time_for(&self, bytes: u64) -> Duration {
        let (copied, took) = self.last;
        took.mul_f64(batches(bytes) as f64 / batches(copied).max(1) as f64)
    }
}

/// Reads that QEMU carries out one after the other if none of these pages are neighbours.
fn batches(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE_BYTES * READS_AT_ONCE)
}

/// Has QEMU open a hold.
fn begin_hold(monitor: &mut Monitor) -> Result<Hold, DisksError> {
    let (ours, theirs) = UnixStream::pair().map_err(ServerError::Socket)?;
    let opened = thread::scope(|scope| {
        // It talks to QEMU while that carries out the command.
        let serving = thread::Builder::new()
            .name("hold".to_owned())
            .spawn_scoped(scope, || Hold::open(ours, HOLD_LIMIT))
            .map_err(ServerError::Socket)?;
        let begun = monitor.begin_hold(theirs.as_fd(), Hold::EXPORT);
        drop(theirs);
        let opened = serving.join().unwrap_or_else(|panic| resume_unwind(panic));
        begun?;
        Ok::<_, DisksError>(opened)
    })?;
    Ok(opened.map_err(|error| RoundsError::NotHeld(Some(error)))?)
}

impl LiveDisk {
    fn failed(&self, source: NbdError) -> RoundsError {
        RoundsError::Read {
            device: self.disk.device.clone(),
            source,
        }
    }

    fn ranges(
        &mut self,
        context: usize,
        wanted: fn(u32) -> bool,
    ) -> Result<Vec<Range<u64>>, RoundsError> {
        let bytes = self.disk.bytes;
        let extents = match &mut self.client {
            Some(client) => client.extents(context, 0..bytes),
            None => return Ok(Vec::new()),
        };
        let extents = extents.map_err(|source| self.failed(source))?;
        Ok(pages_of(&extents, wanted, bytes))
    }

    /// Copies what one of the contexts shows. Returns the number of bytes.
    fn copy(
        &mut self,
        context: usize,
        wanted: fn(u32) -> bool,
        limit_bytes: u64,
    ) -> Result<u64, RoundsError> {
        let ranges = self.ranges(context, wanted)?;
        let bytes = length(&ranges);
        if bytes > limit_bytes {
            return Err(RoundsError::TooMuch {
                device: self.disk.device.clone(),
                mib: bytes >> 20,
                limit_mib: limit_bytes >> 20,
            });
        }
        let (copy, device) = (&mut self.copy, &self.disk.device);
        let Some(client) = &mut self.client else {
            return Ok(0);
        };
        let read = client.read(ranges, &mut |offset, bytes| {
            copy.add(offset, bytes).map_err(Fault::Keep)
        });
        match read {
            Ok(()) => Ok(bytes),
            Err(Fault::Read(source)) => Err(self.failed(source)),
            Err(Fault::Keep(source)) => Err(RoundsError::Keep {
                device: device.clone(),
                source,
            }),
        }
    }
}

/// Why copying ended early.
enum Fault {
    Read(NbdError),
    Keep(io::Error),
}

impl From<NbdError> for Fault {
    fn from(error: NbdError) -> Fault {
        Fault::Read(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_read_sixteen_at_once() {
        let of_pages = |pages: u64| batches(pages * PAGE_BYTES);
        assert_eq!([0, 1, 16, 17, 64].map(of_pages), [0, 1, 1, 2, 4]);
    }
}
