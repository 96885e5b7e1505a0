//! The disks of a rewind: what differs from the checkpoint is gathered while the guest runs, and written while it cannot run.
//!
//! ```text
//!   guest runs     a bitmap records writes ── all is read and compared ── what was written meanwhile is gathered
//!   pause          what was written since is gathered
//!   cont blocked   device has an empty node ── old content kept, new one written ── device has its image
//! ```
//!
//! From the first write until all is written, or put back, the image is marked in QEMU: a rewind that follows one that was
//! killed has to write it, too.

use std::ops::Range;
use std::rc::Rc;

use serde::Serialize;
use stillframe_fault::{self as fault, Point};
use stillframe_nbd::{Client, NbdError};
use stillframe_page::hash::ContentHasher;
use stillframe_page::{PAGE, PAGE_BYTES, is_zero};
use stillframe_qemu::monitor::{DiskDevice, EndCommands, Monitor, MonitorError, RewoundDisk};
use stillframe_repo::{DiskTable, Manifest, PageMap, Reader};

use super::RewindError;
use super::disks_error::RewindDisksError;
use super::staged::{Budget, Gathered};
use crate::disks::SILENCE_LIMIT;
use crate::disks::server::{Server, ServerError};
use crate::disks::view::{ALLOCATION, Fault, WRITTEN, ZERO, pages_of, read_pages};
use crate::guardian::{Guardian, OnDisconnect};

/// Bitmaps of a disk: of the comparison, and of what follows it.
const BITMAPS: usize = 2;
/// Connections of a disk: those of the exports that read stay until the end.
const CONNECTIONS: usize = 5;
/// The exports of a disk, one after the other: to compare, with each of the bitmaps, to write, to put back.
const COMPARED: usize = 0;
const WRITES: usize = 3;
const PUT_BACK: usize = 4;
/// Bytes whose old content is read before any of them is written.
const GROUP_BYTES: usize = 16 << 20;

/// A disk that was rewound.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DiskRewound {
    /// The drive or device.
    pub device: String,
    /// Pages that differed and were written.
    pub written: u64,
}

/// One disk.
struct StagedDisk<'a> {
    rewound: RewoundDisk,
    gathered: Gathered<'a>,
    server: Rc<Server>,
    /// Runs that were exchanged, or may be in part: they have their old content.
    exchanged: usize,
    /// The name of the export that writes; its device has an empty node.
    taken: Option<String>,
}

/// All disks whose content the checkpoint has; none with `--disks-as-they-are`.
#[derive(Default)]
pub(super) struct StagedDisks<'a>(Vec<StagedDisk<'a>>);

impl<'a> StagedDisks<'a> {
    /// Begins to record writes to the chosen disks. [`end`] takes all away again, also after an error.
    pub(super) fn begin(
        monitor: &mut Monitor,
        guardian: &Guardian,
        chosen: &[Chosen<'_>],
        reader: &'a Reader<'_>,
    ) -> Result<StagedDisks<'a>, RewindError> {
        if chosen.is_empty() {
            return Ok(StagedDisks::default());
        }
        let disks: Vec<RewoundDisk> = chosen.iter().map(|one| one.rewound.clone()).collect();
        let server = Rc::new(prepare(monitor, guardian, &disks)?);
        let staged = disks.into_iter().zip(chosen).map(|(rewound, chosen)| {
            Ok(StagedDisk {
                rewound,
                gathered: Gathered::new(PageMap::open(reader, &chosen.table.table)?),
                server: server.clone(),
                exchanged: 0,
                taken: None,
            })
        });
        Ok(StagedDisks(staged.collect::<Result<_, RewindError>>()?))
    }

    /// Number of pages of all of them.
    pub(super) fn pages(&self) -> u64 {
        self.0.iter().map(|disk| disk.gathered.map.pages()).sum()
    }

    /// While the guest runs: gathers what differs. `progress` gets the number of pages that were gone through.
    pub(super) fn compare(
        &mut self,
        monitor: &mut Monitor,
        hasher: &ContentHasher,
        budget: &mut Budget,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), RewindError> {
        let mut before = 0;
        for disk in &mut self.0 {
            let rewound = &disk.rewound;
            monitor.export_to_read(rewound, COMPARED, None)?;
            let mut client = disk.open(COMPARED, &[ALLOCATION])?;
            let candidates = disk.other_pages(&mut client, hasher, &mut |done| {
                progress(before + done);
            })?;
            client.close().map_err(|error| disk.failed(error))?;
            disk.gather(candidates, budget)?;
            before += disk.gathered.map.pages();
        }
        Ok(())
    }

