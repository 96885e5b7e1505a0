//! The pages to exchange: those that differ from the checkpoint, with the content of the checkpoint.
//!
//! They are gathered while the guest runs. Then each is exchanged with the guest's page, so that the old content is
//! at hand if something goes wrong.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use stillframe_fault::{self as fault, Point};
use stillframe_page::bitmap::DirtyBitmap;
use stillframe_page::hash::ContentHasher;
use stillframe_page::{PAGE, PAGE_BYTES};
use stillframe_repo::PageMap;
use stillframe_sys::affinity;

use super::RewindError;
use crate::encoding::page_encoder::hash_all;
use crate::memory::Page;
use crate::memory::block::{Block, BlockError};

/// Pages of a VM that are read at once.
const CHUNK_PAGES: u64 = 2048;

/// Consecutive pages with their new content; or with their old content, once they are exchanged.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) first: u64,
    pub(super) bytes: Vec<u8>,
}

impl Run {
    pub(super) fn pages(&self) -> Range<u64> {
        self.first..self.first + self.bytes.len() as u64 / PAGE_BYTES
    }
}

/// The pages of a RAM block or a disk that are to be exchanged.
pub(super) struct Gathered<'a> {
    pub(super) map: PageMap<'a>,
    pages: DirtyBitmap,
    pub(super) runs: Vec<Run>,
}

/// The present content of neighbouring pages, by the number of the first and their length in bytes; `None`: they count as
/// different, without a comparison.
type There<'t> = &'t (dyn Fn(u64, usize) -> Result<Option<Vec<u8>>, RewindError> + Sync);

impl<'a> Gathered<'a> {
    pub(super) fn new(map: PageMap<'a>) -> Gathered<'a> {
        Gathered {
            pages: DirtyBitmap::new(map.pages()),
            runs: Vec::new(),
            map,
        }
    }

    /// Adds the pages that are not zero in the checkpoint.
    pub(super) fn not_zero(
        &self,
        pages: Range<u64>,
        into: &mut Vec<u64>,
    ) -> Result<(), RewindError> {
        for page in pages {
            if !self.map.is_zero(page)? {
                into.push(page);
            }
        }
        Ok(())
    }

    /// Adds those of the pages that are, or may be, something else in the checkpoint. A page that is made of deltas
    /// has no content id.
    pub(super) fn other_content(
        &self,
        pages: &[Page<'_>],
        hasher: &ContentHasher,
        into: &mut Vec<u64>,
    ) -> Result<(), RewindError> {
        for (page, id) in pages.iter().zip(hash_all(hasher, pages)) {
            let wanted = self.map.whole_id(page.number)?;
            if wanted != id || (id.is_none() && !self.map.is_zero(page.number)?) {
                into.push(page.number);
            }
        }
        Ok(())
    }

    /// Gathers the pages that differ from what is there and are not gathered yet; the guest may run. A page may be named
    /// twice: it must not be exchanged twice, or it could not be put back.
    pub(super) fn gather(
        &mut self,
        pages: impl IntoIterator<Item = u64>,
        budget: &mut Budget,
        there: There<'_>,
    ) -> Result<(), RewindError> {
        let mut wanted: Vec<u64> = pages.into_iter().collect();
        wanted.retain(|&page| !self.pages.get(page));
        wanted.sort_unstable();
        wanted.dedup();
        let found = Mutex::new((Vec::new(), budget));
        self.map.read_pages(wanted, threads(), &|first, bytes| {
            let there = there(first, bytes.len())?;
            let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
            let (runs, budget) = &mut *found;
            for (at, (page, wanted)) in (first..).zip(bytes.chunks(PAGE)).enumerate() {
                let is_same = |there: &Vec<u8>| there[at * PAGE..][..PAGE] == *wanted;
                if !there.as_ref().is_some_and(is_same) {
                    budget.take(PAGE)?;
                    append(runs, page, wanted);
                }
            }
            Ok::<(), RewindError>(())
        })?;
        let (runs, _) = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        for run in &runs {
            self.pages.set_range(run.pages());
        }
        self.runs.extend(runs);
        Ok(())
    }
}

/// One RAM block.
pub(super) struct StagedBlock<'a> {
    pub(super) block: &'a Block,
    pub(super) gathered: Gathered<'a>,
}

impl<'a> StagedBlock<'a> {
    pub(super) fn new(block: &'a Block, map: PageMap<'a>) -> StagedBlock<'a> {
        StagedBlock {
            block,
            gathered: Gathered::new(map),
        }
    }

