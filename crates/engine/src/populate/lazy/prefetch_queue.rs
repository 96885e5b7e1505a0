//! The prefetch queue: background fill and fault handlers take the pages of the working set one after the
//! other, each page once.

use std::sync::atomic::{AtomicUsize, Ordering};

use stillframe_page::GuestPage;

/// Pages of one group, a frame, are populated at once.
const GROUP_PAGES: u64 = 16;

/// The rest of the working set.
#[derive(Debug)]
pub(super) struct PrefetchQueue {
    pages: Vec<GuestPage>,
    groups: Groups,
    next: AtomicUsize,
}

impl PrefetchQueue {
    /// A queue of these pages; the first `taken` of them are taken already.
    pub(super) fn new(pages: Vec<GuestPage>, taken: usize) -> PrefetchQueue {
        PrefetchQueue {
            groups: Groups::of(&pages),
            next: AtomicUsize::new(taken),
            pages,
        }
    }

    /// All its pages.
    pub(super) fn pages(&self) -> &[GuestPage] {
        &self.pages
    }

    /// How many of them were taken.
    pub(super) fn taken(&self) -> usize {
        self.next.load(Ordering::Relaxed).min(self.pages.len())
    }

    /// Takes the next page, which this thread then populates.
    pub(super) fn take(&self) -> Option<GuestPage> {
        // Not counted on and on when there are none left.
        if self.taken() == self.pages.len() {
            return None;
        }
        let place = self.next.fetch_add(1, Ordering::Relaxed);
        self.pages.get(place).copied()
    }

    /// Whether a fault on this page is one of the working set: then the queue predicts the next pages.
    pub(super) fn predicts(&self, page: GuestPage) -> bool {
        self.taken() < self.pages.len() && self.groups.has(page)
    }
}

/// The groups that contain pages of a set: a bit each, for each block. The guest waits while they are made.
#[derive(Debug, Default)]
struct Groups(Vec<Vec<u64>>);

impl Groups {
    fn of(pages: &[GuestPage]) -> Groups {
        let mut groups = Groups::default();
        for &page in pages {
            let GroupBit { block, word, bit } = GroupBit::of(page);
            if groups.0.len() <= block {
                groups.0.resize_with(block + 1, Vec::new);
            }
            let words = &mut groups.0[block];
            if words.len() <= word {
                words.resize(word + 1, 0);
            }
            words[word] |= bit;
        }
        groups
    }

    fn has(&self, page: GuestPage) -> bool {
        let GroupBit { block, word, bit } = GroupBit::of(page);
        let words = self.0.get(block).and_then(|words| words.get(word));
        words.is_some_and(|word| word & bit != 0)
    }
}

/// The bit of a group.
struct GroupBit {
    block: usize,
    word: usize,
    bit: u64,
}

impl GroupBit {
    fn of(GuestPage { block, page }: GuestPage) -> GroupBit {
        let group = page / GROUP_PAGES;
        GroupBit {
            block,
            word: (group / 64) as usize,
            bit: 1 << (group % 64),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn page(blocks: usize, pages: u64) -> impl Strategy<Value = GuestPage> {
        (0..blocks, 0..pages).prop_map(|(block, page)| GuestPage::new(block, page))
    }

    proptest! {
        /// Against a set of them.
        #[test]
        fn groups_are_those_of_the_pages(
            pages in prop::collection::vec(page(4, 40_000), 0..60),
            others in prop::collection::vec(page(6, 50_000), 0..200),
        ) {
            let group = |page: &GuestPage| (page.block, page.page / GROUP_PAGES);
            let slow: HashSet<(usize, u64)> = pages.iter().map(group).collect();
            let groups = Groups::of(&pages);
            for page in pages.iter().chain(&others) {
                prop_assert_eq!(groups.has(*page), slow.contains(&group(page)));
            }
        }
    }

    #[test]
    fn each_page_is_taken_once() {
        let queue = PrefetchQueue::new((0..1000).map(|page| GuestPage::new(0, page)).collect(), 0);
        let mut taken: Vec<GuestPage> = std::thread::scope(|scope| {
            let take_all = || std::iter::from_fn(|| queue.take()).collect::<Vec<_>>();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(take_all)).collect();
            let taken = threads
                .into_iter()
                .flat_map(|thread| thread.join().unwrap());
            taken.collect()
        });
        taken.sort_unstable();
        assert_eq!(taken, queue.pages());
        assert_eq!((queue.take(), queue.taken()), (None, 1000));
    }

    #[test]
    fn pages_near_a_member_are_predicted_until_all_are_taken() {
        let page = GuestPage::new;
        let queue = PrefetchQueue::new(vec![page(0, 7), page(1, 40), page(1, 100)], 1);
        assert!(queue.predicts(page(1, 32)) && queue.predicts(page(1, 47)));
        assert!(!queue.predicts(page(0, 40)) && !queue.predicts(page(1, 48)));
        assert_eq!(queue.take(), Some(page(1, 40)));
        assert!(queue.predicts(page(1, 40)));
        assert_eq!(queue.take(), Some(page(1, 100)));
        assert!(!queue.predicts(page(1, 40)));
    }
}
