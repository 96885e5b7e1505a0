//! From captured pages to the repository.
//!
//! What a page is stored as is found out by threads (see [`super::verdict`]); this one writes it
//! down. The repository compresses and encrypts in threads of its own, which make it wait when they
//! cannot follow: memory stays bounded.

use std::time::{Duration, Instant};

use stillframe_page::PageIndex;
use stillframe_page::bitmap::DirtyBitmap;
use stillframe_page::hash::ContentHasher;
use stillframe_repo::page_table::table::PageRef;
use stillframe_repo::{MemoryEditor, PageCounts, Put, RepoError, Writer};

use super::cache::DeltaCache;
use super::stage::Stage;
use super::tracker::BlockShape;
use super::verdict::{Judge, Page, Verdict};

/// Pages judged at once: enough to make threads worth their start.
pub const BATCH_PAGES: usize = 2048;

/// What is collected of the pages of one checkpoint.
pub struct Ingested {
    hasher: ContentHasher,
    dedup: bool,
    memory: Vec<MemoryEditor>,
    /// Where a pass came before the stage, the pages that came already, by block. A stage holds each page
    /// once.
    seen: Vec<DirtyBitmap>,
    /// Pages that the delta cache should know the content of, once it is committed; by block.
    keep: Vec<DirtyBitmap>,
    /// What the pages turned out to hold, by block.
    pub found: Vec<Found>,
    /// What happened so far.
    pub counts: PageCounts,
    /// Finding out what pages are to be stored as: comparing, hashing, making deltas.
    pub judging: Duration,
    /// Handing over to the repository, and waiting for it.
    pub writing: Duration,
}

/// What a captured page holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    /// Only zero bytes.
    Zero,
    /// Content that the repository has already.
    Known,
    /// Content that it did not have.
    New,
}

/// What the captured pages of a block turned out to hold.
#[derive(Debug)]
pub struct Found {
    /// Only zero bytes.
    pub zero: DirtyBitmap,
    /// Anything else.
    pub content: DirtyBitmap,
    /// Content that the repository did not have.
    pub new: DirtyBitmap,
}

impl Found {
    fn new(block: &BlockShape) -> Found {
        Found {
            zero: DirtyBitmap::new(block.pages),
            content: DirtyBitmap::new(block.pages),
            new: DirtyBitmap::new(block.pages),
        }
    }

    /// The last word counts: a page may come twice.
    fn note(&mut self, page: PageIndex, content: Content) {
        let put = |set: &mut DirtyBitmap, belongs| match belongs {
            true => set.set(page),
            false => set.clear(page),
        };
        put(&mut self.zero, content == Content::Zero);
        put(&mut self.content, content != Content::Zero);
        put(&mut self.new, content == Content::New);
    }
}

/// What [`Ingested::batch`] works with.
pub struct Tools<'a, 'r> {
    /// The repository.
    pub writer: &'a mut Writer<'r>,
    /// What the pages held.
    pub cache: &'a DeltaCache,
    /// Compares, hashes, makes deltas.
    pub judge: &'a mut Judge,
}

impl Ingested {
    /// Nothing so far, of blocks that are written down by `memory`. Without `dedup` pages are stored whether
    /// or not the repository has them.
    pub fn new(
        memory: Vec<MemoryEditor>,
        blocks: &[BlockShape],
        hasher: ContentHasher,
        dedup: bool,
    ) -> Ingested {
        let bitmaps = blocks.iter().map(|block| DirtyBitmap::new(block.pages));
        Ingested {
            hasher,
            dedup,
            memory,
            seen: Vec::new(),
            keep: bitmaps.collect(),
            found: blocks.iter().map(Found::new).collect(),
            counts: PageCounts {
                total: blocks.iter().map(|block| block.pages).sum(),
                ..PageCounts::default()
            },
            judging: Duration::ZERO,
            writing: Duration::ZERO,
        }
    }

    /// A page may come a second time, and is counted once. (It must not come as a delta then.)
    pub fn pages_may_come_twice(&mut self, blocks: &[BlockShape]) {
        let bitmaps = blocks.iter().map(|block| DirtyBitmap::new(block.pages));
        self.seen = bitmaps.collect();
    }

    /// Stores a batch of ascending pages of block number `block`.
    pub fn batch(
        &mut self,
        tools: &mut Tools<'_, '_>,
        block: usize,
        pages: &[Page<'_>],
    ) -> Result<(), RepoError> {
        let begin = Instant::now();
        let judged = tools.judge.batch(&self.hasher, tools.cache, block, pages)?;
        let judged_at = Instant::now();
        for (&page, verdict) in pages.iter().zip(judged.verdicts) {
            let content = self.write(tools.writer, block, page, verdict)?;
            self.found[block].note(PageIndex(page.0), content);
        }
        for delta in judged.deltas {
            self.memory[block].add_delta(tools.writer, delta)?;
        }
        self.judging += judged_at - begin;
        self.writing += judged_at.elapsed();
        Ok(())
    }

    fn write(
        &mut self,
        writer: &mut Writer<'_>,
        block: usize,
        (page, bytes): Page<'_>,
        verdict: Verdict,
    ) -> Result<Content, RepoError> {
        let index = PageIndex(page);
        let seen = self.seen.get_mut(block);
        if seen.is_none_or(|seen| seen.set(index)) {
            self.counts.captured += 1;
        }
        // A page whose delta was of no use leaves the cache: of pages that are always written all
        // over only every second version is compared in vain.
        match verdict {
            Verdict::Zero | Verdict::TooMuch(_) => self.keep[block].clear(index),
            Verdict::Same | Verdict::Delta | Verdict::Unknown(_) => self.keep[block].set(index),
        };
        Ok(match verdict {
            Verdict::Zero => {
                self.memory[block].set(page, PageRef::Zero);
                self.counts.zero += 1;
                Content::Zero
            }
            Verdict::Same => {
                self.counts.unchanged += 1;
                Content::Known
            }
            Verdict::Delta => {
                self.counts.delta += 1;
                Content::New
            }
            Verdict::Unknown(id) | Verdict::TooMuch(id) => {
                let put = match self.dedup {
                    true => writer.put(id, bytes)?,
                    false => writer.put_again(id, bytes)?,
                };
                self.memory[block].set(page, PageRef::Stored(id));
                match put {
                    Put::New => {
                        self.counts.new += 1;
                        Content::New
                    }
                    Put::Duplicate => {
                        self.counts.duplicate += 1;
                        Content::Known
                    }
                }
            }
        })
    }

    /// The blocks, ready to be finished.
    pub fn take_memory(&mut self) -> Vec<MemoryEditor> {
        std::mem::take(&mut self.memory)
    }

    /// To be called when the checkpoint is durable: the cache learns what its pages hold.
    pub fn remember(&self, stage: &Stage, cache: &mut DeltaCache) {
        for (block, keep) in self.keep.iter().enumerate() {
            for (page, bytes) in stage.pages_of(block) {
                match keep.get(PageIndex(page)) {
                    true => cache.put(block, page, bytes),
                    false => cache.remove(block, page),
                }
            }
        }
    }
}
