//! The memory of a checkpoint as files, which several VMs map privately: what none of them has written,
//! they share. Made once a checkpoint and kept, within a budget, for the next clones.
//!
//! ```text
//!   DIR/lock
//!   DIR/<repository>-<checkpoint>/0.ram 1.ram ...        (whole: it got its name last)
//!   DIR/partial-<pid>/...                                (being made, or left by who was killed)
//! ```
//!
//! The files hold the guest's memory in the clear. That is why DIR should be in memory (`/dev/shm`), and why
//! nobody but the owner may read it.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock, fstatfs};
use stillframe_qemu::launch::CloneMemory;
use stillframe_repo::{PageMap, RamTable, Reader, RepoError};
use stillframe_sys::affinity;
use stillframe_sys::pagemap::Pagemap;
use stillframe_sys::process::{Mapping, Process};
use thiserror::Error;

use super::eager::{self, PopulateError};
use crate::capture::block::{Block, PAGE, PAGE_BYTES};
use crate::{Progress, ProgressSink};

/// `statfs(2)`: TMPFS_MAGIC.
const TMPFS: i64 = 0x0102_1994;
/// Pages read for one round of writing.
const WINDOW_PAGES: u64 = 1 << 18;

/// Why there is no base.
#[derive(Debug, Error)]
pub enum BaseError {
    /// The file system refused.
    #[error("cannot {action} {path}, where the memory of clones is kept (--base-dir)")]
    File {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// No room.
    #[error(
        "{path} has no room for {bytes} bytes of memory that the clones share: free some, or name another directory with --base-dir"
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

/// Where bases are kept, and how many.
#[derive(Debug, Clone)]
pub struct BaseOptions {
    /// The directory; made if need be.
    pub folder: PathBuf,
    /// Bases that were used longest ago go when all take more than this, in bytes. One that is mapped lives on
    /// without a name.
    pub budget_bytes: u64,
}

/// One block of a base.
#[derive(Debug)]
struct BaseFile {
    memory: CloneMemory,
    inode: u64,
}

/// The memory of one checkpoint. While it is held, nobody takes it away.
#[derive(Debug)]
pub struct Base {
    files: Vec<BaseFile>,
    /// Whether it was made now.
    pub made: bool,
    options: BaseOptions,
    folder: PathBuf,
    // Unlocked when closed.
    lock: File,
}

impl Base {
    /// Finds the base of a checkpoint, or makes it. `key` tells the checkpoint from all others, `tables` are
    /// those of its blocks that are to be in it.
    pub fn of(
        key: &str,
        tables: &[&RamTable],
        reader: &Reader<'_>,
        options: &BaseOptions,
        progress: ProgressSink<'_>,
    ) -> Result<Base, BaseError> {
        let folder = &options.folder;
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder.create(folder).map_err(failed("create", folder))?;
        let lock = locked(&folder.join("lock"))?;
        let whole = folder.join(key);
        let made = !whole.is_dir();
        if made {
            remove_leftovers(folder);
            make(&whole, tables, reader, progress)?;
        }
        // The time of its last use.
        let now = File::open(&whole).and_then(|folder| folder.set_modified(SystemTime::now()));
        now.map_err(failed("touch", &whole))?;
        let files = (0..).zip(tables).map(|(number, table)| {
            let path = file_of(&whole, number);
            let metadata = fs::metadata(&path).map_err(failed("examine", &path))?;
            Ok(BaseFile {
                memory: CloneMemory {
                    block: table.name.clone(),
                    bytes: table.pages * u64::from(table.page_bytes),
                    file: path,
                },
                inode: metadata.ino(),
            })
        });
        let base = Base {
            files: files.collect::<Result<_, BaseError>>()?,
            made,
            options: options.clone(),
            folder: whole,
            lock,
        };
        Ok(base)
    }

    /// What a clone is told of it.
    pub fn memory(&self) -> Vec<CloneMemory> {
        self.files.iter().map(|file| file.memory.clone()).collect()
    }

    /// Fills the memory of a fresh QEMU that was started with this: the blocks that are not in it, and what
    /// QEMU has written already into those that are. Returns how many pages had content.
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

    /// Lets others take it away, and takes away what is over the budget.
    pub fn release(self) -> Result<(), BaseError> {
        let mut all = Vec::new();
        let folder = &self.options.folder;
        for entry in fs::read_dir(folder).map_err(failed("list", folder))? {
            let path = entry.map_err(failed("list", folder))?.path();
            if path.is_dir() {
                let metadata = fs::metadata(&path).map_err(failed("examine", &path))?;
                let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                all.push((used, bytes_in(&path), path));
            }
        }
        // The one in use last of all.
        all.sort_by_key(|(used, _, path)| (*path == self.folder, *used));
        let mut total: u64 = all.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, bytes, path) in all {
            if total <= self.options.budget_bytes {
                break;
            }
            fs::remove_dir_all(&path).map_err(failed("remove", &path))?;
            total -= bytes;
        }
        drop(self.lock);
        Ok(())
    }
}

impl BaseFile {
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

/// Writes those of the pages that are not what they should be.
fn put_right(
    block: &Block,
    map: &PageMap<'_>,
    pages: impl Iterator<Item = u64>,
) -> Result<u64, PopulateError> {
    let mut written = 0;
    for page in pages.filter(|&page| page < map.pages()) {
        let wanted = map.read_together(&[page])?;
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
    whole: &Path,
    tables: &[&RamTable],
    reader: &Reader<'_>,
    progress: ProgressSink<'_>,
) -> Result<(), BaseError> {
    let partial = whole.with_file_name(format!("partial-{}", std::process::id()));
    let mut builder = DirBuilder::new();
    builder.mode(0o700);
    builder
        .create(&partial)
        .map_err(failed("create", &partial))?;
    let made = fill(&partial, tables, reader, progress)
        .and_then(|()| fs::rename(&partial, whole).map_err(failed("rename", &partial)));
    if made.is_err() {
        // What cannot be removed now is removed the next time.
        let _ = fs::remove_dir_all(&partial);
    }
    made
}

fn fill(
    folder: &Path,
    tables: &[&RamTable],
    reader: &Reader<'_>,
    progress: ProgressSink<'_>,
) -> Result<(), BaseError> {
    let total = tables.iter().map(|table| table.pages).sum();
    let mut done = 0;
    for (number, table) in (0..).zip(tables) {
        let path = file_of(folder, number);
        let bytes = table.pages * PAGE_BYTES;
        let file = room(&path, bytes)?;
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
            super::read_pages(&map, content, threads, |page, bytes| {
                let written = file.write_all_at(bytes, page * PAGE_BYTES);
                written.map_err(|source| no_space(&path, bytes.len() as u64, "write", source))
            })?;
            progress(Progress::Populating {
                done: done + end,
                total,
            });
        }
        done += table.pages;
        // Whoever finds it under its name finds it whole.
        file.sync_all().map_err(failed("write", &path))?;
        let read_only = Permissions::from_mode(0o400);
        fs::set_permissions(&path, read_only).map_err(failed("protect", &path))?;
    }
    Ok(())
}

/// A file of zeros. In memory all of it is reserved: a page that could not be had later would end the VM.
fn room(path: &Path, bytes: u64) -> Result<File, BaseError> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let file = options.open(path).map_err(failed("create", path))?;
    file.set_len(bytes).map_err(failed("extend", path))?;
    let status = fstatfs(&file).map_err(|errno| failed("examine", path)(errno.into()))?;
    if status.f_type == TMPFS {
        fallocate(&file, FallocateFlags::empty(), 0, bytes)
            .map_err(|errno| no_space(path, bytes, "reserve", errno.into()))?;
    }
    Ok(file)
}

fn no_space(path: &Path, bytes: u64, action: &'static str, source: io::Error) -> BaseError {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => BaseError::NoSpace {
            path: path.to_owned(),
            bytes,
        },
        _ => failed(action, path)(source),
    }
}

fn file_of(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("{number}.ram"))
}

fn locked(path: &Path) -> Result<File, BaseError> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    let file = options.open(path).map_err(failed("create", path))?;
    flock(&file, FlockOperation::LockExclusive)
        .map_err(|errno| failed("lock", path)(errno.into()))?;
    Ok(file)
}

/// What those who were killed have left. The lock is held.
fn remove_leftovers(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("partial-") {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn bytes_in(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let blocks = entries.filter_map(|entry| Some(entry.metadata().ok()?.blocks()));
    blocks.sum::<u64>() * 512
}

fn failed<'p>(action: &'static str, path: &'p Path) -> impl Fn(io::Error) -> BaseError + 'p {
    move |source| BaseError::File {
        action,
        path: path.to_owned(),
        source,
    }
}
