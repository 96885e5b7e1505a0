//! The verb *stats*: what has changed in a VM's memory between two checkpoints, page by page and
//! byte by byte (FITDOC, table I).

use serde::Serialize;
use stillframe_page::delta::DeltaEncoder;
use stillframe_page::difference::{WORD_BYTES, difference};
use stillframe_page::{PAGE, PAGE_BYTES};
use stillframe_repo::{Manifest, PageMap, Reader, RepoError};
use thiserror::Error;

use crate::{Progress, ProgressSink};

/// Upper ends of the histogram's ranges, in changed bytes a page; each begins above the one before.
pub const RANGES: [u32; 13] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096];
/// Zstandard level of deltas.
const LEVEL: i32 = 1;
/// Pages compared at once; both versions of each are in memory.
const BATCH_PAGES: usize = 1024;

/// Why two checkpoints cannot be compared.
#[derive(Debug, Error)]
pub enum StatisticsError {
    /// The checkpoints have different memory.
    #[error(
        "the checkpoints have different RAM blocks ({block}): compare two of the same VM, between which nothing was plugged"
    )]
    Blocks {
        /// The first block that only one of them has, or has in another size.
        block: String,
    },
    /// The repository failed.
    #[error(transparent)]
    Repo(#[from] RepoError),
}

/// Pages whose changed bytes lie in one range.
#[derive(Debug, Clone, Copy, Serialize, PartialEq, Eq)]
pub struct Range {
    /// The pages have more changed bytes than this.
    pub above: u32,
    /// At most this many.
    pub up_to: u32,
    /// The number of pages.
    pub pages: u64,
}

/// The changes between two checkpoints.
#[derive(Debug, Clone, Serialize, PartialEq)]
pub struct Statistics {
    /// Time between the two, in seconds.
    pub interval_s: f64,
    /// Pages of all RAM blocks.
    pub pages: u64,
    /// The pages among them that are all zero in the newer checkpoint.
    pub zero_pages: u64,
    /// The pages among them that are the same in both.
    pub unchanged_pages: u64,
    /// The pages among them that differ.
    pub dirty_pages: u64,
    /// Dirty pages by how many of their bytes changed.
    pub histogram: Vec<Range>,
    /// Bytes that changed.
    pub dirty_bytes: u64,
    /// The bytes among them in aligned words of eight bytes all of which changed.
    pub dirty_word_bytes: u64,
    /// The size of the changes as deltas of pages, in bytes, positions included (`stillframe_page::delta`).
    pub delta_bytes: u64,
}

/// Shares and rates; `None` where nothing changed or no time passed.
#[derive(Debug, Clone, Copy, Serialize, PartialEq)]
pub struct Rates {
    /// Dirty pages of all pages.
    pub dirty_pages: Option<f64>,
    /// Changed bytes of the bytes of dirty pages.
    pub dirty_bytes_of_dirty_pages: Option<f64>,
    /// Changed bytes of all bytes.
    pub dirty_bytes_of_all: Option<f64>,
    /// Bytes in whole words of changed bytes.
    pub word_bytes_of_dirty_bytes: Option<f64>,
    /// Dirty pages a second.
    pub dirty_pages_per_s: Option<f64>,
    /// Changed bytes a second.
    pub dirty_bytes_per_s: Option<f64>,
}

impl Statistics {
    /// The shares and rates that follow.
    pub fn rates(&self) -> Rates {
        let share = |part: u64, whole: f64| (whole > 0.0).then(|| part as f64 / whole);
        let page_bytes = PAGE_BYTES as f64;
        Rates {
            dirty_pages: share(self.dirty_pages, self.pages as f64),
            dirty_bytes_of_dirty_pages: share(
                self.dirty_bytes,
                self.dirty_pages as f64 * page_bytes,
            ),
            dirty_bytes_of_all: share(self.dirty_bytes, self.pages as f64 * page_bytes),
            word_bytes_of_dirty_bytes: share(self.dirty_word_bytes, self.dirty_bytes as f64),
            dirty_pages_per_s: share(self.dirty_pages, self.interval_s),
            dirty_bytes_per_s: share(self.dirty_bytes, self.interval_s),
        }
    }

    fn new(interval_s: f64) -> Statistics {
        let above = std::iter::once(0).chain(RANGES);
        let ranges = above.zip(RANGES).map(|(above, up_to)| Range {
            above,
            up_to,
            pages: 0,
        });
        Statistics {
            interval_s,
            pages: 0,
            zero_pages: 0,
            unchanged_pages: 0,
            dirty_pages: 0,
            histogram: ranges.collect(),
            dirty_bytes: 0,
            dirty_word_bytes: 0,
            delta_bytes: 0,
        }
    }

