//! The working set on its way into memory: the filler and the fault servers take its pages one after the
//! other, each page once.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::asked::Page;

/// Pages that lie so close come together: a frame.
const GROUP_PAGES: u64 = 16;

/// What is left of the working set.
#[derive(Debug)]
pub(super) struct Ahead {
    pages: Vec<Page>,
    groups: HashSet<Page>,
    next: AtomicUsize,
}

impl Ahead {
    pub(super) fn new(pages: Vec<Page>) -> Ahead {
        Ahead {
            groups: pages.iter().map(group).collect(),
            next: AtomicUsize::new(0),
            pages,
        }
    }

    /// All its pages.
    pub(super) fn pages(&self) -> &[Page] {
        &self.pages
    }

    /// How many of them were taken.
    pub(super) fn taken(&self) -> usize {
        self.next.load(Ordering::Relaxed).min(self.pages.len())
    }

    /// Takes the next one, which is this thread's to fill.
    pub(super) fn take(&self) -> Option<Page> {
        // Not counted on and on when there are none left.
        if self.taken() == self.pages.len() {
            return None;
        }
        let place = self.next.fetch_add(1, Ordering::Relaxed);
        self.pages.get(place).copied()
    }

    /// Whether the guest does as it did before when it asks for this page: then what comes next is known.
    pub(super) fn foretells(&self, page: Page) -> bool {
        self.taken() < self.pages.len() && self.groups.contains(&group(&page))
    }
}

fn group(&(block, page): &Page) -> Page {
    (block, page / GROUP_PAGES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_is_taken_once() {
        let ahead = Ahead::new((0..1000).map(|page| (0, page)).collect());
        let mut taken: Vec<Page> = std::thread::scope(|scope| {
            let take_all = || std::iter::from_fn(|| ahead.take()).collect::<Vec<_>>();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(take_all)).collect();
            let taken = threads
                .into_iter()
                .flat_map(|thread| thread.join().unwrap());
            taken.collect()
        });
        taken.sort_unstable();
        assert_eq!(taken, ahead.pages());
        assert_eq!((ahead.take(), ahead.taken()), (None, 1000));
    }

    #[test]
    fn what_lies_near_is_foretold_until_all_is_taken() {
        let ahead = Ahead::new(vec![(1, 40), (1, 100)]);
        assert!(ahead.foretells((1, 32)) && ahead.foretells((1, 47)));
        assert!(!ahead.foretells((0, 40)) && !ahead.foretells((1, 48)));
        assert_eq!(ahead.take(), Some((1, 40)));
        assert!(ahead.foretells((1, 40)));
        assert_eq!(ahead.take(), Some((1, 100)));
        assert!(!ahead.foretells((1, 40)));
    }
}
