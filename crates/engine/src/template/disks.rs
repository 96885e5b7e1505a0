//! The disks of a checkpoint as images that clones only read.

use std::fs;
use std::path::Path;

use stillframe_qemu::launch::{NewFormat, NewImage};
use stillframe_repo::{DiskTable, Reader};

use super::files::Template;
use super::kept::Content;
use super::{TemplateError, TemplateOptions};
use crate::{Progress, ProgressSink};

/// The images of one checkpoint's disks. While this value lives, no process removes them.
#[derive(Debug)]
pub struct DiskTemplate(Template);

impl DiskTemplate {
    /// Where the images will lie, known before they are made.
    pub fn images(folder: &Path, key: &str, disks: &[DiskTable]) -> Vec<NewImage> {
        let numbered = disks.iter().enumerate();
        let images = numbered.map(|(number, disk)| NewImage {
            device: disk.table.name.clone(),
            path: folder.join(key).join(file_name(number)),
            format: NewFormat::Raw,
        });
        images.collect()
    }

    /// Finds the images of a checkpoint's disks, or makes them, in a directory that is not that of memory.
    ///
    /// # Errors
    /// They cannot be made or read.
    pub fn of(
        folder: &Path,
        key: &str,
        disks: &[DiskTable],
        (reader, memory): (&Reader<'_>, &TemplateOptions),
        progress: ProgressSink<'_>,
    ) -> Result<DiskTemplate, TemplateError> {
        let whole = |path: &Path| fs::canonicalize(path).ok();
        if folder == memory.folder
            || whole(folder).is_some_and(|it| whole(&memory.folder) == Some(it))
        {
            return Err(TemplateError::OneDirectory {
                path: folder.to_owned(),
            });
        }
        let numbered = disks.iter().enumerate();
        let contents = numbered.map(|(number, disk)| Content {
            file: file_name(number),
            table: &disk.table,
            bytes: disk.bytes,
        });
        let contents: Vec<Content<'_>> = contents.collect();
        let template = Template::of(folder, key, &contents, reader, &mut |done, total| {
            progress(Progress::FillingDisks { done, total });
        })?;
        Ok(DiskTemplate(template))
    }

    /// Whether they were made now.
    pub fn is_new(&self) -> bool {
        self.0.made
    }

    /// Removes those that were made now, and which no clone has.
    ///
    /// # Errors
    /// They cannot be removed.
    pub fn discard(self) -> Result<(), TemplateError> {
        self.0.discard()
    }
}

fn file_name(number: usize) -> String {
    format!("{number}.img")
}
