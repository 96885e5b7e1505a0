//! Memory templates: the memory of a checkpoint as files, which several VMs map privately. Pages that none of
//! them has written they share. Made once a checkpoint and kept, within a budget, for the next clones.
//!
//! ```text
//!   DIR/lock
//!   DIR/<repository>-<checkpoint>/0.ram 1.ram ...        (whole: it got its name last)
//!                                 template.json          identity of the files when they were written
//!   DIR/partial-<pid>/...                                (being made, or left by a process that was killed)
//! ```
//!
//! The files hold the guest's memory in the clear, and decide what later clones run on. That is why DIR should
//! be in memory (`/dev/shm`), and must be its owner's alone ([`PrivateDir`]). Before a template is used again
//! owner, mode, inode, size and time of change of each file are compared with its record. Hashing the content
//! would take longer than starting a clone: 0.3 s a GiB.

mod kept;

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{FallocateFlags, fallocate};
use stillframe_fault::{self as fault, Point};
use stillframe_page::{PAGE, PAGE_BYTES};
use stillframe_qemu::launch::CloneMemory;
use stillframe_repo::{BlockTable, PageMap, Reader, RepoError};
use stillframe_sys::affinity;
use stillframe_sys::memory;
use stillframe_sys::pagemap::Pagemap;
use stillframe_sys::private_dir::{PrivateDir, PrivateError};
use stillframe_sys::process::{Mapping, Process};
use thiserror::Error;

use crate::memory::block::Block;
use crate::populate::eager::{self, PopulateError};
use crate::source::SourceError;
use crate::{Progress, ProgressSink};
pub use kept::{KeptTemplate, drop_kept, kept};

/// Held while clones are started, and while templates are removed.
const LOCK: &str = "lock";
/// Pages read for one round of writing.
const WINDOW_PAGES: u64 = 1 << 18;

/// Why there is no memory template.
#[derive(Debug, Error)]
pub enum TemplateError {
    /// The directory, or a file in it, is not its owner's alone, or cannot be used.
    #[error(
        "memory templates of clones are kept in a directory of their own (another: --template-dir)"
    )]
    Private(#[from] PrivateError),
    /// Clones are being started from templates of this directory.
    #[error(
        "memory templates in {path} are in use by another process: try again when its clones run"
    )]
    Busy {
        /// The directory.
        path: PathBuf,
    },
    /// The file system refused.
    #[error("cannot {action} {path}, where the memory of clones is kept (--template-dir)")]
    File {
        /// The action that failed.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Not enough space.
    #[error(
        "{path} has no room for {bytes} bytes of memory that the clones share: free some, or name another directory with --template-dir"
    )]
    NoSpace {
        /// The directory.
        path: PathBuf,
        /// How much is needed.
        bytes: u64,
    },
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Repo(#[from] RepoError),
}

/// Where memory templates are kept, and how many.
#[derive(Debug, Clone)]
pub struct TemplateOptions {
    /// The directory; made if need be.
    pub folder: PathBuf,
    /// Templates that were used longest ago go when all take more than this, in bytes. A template that is mapped
    /// lives on without a name.
    pub budget_bytes: u64,
    /// Templates that were used longer ago than this are removed too.
    pub age_limit: Option<Duration>,
}

impl TemplateOptions {
    /// Where the files of a template will lie, known before they are made.
    pub fn memory(&self, key: &str, tables: &[&BlockTable]) -> Vec<CloneMemory> {
        let numbered = (0..).zip(tables);
        let memory = numbered.map(|(number, table)| CloneMemory {
            block: table.name.clone(),
            bytes: table.pages * u64::from(table.page_bytes),
            file: self.folder.join(key).join(file_name(number)),
        });
        memory.collect()
    }
}

/// One block of a memory template.
#[derive(Debug)]
struct TemplateFile {
    memory: CloneMemory,
    inode: u64,
}

