//! From captured pages to the repository: zero pages become a mark in the page table, all others
//! a content id, stored once.
//!
//! Hashing runs on all processors that the caller may use, a batch at a time; the repository
//! compresses and encrypts in threads of its own.

use std::num::NonZero;
use std::thread;

use stillframe_page::bitmap::DirtyBitmap;
use stillframe_page::hash::{ContentHasher, ContentId};
use stillframe_page::{PageIndex, is_zero};
use stillframe_repo::table::{PageRef, TableEditor};
use stillframe_repo::{PageCounts, Put, RepoError, Writer};

use super::tracker::{Content, Tracker};

/// Pages hashed at once: enough to make threads worth their start.
pub const BATCH_PAGES: usize = 2048;

/// No thread is started for fewer.
const SHARE_PAGES_MIN: usize = 64;

const THREADS_MAX: usize = 8;

/// One page on its way: its number in the block, and its bytes.
pub type Page<'a> = (u64, &'a [u8]);

/// Stores pages of one checkpoint.
pub struct Ingest<'a, 'r> {
    /// The repository.
    pub writer: &'a mut Writer<'r>,
    /// One page table a block.
    pub tables: &'a mut [TableEditor],
    /// What happened so far.
    pub counts: &'a mut PageCounts,
    /// Pages of each block that this checkpoint has captured already; empty where none can come
    /// twice.
    pub seen: &'a mut [DirtyBitmap],
    /// Learns what the pages hold.
    pub tracker: &'a mut Tracker,
    /// The repository's hasher.
    pub hasher: &'a ContentHasher,
}

impl Ingest<'_, '_> {
    /// Stores a batch of pages of block number `block`.
    pub fn batch(&mut self, block: usize, pages: &[Page<'_>]) -> Result<(), RepoError> {
        let ids = hash_all(self.hasher, pages);
        for (&(page, bytes), id) in pages.iter().zip(ids) {
            let seen = self.seen.get_mut(block);
            if seen.is_none_or(|seen| seen.set(PageIndex(page))) {
                self.counts.captured += 1;
            }
            let (content, place) = match id {
                None => (Content::Zero, PageRef::Zero),
                Some(id) => match self.writer.put(id, bytes)? {
                    Put::New => (Content::New, PageRef::Stored(id)),
                    Put::Duplicate => (Content::Known, PageRef::Stored(id)),
                },
            };
            match content {
                Content::Zero => self.counts.zero += 1,
                Content::Known => self.counts.duplicate += 1,
                Content::New => self.counts.new += 1,
            }
            self.tracker.note_content(block, page, content);
            self.tables[block].set(page, place);
        }
        Ok(())
    }
}

/// The content id of each page, `None` for zero pages.
pub fn hash_all(hasher: &ContentHasher, pages: &[Page<'_>]) -> Vec<Option<ContentId>> {
    let one = |bytes: &[u8]| (!is_zero(bytes)).then(|| hasher.id(bytes));
    let threads = thread::available_parallelism()
        .map_or(1, NonZero::get)
        .min(THREADS_MAX);
    let share = pages.len().div_ceil(threads).max(SHARE_PAGES_MIN);
    if pages.len() <= share {
        return pages.iter().map(|(_, bytes)| one(bytes)).collect();
    }
    thread::scope(|scope| {
        let workers: Vec<_> = pages
            .chunks(share)
            .map(|chunk| {
                scope.spawn(move || {
                    chunk
                        .iter()
                        .map(|(_, bytes)| one(bytes))
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        workers
            .into_iter()
            .zip(pages.chunks(share))
            .flat_map(|(worker, chunk)| match worker.join() {
                Ok(ids) => ids,
                // A worker cannot panic (it only reads); should it, the work is done here.
                Err(_) => chunk.iter().map(|(_, bytes)| one(bytes)).collect(),
            })
            .collect()
    })
}
