//! The source's pages on their way over one connection, each as often as it changes.

use std::io::Write;
use std::num::NonZeroU16;
use std::sync::{Arc, OnceLock};

use stillframe_page::{GuestPage, PAGE, is_zero};

use super::MigratedPages;
use super::image_blocks::ImageFinder;
use super::seed::Seeds;
use super::sent_ids::{PageHash, SentIds};
use crate::connection::ConnectionError;
use crate::connection::image_pages::{ENTRY_BYTES, ImagePage, ImagePages};
use crate::encoding::delta_cache::{Contents, DeltaCache};
use crate::encoding::page_encoder::{PageEncoder, PageEncoding};
use crate::memory::{BlockShape, Page};
use crate::sink::connection::{ConnectionPages, Sizes};
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
    in_image: u64,
    not_in_image: u64,
    /// Places were sent since the destination last said which of them it has.
    unanswered: bool,
    fake: u64,
    fake_bytes: u64,
    doomed: u64,
    doomed_bytes: u64,
    /// One more than the bytes that each page took when it was sent last, if it was, by block: two bytes a page.
    took: Vec<Vec<Option<NonZeroU16>>>,
    /// Left out because the guest had written them again.
    pub postponed: u64,
}

/// What the destination had before.
pub(super) struct There {
    /// It has said the ids of its pages.
    pub seeds: Arc<OnceLock<Seeds>>,
    /// It has these, of pages that were not sent.
    pub base: Contents,
    /// It has these images, once they are read here.
    pub images: Arc<OnceLock<ImageFinder>>,
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
            in_image: 0,
            not_in_image: 0,
            unanswered: false,
            fake: 0,
            fake_bytes: 0,
            doomed: 0,
            doomed_bytes: 0,
            took: blocks
                .iter()
                .map(|block| vec![None; block.pages as usize])
                .collect(),
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
        let mut fakes = Vec::new();
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
                false if fake => fakes.push(page.number),
                false => {}
            }
            !fake || !self.skip_known
        });
        self.put_places(sink, (block, &mut pages), remembered)?;
        self.encode(sink, block, &pages)?;
        self.fake += fakes.len() as u64;
        let took = fakes.iter().map(|&page| self.took[block][page as usize]);
        self.fake_bytes += took.flatten().map(bytes_of).sum::<u64>();
        for page in &pages {
            self.remember(block, page, remembered);
        }
        Ok(())
    }

    fn remember(&mut self, block: usize, page: &Page<'_>, remembered: bool) {
        let number = GuestPage::new(block, page.number);
        match remembered {
            true => self.cache.put(number, page.bytes),
            false => self.cache.remove(number),
        }
    }

    fn encode<S: Write>(
        &mut self,
        sink: &mut ConnectionPages<S>,
        block: usize,
        pages: &[Page<'_>],
    ) -> Result<(), ConnectionError> {
        let before = sink.sizes();
        let encodings = self
            .stream
            .put(sink, &mut self.encoder, &self.cache, block, pages)?;
        self.note_sizes(block, pages, &encodings, sink.sizes() - before);
        Ok(())
    }

    /// Sends the places of those pages that are in an image of the destination's, and takes them out. A page whose content
    /// is in the delta cache is left: it takes as little.
    fn put_places<S: Write>(
        &mut self,
        sink: &mut ConnectionPages<S>,
        (block, pages): (usize, &mut Vec<Page<'_>>),
        remembered: bool,
    ) -> Result<(), ConnectionError> {
        let images = Arc::clone(&self.there.images);
        let Some(finder) = images.get() else {
            return Ok(());
        };
        let unknown = |page: &Page<'_>| {
            let number = GuestPage::new(block, page.number);
            self.cache.get(number).is_none() && !is_zero(page.bytes)
        };
        let (sought, mut rest): (Vec<_>, Vec<_>) = pages.drain(..).partition(unknown);
        let contents: Vec<&[u8; PAGE]> = sought.iter().map(|page| page.bytes).collect();
        let mut places = Vec::new();
        for (page, found) in sought.into_iter().zip(finder.find(&contents)) {
            let Some((place, id)) = found else {
                rest.push(page);
                continue;
            };
            self.note(block, page.number, ENTRY_BYTES as u16);
            self.remember(block, &page, remembered);
            let page = page.number;
            places.push(ImagePage { page, place, id });
        }
        rest.sort_unstable_by_key(|page| page.number);
        *pages = rest;
        if places.is_empty() {
            return Ok(());
        }
        self.in_image += places.len() as u64;
        self.unanswered = true;
        let pages = places;
        sink.put_places(&ImagePages { block, pages })
    }

    /// From here on pages come whole: while the VM is stopped, the destination should not wait for a disk.
    pub fn send_no_places(&mut self) {
        self.there.images = Arc::default();
    }

    /// Whether the destination is to say which pages it has not found.
    pub fn awaits_answer(&self) -> bool {
        self.unanswered
    }

    /// It has said so. Whether it was to.
    pub fn take_awaited(&mut self) -> bool {
        std::mem::take(&mut self.unanswered)
    }

    /// Sends ascending pages of one block that the destination has not found: whole, whatever was sent of them.
    pub fn put_again<S: Write>(
        &mut self,
        sink: &mut ConnectionPages<S>,
        (block, pages): (usize, &[Page<'_>]),
    ) -> Result<(), ConnectionError> {
        for page in pages {
            let number = GuestPage::new(block, page.number);
            self.cache.remove(number);
            self.ids.is_known(number, page.bytes);
        }
        self.not_in_image += pages.len() as u64;
        self.encode(sink, block, pages)?;
        for page in pages {
            self.remember(block, page, true);
        }
        Ok(())
    }

    /// Notes what each page took, and adds up what those took that are sent again.
    fn note_sizes(
        &mut self,
        block: usize,
        pages: &[Page<'_>],
        encodings: &[PageEncoding],
        sizes: Sizes,
    ) {
        let each = |bytes: u64, of: fn(&PageEncoding) -> bool| {
            let count = encodings.iter().filter(|encoding| of(encoding)).count() as u64;
            // A page takes little more than its length.
            (bytes / count.max(1)) as u16
        };
        let whole = each(sizes.whole, |encoding| encoding.is_whole());
        let delta = each(sizes.deltas, |encoding| *encoding == PageEncoding::Delta);
        for (page, encoding) in pages.iter().zip(encodings) {
            let now = match encoding {
                PageEncoding::Same => continue,
                PageEncoding::Zero => 0,
                PageEncoding::Delta => delta,
                PageEncoding::Unknown | PageEncoding::TooMuch => whole,
            };
            self.note(block, page.number, now);
        }
    }

    /// Notes what a page took.
    fn note(&mut self, block: usize, page: u64, bytes: u16) {
        let now = NonZeroU16::MIN.saturating_add(bytes);
        if let Some(before) = self.took[block][page as usize].replace(now) {
            self.doomed += 1;
            self.doomed_bytes += bytes_of(before);
        }
    }

    /// What was sent so far.
    pub fn counts(&self) -> MigratedPages {
        let counts = &self.stream.counts;
        MigratedPages {
            sent: counts.new + counts.duplicate + counts.zero + counts.delta,
            zero: counts.zero,
            delta: counts.delta,
            known: counts.unchanged + self.known,
            seeded: self.seeded,
            in_image: self.in_image,
            not_in_image: self.not_in_image,
            postponed: self.postponed,
            fake: self.fake,
            fake_bytes: self.fake_bytes,
            doomed: self.doomed,
            doomed_bytes: self.doomed_bytes,
        }
    }
}

/// The bytes that a page took, by what is noted of it.
fn bytes_of(took: NonZeroU16) -> u64 {
    u64::from(took.get() - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::Connection;
    use crate::migration::CompressionChoice;

    /// What was sent, of pages with these contents, without copies and ids of what was sent before.
    fn sent(versions: &[Vec<[u8; PAGE]>], cache_bytes: u64) -> MigratedPages {
        sent_on(Contents::default(), versions, cache_bytes)
    }

    /// The same, where the destination has this.
    fn sent_on(base: Contents, versions: &[Vec<[u8; PAGE]>], cache_bytes: u64) -> MigratedPages {
        let blocks = [BlockShape {
            name: "ram".to_owned(),
            pages: 8,
        }];
        let there = There {
            seeds: Arc::default(),
            base,
            images: Arc::default(),
        };
        let mut pages = SentPages::new(&blocks, cache_bytes, 1, None, there);
        let connection = Connection::new(Vec::new());
        let mut sink = ConnectionPages::new(connection, CompressionChoice::Auto).unwrap();
        for contents in versions {
            let batch = (0..).zip(contents);
            let batch = batch.map(|(number, bytes)| Page { number, bytes });
            pages.put(&mut sink, (0, batch.collect()), true).unwrap();
        }
        pages.counts()
    }

    fn noise(seed: u64) -> [u8; PAGE] {
        let mut state = seed;
        std::array::from_fn(|_| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (state >> 56) as u8
        })
    }

    #[test]
    fn bytes_that_were_sent_in_vain_are_counted() {
        let [a, b, c] = [1, 2, 3].map(noise);
        let counts = sent(&[vec![a, b], vec![a, c]], 0);
        assert_eq!((counts.fake, counts.doomed), (1, 2));
        assert_eq!(counts.fake_bytes / 4000, 1);
        assert_eq!(counts.doomed_bytes / 8000, 1);
        // A page of zeros takes nothing, and a change little.
        let mut changed = a;
        changed[7] ^= 1;
        let counts = sent(&[vec![[0; PAGE], a], vec![b, changed], vec![c, b]], 1 << 20);
        assert_eq!((counts.delta, counts.doomed), (1, 4));
        let small = counts.doomed_bytes - 8192;
        assert!((1..200).contains(&small), "{small}");
    }

    #[test]
    fn a_page_that_is_as_in_the_base_is_sent_when_it_changes_and_not_again() {
        let [a, b, c] = [1, 2, 3].map(noise);
        let on_a = |versions: &[Vec<[u8; PAGE]>]| {
            let mut known = DeltaCache::default();
            known.set_budget(1 << 20);
            known.put(GuestPage::new(0, 0), &a);
            let counts = sent_on(known.into(), versions, 1 << 20);
            (counts.seeded, counts.known, counts.sent, counts.doomed)
        };
        // Written, and as before all the same.
        assert_eq!(on_a(&[vec![a], vec![a]]), (1, 1, 0, 0));
        assert_eq!(on_a(&[vec![a], vec![a], vec![b]]), (1, 1, 1, 0));
        assert_eq!(on_a(&[vec![a], vec![b], vec![c]]), (1, 0, 2, 1));
    }

    #[test]
    fn what_the_destination_has_of_the_base_is_a_content_to_change() {
        let page = |number| GuestPage::new(0, number);
        let mut known = DeltaCache::default();
        known.set_budget(1 << 20);
        known.put(page(1), &[1; PAGE]);
        let there = There {
            seeds: Arc::default(),
            base: known.into(),
            images: Arc::default(),
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