/// The memory template of one checkpoint. While this value lives, no process removes the template.
#[derive(Debug)]
pub struct MemoryTemplate {
    files: Vec<TemplateFile>,
    /// Whether it was made now.
    pub made: bool,
    options: TemplateOptions,
    folder: PrivateDir,
    key: String,
    // Unlocked when closed.
    lock: File,
}

impl MemoryTemplate {
    /// Finds the memory template of a checkpoint, or makes it. `key` distinguishes the checkpoint from all others
    /// ([`KeptTemplate::name`]), `tables` are those of its blocks that are to be in it.
    pub fn of(
        key: &str,
        tables: &[&BlockTable],
        reader: &Reader<'_>,
        options: &TemplateOptions,
        progress: ProgressSink<'_>,
    ) -> Result<MemoryTemplate, TemplateError> {
        let folder = PrivateDir::create(&options.folder)?;
        let lock = folder.lock_file(LOCK, true)?;
        let busy = || TemplateError::Busy {
            path: options.folder.clone(),
        };
        let lock = lock.ok_or_else(busy)?;
        kept::remove_leftovers(&folder)?;
        let found = kept::unchanged(&folder, key, tables)?;
        let made = found.is_none();
        let (whole, inodes) = match found {
            Some(found) => found,
            None => {
                folder.remove_directory(key)?;
                make(&folder, key, tables, reader, progress)?;
                let made = kept::unchanged(&folder, key, tables)?;
                made.ok_or_else(|| {
                    failed("find", &options.folder.join(key))(io::ErrorKind::NotFound.into())
                })?
            }
        };
        kept::touch(&whole)?;
        let memory = options.memory(key, tables).into_iter();
        let files = memory.zip(inodes);
        Ok(MemoryTemplate {
            files: files
                .map(|(memory, inode)| TemplateFile { memory, inode })
                .collect(),
            made,
            options: options.clone(),
            folder,
            key: key.to_owned(),
            lock,
        })
    }

    /// Populates the memory of a fresh QEMU that was started with this template: the blocks that are not in it, and
    /// the pages that QEMU has already written in its blocks. Returns how many pages had content.
    pub(crate) fn complete(
        &self,
        process: &Process,
        blocks: &[&Block],
        maps: Vec<PageMap<'_>>,
        progress: ProgressSink<'_>,
    ) -> Result<u64, PopulateError> {
        let mappings = process.mappings()?;
        let pagemap = Pagemap::open(process)?;
        let (mut others, mut their_maps, mut written) = (Vec::new(), Vec::new(), 0);
        for (block, map) in blocks.iter().zip(maps) {
            let mut files = self.files.iter();
            let Some(file) = files.find(|file| file.memory.block == block.name()) else {
                others.push(*block);
                their_maps.push(map);
                continue;
            };
            file.expect_mapped(block, &mappings)?;
            let mut touched = Vec::new();
            pagemap.populated(block.range(), &mut touched)?;
            let base = block.range().start;
            let pages = touched.iter().flat_map(|range| {
                (range.start - base) / PAGE_BYTES..(range.end - base) / PAGE_BYTES
            });
            written += put_right(block, &map, pages)?;
        }
        Ok(written + eager::populate(process, &others, their_maps, progress)?)
    }

    /// Unlocks the template, and removes templates that exceed the budget or the age limit. Returns whether
    /// this one remains for the next clones.
    pub fn release(self) -> Result<bool, TemplateError> {
        let mut all = kept::all_in(&self.folder)?;
        // The one in use last of all.
        all.sort_by_key(|template| (template.name == self.key, template.used));
        let mut total: u64 = all.iter().map(|template| template.bytes).sum();
        let now = SystemTime::now();
        let mut kept = true;
        for template in all {
            let age = now.duration_since(template.used).unwrap_or_default();
            let too_old = self.options.age_limit.is_some_and(|limit| age > limit);
            if total > self.options.budget_bytes || too_old {
                self.folder.remove_directory(&template.name)?;
                total -= template.bytes;
                kept &= template.name != self.key;
            }
        }
        drop(self.lock);
        Ok(kept)
    }

