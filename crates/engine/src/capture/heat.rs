//! Which pages are hot: written with new content in one interval after the other.
//!
//! A first write to a protected page costs the vCPU a fault. A page that will be written anyway
//! gains nothing by it, so hot pages stay open where that is cheaper, and the next checkpoint takes
//! them for written.
//!
//! ```text
//!   new content in the last two checkpoints    ->  hot
//!   hot, but the content turns out unchanged   ->  cold
//! ```
//!
//! What a fault costs depends on who serves it, and what an open page costs on how it comes to be open
//! (x86: whenever a page becomes writable, or is protected, the kernel interrupts every processor that
//! runs the VM, for its TLB). With 2 processors that are themselves virtual:
//!
//! ```text
//!   fault served by the kernel (asynchronous tracking)   2.6 us a page
//!   fault served by a thread (synchronous)               80 us a page
//!   opening a page while the VM runs                     8 us a run of pages
//!   passing over it in the scan that protects            8 us a run of pages, in the pause
//! ```

use std::cmp::Reverse;
use std::ops::Range;

use stillframe_page::bitmap::DirtyBitmap;

/// So long a run of hot pages is worth being passed over in the pause, in pages.
const RUN_MIN: u64 = 16;

/// So many runs at most: half a millisecond.
const RUNS_MAX: usize = 64;

/// The heat of one block's pages.
#[derive(Debug)]
pub struct Heat {
    /// New content in the last checkpoint.
    last: DirtyBitmap,
    /// New content in the last two checkpoints.
    both: DirtyBitmap,
}

impl Heat {
    /// All pages of a block of this many pages are cold.
    pub fn new(pages: u64) -> Heat {
        Heat {
            last: DirtyBitmap::new(pages),
            both: DirtyBitmap::new(pages),
        }
    }

    /// A checkpoint is durable, and holds content of these pages that the repository did not have.
    pub fn committed(&mut self, new: &DirtyBitmap) {
        std::mem::swap(&mut self.both, &mut self.last);
        self.both.intersect_with(new);
        self.last.clone_from(new);
    }

    /// The hot pages.
    pub fn hot(&self) -> &DirtyBitmap {
        &self.both
    }

    /// Those to be passed over by a scan that protects as it goes: all in long runs, ascending.
    pub fn long_runs(&self) -> Vec<Range<u64>> {
        let runs = self.both.ranges();
        let long = runs.filter(|run| run.end - run.start >= RUN_MIN);
        longest(long.collect(), RUNS_MAX)
    }
}

fn longest(mut runs: Vec<Range<u64>>, most: usize) -> Vec<Range<u64>> {
    if runs.len() > most {
        runs.select_nth_unstable_by_key(most, |run| Reverse(run.end - run.start));
        runs.truncate(most);
        runs.sort_unstable_by_key(|run| run.start);
    }
    runs
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use stillframe_page::PageIndex;

    use super::*;

    const PAGES: u64 = 200;

    fn bitmap(pages: &BTreeSet<u64>) -> DirtyBitmap {
        let mut bitmap = DirtyBitmap::new(PAGES);
        for &page in pages {
            bitmap.set(PageIndex(page));
        }
        bitmap
    }

    fn pages() -> impl Strategy<Value = BTreeSet<u64>> {
        prop::collection::btree_set(0..PAGES, 0..150)
    }

    proptest! {
        /// The slow twin: the whole history, looked through anew each time.
        #[test]
        fn hot_is_new_twice_running(history in prop::collection::vec(pages(), 0..6)) {
            let mut heat = Heat::new(PAGES);
            for checkpoint in &history {
                heat.committed(&bitmap(checkpoint));
            }
            let expected = match history.as_slice() {
                [.., before, last] => before & last,
                _ => BTreeSet::new(),
            };
            prop_assert_eq!(heat.hot(), &bitmap(&expected));
            let long = heat.hot().ranges().filter(|run| run.end - run.start >= RUN_MIN);
            prop_assert_eq!(heat.long_runs(), long.collect::<Vec<_>>());
        }

        #[test]
        fn the_longest_runs_are_kept_in_order(pages in pages(), most in 0..60_usize) {
            let runs: Vec<Range<u64>> = bitmap(&pages).ranges().collect();
            let kept = longest(runs.clone(), most);
            prop_assert_eq!(kept.len(), runs.len().min(most));
            prop_assert!(kept.is_sorted_by_key(|run| run.start));
            let lengths = |runs: &[Range<u64>]| {
                let mut lengths: Vec<u64> = runs.iter().map(|run| run.end - run.start).collect();
                lengths.sort_unstable_by_key(|&length| Reverse(length));
                lengths
            };
            prop_assert!(kept.iter().all(|run| runs.contains(run)));
            prop_assert_eq!(lengths(&kept), &lengths(&runs)[..kept.len()]);
        }
    }
}
