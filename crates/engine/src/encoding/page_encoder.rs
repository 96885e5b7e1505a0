//! The page encoder: several threads decide how each captured page is stored.

use std::thread;
use std::time::{Duration, Instant};

use stillframe_page::delta::{Added, DeltaEncoder, EncodedDelta};
use stillframe_page::difference::difference;
use stillframe_page::encoding::{Compression, Encoder, EncodingError};
use stillframe_page::hash::{ContentHasher, ContentId};
use stillframe_page::is_zero;
use stillframe_page::{GuestPage, PAGE};

use crate::encoding::delta_cache::DeltaCache;
use crate::memory::Page;

/// No thread is started for fewer.
const SHARE_PAGES_MIN: usize = 64;

const THREADS_MAX: usize = 8;

/// Zstandard level of deltas, and of the trial: that of the repository.
const LEVEL: i32 = 1;

/// Pages that changed less are cheaper as deltas, whatever their content. In bytes.
const CHANGED_LITTLE: u32 = 512;
/// Pages compressed both ways, and pages inspected to find them.
const TRIAL_PAGES: usize = 16;
const TRIAL_LOOKS: usize = 64;
/// Bytes that a whole page costs in addition to its content: its id.
const ID_BYTES: usize = 32;

/// How a page is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageEncoding {
    /// It is all zero.
    Zero,
    /// Its content is unchanged.
    Same,
    /// It is in one of the deltas.
    Delta,
    /// It is stored whole, because its content before is not known.
    Unknown,
    /// It is stored whole, because too much of it changed.
    TooMuch,
}

impl PageEncoding {
    /// Whether the page is stored with all its content.
    pub fn is_whole(self) -> bool {
        matches!(self, PageEncoding::Unknown | PageEncoding::TooMuch)
    }
}

/// The encodings of a batch of pages.
#[derive(Debug, Default)]
pub struct EncodedPages {
    /// One for each page.
    pub encodings: Vec<PageEncoding>,
    /// The id of each page that is stored whole, in their order; none without a hasher.
    pub ids: Vec<ContentId>,
    /// The changes, in the order of the pages.
    pub deltas: Vec<EncodedDelta>,
    /// The time it took.
    pub took: Duration,
}

/// Encodes pages; keeps the state of each worker.
pub struct PageEncoder {
    workers: Vec<EncoderWorker>,
    threads_max: usize,
}

impl Default for PageEncoder {
    fn default() -> PageEncoder {
        PageEncoder {
            workers: Vec::new(),
            threads_max: THREADS_MAX,
        }
    }
}

impl std::fmt::Debug for PageEncoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PageEncoder({} workers)", self.workers.len())
    }
}

impl PageEncoder {
    /// Encodes in the caller's thread only.
    pub fn in_one_thread() -> PageEncoder {
        PageEncoder {
            threads_max: 1,
            ..PageEncoder::default()
        }
    }