    /// Gathers what differs, in all of the block. `populated` are the pages that may be other than zero.
    pub(super) fn compare(
        &mut self,
        populated: &[Range<u64>],
        hasher: &ContentHasher,
        budget: &mut Budget,
    ) -> Result<(), RewindError> {
        let gathered = &self.gathered;
        let mut candidates = Vec::new();
        let mut next = 0;
        for range in populated {
            gathered.not_zero(next..range.start, &mut candidates)?;
            for start in (range.start..range.end).step_by(CHUNK_PAGES as usize) {
                let pages = range.end.min(start + CHUNK_PAGES) - start;
                let bytes = read(self.block, start, pages as usize * PAGE)?;
                let chunk: Vec<Page<'_>> = Page::consecutive(start, &bytes).collect();
                gathered.other_content(&chunk, hasher, &mut candidates)?;
            }
            next = range.end;
        }
        gathered.not_zero(next..gathered.map.pages(), &mut candidates)?;
        self.gather(candidates, budget)
    }

    /// Gathers the pages that differ and are not gathered yet.
    pub(super) fn gather(
        &mut self,
        pages: impl IntoIterator<Item = u64>,
        budget: &mut Budget,
    ) -> Result<(), RewindError> {
        let block = self.block;
        let there = |first, bytes| Ok(Some(read(block, first, bytes)?));
        self.gathered.gather(pages, budget, &there)
    }

    /// Gathers all pages, whether they differ or not: QEMU will have overwritten them.
    pub(super) fn gather_all(&mut self) -> Result<(), RewindError> {
        let map = &self.gathered.map;
        let pages: Vec<u64> = (0..map.pages()).collect();
        self.gathered.runs = vec![Run {
            first: 0,
            bytes: map.read_together(&pages)?,
        }];
        Ok(())
    }

    /// Exchanges the gathered pages, from run number `from` on, with the guest's. Returns how many pages
    /// that changed, and moves `from` to the first run that was not exchanged.
    pub(super) fn exchange(&mut self, from: &mut usize) -> Result<u64, RewindError> {
        let mut pages = 0;
        let runs = &mut self.gathered.runs;
        let half = runs.len() / 2;
        for run in runs.iter_mut().skip(*from) {
            if *from == half {
                fault::at(Point::RewindExchange)?;
            }
            let mut there = vec![0; run.bytes.len()];
            self.block.read_slowly(run.first, &mut there)?;
            if there != run.bytes {
                self.block.write(run.first, &run.bytes)?;
                run.bytes = there;
                pages += run.bytes.len() as u64 / PAGE_BYTES;
            }
            *from += 1;
        }
        Ok(pages)
    }

    /// Puts back the old content of the first `exchanged` runs.
    pub(super) fn put_back(&mut self, exchanged: usize) -> Result<(), BlockError> {
        for run in &self.gathered.runs[..exchanged] {
            self.block.write(run.first, &run.bytes)?;
        }
        Ok(())
    }

    /// The whole current content.
    pub(super) fn read_all(&self) -> Result<Vec<u8>, BlockError> {
        read(self.block, 0, self.gathered.map.pages() as usize * PAGE)
    }
}

fn read(block: &Block, first: u64, bytes: usize) -> Result<Vec<u8>, BlockError> {
    let mut there = vec![0; bytes];
    block.read_slowly(first, &mut there)?;
    Ok(there)
}

fn append(runs: &mut Vec<Run>, page: u64, bytes: &[u8]) {
    if let Some(last) = runs.last_mut()
        && last.pages().end == page
    {
        last.bytes.extend_from_slice(bytes);
        return;
    }
    runs.push(Run {
        first: page,
        bytes: bytes.to_vec(),
    });
}

fn threads() -> usize {
    affinity::of_this_thread().len()
}

/// How much may be gathered.
#[derive(Debug)]
pub(super) struct Budget {
    pub(super) taken_bytes: u64,
    pub(super) limit_bytes: u64,
}

impl Budget {
    fn take(&mut self, bytes: usize) -> Result<(), RewindError> {
        self.taken_bytes += bytes as u64;
        match self.taken_bytes <= self.limit_bytes {
            true => Ok(()),
            false => Err(RewindError::TooMuch {
                limit_bytes: self.limit_bytes,
            }),
        }
    }
}