    /// Counts a page that may have changed.
    fn count(&mut self, old: &[u8; PAGE], new: &[u8; PAGE]) {
        let found = difference(old, new);
        if found.bytes == 0 {
            self.unchanged_pages += 1;
            return;
        }
        let range = RANGES.partition_point(|&up_to| up_to < found.bytes);
        if let Some(range) = self.histogram.get_mut(range) {
            range.pages += 1;
        }
        self.dirty_pages += 1;
        self.dirty_bytes += u64::from(found.bytes);
        self.dirty_word_bytes += u64::from(found.whole_words) * WORD_BYTES as u64;
    }
}

/// Compares the memory of two checkpoints.
pub fn between(
    reader: &Reader<'_>,
    [older, newer]: [&Manifest; 2],
    progress: ProgressSink<'_>,
) -> Result<Statistics, StatisticsError> {
    let interval = newer.time.duration_since(older.time).as_secs_f64();
    let mut statistics = Statistics::new(interval.max(0.0));
    let mut encoder = DeltaEncoder::new(LEVEL).map_err(RepoError::from)?;
    let total = newer.ram.iter().map(|table| table.pages).sum();
    let shape = |manifest: &Manifest| -> Vec<(String, u64)> {
        let tables = manifest.ram.iter();
        tables
            .map(|table| (table.name.clone(), table.pages))
            .collect()
    };
    let (old_shape, new_shape) = (shape(older), shape(newer));
    let alone = |(name, pages): &&(String, u64)| {
        let block = (name.clone(), *pages);
        !(old_shape.contains(&block) && new_shape.contains(&block))
    };
    if let Some((name, _)) = old_shape.iter().chain(&new_shape).find(alone) {
        return Err(StatisticsError::Blocks {
            block: name.clone(),
        });
    }
    for table in &newer.ram {
        // There is one: the shapes are the same.
        let old = older.ram.iter().find(|old| old.name == table.name);
        let maps = [
            PageMap::read(reader, old.unwrap_or(table))?,
            PageMap::read(reader, table)?,
        ];
        let mut changed = Vec::new();
        for page in 0..table.pages {
            let (old, new) = (maps[0].version(page)?, maps[1].version(page)?);
            statistics.pages += 1;
            statistics.zero_pages += u64::from(maps[1].is_zero(page)?);
            match old == new {
                true => statistics.unchanged_pages += 1,
                false => changed.push(page),
            }
            if changed.len() >= BATCH_PAGES {
                count_all(&maps, &mut encoder, &mut changed, &mut statistics)?;
                let done = statistics.pages;
                progress(Progress::Comparing { done, total });
            }
        }
        count_all(&maps, &mut encoder, &mut changed, &mut statistics)?;
    }
    Ok(statistics)
}

/// Reads both versions of the pages, compares them and forgets them.
fn count_all(
    maps: &[PageMap<'_>; 2],
    encoder: &mut DeltaEncoder,
    changed: &mut Vec<u64>,
    statistics: &mut Statistics,
) -> Result<(), RepoError> {
    let [old, new] = maps;
    let (old, new) = (old.read_together(changed)?, new.read_together(changed)?);
    let versions = old.as_chunks().0.iter().zip(new.as_chunks().0);
    for (page, (old, new)) in changed.drain(..).zip(versions) {
        statistics.count(old, new);
        // A table has less than 2^30 pages.
        encoder.add(page as u32, [old, new], PAGE);
    }
    statistics.delta_bytes += encoder.finish()?.bytes.len() as u64;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_falls_into_the_range_of_its_changed_bytes() {
        let old = [0u8; PAGE];
        for bytes in [1, 2, 3, 4, 5, 64, 65, 2048, 2049, 4096] {
            let mut new = old;
            new[..bytes].fill(1);
            let mut statistics = Statistics::new(2.0);
            statistics.count(&old, &new);
            let used: Vec<&Range> = statistics
                .histogram
                .iter()
                .filter(|range| range.pages > 0)
                .collect();
            let [range] = used.as_slice() else {
                panic!("{used:?}")
            };
            assert!((range.above as usize) < bytes && bytes <= range.up_to as usize);
            assert_eq!(statistics.dirty_bytes, bytes as u64);
            assert_eq!(
                statistics.dirty_word_bytes as usize,
                bytes / WORD_BYTES * WORD_BYTES
            );
        }
    }

    #[test]
    fn nothing_changed_has_no_rates_but_shares_of_zero() {
        let mut statistics = Statistics::new(0.0);
        statistics.pages = 10;
        let rates = statistics.rates();
        assert_eq!(rates.dirty_pages, Some(0.0));
        assert_eq!(rates.dirty_bytes_of_dirty_pages, None);
        assert_eq!(rates.dirty_pages_per_s, None);
    }
}
