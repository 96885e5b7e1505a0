//! The source's pages on their way over one connection, each as often as it changes.

use std::io::Write;
use std::sync::{Arc, OnceLock};

use stillframe_page::{GuestPage, PAGE};

use super::MigratedPages;
use super::seed::Seeds;
use super::sent_ids::{PageHash, SentIds};
use crate::connection::ConnectionError;
use crate::encoding::delta_cache::{Contents, DeltaCache};
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
    there: There,
    /// Pages that have the id with which they were sent last are not sent.
    skip_known: bool,
    known: u64,
    seeded: u64,
    fake: u64,
    /// Left out because the guest had written them again.
    pub postponed: u64,
}

/// What the destination had before.
pub(super) struct There {
    /// It has said the ids of its pages.
    pub seeds: Arc<OnceLock<Seeds>>,
    /// It has these, of pages that were not sent.
    pub base: Contents,
}

impl There {
    /// Whether it has this content of a page. If its content is known, the cache has it from here on.
    fn has(&self, page: GuestPage, bytes: &[u8; PAGE], cache: &mut DeltaCache) -> bool {
        if let Some(content) = self.base.get(page) {
            cache.put(page, content);
            return content == bytes;
        }
        let seeds = self.seeds.get();
        seeds.is_some_and(|seeds| seeds.has(page, bytes))
    }
}

impl SentPages {
    /// None yet. `cache_bytes` is the budget of the delta cache, `seed` the secret of the ids. Without a hash, pages that
    /// are known by their ids are counted, and sent.
    pub fn new(
        blocks: &[BlockShape],
        cache_bytes: u64,
        seed: u64,
        hash: Option<PageHash>,
        there: There,
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
            there,
            skip_known: hash.is_some(),
            known: 0,
            seeded: 0,
            fake: 0,
            postponed: 0,
        }
    }

    /// Whether a page with its old content is found by its id.
    pub fn finds_known(&self) -> bool {
        self.skip_known
    }

    /// Sends ascending pages of one block. Of those that are remembered, changes are found later.
    pub fn put<S: Write>(
        &mut self,
        sink: &mut ConnectionPages<S>,
        (block, mut pages): (usize, Vec<Page<'_>>),
        remembered: bool,
    ) -> Result<(), ConnectionError> {
        pages.retain(|page| {
            let number = GuestPage::new(block, page.number);
            if self.ids.is_new(number) && self.there.has(number, page.bytes, &mut self.cache) {
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
            let page = GuestPage::new(block, number);
            match remembered {
                true => self.cache.put(page, bytes),
                false => self.cache.remove(page),
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_destination_has_of_the_base_is_a_content_to_change() {
        let page = |number| GuestPage::new(0, number);
        let mut known = DeltaCache::default();
        known.set_budget(1 << 20);
        known.put(page(1), &[1; PAGE]);
        let there = There {
            seeds: Arc::default(),
            base: known.into(),
        };
        let mut cache = DeltaCache::default();
        cache.set_budget(1 << 20);
        assert!(there.has(page(1), &[1; PAGE], &mut cache));
        assert!(!there.has(page(1), &[2; PAGE], &mut cache));
        assert_eq!(cache.get(page(1)), Some(&[1; PAGE]));
        // Of this one nothing is known, not even that it is zero.
        assert!(!there.has(page(2), &[0; PAGE], &mut cache));
        assert_eq!(cache.get(page(2)), None);
    }
}