    /// While the guest runs: gathers what it wrote during the comparison, and begins to record anew.
    pub(super) fn gather_running(
        &mut self,
        monitor: &mut Monitor,
        budget: &mut Budget,
    ) -> Result<(), RewindError> {
        self.0.iter_mut().try_for_each(|disk| {
            let [old, new] = [0, 1].map(|number| disk.rewound.bitmap(number));
            monitor.exchange_bitmap(&old, &new)?;
            disk.gather_written(monitor, 0, budget)
        })
    }

    /// In the pause: gathers what it wrote since.
    pub(super) fn gather_stopped(
        &mut self,
        monitor: &mut Monitor,
        budget: &mut Budget,
    ) -> Result<(), RewindError> {
        self.0.iter_mut().try_for_each(|disk| {
            monitor.freeze_bitmap(&disk.rewound.bitmap(1))?;
            disk.gather_written(monitor, 1, budget)
        })
    }

    /// Exchanges what was gathered with what is on the disks. The VM must not be able to run.
    pub(super) fn exchange(
        &mut self,
        monitor: &mut Monitor,
    ) -> Result<Vec<DiskRewound>, RewindError> {
        let mut report = Vec::new();
        for disk in &mut self.0 {
            let written = disk.exchange(monitor)?;
            report.push(DiskRewound {
                device: disk.rewound.disk.device.clone(),
                written,
            });
        }
        Ok(report)
    }

    /// Puts back what was there.
    pub(super) fn put_back(&mut self, monitor: &mut Monitor) -> Result<(), RewindDisksError> {
        self.0
            .iter_mut()
            .try_for_each(|disk| disk.put_back(monitor))
    }

    /// The disks are of one moment: the checkpoint's, or that before this rewind.
    pub(super) fn are_consistent(&mut self, monitor: &mut Monitor) -> Result<(), MonitorError> {
        if self.0.is_empty() {
            return Ok(());
        }
        let marked = monitor.half_rewound()?;
        let disks = self.0.iter().map(|disk| &disk.rewound.disk);
        let mut disks = disks.filter(|disk| marked.contains(&disk.node));
        disks.try_for_each(|disk| monitor.unmark_half_rewound(disk))
    }
}

/// Takes all of a rewind's disks away from QEMU but the marks of images. Each device has its image again.
///
/// # Errors
/// QEMU refuses it.
pub(super) fn end(monitor: &mut Monitor, guardian: &Guardian) -> Result<(), RewindDisksError> {
    monitor.end_snapshots(true)?;
    // Those that record what is written after a checkpoint have recorded what was written here.
    let left = monitor.left_bitmaps()?;
    monitor.remove_bitmaps(&left)?;
    Ok(guardian.on_disconnect(OnDisconnect::Nothing)?)
}

/// A disk of the VM, and its content in the checkpoint.
#[derive(Debug)]
pub(super) struct Chosen<'m> {
    rewound: RewoundDisk,
    table: &'m DiskTable,
}

/// The disks whose content the checkpoint has; none with `as_they_are`.
///
/// # Errors
/// The VM does not have one as it was, or has one that is half rewound, and not among them.
pub(super) fn choose<'m>(
    monitor: &mut Monitor,
    manifest: &'m Manifest,
    as_they_are: bool,
) -> Result<Vec<Chosen<'m>>, RewindDisksError> {
    let tables: &[DiskTable] = match as_they_are {
        true => &[],
        false => &manifest.disks,
    };
    // QEMU 10.0 has ended in a rewind of such a VM.
    if !tables.is_empty() && monitor.has_io_threads()? {
        return Err(RewindDisksError::IoThreads);
    }
    let (devices, marked) = (monitor.disk_devices()?, monitor.half_rewound()?);
    chosen(tables, &devices, &marked)
}

