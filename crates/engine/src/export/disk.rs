//! One disk of a checkpoint as an image: raw, with holes for zeros.

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;
use stillframe_page::PAGE_BYTES;
use stillframe_qemu::migration_file::MigrationFileError;
use stillframe_repo::{DiskTable, PageMap, Repository};

use super::pages::Walk;
use super::{ExportError, Output};
use crate::ProgressSink;
use crate::restore::Checkpoint;

/// The report on a written image.
#[derive(Debug, Clone, Serialize)]
pub struct DiskReport {
    /// The checkpoint.
    pub checkpoint: String,
    /// The VM's name.
    pub vm: String,
    /// The disk.
    pub disk: String,
    /// The image.
    pub file: PathBuf,
    /// Its length in bytes; zeros are holes in it.
    pub bytes: u64,
    /// Pages with content that were written.
    pub pages: u64,
    /// Pages of zeros.
    pub zero_pages: u64,
}

/// Writes a disk of a checkpoint as a raw image.
///
/// # Errors
/// [`ExportError`]; a file of that name is as it was then.
pub fn export_disk(
    repository: &mut Repository,
    Checkpoint { id, manifest }: Checkpoint<'_>,
    device: &str,
    (path, replace): (PathBuf, bool),
    lock_wait: Duration,
    progress: ProgressSink<'_>,
) -> Result<DiskReport, ExportError> {
    let disks = &manifest.disks;
    let found = disks.iter().find(|disk| disk.table.name == device);
    let DiskTable { bytes, table, .. } = found.ok_or_else(|| ExportError::NoDisk {
        disk: device.to_owned(),
        there: match disks.is_empty() {
            true => "no disk; it was taken without their content".to_owned(),
            false => {
                let names: Vec<&str> = disks.iter().map(|disk| disk.table.name.as_str()).collect();
                names.join(", ")
            }
        },
    })?;
    let output = Output::create(&path, replace)?;
    output.set_length(*bytes)?;
    let reader = repository.reader(lock_wait)?;
    let mut walk = Walk::new(vec![PageMap::open(&reader, table)?], progress);
    let sink = |page: u64, content: &[u8]| {
        let at = page * PAGE_BYTES;
        // The last page may be filled up.
        let length = content.len().min((bytes - at) as usize);
        let put = output.put_io(&content[..length], at);
        put.map_err(|source| MigrationFileError::Write(source).into())
    };
    walk.block(0, &mut |_, _| Ok(()), &sink)
        .map_err(|error| output.blame(error))?;
    Ok(DiskReport {
        checkpoint: id.to_string(),
        vm: manifest.vm.clone(),
        disk: device.to_owned(),
        file: output.finish()?,
        bytes: *bytes,
        pages: walk.pages,
        zero_pages: walk.zero_pages,
    })
}
