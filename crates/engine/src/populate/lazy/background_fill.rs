//! The background fill: populates pages that caused no fault yet. First pages that are likely to be accessed, then
//! everything, in the order of the source.
//!
//! A page that cannot be read is left out and tried again later: the guest may never access it. If it does,
//! that is a stall, which the fault handlers report.

use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use stillframe_page::{GuestPage, PAGE_BYTES};
use stillframe_sys::uffd::Waiters;

use crate::in_words;
use crate::populate::lazy::fault_around::FaultAround;
use crate::populate::lazy::memory::{FillError, LazyMemory};
use crate::populate::lazy::prefetch::PreloadBuffer;
use crate::populate::lazy::prefetch_queue::PrefetchQueue;
use crate::source::{PageSource, SourceError};

/// Pages of the last interval are read in groups of this many. Groups are small, because only within a group pages
/// are read in the order of the repository.
const NEWEST_PAGES: usize = 512;
/// Other pages: 128 MiB.
const WINDOW_PAGES: u64 = 1 << 15;
/// Size of the pieces of a window that cannot be read as a whole, in pages.
const PIECE_PAGES: usize = 256;
/// How long until pages that could not be read are tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// How often a wait looks whether to end.
const LOOK: Duration = Duration::from_millis(20);

/// The background work.
pub(super) struct BackgroundFill<'m, S> {
    pub(super) memory: &'m LazyMemory<S>,
    pub(super) prefetch_queue: &'m PrefetchQueue,
    pub(super) threads: usize,
    /// Rate limit in bytes per second.
    pub(super) bytes_per_s: Option<NonZeroU64>,
    pub(super) end: &'m AtomicBool,
    /// Why a page could not be read last, in words.
    pub(super) problem: &'m Mutex<Option<String>>,
}

