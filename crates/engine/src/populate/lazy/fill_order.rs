//! The fill order, in the numbers of the blocks that are populated lazily: those of the manifest may
//! be others.

use stillframe_page::GuestPage;

use crate::populate::lazy::prefetch::{Prefetched, PreloadBuffer};
use crate::populate::lazy::prefetch_queue::PrefetchQueue;
use crate::source::PageSource;

/// The fill order.
#[derive(Debug, Default)]
pub struct FillOrder {
    working_set: Vec<GuestPage>,
    /// How many of these, from the beginning, are in the preload buffers.
    taken: usize,
    pub(super) buffers: Vec<PreloadBuffer>,
    pub(super) prefetched_pages: u64,
}

impl FillOrder {
    /// The preload buffers, and then the rest of the working set. `blocks` are the numbers in the manifest
    /// of those that are populated lazily, whose pages come from `sources`; both are in the same order.
    pub fn new<S: PageSource>(
        blocks: &[usize],
        sources: &[S],
        working_set: &[GuestPage],
        prefetched: Prefetched,
    ) -> FillOrder {
        let number = |block: usize| blocks.iter().position(|&other| other == block);
        let here = |&GuestPage { block, page }: &GuestPage| {
            let number = number(block)?;
            let there = page < sources.get(number)?.pages();
            there.then_some(GuestPage::new(number, page))
        };
        let prefetched_pages = prefetched.pages();
        let of_them = working_set.iter().take(prefetched.of_working_set);
        let buffers = prefetched.buffers.into_iter().filter_map(|buffer| {
            let block = number(buffer.block)?;
            Some(PreloadBuffer { block, ..buffer })
        });
        FillOrder {
            prefetched_pages,
            taken: of_them.filter_map(here).count(),
            buffers: buffers.collect(),
            working_set: working_set.iter().filter_map(here).collect(),
        }
    }

    /// The prefetch queue.
    pub(super) fn prefetch_queue(self) -> PrefetchQueue {
        PrefetchQueue::new(self.working_set, self.taken)
    }
}
