//! `--verify` compares every page of every RAM block with the repository. It reads the pages in the pause (or
//! before a restored VM runs) by a slow way of its own.
//!
//! The comparison is by content id, a keyed 256-bit hash. `check --read-data` shows that the stored bytes have the
//! id they are stored under, for all checkpoints at once. Pages that are stored as deltas are made out of them, and
//! hashed.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;
use stillframe_page::hash::{ContentHasher, ContentId};
use stillframe_page::is_zero;
use stillframe_page::{PAGE, PAGE_BYTES};
use stillframe_repo::{BlockTable, PageMap, Reader, RepoError};
use thiserror::Error;

use crate::encoding::page_encoder::hash_all;
use crate::memory::Page;
use crate::memory::block::{Block, BlockError};
use crate::memory::ranges::PageRanges;
use crate::{Progress, ProgressSink};

/// Pages read at once.
const CHUNK_PAGES: u64 = 2048;
/// Differences named one by one.
const NAMED_MAX: usize = 16;

/// Why a comparison could not be made.
#[derive(Debug, Error)]
pub enum VerifyError {
    /// The page tables cannot be read back.
    #[error("cannot read the checkpoint back to compare it")]
    Repo(#[from] RepoError),
    /// The RAM blocks do not match.
    #[error("the checkpoint has no page table of {pages} pages for RAM block {block}")]
    NoTable {
        /// The block.
        block: String,
        /// Its length.
        pages: u64,
    },
}

/// The result of a comparison.
#[derive(Debug, Clone, Default, Serialize, PartialEq, Eq)]
pub struct VerifyReport {
    /// Pages compared: all pages of all RAM blocks.
    pub pages: u64,
    /// Pages whose content differs. Anything but 0 is a bug of Stillframe or of the machine.
    pub differing: u64,
    /// Pages that the guest called free and did not write since, which are zeros in the checkpoint and hold something.
    /// They are not among the differing.
    pub free: u64,
    /// The first of them, as `block page`.
    pub first: Vec<String>,
}

impl VerifyReport {
    /// Notes a page that differs.
    fn differs(&mut self, block: &str, page: u64) {
        self.differing += 1;
        if self.first.len() < NAMED_MAX {
            self.first.push(format!("{block} {page}"));
        }
    }
}

/// The content ids of all of memory at one instant; `None` is a zero page.
#[derive(Debug)]
pub struct Image {
    hasher: ContentHasher,
    blocks: Vec<(String, Vec<Option<ContentId>>)>,
    /// Pages that may be zeros in the checkpoint, by block; none if empty.
    free: PageRanges,
}

impl Image {
    /// Memory it takes, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let ids: usize = self.blocks.iter().map(|(_, ids)| ids.len()).sum();
        (ids * size_of::<Option<ContentId>>()) as u64
    }