fn chosen<'m>(
    tables: &'m [DiskTable],
    devices: &[DiskDevice],
    marked: &[String],
) -> Result<Vec<Chosen<'m>>, RewindDisksError> {
    let is_chosen = |disk: &DiskDevice| tables.iter().any(|one| one.table.name == disk.device);
    let is_marked = |disk: &&DiskDevice| marked.contains(&disk.node) && !is_chosen(disk);
    if let Some(disk) = devices.iter().find(is_marked) {
        return Err(RewindDisksError::HalfRewound {
            device: disk.device.clone(),
        });
    }
    let found = tables.iter().enumerate().map(|(number, table)| {
        let name = &table.table.name;
        let mut devices = devices.iter();
        let disk = devices.find(|disk| disk.device == *name);
        let disk = disk.ok_or_else(|| RewindDisksError::Missing {
            device: name.clone(),
        })?;
        if disk.is_incomplete {
            return Err(RewindDisksError::Incomplete {
                device: name.clone(),
            });
        }
        let disk = disk.clone();
        match disk.bytes == table.bytes {
            true => Ok(Chosen {
                rewound: RewoundDisk { number, disk },
                table,
            }),
            false => Err(RewindDisksError::OtherSize {
                device: name.clone(),
                then: table.bytes,
                now: disk.bytes,
            }),
        }
    });
    found.collect()
}

/// The guardian learns of each thing in QEMU before it is made.
fn prepare(
    monitor: &mut Monitor,
    guardian: &Guardian,
    disks: &[RewoundDisk],
) -> Result<Server, RewindDisksError> {
    let announce = |serving| {
        let commands = EndCommands::of_rewound(disks, BITMAPS, serving);
        guardian.on_disconnect(OnDisconnect::EndSnapshots(commands))
    };
    announce(false)?;
    for disk in disks {
        monitor.add_empty(disk)?;
    }
    // After the nodes, which show whose the server is.
    if monitor.has_other_exports()? {
        return Err(ServerError::Taken.into());
    }
    announce(true)?;
    let server = Server::start(monitor, disks.len() * CONNECTIONS);
    if server.is_err() {
        announce(false)?;
    }
    let server = server?;
    for disk in disks {
        monitor.add_bitmaps(&[disk.bitmap(0)])?;
    }
    Ok(server)
}

