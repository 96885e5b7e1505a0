//! The disks of a checkpoint in new images: written while the VM waits, or lazily, while it runs.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde::Serialize;
use stillframe_qemu::launch::{Launched, NewFormat, NewImage};
use stillframe_qemu::monitor::{Disk, Monitor, image_of};
use stillframe_qemu::record::VmRecord;
use stillframe_repo::{DiskTable, Manifest, PageMap, Reader};

use super::{Checkpoint, LazyEvent, LazySink, RestoreError, RestoreOptions, vm_record};
use crate::Progress;
use crate::disks::fill::{fill, fill_file};
use crate::disks::images::{Advice, ExportedImages, NewImages, export_name, fitting_disks};
use crate::disks::lazy::{self, LazyDisk, LazyDisks, ServerSocket};

/// What the user of a restore can do about an image.
const ADVICE: Advice = Advice {
    exists: "Remove it if it is not needed, or name another directory",
    place: "Name another directory",
    device: "files made there would be lost",
    format: "Write the disk with `export --disk`, convert it, and restore with --replace and --disks-as-they-are",
};

/// The format of an image that can lack content.
const QCOW2: &str = "qcow2";

/// A disk that was written anew.
#[derive(Debug, Clone, Serialize)]
pub struct RestoredDisk {
    /// The drive or device.
    pub device: String,
    /// Its image.
    pub file: PathBuf,
    /// The disk's length in bytes.
    pub bytes: u64,
    /// Pages with content that were written; all others are zero. Of a lazily restored disk: that QEMU has read.
    pub pages: u64,
}

/// The images in `folder` that the disks of a checkpoint are to be written into, each named as the disk's file was. Where two
/// have the same name, the device's name comes before it.
///
/// # Errors
/// The checkpoint holds no disks.
pub fn new_images(
    Checkpoint { id, manifest }: Checkpoint<'_>,
    folder: &Path,
) -> Result<Vec<NewImage>, RestoreError> {
    let record = vm_record(id, manifest)?;
    if manifest.disks.is_empty() {
        return Err(RestoreError::NoDisks {
            checkpoint: id.to_string(),
        });
    }
    let disks = manifest.disks.iter().map(|disk| {
        image_of(&record.disks, &disk.table.name).ok_or_else(|| RestoreError::Manifest {
            checkpoint: id.to_string(),
            what: format!(
                "it has the content of disk {}, and no record of it",
                disk.table.name
            ),
        })
    });
    let disks = disks.collect::<Result<Vec<&Disk>, _>>()?;
    Ok(named_in(folder, disks))
}

/// A new image for each of these disks, named as its file was.
fn named_in<'d>(folder: &Path, disks: impl IntoIterator<Item = &'d Disk>) -> Vec<NewImage> {
    let mut taken = HashSet::new();
    let images = disks.into_iter().map(|disk| {
        let name = disk.path.file_name().unwrap_or(disk.device.as_ref());
        let mut name = name.to_owned();
        if !taken.insert(name.clone()) {
            let mut longer =
                std::ffi::OsString::from(format!("{}-", disk.device.replace('/', "-")));
            longer.push(&name);
            taken.insert(longer.clone());
            name = longer;
        }
        NewImage {
            device: disk.device.clone(),
            path: folder.join(name),
            format: NewFormat::Recorded,
        }
    });
    images.collect()
}

/// Images in `folder` for all disks that the VM can write to, whatever the checkpoint holds of them. Those of the firmware stay.
///
/// # Errors
/// The record cannot be read.
pub fn empty_images(
    Checkpoint { id, manifest }: Checkpoint<'_>,
    folder: &Path,
) -> Result<Vec<NewImage>, RestoreError> {
    let record = vm_record(id, manifest)?;
    let disks = record.disks.iter();
    let disks = disks.filter(|disk| disk.is_image() && !disk.flash && !disk.read_only);
    Ok(named_in(folder, disks))
}