impl<S: PageSource> BackgroundFill<'_, S> {
    /// Populates all pages with content: first the preload buffers, then the working set, then the newest
    /// changes; `false` when it was ended before.
    pub(super) fn run(
        &self,
        prefetched: Vec<PreloadBuffer>,
        newest: &[GuestPage],
    ) -> Result<bool, FillError> {
        self.put(prefetched)?;
        self.fill_working_set()?;
        let mut failed = Vec::new();
        for group in newest.chunks(NEWEST_PAGES) {
            self.fill_group(group, &mut failed)?;
            self.pace(group.len() as u64);
        }
        for number in 0..self.memory.blocks.len() {
            self.fill_block(number, &mut failed)?;
        }
        while !failed.is_empty() && self.wait(AGAIN) {
            let mut still = Vec::new();
            for group in std::mem::take(&mut failed) {
                self.fill_group(&group, &mut still)?;
            }
            failed = still;
        }
        Ok(!self.has_ended())
    }

    /// Populates pages from the preload buffers. Blocks are numbered as here.
    fn put(&self, prefetched: Vec<PreloadBuffer>) -> Result<(), FillError> {
        for PreloadBuffer {
            block,
            pages,
            bytes,
        } in prefetched
        {
            if self.has_ended() {
                break;
            }
            match bytes.is_empty() {
                true => self.memory.put_zeros(block, pages)?,
                false => {
                    let first = GuestPage::new(block, pages.start);
                    self.memory.put(first, &bytes, Waiters::Wake)?;
                }
            }
        }
        Ok(())
    }

    /// Populates the working set in its order, with fault-around. Pages that cannot be read are tried again with all
    /// others.
    fn fill_working_set(&self) -> Result<(), FillError> {
        let work = || -> Result<(), FillError> {
            let mut fault_around = FaultAround::new(self.memory);
            while !self.has_ended() {
                match fault_around.fill_from(self.prefetch_queue) {
                    Ok(Some(pages)) => self.pace(pages),
                    Ok(None) => break,
                    Err(FillError::Source(error)) => _ = self.cannot(&error),
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        };
        thread::scope(|scope| {
            let helpers: Vec<_> = (1..self.threads).map(|_| scope.spawn(work)).collect();
            let own = work();
            let theirs = helpers.into_iter().map(|helper| match helper.join() {
                Ok(done) => done,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            theirs.fold(own, Result::and)
        })
    }

    fn fill_block(&self, number: usize, failed: &mut Vec<Vec<GuestPage>>) -> Result<(), FillError> {
        let block = &self.memory.blocks[number];
        // If this fails, reading single pages reports it.
        let _ = block.source.prepare();
        let pages = block.source.pages();
        let at_once = match self.bytes_per_s {
            None => WINDOW_PAGES,
            Some(_) => PIECE_PAGES as u64,
        };
        for window in windows(pages, at_once, !self.prefetch_queue.pages().is_empty()) {
            let group: Vec<GuestPage> = window
                .clone()
                .filter(|&page| !block.is_populated(page) && !block.source.is_known_zero(page))
                .map(|page| GuestPage::new(number, page))
                .collect();
            self.fill_group(&group, failed)?;
            self.memory.passed(window);
            self.pace(group.len() as u64);
        }
        Ok(())
    }

    /// Populates pages, and remembers the unreadable ones.
    fn fill_group(
        &self,
        group: &[GuestPage],
        failed: &mut Vec<Vec<GuestPage>>,
    ) -> Result<(), FillError> {
        if self.has_ended() || self.try_fill(group)? {
            return Ok(());
        }
        for piece in group.chunks(PIECE_PAGES) {
            if !self.has_ended() && !self.try_fill(piece)? {
                failed.push(piece.to_vec());
            }
        }
        Ok(())
    }

    /// Populates the pages that are not there yet; `false` when some cannot be read.
    fn try_fill(&self, group: &[GuestPage]) -> Result<bool, FillError> {
        for (number, block) in self.memory.blocks.iter().enumerate() {
            let mut wanted = Vec::new();
            for &GuestPage { page, .. } in group.iter().filter(|page| page.block == number) {
                if block.is_populated(page) {
                    continue;
                }
                match block.source.is_zero(page) {
                    Ok(false) => wanted.push(page),
                    // In the list only where it caused a fault in an earlier restore.
                    Ok(true) => self.memory.put_zeros(number, page..page + 1)?,
                    Err(error) => return Ok(self.cannot(&error)),
                }
            }
            let still = |page| !block.is_populated(page);
            let take = |page, bytes: &[u8]| match self.has_ended() {
                true => Err(FillError::Ended),
                false => {
                    let first = GuestPage::new(number, page);
                    self.memory.put(first, bytes, Waiters::Wake)
                }
            };
            let read = block.source.fetch_many(wanted, self.threads, &still, &take);
            match read {
                Err(FillError::Source(error)) => return Ok(self.cannot(&error)),
                Ok(()) | Err(FillError::Ended) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn cannot(&self, error: &SourceError) -> bool {
        let mut problem = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
        *problem = Some(in_words(error));
        false
    }

    fn has_ended(&self) -> bool {
        self.end.load(Ordering::Relaxed)
    }

    /// The rate limit: waits for the time that `pages` pages may take.
    fn pace(&self, pages: u64) {
        if let Some(rate) = self.bytes_per_s {
            let bytes = pages * PAGE_BYTES;
            self.wait(Duration::from_secs_f64(bytes as f64 / rate.get() as f64));
        }
    }

    /// Waits; `false` when it is time to end.
    fn wait(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        while !self.has_ended() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            thread::sleep(LOOK.min(left));
        }
        !self.has_ended()
    }
}

/// All pages, `at_once` at a time; from the last ones on if a working set is known. A guest that runs through its
/// memory then faults on pages that the set lacks, and the next set has them. Forwards, the background fill would
/// populate them before their first access.
fn windows(pages: u64, at_once: u64, backwards: bool) -> impl Iterator<Item = Range<u64>> {
    let count = pages.div_ceil(at_once);
    (0..count).map(move |number| {
        let number = match backwards {
            true => count - 1 - number,
            false => number,
        };
        number * at_once..pages.min((number + 1) * at_once)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_hold_every_page_once() {
        let forwards: Vec<_> = windows(25, 10, false).collect();
        assert_eq!(forwards, [0..10, 10..20, 20..25]);
        let mut backwards: Vec<_> = windows(25, 10, true).collect();
        backwards.reverse();
        assert_eq!(backwards, forwards);
        assert_eq!(windows(0, 10, true).count(), 0);
    }
}