impl StagedDisk<'_> {
    fn failed(&self, source: NbdError) -> RewindDisksError {
        RewindDisksError::Content {
            device: self.rewound.disk.device.clone(),
            source,
        }
    }

    /// Connects to the export with this number.
    fn open(&self, export: usize, contexts: &[&str]) -> Result<Client, RewindDisksError> {
        let name = self.rewound.export(export);
        let socket = self.server.connect()?;
        let opened = Client::open(socket, &name, contexts, SILENCE_LIMIT);
        opened.map_err(|error| self.failed(error))
    }

    /// The pages of the disk that are, or may be, something else in the checkpoint.
    fn other_pages(
        &self,
        client: &mut Client,
        hasher: &ContentHasher,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Vec<u64>, RewindError> {
        let bytes = self.rewound.disk.bytes;
        let extents = client.extents(0, 0..bytes);
        let extents = extents.map_err(|error| self.failed(error))?;
        let with_data = pages_of(&extents, |flags| flags & ZERO == 0, bytes);
        let mut candidates = Vec::new();
        let mut next = 0;
        for range in &with_data {
            let pages = next..range.start / PAGE_BYTES;
            self.gathered.not_zero(pages, &mut candidates)?;
            next = range.end.div_ceil(PAGE_BYTES);
        }
        let rest = next..self.gathered.map.pages();
        self.gathered.not_zero(rest, &mut candidates)?;
        let read = read_pages(client, with_data, &mut || Ok(()), &mut |pages| {
            progress(pages.last().map_or(0, |page| page.number + 1));
            self.gathered.other_content(pages, hasher, &mut candidates)
        });
        match read {
            Ok(_) => Ok(candidates),
            Err(Fault::Sink(error)) => Err(error),
            Err(Fault::Engine(error)) => Err(RewindError::ReadDisks(error)),
            Err(Fault::Nbd(error)) => Err(self.failed(error).into()),
        }
    }

    fn gather(&mut self, pages: Vec<u64>, budget: &mut Budget) -> Result<(), RewindError> {
        // What is there is read when it is exchanged.
        self.gathered.gather(pages, budget, &|_, _| Ok(None))
    }

    /// Gathers what a frozen bitmap has.
    fn gather_written(
        &mut self,
        monitor: &mut Monitor,
        bitmap: usize,
        budget: &mut Budget,
    ) -> Result<(), RewindError> {
        let export = COMPARED + 1 + bitmap;
        monitor.export_to_read(&self.rewound, export, Some(bitmap))?;
        let mut client = self.open(export, &[&self.rewound.written(bitmap)])?;
        let bytes = self.rewound.disk.bytes;
        let extents = client.extents(0, 0..bytes);
        let extents = extents.map_err(|error| self.failed(error))?;
        client.close().map_err(|error| self.failed(error))?;
        let written = pages_of(&extents, |flags| flags & WRITTEN != 0, bytes);
        let pages = written
            .into_iter()
            .flat_map(|range| range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES));
        self.gather(pages.collect(), budget)
    }

    /// The device gets an empty node, and the image is exported for writing.
    fn take(&mut self, monitor: &mut Monitor, export: usize) -> Result<(), RewindDisksError> {
        monitor.mark_half_rewound(&self.rewound.disk)?;
        let name = self.rewound.export(export);
        // Before the command, whose reply may not come.
        self.taken = Some(name.clone());
        fault::at(Point::RewindDiskTaking)?;
        monitor.take_image(&self.rewound)?;
        fault::at(Point::RewindDiskTaken)?;
        Ok(monitor.export(&self.rewound.disk.node, &name)?)
    }

    /// The device has its image again.
    fn give(&mut self, monitor: &mut Monitor) -> Result<(), MonitorError> {
        let Some(name) = &self.taken else {
            return Ok(());
        };
        monitor.close_export(name)?;
        monitor.give_image(&self.rewound)?;
        self.taken = None;
        Ok(())
    }

    /// Returns the number of pages that were written.
    fn exchange(&mut self, monitor: &mut Monitor) -> Result<u64, RewindError> {
        if self.gathered.runs.is_empty() {
            return Ok(0);
        }
        self.take(monitor, WRITES)?;
        let mut client = self.open(WRITES, &[])?;
        let mut pages = 0;
        let runs = self.gathered.runs.len();
        while self.exchanged < runs {
            let from = self.exchanged;
            pages += self.exchange_group(&mut client)?;
            if (from..self.exchanged).contains(&(runs / 2)) {
                fault::at(Point::RewindDiskExchange)?;
            }
        }
        client.close().map_err(|error| self.failed(error))?;
        self.give(monitor)?;
        Ok(pages)
    }

    /// The next runs: reads their old content, then writes the new one, and has it on stable storage.
    fn exchange_group(&mut self, client: &mut Client) -> Result<u64, RewindError> {
        let device_bytes = self.rewound.disk.bytes;
        let rest = &self.gathered.runs[self.exchanged..];
        let mut bytes = 0;
        let group = rest.iter().take_while(|run| {
            let fits = bytes == 0 || bytes + run.bytes.len() <= GROUP_BYTES;
            bytes += run.bytes.len();
            fits
        });
        let group = self.exchanged..self.exchanged + group.count();
        let mut old = self.read_old(client, group.clone())?.into_iter();
        let mut new = Vec::new();
        for run in &mut self.gathered.runs[group.clone()] {
            let old = old.next().unwrap_or_default();
            new.push((run.first, std::mem::replace(&mut run.bytes, old)));
        }
        // Whatever becomes of the writes, the old content is at hand.
        self.exchanged = group.end;
        let old = self.gathered.runs[group].iter();
        let mut pages = 0;
        let mut written = Vec::new();
        for (run, (first, bytes)) in old.zip(&new) {
            let both = run.bytes.chunks(PAGE).zip(bytes.chunks(PAGE));
            for (page, (_, new)) in (*first..).zip(both).filter(|(_, (old, new))| old != new) {
                pages += 1;
                written.push((page, new));
            }
        }
        let done = write(client, device_bytes, written);
        done.map_err(|error| self.failed(error))?;
        Ok(pages)
    }

    /// The present content of these runs, each in whole pages.
    fn read_old(
        &self,
        client: &mut Client,
        runs: Range<usize>,
    ) -> Result<Vec<Vec<u8>>, RewindDisksError> {
        let runs = &self.gathered.runs[runs];
        let end = self.rewound.disk.bytes;
        let ranges = runs.iter().map(|run| {
            let Range { start, end: after } = run.pages();
            start * PAGE_BYTES..end.min(after * PAGE_BYTES)
        });
        let mut old: Vec<Vec<u8>> = runs
            .iter()
            .map(|run| Vec::with_capacity(run.bytes.len()))
            .collect();
        let mut at = 0;
        let read = client.read::<NbdError>(ranges, &mut |_, bytes| {
            while old[at].len() == runs[at].bytes.len() {
                at += 1;
            }
            old[at].extend_from_slice(bytes);
            Ok(())
        });
        read.map_err(|error| self.failed(error))?;
        for (old, run) in old.iter_mut().zip(runs) {
            // The end of the disk.
            old.resize(run.bytes.len(), 0);
        }
        Ok(old)
    }

    /// Puts back the old content of all runs that may have been written.
    fn put_back(&mut self, monitor: &mut Monitor) -> Result<(), RewindDisksError> {
        // It was written in part, or not at all.
        self.give(monitor)?;
        if self.exchanged == 0 {
            return Ok(());
        }
        self.take(monitor, PUT_BACK)?;
        let mut client = self.open(PUT_BACK, &[])?;
        let runs = self.gathered.runs[..self.exchanged].iter();
        let pages = runs.flat_map(|run| run.pages().zip(run.bytes.chunks(PAGE)));
        let done = write(&mut client, self.rewound.disk.bytes, pages);
        done.map_err(|error| self.failed(error))?;
        client.close().map_err(|error| self.failed(error))?;
        self.give(monitor)?;
        self.exchanged = 0;
        Ok(())
    }
}

