//! The files of a template: found as they were written, or made.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, fallocate};
use stillframe_fault::{self as fault, Point};
use stillframe_page::PAGE_BYTES;
use stillframe_repo::{PageMap, Reader};
use stillframe_sys::affinity;
use stillframe_sys::memory;
use stillframe_sys::private_dir::PrivateDir;

use super::kept::{self, Content};
use super::{LOCK, TemplateError, failed};

/// Pages read for one round of writing.
const WINDOW_PAGES: u64 = 1 << 18;

/// Gets the number of pages that are done, and that of all.
type PagesSink<'p> = &'p mut dyn FnMut(u64, u64);

/// A directory of files with a content each. While this value lives, no process removes it.
#[derive(Debug)]
pub(super) struct Template {
    pub folder: PrivateDir,
    pub key: String,
    /// Whether it was made now.
    pub made: bool,
    /// Those of the files, in the order of the contents.
    pub inodes: Vec<u64>,
    // Unlocked when closed.
    _lock: File,
}

impl Template {
    /// Finds the template of this name in a directory, or makes it.
    pub fn of(
        folder: &Path,
        key: &str,
        contents: &[Content<'_>],
        reader: &Reader<'_>,
        progress: PagesSink<'_>,
    ) -> Result<Template, TemplateError> {
        let path = folder;
        let folder = PrivateDir::create(path)?;
        let lock = folder.lock_file(LOCK, true)?;
        let lock = lock.ok_or_else(|| TemplateError::Busy {
            path: path.to_owned(),
        })?;
        kept::remove_leftovers(&folder)?;
        let found = kept::unchanged(&folder, key, contents)?;
        let made = found.is_none();
        let (whole, inodes) = match found {
            Some(found) => found,
            None => {
                folder.remove_directory(key)?;
                make(&folder, key, contents, reader, progress)?;
                let made = kept::unchanged(&folder, key, contents)?;
                made.ok_or_else(|| failed("find", &path.join(key))(io::ErrorKind::NotFound.into()))?
            }
        };
        kept::touch(&whole)?;
        Ok(Template {
            folder,
            key: key.to_owned(),
            made,
            inodes,
            _lock: lock,
        })
    }

    /// Removes it if it was made now.
    pub fn discard(self) -> Result<(), TemplateError> {
        match self.made {
            true => Ok(self.folder.remove_directory(&self.key)?),
            false => Ok(()),
        }
    }
}

fn make(
    folder: &PrivateDir,
    key: &str,
    contents: &[Content<'_>],
    reader: &Reader<'_>,
    progress: PagesSink<'_>,
) -> Result<(), TemplateError> {
    let partial = format!("{}{}", kept::PARTIAL, std::process::id());
    let made = folder
        .make_directory(&partial)
        .map_err(TemplateError::from)
        .and_then(|partial| fill(&partial, contents, reader, progress))
        .and_then(|()| Ok(folder.rename(&partial, key)?));
    if made.is_err() {
        // A directory that cannot be removed now is removed the next time.
        let _ = folder.remove_directory(&partial);
    }
    made
}

fn fill(
    folder: &PrivateDir,
    contents: &[Content<'_>],
    reader: &Reader<'_>,
    progress: PagesSink<'_>,
) -> Result<(), TemplateError> {
    let total = contents.iter().map(|content| content.table.pages).sum();
    let mut done = 0;
    let mut files = Vec::new();
    for Content { file, table, bytes } in contents {
        let path = folder.path().join(file);
        let file = folder.create_file(file)?;
        make_room(&file, &path, *bytes)?;
        let map = PageMap::read(reader, table)?;
        for start in (0..table.pages).step_by(WINDOW_PAGES as usize) {
            let end = table.pages.min(start + WINDOW_PAGES);
            let mut with_content = Vec::new();
            for page in start..end {
                if !map.is_zero(page)? {
                    with_content.push(page);
                }
            }
            let threads = affinity::of_this_thread().len();
            map.read_pages(with_content, threads, &|page, content| {
                let at = page * PAGE_BYTES;
                // The last page of a disk may be filled up.
                let length = content.len().min((bytes - at) as usize);
                let written = file.write_all_at(&content[..length], at);
                written.map_err(|source| no_space(&path, length as u64, "write", source))
            })?;
            progress(done + end, total);
        }
        done += table.pages;
        // Under its name it is always whole.
        file.sync_all().map_err(failed("write", &path))?;
        let read_only = Permissions::from_mode(0o400);
        file.set_permissions(read_only)
            .map_err(failed("protect", &path))?;
        files.push(file);
    }
    fault::at(Point::TemplateFilled).map_err(failed("complete", folder.path()))?;
    kept::record(folder, contents, &files)
}

/// Makes it a file of zeros. In memory all of it is reserved: a page that could not be had later would end the
/// VM.
fn make_room(file: &File, path: &Path, bytes: u64) -> Result<(), TemplateError> {
    file.set_len(bytes).map_err(failed("extend", path))?;
    if memory::is_in_tmpfs(file).map_err(failed("examine", path))? {
        fallocate(file, FallocateFlags::empty(), 0, bytes)
            .map_err(|errno| no_space(path, bytes, "reserve", errno.into()))?;
    }
    Ok(())
}

fn no_space(path: &Path, bytes: u64, action: &'static str, source: io::Error) -> TemplateError {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => TemplateError::NoSpace {
            path: path.to_owned(),
            bytes,
        },
        _ => failed(action, path)(source),
    }
}