    /// Removes a template that was made now, and of which no clone was made.
    pub fn discard(self) -> Result<(), TemplateError> {
        match self.made {
            true => Ok(self.folder.remove_directory(&self.key)?),
            false => Ok(()),
        }
    }
}

impl TemplateFile {
    /// That QEMU has it for its memory, privately: else its memory would be nothing.
    fn expect_mapped(&self, block: &Block, mappings: &[Mapping]) -> Result<(), PopulateError> {
        let range = block.range();
        let mut mapped = mappings
            .iter()
            .filter(|mapping| mapping.range.intersect(&range).is_some());
        let right = |mapping: &Mapping| {
            let offset = mapping.range.start.max(range.start) - range.start;
            let of_file = mapping.file_offset + (range.start + offset - mapping.range.start);
            !mapping.shared && mapping.inode == self.inode && of_file == offset
        };
        match mapped.all(right) {
            true => Ok(()),
            false => Err(PopulateError::Blocks {
                difference: format!(
                    "{} is not the file {} of its own",
                    block.name(),
                    self.memory.file.display()
                ),
            }),
        }
    }
}

/// Writes the pages whose content differs from the expected.
fn put_right(
    block: &Block,
    map: &PageMap<'_>,
    pages: impl Iterator<Item = u64>,
) -> Result<u64, PopulateError> {
    let mut written = 0;
    for page in pages.filter(|&page| page < map.pages()) {
        let wanted = map.read_together(&[page]).map_err(SourceError::from)?;
        let mut there = [0; PAGE];
        block.read_slowly(page, &mut there)?;
        if wanted != there {
            block.write(page, &wanted)?;
            written += 1;
        }
    }
    Ok(written)
}

fn make(
    folder: &PrivateDir,
    key: &str,
    tables: &[&BlockTable],
    reader: &Reader<'_>,
    progress: ProgressSink<'_>,
) -> Result<(), TemplateError> {
    let partial = format!("{}{}", kept::PARTIAL, std::process::id());
    let made = folder
        .make_directory(&partial)
        .map_err(TemplateError::from)
        .and_then(|partial| fill(&partial, tables, reader, progress))
        .and_then(|()| Ok(folder.rename(&partial, key)?));
    if made.is_err() {
        // A directory that cannot be removed now is removed the next time.
        let _ = folder.remove_directory(&partial);
    }
    made
}

fn fill(
    folder: &PrivateDir,
    tables: &[&BlockTable],
    reader: &Reader<'_>,
    progress: ProgressSink<'_>,
) -> Result<(), TemplateError> {
    let total = tables.iter().map(|table| table.pages).sum();
    let mut done = 0;
    let mut files = Vec::new();
    for (number, table) in (0..).zip(tables) {
        let path = folder.path().join(file_name(number));
        let file = folder.create_file(&file_name(number))?;
        make_room(&file, &path, table.pages * PAGE_BYTES)?;
        let map = PageMap::read(reader, table)?;
        for start in (0..table.pages).step_by(WINDOW_PAGES as usize) {
            let end = table.pages.min(start + WINDOW_PAGES);
            let mut content = Vec::new();
            for page in start..end {
                if !map.is_zero(page)? {
                    content.push(page);
                }
            }
            let threads = affinity::of_this_thread().len();
            map.read_pages(content, threads, &|page, bytes| {
                let written = file.write_all_at(bytes, page * PAGE_BYTES);
                written.map_err(|source| no_space(&path, bytes.len() as u64, "write", source))
            })?;
            progress(Progress::Populating {
                done: done + end,
                total,
            });
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
    kept::record(folder, tables, &files)
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

fn file_name(number: usize) -> String {
    format!("{number}.ram")
}

fn failed<'p>(action: &'static str, path: &'p Path) -> impl Fn(io::Error) -> TemplateError + 'p {
    move |source| TemplateError::File {
        action,
        path: path.to_owned(),
        source,
    }
}