/// Writes pages of a disk, the last of which may end after it. Returns when they are on stable storage.
fn write<'p>(
    client: &mut Client,
    device_bytes: u64,
    pages: impl IntoIterator<Item = (u64, &'p [u8])>,
) -> Result<(), NbdError> {
    let mut writer = client.writer()?;
    for (page, bytes) in pages {
        let start = page * PAGE_BYTES;
        let end = device_bytes.min(start + PAGE_BYTES);
        match is_zero(bytes) {
            // A hole, where the image can have one.
            true => writer.write_zeros(start..end)?,
            false => writer.write(start, &bytes[..(end - start) as usize])?,
        }
    }
    writer.finish()
}

#[cfg(test)]
mod tests {
    use stillframe_repo::BlockTable;

    use super::*;

    fn device(name: &str, bytes: u64) -> DiskDevice {
        DiskDevice {
            device: name.to_owned(),
            node: format!("node-of-{name}"),
            path: format!("/{name}"),
            bytes,
            is_incomplete: false,
        }
    }

    fn table(name: &str, bytes: u64) -> DiskTable {
        DiskTable {
            bytes,
            bitmap: None,
            table: BlockTable {
                name: name.to_owned(),
                pages: bytes.div_ceil(PAGE_BYTES),
                page_bytes: PAGE as u32,
                root: stillframe_page::hash::ContentId([0; 32]),
                layers: Vec::new(),
            },
        }
    }

    #[test]
    fn a_disk_that_is_half_rewound_must_be_among_them() {
        let devices = [device("a", 4096), device("b", 8192)];
        let [a, b] = ["node-of-a", "node-of-b"].map(str::to_owned);
        let tables = [table("b", 8192)];
        let found = chosen(&tables, &devices, &[]).expect("chosen");
        let RewoundDisk { number, disk } = &found[0].rewound;
        assert_eq!((*number, disk), (0, &devices[1]));
        assert!(chosen(&tables, &devices, std::slice::from_ref(&b)).is_ok());
        let refused = |tables: &[DiskTable], marked: &[String]| {
            chosen(tables, &devices, marked).expect_err("refused")
        };
        let half = refused(&tables, &[b, a.clone()]);
        assert!(matches!(half, RewindDisksError::HalfRewound { device } if device == "a"));
        let half = refused(&[], &[a]);
        assert!(matches!(half, RewindDisksError::HalfRewound { .. }));
        let gone = refused(&[table("c", 512)], &[]);
        assert!(matches!(gone, RewindDisksError::Missing { .. }));
        let size = refused(&[table("a", 512)], &[]);
        assert!(matches!(size, RewindDisksError::OtherSize { .. }));
        let mut lazy = device("a", 512);
        lazy.is_incomplete = true;
        let lazy = chosen(&[table("a", 512)], &[lazy], &[]).map(|_| ());
        assert!(matches!(lazy, Err(RewindDisksError::Incomplete { .. })));
    }
}
