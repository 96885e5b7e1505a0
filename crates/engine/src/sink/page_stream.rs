//! Captured pages on their way into a sink: encoded by threads (see [`crate::encoding::page_encoder`]), handed over batch by
//! batch, and counted.

use std::ops::Range;
use std::time::{Duration, Instant};

use stillframe_page::bitmap::DirtyBitmap;
use stillframe_page::{GuestPage, PAGE};

use crate::capture::staging::StagingBuffer;
use crate::encoding::delta_cache::DeltaCache;
use crate::encoding::page_encoder::{EncodedPages, PageEncoder, PageEncoding};
use crate::memory::outcome::{Content, Found};
use crate::memory::ranges::PageRanges;
use crate::memory::{BlockShape, Page};
use crate::sink::{EncodedBatch, PageSink};

/// Pages encoded at once: enough to make threads worth their start.
pub const BATCH_PAGES: usize = 2048;

/// Counts of the pages of a stream, by their encoding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamCounts {
    /// Pages of all blocks.
    pub total: u64,
    /// Pages that came, each counted once.
    pub captured: u64,
    /// Whole pages that the sink did not have. This and all below count a page again when it comes again.
    pub new: u64,
    /// Whole pages that the sink had.
    pub duplicate: u64,
    /// Pages of zeros.
    pub zero: u64,
    /// Pages of which only what changed went to the sink.
    pub delta: u64,
    /// Pages that were written, and have the same content.
    pub unchanged: u64,
}

/// The pages of one checkpoint or migration.
pub struct PageStream {
    /// Where iterations come before the pages of the staging buffer: the pages that came already, by block. Pages of
    /// the buffer come once.
    seen: Vec<DirtyBitmap>,
    /// Pages that the delta cache should know the content of, once it is committed; by block.
    keep: Vec<DirtyBitmap>,
    /// Pages that came as zeros without being read, by block.
    zeroed: PageRanges,
    /// The capture outcome, by block.
    pub outcome: Vec<Found>,
    /// Counts of the pages so far.
    pub counts: StreamCounts,
    /// Encoding: comparing, hashing, making deltas.
    pub encoding: Duration,
    /// Handing over to the sink, and waiting for it.
    pub writing: Duration,
}

impl PageStream {
    /// A stream of these blocks; no page came yet.
    pub fn new(blocks: &[BlockShape]) -> PageStream {
        let bitmaps = blocks.iter().map(|block| DirtyBitmap::new(block.pages));
        PageStream {
            seen: Vec::new(),
            keep: bitmaps.collect(),
            zeroed: vec![Vec::new(); blocks.len()],
            outcome: blocks.iter().map(Found::new).collect(),
            counts: StreamCounts {
                total: blocks.iter().map(|block| block.pages).sum(),
                ..StreamCounts::default()
            },
            encoding: Duration::ZERO,
            writing: Duration::ZERO,
        }
    }

    /// A page may come a second time, and is counted once. (It must not come as a delta then.)
    pub fn pages_may_come_twice(&mut self, blocks: &[BlockShape]) {
        let bitmaps = blocks.iter().map(|block| DirtyBitmap::new(block.pages));
        self.seen = bitmaps.collect();
    }

    /// Encodes ascending pages of block number `block`, and hands them to the sink. `cache` knows the old
    /// contents of the pages. Returns how each was encoded.
    ///
    /// # Errors
    /// That of the sink.
    pub fn put<S: PageSink>(
        &mut self,
        sink: &mut S,
        encoder: &mut PageEncoder,
        cache: &DeltaCache,
        block: usize,
        pages: &[Page<'_>],
    ) -> Result<Vec<PageEncoding>, S::Error> {
        let encoded = encoder.batch(sink.hasher(), cache, block, pages)?;
        self.put_encoded(sink, block, pages, encoded)
    }

    /// The same with pages that are encoded already.
    ///
    /// # Errors
    /// That of the sink.
    pub fn put_encoded<S: PageSink>(
        &mut self,
        sink: &mut S,
        block: usize,
        pages: &[Page<'_>],
        encoded: EncodedPages,
    ) -> Result<Vec<PageEncoding>, S::Error> {
        let begin = Instant::now();
        let contents = sink.put(EncodedBatch {
            block,
            pages,
            encodings: &encoded.encodings,
            ids: &encoded.ids,
            deltas: encoded.deltas,
        })?;
        let both = encoded.encodings.iter().zip(contents);
        for (page, (&encoding, content)) in pages.iter().zip(both) {
            let page = GuestPage::new(block, page.number);
            self.count(page, encoding, content);
        }
        self.encoding += encoded.took;
        self.writing += begin.elapsed();
        Ok(encoded.encodings)
    }

    /// These pages of block number `block` are zeros from now on, whatever they held. They are not counted.
    ///
    /// # Errors
    /// That of the sink.
    pub fn put_zeros<S: PageSink>(
        &mut self,
        sink: &mut S,
        block: usize,
        ranges: &[Range<u64>],
    ) -> Result<(), S::Error> {
        let begin = Instant::now();
        let mut numbers = ranges.iter().cloned().flatten().peekable();
        while numbers.peek().is_some() {
            let batch = numbers.by_ref().take(BATCH_PAGES);
            let zero = |number| Page {
                number,
                bytes: &[0; PAGE],
            };
            let pages: Vec<Page<'_>> = batch.map(zero).collect();
            sink.put(EncodedBatch {
                block,
                pages: &pages,
                encodings: &vec![PageEncoding::Zero; pages.len()],
                ids: &[],
                deltas: Vec::new(),
            })?;
            for page in pages {
                self.outcome[block].note(page.number, Content::Zero);
            }
        }
        self.zeroed[block].extend(ranges.iter().cloned());
        self.writing += begin.elapsed();
        Ok(())
    }

    fn count(&mut self, page: GuestPage, encoding: PageEncoding, content: Content) {
        let GuestPage { block, page } = page;
        let seen = self.seen.get_mut(block);
        if seen.is_none_or(|seen| seen.set(page)) {
            self.counts.captured += 1;
        }
        // A page whose delta was of no use leaves the cache. So for pages that are always rewritten entirely, only
        // every second version is compared in vain.
        match encoding {
            PageEncoding::Zero | PageEncoding::TooMuch => self.keep[block].clear(page),
            PageEncoding::Same | PageEncoding::Delta | PageEncoding::Unknown => {
                self.keep[block].set(page)
            }
        };
        let counter = match (encoding, content) {
            (PageEncoding::Zero, _) => &mut self.counts.zero,
            (PageEncoding::Same, _) => &mut self.counts.unchanged,
            (PageEncoding::Delta, _) => &mut self.counts.delta,
            (_, Content::New) => &mut self.counts.new,
            (_, Content::Known | Content::Zero) => &mut self.counts.duplicate,
        };
        *counter += 1;
        self.outcome[block].note(page, content);
    }

    /// Takes the contents of pages in the staging buffer into the cache, which forgets those of pages that are zeros now.
    /// It is called when they are durable.
    pub fn remember(&self, staging: &StagingBuffer, cache: &mut DeltaCache) {
        for (block, keep) in self.keep.iter().enumerate() {
            for Page { number, bytes } in staging.pages_of(block) {
                let page = GuestPage::new(block, number);
                match keep.get(number) {
                    true => cache.put(page, bytes),
                    false => cache.remove(page),
                }
            }
        }
        for (block, ranges) in self.zeroed.iter().enumerate() {
            for page in ranges.iter().cloned().flatten() {
                cache.remove(GuestPage::new(block, page));
            }
        }
    }
}
