//! The disks of a checkpoint, written into new images while the VM waits.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;
use stillframe_qemu::launch::{Launched, NewImage};
use stillframe_qemu::monitor::{Disk, image_of};
use stillframe_qemu::record::VmRecord;
use stillframe_repo::{DiskTable, Manifest, PageMap, Reader};

use super::{Checkpoint, LazyEvent, LazySink, RestoreError, RestoreOptions, vm_record};
use crate::Progress;
use crate::disks::fill::fill;
use crate::disks::images::{Advice, ExportedImages, NewImages, export_name};

/// What the user of a restore can do about an image.
const ADVICE: Advice = Advice {
    exists: "Remove it if it is not needed, or name another directory",
    place: "Name another directory",
    device: "files made there would be lost",
    format: "Write the disk with `export --disk`, convert it, and restore with --replace and --disks-as-they-are",
};

/// A disk that was written anew.
#[derive(Debug, Clone, Serialize)]
pub struct RestoredDisk {
    /// The drive or device.
    pub device: String,
    /// Its image.
    pub file: PathBuf,
    /// The disk's length in bytes.
    pub bytes: u64,
    /// Pages with content that were written; all others are zero.
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
            raw: false,
        }
    });
    Ok(images.collect())
}

/// The new images of a VM.
pub(super) struct NewDisks {
    made: NewImages,
    tables: Vec<DiskTable>,
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
        let tables = tables.filter(|disk| devices.contains(&&disk.table.name));
        Ok(NewDisks {
            tables: tables.cloned().collect(),
            made: NewImages::make(record, devices, &options.launch, false, &ADVICE)?,
        })
    }

    /// Writes their content. QEMU has them open, and does not use them yet.
    pub(super) fn fill(
        &self,
        record: &VmRecord,
        launched: &mut Launched,
        reader: &Reader<'_>,
        events: LazySink<'_>,
    ) -> Result<Vec<RestoredDisk>, RestoreError> {
        if self.tables.is_empty() {
            return Ok(Vec::new());
        }
        let devices = self.tables.iter().map(|disk| &disk.table.name);
        let exported = ExportedImages::start(&mut launched.monitor, record, devices)?;
        let total = self.tables.iter().map(|disk| disk.table.pages).sum();
        let mut before = 0;
        let mut restored = Vec::new();
        let all = self.tables.iter().zip(exported.sockets).zip(exported.disks);
        for (number, ((DiskTable { bytes, table, .. }, socket), disk)) in all.enumerate() {
            let map = PageMap::open(reader, table)?;
            map.read_rest()?;
            let mut progress = |done| {
                let done = before + done;
                events(LazyEvent::Progress(Progress::FillingDisks { done, total }));
            };
            let socket = (socket, &*export_name(number));
            let pages = fill((&table.name, *bytes), &map, socket, &mut progress)?;
            before += table.pages;
            restored.push(RestoredDisk {
                device: table.name.clone(),
                file: disk.path,
                bytes: *bytes,
                pages,
            });
        }
        ExportedImages::stop(&mut launched.monitor)?;
        Ok(restored)
    }

    /// The VM may run on them from now on.
    pub(super) fn keep(self) {
        drop(self.made.keep());
    }
}
