//! Templates: the memory of a checkpoint as files, which several VMs map privately, and its disks as images, which they
//! only read. Pages that none of them has written they share. Made once a checkpoint and kept for the next clones: of memory as
//! much as a budget allows, of disks all.
//!
//! ```text
//!   DIR/lock
//!   DIR/<repository>-<checkpoint>/0.ram 1.ram ...        (whole: it got its name last; of disks 0.img)
//!                                 template.json          identity of the files when they were written
//!   DIR/partial-<pid>/...                                (being made, or left by a process that was killed)
//! ```
//!
//! The files hold the guest's data in the clear, and decide what later clones run on. That is why DIR of memory should
//! be in memory (`/dev/shm`), and any must be its owner's alone ([`PrivateDir`]). Before a template is used again
//! owner, mode, inode, size and time of change of each file are compared with its record. Hashing the content
//! would take longer than starting a clone: 0.3 s a GiB.

mod disks;
mod files;
mod kept;

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use stillframe_page::{PAGE, PAGE_BYTES};
use stillframe_qemu::launch::CloneMemory;
use stillframe_repo::{BlockTable, PageMap, Reader, RepoError};
use stillframe_sys::pagemap::Pagemap;
use stillframe_sys::private_dir::PrivateError;
use stillframe_sys::process::{Mapping, Process};
use thiserror::Error;

use crate::memory::block::Block;
use crate::populate::eager::{self, PopulateError};
use crate::source::SourceError;
use crate::{Progress, ProgressSink};
pub use disks::DiskTemplate;
use files::Template;
use kept::Content;
pub use kept::{KeptTemplate, drop_kept, kept};

/// Held while clones are started, and while templates are removed.
const LOCK: &str = "lock";

/// Why there is no memory template.
#[derive(Debug, Error)]
pub enum TemplateError {
    /// The directory, or a file in it, is not its owner's alone, or cannot be used.
    #[error(
        "what clones share is kept in a directory of its own (another: --template-dir, or DIR of --disks new=DIR)"
    )]
    Private(#[from] PrivateError),
    /// Clones are being started from templates of this directory.
    #[error("templates in {path} are in use by another process: try again when its clones run")]
    Busy {
        /// The directory.
        path: PathBuf,
    },
    /// The file system refused.
    #[error(
        "cannot {action} {path}, where is kept what clones share (--template-dir, or DIR of --disks new=DIR)"
    )]
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
        "{path} has no room for {bytes} bytes that the clones share: free some, or name another directory (--template-dir, or DIR of --disks new=DIR)"
    )]
    NoSpace {
        /// The directory.
        path: PathBuf,
        /// How much is needed.
        bytes: u64,
    },
    /// The two kinds would have one name.
    #[error("{path} is the directory of memory templates; name another one for disks")]
    OneDirectory {
        /// The directory.
        path: PathBuf,
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
    template: Template,
    options: TemplateOptions,
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
        let contents = (0..).zip(tables).map(|(number, table)| Content {
            file: file_name(number),
            table,
            bytes: table.pages * u64::from(table.page_bytes),
        });
        let contents: Vec<Content<'_>> = contents.collect();
        let template = Template::of(
            &options.folder,
            key,
            &contents,
            reader,
            &mut |done, total| {
                progress(Progress::Populating { done, total });
            },
        )?;
        let memory = options.memory(key, tables).into_iter();
        let files = memory.zip(&template.inodes);
        Ok(MemoryTemplate {
            files: files
                .map(|(memory, &inode)| TemplateFile { memory, inode })
                .collect(),
            template,
            options: options.clone(),
        })
    }

    /// Whether it was made now.
    pub fn is_new(&self) -> bool {
        self.template.made
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
        let Template { folder, key, .. } = &self.template;
        let mut all = kept::all_in(folder)?;
        // The one in use last of all.
        all.sort_by_key(|template| (template.name == *key, template.used));
        let mut total: u64 = all.iter().map(|template| template.bytes).sum();
        let now = SystemTime::now();
        let mut kept = true;
        for template in all {
            let age = now.duration_since(template.used).unwrap_or_default();
            let too_old = self.options.age_limit.is_some_and(|limit| age > limit);
            if total > self.options.budget_bytes || too_old {
                folder.remove_directory(&template.name)?;
                total -= template.bytes;
                kept &= template.name != *key;
            }
        }
        Ok(kept)
    }

    /// Removes a template that was made now, and of which no clone was made.
    pub fn discard(self) -> Result<(), TemplateError> {
        self.template.discard()
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
