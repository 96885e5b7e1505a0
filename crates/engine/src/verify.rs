//! `--verify`: every page of every RAM block, read in the pause (or before a restored VM runs) by a
//! slow way of its own, compared with what the repository holds for it.
//!
//! The comparison is by content id, a keyed 256-bit hash. That the stored bytes have the id they
//! are stored under is what `check --read-data` shows, for all checkpoints at once.

use serde::Serialize;
use stillframe_page::hash::{ContentHasher, ContentId};
use stillframe_repo::table::{self, PageRef};
use stillframe_repo::{RamTable, Reader, RepoError};
use thiserror::Error;

use crate::capture::block::{Block, BlockError, PAGE_BYTES};
use crate::capture::ingest::{Page, hash_all};
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

/// What a comparison found.
#[derive(Debug, Clone, Serialize, PartialEq, Eq)]
pub struct VerifyReport {
    /// Pages compared: all pages of all RAM blocks.
    pub pages: u64,
    /// Pages whose content differs. Anything but 0 is a bug of Stillframe or of the machine.
    pub differing: u64,
    /// The first of them, as `block page`.
    pub first: Vec<String>,
}

/// The content ids of all of memory at one instant; `None` is a zero page.
#[derive(Debug)]
pub struct Image {
    blocks: Vec<(String, Vec<Option<ContentId>>)>,
}

impl Image {
    /// Reads and hashes all pages of `blocks`. The guest must stand still.
    pub fn take<'a>(
        blocks: impl Iterator<Item = &'a Block>,
        hasher: &ContentHasher,
    ) -> Result<Image, BlockError> {
        let mut buffer = vec![0u8; (CHUNK_PAGES * PAGE_BYTES) as usize];
        let mut image = Image { blocks: Vec::new() };
        for block in blocks {
            let mut ids = Vec::with_capacity(block.pages() as usize);
            let mut page = 0;
            while page < block.pages() {
                let pages = CHUNK_PAGES.min(block.pages() - page);
                let bytes = &mut buffer[..(pages * PAGE_BYTES) as usize];
                block.read_slowly(page, bytes)?;
                let chunk: Vec<Page<'_>> = (page..)
                    .zip(bytes.chunks_exact(PAGE_BYTES as usize))
                    .collect();
                ids.extend(hash_all(hasher, &chunk));
                page += pages;
            }
            image.blocks.push((block.name().to_owned(), ids));
        }
        Ok(image)
    }

    /// Compares with the page tables of a checkpoint, read back from the repository.
    pub fn compare(
        &self,
        reader: &mut Reader<'_>,
        tables: &[RamTable],
        progress: ProgressSink<'_>,
    ) -> Result<VerifyReport, VerifyError> {
        let total = self.blocks.iter().map(|(_, ids)| ids.len() as u64).sum();
        let mut report = VerifyReport {
            pages: 0,
            differing: 0,
            first: Vec::new(),
        };
        for (name, ids) in &self.blocks {
            let pages = ids.len() as u64;
            let table = tables
                .iter()
                .find(|table| table.name == *name && table.pages == pages)
                .ok_or_else(|| VerifyError::NoTable {
                    block: name.clone(),
                    pages,
                })?;
            table::read_table(&*reader, &table.root, pages, |page, stored| {
                let stored = match stored {
                    PageRef::Zero => None,
                    PageRef::Stored(id) => Some(id),
                };
                report.pages += 1;
                if ids[page as usize] != stored {
                    report.differing += 1;
                    if report.first.len() < NAMED_MAX {
                        report.first.push(format!("{name} {page}"));
                    }
                }
                if report.pages.is_multiple_of(1 << 16) {
                    progress(Progress::Verifying {
                        done: report.pages,
                        total,
                    });
                }
            })?;
        }
        Ok(report)
    }
}
