//! Fault-around: with a page that a thread waits for, or is about to access, come other pages that cost little more.

use stillframe_page::{GuestPage, PAGE_BYTES, PageRequest, ReadOrder};
use stillframe_sys::uffd::Waiters;

use crate::populate::lazy::memory::{FillError, LazyMemory};
use crate::populate::lazy::prefetch_queue::PrefetchQueue;
use crate::source::{PageFetcher as _, PageSource};

/// Pages on each side that may come with one: frames are 16 pages.
const REACH: u64 = 15;
/// Zero pages that come with one.
const ZEROS_TOGETHER: u64 = 16;

/// Populates single pages with fault-around. The state of one thread.
pub(super) struct FaultAround<'m, S: PageSource> {
    memory: &'m LazyMemory<S>,
    /// Made for the first page that is not zero.
    fetcher: Option<S::Fetcher>,
}

impl<'m, S: PageSource> FaultAround<'m, S> {
    pub(super) fn new(memory: &'m LazyMemory<S>) -> FaultAround<'m, S> {
        FaultAround {
            memory,
            fetcher: None,
        }
    }

    /// Populates a page that a thread waits for and that is not populated yet, then others around it. The waiting
    /// thread is woken as soon as the page is there, or left to the caller.
    pub(super) fn fill(&mut self, page: GuestPage, waiters: Waiters) -> Result<(), FillError> {
        let memory = self.memory;
        let wake = || match waiters {
            Waiters::Wake => memory.wake(page),
            Waiters::Leave => Ok(()),
        };
        if self.fill_zeros(page)? > 0 {
            return wake();
        }
        let put = |first: u64, bytes: &[u8]| {
            let from = GuestPage::new(page.block, first);
            match from == page {
                true => memory.put(from, bytes, waiters).and_then(|()| wake()),
                false => memory.put(from, bytes, Waiters::Wake),
            }
        };
        self.fetch(page, ReadOrder::RequestedFirst, put)
    }

    /// Populates a page that no thread waits for, and others around it. Returns how many pages that were.
    fn fill_together(&mut self, page: GuestPage) -> Result<u64, FillError> {
        let zeros = self.fill_zeros(page)?;
        if zeros > 0 {
            return Ok(zeros);
        }
        let memory = self.memory;
        let mut pages = 0;
        let put = |first: u64, bytes: &[u8]| {
            pages += bytes.len() as u64 / PAGE_BYTES;
            memory.put(GuestPage::new(page.block, first), bytes, Waiters::Wake)
        };
        self.fetch(page, ReadOrder::Ascending, put)?;
        Ok(pages)
    }

    /// Populates a page that is zero, and zero pages behind it. Returns how many pages that were: none where it has
    /// content.
    fn fill_zeros(&self, GuestPage { block, page }: GuestPage) -> Result<u64, FillError> {
        let number = block;
        let block = &self.memory.blocks[number];
        if !block.source.is_zero(page)? {
            return Ok(0);
        }
        let mut end = page + 1;
        while end < block.source.pages().min(page + ZEROS_TOGETHER)
            && !block.is_populated(end)
            && block.source.is_known_zero(end)
        {
            end += 1;
        }
        self.memory.put_zeros(number, page..end)?;
        Ok(end - page)
    }

    /// Fetches a page and those around it that are not there yet, and puts them into memory.
    fn fetch(
        &mut self,
        GuestPage { block, page }: GuestPage,
        order: ReadOrder,
        mut put: impl FnMut(u64, &[u8]) -> Result<(), FillError>,
    ) -> Result<(), FillError> {
        let block = &self.memory.blocks[block];
        let mut around = pages_around(page, block.source.pages());
        around.retain(|&other| !block.is_populated(other));
        let source = &block.source;
        let fetcher = match &mut self.fetcher {
            Some(fetcher) => fetcher,
            none => none.insert(source.fetcher()?),
        };
        let request = PageRequest {
            page,
            neighbours: &around,
            order,
        };
        fetcher.fetch(source, request, &mut put)
    }

    /// Populates the next page of the prefetch queue, if it is not populated yet. Returns how many pages that were,
    /// or `None` at the end of the queue.
    pub(super) fn fill_from(
        &mut self,
        prefetch_queue: &PrefetchQueue,
    ) -> Result<Option<u64>, FillError> {
        match prefetch_queue.take() {
            Some(page) if self.memory.is_populated(page) => Ok(Some(0)),
            Some(page) => self.fill_together(page).map(Some),
            None => Ok(None),
        }
    }
}

/// The pages around `page` that may come with it, of a block of `pages`.
pub(super) fn pages_around(page: u64, pages: u64) -> Vec<u64> {
    let all = page.saturating_sub(REACH)..pages.min(page + REACH + 1);
    all.filter(|&other| other != page).collect()
}