/// As [`new_images`], but the VM runs before they have their content. They are qcow2: the name of one that was of another
/// format ends so.
///
/// # Errors
/// The checkpoint holds no disks.
pub fn lazy_images(
    checkpoint: Checkpoint<'_>,
    folder: &Path,
) -> Result<Vec<NewImage>, RestoreError> {
    let record = vm_record(checkpoint.id, checkpoint.manifest)?;
    let mut images = new_images(checkpoint, folder)?;
    for image in &mut images {
        let disk = image_of(&record.disks, &image.device);
        if disk.is_some_and(|disk| disk.format != QCOW2) {
            image.path.as_mut_os_string().push(".qcow2");
        }
    }
    let socket = images.first().map(|image| socket_of(&image.path));
    let id = checkpoint.id.to_string();
    for (number, image) in images.iter_mut().enumerate() {
        let export = lazy::export_name(&id, number);
        let socket = socket.as_deref().unwrap_or(Path::new(""));
        image.format = NewFormat::Overlay(lazy::backing(socket, &export));
    }
    Ok(images)
}

/// The socket through which QEMU reads what images lack, by the first of them. It lies beside it: QEMU reaches that directory.
fn socket_of(image: &Path) -> PathBuf {
    let mut path = OsString::from(image);
    path.push(".nbd");
    path.into()
}

/// The disks whose images lack content, with the tables of what they lack, from a manifest, which is authenticated.
pub(super) fn tables_of<'m>(
    disks: &[LazyDisk],
    manifest: &'m Manifest,
) -> Option<Vec<&'m DiskTable>> {
    let named = |disk: &LazyDisk| {
        let mut tables = manifest.disks.iter();
        tables.find(|table| table.table.name == disk.device)
    };
    disks.iter().map(named).collect()
}

/// Listens for the QEMU that has these images.
///
/// # Errors
/// The socket cannot be made.
pub(super) fn listen(disks: &[LazyDisk]) -> Result<Option<ServerSocket>, RestoreError> {
    let Some(first) = disks.first() else {
        return Ok(None);
    };
    let path = socket_of(&first.image);
    // The user that QEMU runs as.
    let owner = fs::metadata(&first.image).ok();
    let owner = owner.map(|image| (image.uid(), image.gid()));
    let socket = ServerSocket::bind(&path, owner);
    let socket = socket.map_err(|source| RestoreError::Socket { path, source })?;
    Ok(Some(socket))
}

/// Where the content of a disk goes.
enum Target<'f> {
    /// Into the file of a raw image.
    File(&'f File),
    /// To QEMU, which exports the image by this name.
    Export(UnixStream, String),
}

/// The new images of a VM.
pub(super) struct NewDisks {
    made: NewImages,
    tables: Vec<DiskTable>,
    /// Those whose images lack content: all of them, or none.
    lazy: Vec<LazyDisk>,
    socket: Option<ServerSocket>,
}

impl NewDisks {
    /// Makes the images that the launch options name, and their folders.
    pub(super) fn make(
        record: &VmRecord,
        manifest: &Manifest,
        options: &RestoreOptions,
    ) -> Result<NewDisks, RestoreError> {
        let images = &options.launch.images;
        for folder in images.iter().filter_map(|image| image.path.parent()) {
            // Where that cannot be, the image cannot be made, and that is said.
            let _ = fs::create_dir(folder);
        }
        let devices: Vec<&String> = images.iter().map(|image| &image.device).collect();
        let tables = manifest.disks.iter();
        let is_filled =
            |disk: &&DiskTable| !options.empty_disks && devices.contains(&&disk.table.name);
        let tables = tables.filter(is_filled);
        let made = NewImages::make(record, devices.clone(), &options.launch, false, &ADVICE)?;
        let lazy = images.iter().filter_map(|image| match image.format {
            NewFormat::Overlay(_) => Some(LazyDisk {
                device: image.device.clone(),
                image: image.path.clone(),
            }),
            _ => None,
        });
        let lazy: Vec<LazyDisk> = lazy.collect();
        Ok(NewDisks {
            socket: listen(&lazy)?,
            tables: tables.cloned().collect(),
            made,
            lazy,
        })
    }

