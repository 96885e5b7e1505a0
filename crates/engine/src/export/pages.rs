//! Going through all pages of a checkpoint.

use stillframe_repo::PageMap;

use super::ExportError;
use crate::{Progress, ProgressSink};

/// Pages gathered before they are read, in the order in which they lie in the repository.
const WINDOW_PAGES: u64 = 1 << 17;
/// More threads than these are no faster.
const THREADS_MAX: usize = 8;

/// The page maps of a checkpoint, one after the other.
pub(super) struct Walk<'a> {
    maps: Vec<Option<PageMap<'a>>>,
    progress: ProgressSink<'a>,
    done: u64,
    total: u64,
    threads: usize,
    /// Pages with content that were handed over.
    pub(super) pages: u64,
    /// Pages of zeros that were met.
    pub(super) zero_pages: u64,
}

/// Called with each page, ascending, and whether it is zero, before those with content are handed over.
pub(super) type Mention<'m> = &'m mut dyn FnMut(u64, bool) -> Result<(), ExportError>;

impl<'a> Walk<'a> {
    pub(super) fn new(maps: Vec<PageMap<'a>>, progress: ProgressSink<'a>) -> Walk<'a> {
        let threads = std::thread::available_parallelism();
        Walk {
            total: maps.iter().map(PageMap::pages).sum(),
            maps: maps.into_iter().map(Some).collect(),
            progress,
            done: 0,
            threads: threads.map_or(1, std::num::NonZero::get).min(THREADS_MAX),
            pages: 0,
            zero_pages: 0,
        }
    }

    /// Says that only the pages of block number `number` will be wanted.
    pub(super) fn only(&mut self, number: usize) {
        let map = self.maps.get(number).and_then(Option::as_ref);
        self.total = map.map_or(0, PageMap::pages);
    }

    /// Hands over the pages of block number `number`; each block can be had once.
    pub(super) fn block(
        &mut self,
        number: usize,
        mention: Mention<'_>,
        sink: stillframe_repo::PageSink<'_, ExportError>,
    ) -> Result<(), ExportError> {
        // A table that was read takes 33 bytes a page, and goes with its map.
        let Some(map) = self.maps.get_mut(number).and_then(Option::take) else {
            return Ok(());
        };
        map.read_rest()?;
        for start in (0..map.pages()).step_by(WINDOW_PAGES as usize) {
            let end = map.pages().min(start + WINDOW_PAGES);
            let mut with_content = Vec::new();
            for page in start..end {
                let is_zero = map.is_zero(page)?;
                mention(page, is_zero)?;
                if !is_zero {
                    with_content.push(page);
                }
            }
            self.pages += with_content.len() as u64;
            self.zero_pages += end - start - with_content.len() as u64;
            map.read_pages(with_content, self.threads, sink)?;
            (self.progress)(Progress::Exporting {
                done: self.done + end,
                total: self.total,
            });
        }
        self.done += map.pages();
        Ok(())
    }
}
