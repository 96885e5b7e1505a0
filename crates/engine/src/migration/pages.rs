//! The source's pages on their way over one connection, each as often as it changes.

use std::io::Write;
use std::sync::{Arc, OnceLock};

use stillframe_page::GuestPage;

use super::MigratedPages;
use super::seed::Seeds;
use super::sent_ids::{PageHash, SentIds};
use crate::connection::ConnectionError;
use crate::encoding::delta_cache::DeltaCache;
use crate::encoding::page_encoder::PageEncoder;
use crate::memory::{BlockShape, Page};
use crate::sink::connection::ConnectionPages;
use crate::sink::page_stream::PageStream;

/// Pages on their way over one connection, with the means to encode them.
pub(super) struct SentPages {
    stream: PageStream,
    encoder: PageEncoder,
    /// The content of each page as last sent.
    cache: DeltaCache,
    ids: SentIds,
    /// What the destination had before.
    seeds: Arc<OnceLock<Seeds>>,
    /// Pages that have the id with which they were sent last are not sent.
    skip_known: bool,
    known: u64,
    seeded: u64,
    fake: u64,
    /// Left out because the guest had written them again.
    pub postponed: u64,
}

impl SentPages {
    /// None yet. `cache_bytes` is the budget of the delta cache, `seed` the secret of the ids. Without a hash, pages that
    /// are known by their ids are counted, and sent.
    pub fn new(
        blocks: &[BlockShape],
        cache_bytes: u64,
        seed: u64,
        hash: Option<PageHash>,
        seeds: Arc<OnceLock<Seeds>>,
    ) -> SentPages {
        let mut stream = PageStream::new(blocks);
        stream.pages_may_come_twice(blocks);
        let mut cache = DeltaCache::default();
        cache.set_budget(cache_bytes);
        SentPages {
            stream,
            encoder: PageEncoder::in_one_thread(),
            cache,
            ids: SentIds::new(blocks, hash.unwrap_or(PageHash::Xxh3), seed),
            seeds,
            skip_known: hash.is_some(),
            known: 0,
            seeded: 0,
            fake: 0,
            postponed: 0,
        }
    }

    /// Sends ascending pages of one block.
    pub fn put<S: Write>(
        &mut self,
        sink: &mut ConnectionPages<S>,
        block: usize,
        mut pages: Vec<Page<'_>>,
    ) -> Result<(), ConnectionError> {
        pages.retain(|page| {
            let number = GuestPage::new(block, page.number);
            if let Some(seeds) = self.seeds.get()
                && self.ids.is_new(number)
                && seeds.has(number, page.bytes)
            {
                // As if it had been sent.
                self.ids.is_known(number, page.bytes);
                self.seeded += 1;
                return false;
            }
            let known = self.ids.is_known(number, page.bytes);
            // The delta cache finds it by itself.
            let fake = known && self.cache.get(number).is_none();
            match self.skip_known {
                true => self.known += u64::from(fake),
                false => self.fake += u64::from(fake),
            }
            !fake || !self.skip_known
        });
        self.stream
            .put(sink, &mut self.encoder, &self.cache, block, &pages)?;
        for &Page { number, bytes } in &pages {
            self.cache.put(GuestPage::new(block, number), bytes);
        }
        Ok(())
    }

    /// What was sent so far.
    pub fn counts(&self) -> MigratedPages {
        let counts = &self.stream.counts;
        let sent = counts.new + counts.duplicate + counts.zero + counts.delta;
        MigratedPages {
            sent,
            zero: counts.zero,
            delta: counts.delta,
            known: counts.unchanged + self.known,
            seeded: self.seeded,
            postponed: self.postponed,
            fake: self.fake,
            doomed: sent - counts.captured,
        }
    }
}