    /// The server of what the images lack, if they do.
    pub(super) fn open<'r>(
        &mut self,
        id: &str,
        reader: &'r Reader<'r>,
    ) -> Result<Option<LazyDisks<'r>>, RestoreError> {
        let Some(socket) = self.socket.take() else {
            return Ok(None);
        };
        let disks = self.lazy.clone();
        Ok(Some(LazyDisks::open(
            id,
            disks,
            &self.tables,
            socket,
            reader,
        )?))
    }

    /// The report on disks that were restored lazily.
    pub(super) fn restored(&self, served: Option<&LazyDisks<'_>>) -> Vec<RestoredDisk> {
        let read = served.map(LazyDisks::pages_read).unwrap_or_default();
        let disks = self.lazy.iter().zip(&self.tables).zip(read);
        let restored = disks.map(|((disk, table), pages)| RestoredDisk {
            device: disk.device.clone(),
            file: disk.image.clone(),
            bytes: table.bytes,
            pages,
        });
        restored.collect()
    }

    /// Writes their content. QEMU has them open, and does not use them yet.
    pub(super) fn fill(
        &self,
        record: &VmRecord,
        launched: &mut Launched,
        reader: &Reader<'_>,
        events: LazySink<'_>,
    ) -> Result<Vec<RestoredDisk>, RestoreError> {
        if self.tables.is_empty() || !self.lazy.is_empty() {
            return Ok(Vec::new());
        }
        let devices = self.tables.iter().map(|disk| &disk.table.name);
        let disks = fitting_disks(&mut launched.monitor, record, devices)?;
        let targets = self.targets(&mut launched.monitor, &disks)?;
        let is_export = |target: &Target<'_>| matches!(target, Target::Export(..));
        let exports = targets.iter().any(is_export);
        let total = self.tables.iter().map(|disk| disk.table.pages).sum();
        let mut before = 0;
        let mut restored = Vec::new();
        let all = self.tables.iter().zip(targets).zip(disks);
        for ((DiskTable { bytes, table, .. }, target), disk) in all {
            let map = PageMap::open(reader, table)?;
            map.read_rest()?;
            let mut progress = |done| {
                let done = before + done;
                events(LazyEvent::Progress(Progress::FillingDisks { done, total }));
            };
            let named = (&*table.name, *bytes);
            let pages = match target {
                Target::File(file) => fill_file(named, &map, file, &mut progress)?,
                Target::Export(socket, name) => fill(named, &map, (socket, &name), &mut progress)?,
            };
            before += table.pages;
            restored.push(RestoredDisk {
                device: table.name.clone(),
                file: disk.path,
                bytes: *bytes,
                pages,
            });
        }
        if exports {
            ExportedImages::stop(&mut launched.monitor)?;
        }
        Ok(restored)
    }

    /// Where the content of each goes. QEMU exports those whose format it has to write.
    fn targets(
        &self,
        monitor: &mut Monitor,
        disks: &[Disk],
    ) -> Result<Vec<Target<'_>>, RestoreError> {
        let files: Vec<Option<&File>> = disks.iter().map(|disk| self.made.raw_file(disk)).collect();
        let others = disks.iter().zip(&files).filter(|(_, file)| file.is_none());
        let others: Vec<Disk> = others.map(|(disk, _)| disk.clone()).collect();
        let sockets = match others.is_empty() {
            true => Vec::new(),
            false => ExportedImages::of(monitor, others)?.sockets,
        };
        let mut exports = (0..).zip(sockets);
        let mut export = || {
            let (number, socket) = exports.next()?;
            Some(Target::Export(socket, export_name(number)))
        };
        let targets = files.into_iter();
        let targets = targets.filter_map(|file| file.map(Target::File).or_else(&mut export));
        Ok(targets.collect())
    }

    /// The VM may run on them from now on.
    pub(super) fn keep(self) {
        drop(self.made.keep());
    }
}