    /// Reads and hashes all pages of `blocks`. The guest must be stopped.
    pub fn take<'a>(
        blocks: impl Iterator<Item = &'a Block>,
        hasher: &ContentHasher,
    ) -> Result<Image, BlockError> {
        Image::of(blocks.map(|block| (block, block.whole())), hasher)
    }

    /// The same of some pages of each block. The others count as zero, and are not touched.
    pub(crate) fn of<'a>(
        parts: impl Iterator<Item = (&'a Block, Vec<Range<u64>>)>,
        hasher: &ContentHasher,
    ) -> Result<Image, BlockError> {
        let mut buffer = vec![0u8; (CHUNK_PAGES * PAGE_BYTES) as usize];
        let mut image = Image {
            hasher: hasher.clone(),
            blocks: Vec::new(),
            free: PageRanges::new(),
        };
        for (block, parts) in parts {
            let mut ids = vec![None; block.pages() as usize];
            for mut part in parts {
                while part.start < part.end {
                    let pages = CHUNK_PAGES.min(part.end - part.start);
                    let bytes = &mut buffer[..(pages * PAGE_BYTES) as usize];
                    block.read_slowly(part.start, bytes)?;
                    let chunk: Vec<Page<'_>> = Page::consecutive(part.start, bytes).collect();
                    for (id, found) in ids[part.start as usize..]
                        .iter_mut()
                        .zip(hash_all(hasher, &chunk))
                    {
                        *id = found;
                    }
                    part.start += pages;
                }
            }
            image.blocks.push((block.name().to_owned(), ids));
        }
        Ok(image)
    }

    /// The guest calls these pages free: a checkpoint may have zeros for them.
    pub(crate) fn with_free(mut self, free: PageRanges) -> Image {
        self.free = free;
        self
    }

    /// The content ids of all pages, by block.
    pub(crate) fn ids(&self) -> impl Iterator<Item = &[Option<ContentId>]> {
        self.blocks.iter().map(|(_, ids)| &ids[..])
    }

    /// Compares with the content ids of the same pages of another process, in the order of [`Image::ids`]. Pages
    /// that are missing there differ, and so do pages that are too many.
    pub(crate) fn compare_ids(&self, others: &[Option<ContentId>]) -> VerifyReport {
        let mut report = VerifyReport::default();
        let mut others = others.iter();
        for (name, ids) in &self.blocks {
            for (page, id) in ids.iter().enumerate() {
                if others.next() != Some(id) {
                    report.differs(name, page as u64);
                }
            }
            report.pages += ids.len() as u64;
        }
        report.differing += others.len() as u64;
        report
    }

    /// Compares with the repository's content of a checkpoint.
    pub fn compare(
        &self,
        reader: &Reader<'_>,
        tables: &[BlockTable],
        progress: ProgressSink<'_>,
    ) -> Result<VerifyReport, VerifyError> {
        let total = self.blocks.iter().map(|(_, ids)| ids.len() as u64).sum();
        let mut report = VerifyReport::default();
        for (block, (name, ids)) in self.blocks.iter().enumerate() {
            let pages = ids.len() as u64;
            let table = tables
                .iter()
                .find(|table| table.name == *name && table.pages == pages)
                .ok_or_else(|| VerifyError::NoTable {
                    block: name.clone(),
                    pages,
                })?;
            let map = PageMap::read(reader, table)?;
            let free = self.free.get(block).map_or(&[][..], Vec::as_slice);
            for page in self.differing(&map, ids)? {
                let at = free.partition_point(|range| range.end <= page);
                let is_free = free.get(at).is_some_and(|range| range.start <= page);
                match is_free && map.is_zero(page)? {
                    true => report.free += 1,
                    false => report.differs(name, page),
                }
            }
            report.pages += pages;
            progress(Progress::Verifying {
                done: report.pages,
                total,
            });
        }
        Ok(report)
    }

    /// The differing pages of one block, ascending.
    fn differing(
        &self,
        map: &PageMap<'_>,
        ids: &[Option<ContentId>],
    ) -> Result<Vec<u64>, RepoError> {
        let differing = Mutex::new(Vec::new());
        let differs = |page| {
            let mut all = differing.lock().unwrap_or_else(PoisonError::into_inner);
            all.push(page);
        };
        let mut made = Vec::new();
        for (page, id) in (0..).zip(ids) {
            match (map.is_zero(page)?, map.whole_id(page)?) {
                (false, None) => made.push(page),
                (_, found) if found != *id => differs(page),
                _ => {}
            }
        }
        map.read_pages(made, 1, &|first, bytes| {
            for (page, bytes) in (first..).zip(bytes.chunks(PAGE)) {
                let found = (!is_zero(bytes)).then(|| self.hasher.id(bytes));
                if found != ids[page as usize] {
                    differs(page);
                }
            }
            Ok::<(), RepoError>(())
        })?;
        let mut differing = differing
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        differing.sort_unstable();
        Ok(differing)
    }
}
