//! One disk of a checkpoint as an image: raw, with holes for zeros, or of another format.

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;
use stillframe_page::PAGE_BYTES;
use stillframe_qemu::migration_file::MigrationFileError;
use stillframe_repo::{DiskTable, PageMap, Repository};

use super::pages::Walk;
use super::{ExportError, Output, image};
use crate::ProgressSink;
use crate::restore::Checkpoint;

/// The format of an image that is nothing but the disk's content.
const RAW: &str = "raw";

/// The report on a written image.
#[derive(Debug, Clone, Serialize)]
pub struct DiskReport {
    /// The checkpoint.
    pub checkpoint: String,
    /// The VM's name.
    pub vm: String,
    /// The disk.
    pub disk: String,
    /// The image's format.
    pub format: String,
    /// The image.
    pub file: PathBuf,
    /// Its length in bytes; zeros are holes in it.
    pub bytes: u64,
    /// Pages with content that were written.
    pub pages: u64,
    /// Pages of zeros.
    pub zero_pages: u64,
}

/// Writes a disk of a checkpoint as an image of this format, one of those that `qemu-img` knows.
///
/// # Errors
/// [`ExportError`]; a file of that name is as it was then.
pub fn export_disk(
    repository: &mut Repository,
    Checkpoint { id, manifest }: Checkpoint<'_>,
    (device, format): (&str, &str),
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
    let reader = repository.reader(lock_wait)?;
    let map = PageMap::open(&reader, table)?;
    let (pages, zero_pages) = match format {
        RAW => raw(map, *bytes, &output, progress)?,
        _ => other(&map, *bytes, (&output, format), progress)?,
    };
    Ok(DiskReport {
        checkpoint: id.to_string(),
        vm: manifest.vm.clone(),
        disk: device.to_owned(),
        format: format.to_owned(),
        file: output.finish()?,
        bytes: *bytes,
        pages,
        zero_pages,
    })
}

/// Returns the numbers of pages with content and of zeros.
fn raw(
    map: PageMap<'_>,
    bytes: u64,
    output: &Output,
    progress: ProgressSink<'_>,
) -> Result<(u64, u64), ExportError> {
    output.set_length(bytes)?;
    let mut walk = Walk::new(vec![map], progress);
    let sink = |page: u64, content: &[u8]| {
        let at = page * PAGE_BYTES;
        // The last page may be filled up.
        let length = content.len().min((bytes - at) as usize);
        let put = output.put_io(&content[..length], at);
        put.map_err(|source| MigrationFileError::Write(source).into())
    };
    walk.block(0, &mut |_, _| Ok(()), &sink)
        .map_err(|error| output.blame(error))?;
    Ok((walk.pages, walk.zero_pages))
}

fn other(
    map: &PageMap<'_>,
    bytes: u64,
    to: (&Output, &str),
    progress: ProgressSink<'_>,
) -> Result<(u64, u64), ExportError> {
    map.read_rest()?;
    let mut zero_pages = 0;
    for page in 0..map.pages() {
        zero_pages += u64::from(map.is_zero(page)?);
    }
    image::convert(map, bytes, to, progress)?;
    Ok((map.pages() - zero_pages, zero_pages))
}