    /// Encodes ascending pages of block number `block`, on all processors that the caller may use. With a hasher, the
    /// pages that are stored whole get ids.
    pub fn batch(
        &mut self,
        hasher: Option<&ContentHasher>,
        cache: &DeltaCache,
        block: usize,
        pages: &[Page<'_>],
    ) -> Result<EncodedPages, EncodingError> {
        let begin = Instant::now();
        let share = share_of(pages.len(), self.threads_max);
        let shares = pages.chunks(share);
        while self.workers.len() < shares.len() {
            self.workers.push(EncoderWorker::new()?);
        }
        let mut workers = self.workers.iter_mut().zip(shares);
        let (Some((worker, first)), others) = (workers.next(), workers) else {
            return Ok(EncodedPages::default());
        };
        thread::scope(|scope| {
            let others: Vec<_> = others
                .map(|(worker, share)| scope.spawn(|| worker.encode(hasher, cache, block, share)))
                .collect();
            let mut all = worker.encode(hasher, cache, block, first)?;
            for other in others {
                let encoded = other.join();
                let encoded = encoded.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                all.encodings.extend(encoded.encodings);
                all.ids.extend(encoded.ids);
                all.deltas.extend(encoded.deltas);
            }
            all.took = begin.elapsed();
            Ok(all)
        })
    }
}

/// Pages for each thread.
fn share_of(pages: usize, threads_max: usize) -> usize {
    let threads = match threads_max {
        2.. => threads().min(threads_max),
        _ => 1,
    };
    pages.div_ceil(threads).max(SHARE_PAGES_MIN)
}

/// Threads that are worth their start where there is enough to do. Files of control groups are read for the answer.
pub fn threads() -> usize {
    thread::available_parallelism().map_or(1, |found| found.get().min(THREADS_MAX))
}

/// Encodes pages of which no content is known, in the caller's thread.
pub fn encode_unknown(hasher: &ContentHasher, pages: &[Page<'_>]) -> EncodedPages {
    let begin = Instant::now();
    let ids = hash(hasher, pages);
    let encoding = |id: &Option<ContentId>| match id {
        Some(_) => PageEncoding::Unknown,
        None => PageEncoding::Zero,
    };
    EncodedPages {
        encodings: ids.iter().map(encoding).collect(),
        ids: ids.into_iter().flatten().collect(),
        deltas: Vec::new(),
        took: begin.elapsed(),
    }
}

/// The content id of each page, `None` for zero pages.
pub fn hash_all(hasher: &ContentHasher, pages: &[Page<'_>]) -> Vec<Option<ContentId>> {
    let mut shares = pages.chunks(share_of(pages.len(), THREADS_MAX));
    let first = shares.next().unwrap_or_default();
    thread::scope(|scope| {
        let others: Vec<_> = shares
            .map(|share| scope.spawn(move || hash(hasher, share)))
            .collect();
        let mut ids = hash(hasher, first);
        for other in others {
            let found = other.join();
            ids.extend(found.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        ids
    })
}

/// The same in the caller's thread.
fn hash(hasher: &ContentHasher, pages: &[Page<'_>]) -> Vec<Option<ContentId>> {
    let content: Vec<bool> = pages.iter().map(|page| !is_zero(page.bytes)).collect();
    let with_content = pages.iter().zip(&content).filter(|&(_, &has)| has);
    let whole: Vec<_> = with_content.map(|(page, _)| page.bytes).collect();
    let mut ids = hasher.ids(&whole).into_iter();
    let id = |&has: &bool| has.then(|| ids.next()).flatten();
    content.iter().map(id).collect()
}

/// The state of one worker thread.
struct EncoderWorker {
    encoder: DeltaEncoder,
    whole: Encoder,
}

impl EncoderWorker {
    fn new() -> Result<EncoderWorker, EncodingError> {
        Ok(EncoderWorker {
            encoder: DeltaEncoder::new(LEVEL)?,
            whole: Encoder::new(Compression::Zstd(LEVEL))?,
        })
    }

    fn encode(
        &mut self,
        hasher: Option<&ContentHasher>,
        cache: &DeltaCache,
        block: usize,
        pages: &[Page<'_>],
    ) -> Result<EncodedPages, EncodingError> {
        let bytes_max = self.worth(cache, block, pages)?;
        let mut encoded = EncodedPages::default();
        let mut whole = Vec::new();
        for &Page { number, bytes } in pages {
            let encoding = if is_zero(bytes) {
                PageEncoding::Zero
            } else if let Some(old) = cache.get(GuestPage::new(block, number)) {
                // A page table has less than 2^30 pages.
                match self.encoder.add(number as u32, [old, bytes], bytes_max) {
                    Added::Same => PageEncoding::Same,
                    Added::Changed => PageEncoding::Delta,
                    Added::TooMuch => PageEncoding::TooMuch,
                }
            } else {
                PageEncoding::Unknown
            };
            encoded.encodings.push(encoding);
            if encoding.is_whole() {
                whole.push(bytes);
            }
            if self.encoder.is_full() {
                encoded.deltas.push(self.encoder.finish()?);
            }
        }
        if !self.encoder.is_empty() {
            encoded.deltas.push(self.encoder.finish()?);
        }
        encoded.ids = hasher.map_or_else(Vec::new, |hasher| hasher.ids(&whole));
        Ok(encoded)
    }

    /// Up to how many changed bytes a page is better stored as a delta, here.
    fn worth(
        &mut self,
        cache: &DeltaCache,
        block: usize,
        pages: &[Page<'_>],
    ) -> Result<usize, EncodingError> {
        let mut plain = Vec::new();
        let mut changed = 0;
        let known = pages
            .iter()
            .step_by(pages.len().div_ceil(TRIAL_LOOKS).max(1))
            .filter_map(|page| Some((cache.get(GuestPage::new(block, page.number))?, page)));
        for (old, page) in known {
            let new = page.bytes;
            let bytes = difference(old, new).bytes;
            if bytes > CHANGED_LITTLE && !is_zero(new) {
                self.encoder.add(page.number as u32, [old, new], PAGE);
                changed += bytes as usize;
                plain.extend_from_slice(new);
            }
            if plain.len() == TRIAL_PAGES * PAGE {
                break;
            }
        }
        if plain.is_empty() {
            return Ok(PAGE);
        }
        let as_delta = self.encoder.finish()?.bytes.len();
        let mut out = Vec::new();
        self.whole.encode(&plain, &mut out)?;
        let count = plain.len() / PAGE;
        let as_whole = out.len() / count + ID_BYTES;
        Ok((as_whole * changed / as_delta.max(1)).clamp(CHANGED_LITTLE as usize, PAGE))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use stillframe_page::delta::Delta;

    use super::*;

    /// Bytes without any pattern.
    fn noise(mut seed: u64) -> Box<[u8; PAGE]> {
        let mut page = Box::new([0; PAGE]);
        for word in page.as_chunks_mut::<8>().0 {
            seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            *word = (seed ^ seed >> 29).to_le_bytes();
        }
        page
    }

    type Memory = BTreeMap<u64, Box<[u8; PAGE]>>;

    fn encode(cache: &DeltaCache, memory: &Memory) -> EncodedPages {
        let pages: Vec<Page<'_>> = memory
            .iter()
            .map(|(&number, bytes)| Page { number, bytes })
            .collect();
        let hasher = ContentHasher::keyed([3; 32]);
        let mut encode = PageEncoder::default();
        encode.batch(Some(&hasher), cache, 0, &pages).unwrap()
    }

    fn cached(memory: &Memory) -> DeltaCache {
        let mut cache = DeltaCache::default();
        cache.set_budget(1 << 30);
        for (&page, bytes) in memory {
            cache.put(GuestPage::new(0, page), bytes);
        }
        cache
    }

    #[derive(Debug, Clone, Copy)]
    enum Write {
        Nothing,
        Zero,
        Some(usize),
        All,
    }

    fn write() -> impl Strategy<Value = Write> {
        prop_oneof![
            2 => Just(Write::Nothing),
            1 => Just(Write::Zero),
            4 => (1..3000usize).prop_map(Write::Some),
            1 => Just(Write::All),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Old contents, encodings, ids and deltas give back the new contents.
        #[test]
        fn nothing_is_lost_whatever_changed(pages in prop::collection::btree_map(0..5000u64, (any::<bool>(), write()), 0..400)) {
            let mut old = Memory::new();
            let mut new = Memory::new();
            for (&page, &(known, write)) in &pages {
                let before = noise(page);
                let mut after = before.clone();
                match write {
                    Write::Nothing => {}
                    Write::Zero => after.fill(0),
                    Write::Some(bytes) => after[..bytes].copy_from_slice(&noise(page + 9)[..bytes]),
                    Write::All => after = noise(page + 9),
                }
                if known {
                    old.insert(page, before);
                }
                new.insert(page, after);
            }
            let encoded = encode(&cached(&old), &new);
            prop_assert_eq!(encoded.encodings.len(), new.len());
            let hasher = ContentHasher::keyed([3; 32]);
            let mut made = old.clone();
            for delta in &encoded.deltas {
                let read = Delta::decode(&delta.bytes).unwrap();
                for (index, page) in read.pages().enumerate() {
                    read.apply(index, made.get_mut(&page.into()).unwrap());
                }
            }
            let mut ids = encoded.ids.iter();
            for ((&page, bytes), encoding) in new.iter().zip(&encoded.encodings) {
                if encoding.is_whole() {
                    prop_assert_eq!(ids.next(), Some(&hasher.id(&bytes[..])));
                }
                match encoding {
                    PageEncoding::Zero => prop_assert!(is_zero(&bytes[..])),
                    PageEncoding::Same | PageEncoding::Delta => prop_assert!(made[&page] == *bytes),
                    PageEncoding::Unknown => prop_assert!(!old.contains_key(&page)),
                    PageEncoding::TooMuch => prop_assert!(old.contains_key(&page)),
                }
            }
            prop_assert_eq!(ids.next(), None);
            let mut expected: Vec<u32> = new.iter().zip(&encoded.encodings)
                .filter(|(_, encoding)| **encoding == PageEncoding::Delta)
                .map(|((&page, _), _)| page as u32)
                .collect();
            expected.sort_unstable();
            let listed: Vec<u32> = encoded.deltas.iter().flat_map(|delta| delta.pages.clone()).collect();
            prop_assert_eq!(listed, expected);
        }
    }

    #[test]
    fn what_compresses_well_is_stored_whole_and_noise_is_not() {
        let text = |page: u64| {
            let line = format!("page {page}: the same words again and again. ");
            let bytes: Vec<u8> = line.bytes().cycle().take(PAGE).collect();
            Box::<[u8; PAGE]>::try_from(bytes.into_boxed_slice()).unwrap()
        };
        let numbers = || 0..300u64;
        let old: Memory = numbers().map(|page| (page, noise(page))).collect();
        let texts: Memory = numbers().map(|page| (page, text(page))).collect();
        let whole = |encoded: &EncodedPages| {
            let whole = |encoding: &&PageEncoding| **encoding == PageEncoding::TooMuch;
            encoded.encodings.iter().filter(whole).count()
        };
        assert_eq!(whole(&encode(&cached(&old), &texts)), 300);
        let mostly_noise: Memory = numbers()
            .map(|page| {
                let mut bytes = noise(page);
                bytes[..3500].copy_from_slice(&noise(page + 1000)[..3500]);
                (page, bytes)
            })
            .collect();
        assert_eq!(whole(&encode(&cached(&old), &mostly_noise)), 0);
    }
}
