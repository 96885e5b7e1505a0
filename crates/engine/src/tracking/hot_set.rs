//! The hot set: pages that are write-hot, written with new content in one interval after the other.
//!
//! A first write to a protected page costs the vCPU a fault. The fault gains nothing for a page that will be
//! written anyway, so write-hot pages are left unprotected after the pause. The next scan finds them unprotected,
//! takes them for written, and protects them again until that pause is over.
//!
//! ```text
//!   new content in the last two checkpoints  AND  written in this interval  ->  hot
//!   unprotected, but the content turns out unchanged  ->  protected again after the next checkpoint
//! ```
//!
//! Whether that is worth it depends on what handles the fault. To unprotect a page interrupts the processors that
//! run the VM (x86: a page that becomes writable is flushed from their TLBs).
//!
//! ```text
//!   fault handled by the kernel (asynchronous tracking)   2.6 us a page
//!   fault handled by a thread (synchronous)               80 us a page
//!   unprotect                                             8 us a run of pages
//! ```

use std::ops::Range;

use stillframe_page::bitmap::DirtyBitmap;

/// With asynchronous tracking, the shortest run of write-hot pages that is worth unprotecting, in pages.
const ASYNC_RUN_MIN: u64 = 4;

/// The hot set of one block.
#[derive(Debug)]
pub struct HotSet {
    /// New content in the last checkpoint.
    last: DirtyBitmap,
    /// New content in the last two checkpoints.
    both: DirtyBitmap,
}

impl HotSet {
    /// All pages of a block of this many pages are cold.
    pub fn new(pages: u64) -> HotSet {
        HotSet {
            last: DirtyBitmap::new(pages),
            both: DirtyBitmap::new(pages),
        }
    }

    /// A checkpoint is durable, and contains content of these pages that the repository did not have.
    pub fn committed(&mut self, new: &DirtyBitmap) {
        std::mem::swap(&mut self.both, &mut self.last);
        self.both.intersect_with(new);
        self.last.clone_from(new);
    }

    /// The write-hot pages, of those written in this interval.
    pub fn hot(&self, written: &DirtyBitmap) -> DirtyBitmap {
        let mut hot = self.both.clone();
        hot.intersect_with(written);
        hot
    }

    /// The write-hot pages that are worth unprotecting where the kernel handles faults, as runs.
    pub fn hot_runs(&self, written: &DirtyBitmap) -> Vec<Range<u64>> {
        let hot = self.hot(written);
        let runs = hot.ranges();
        runs.filter(|run| run.end - run.start >= ASYNC_RUN_MIN)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const PAGES: u64 = 200;

    fn bitmap(pages: &BTreeSet<u64>) -> DirtyBitmap {
        let mut bitmap = DirtyBitmap::new(PAGES);
        for &page in pages {
            bitmap.set(page);
        }
        bitmap
    }

    fn pages() -> impl Strategy<Value = BTreeSet<u64>> {
        prop::collection::btree_set(0..PAGES, 0..150)
    }

    proptest! {
        /// The slow reference model: the whole history, searched anew each time.
        #[test]
        fn hot_is_new_twice_and_written_now(history in prop::collection::vec(pages(), 0..6), written in pages()) {
            let mut hot_set = HotSet::new(PAGES);
            for checkpoint in &history {
                hot_set.committed(&bitmap(checkpoint));
            }
            let expected = match history.as_slice() {
                [.., before, last] => &(before & last) & &written,
                _ => BTreeSet::new(),
            };
            let expected = bitmap(&expected);
            prop_assert_eq!(&hot_set.hot(&bitmap(&written)), &expected);
            let mut runs: Vec<Range<u64>> = expected.ranges().collect();
            runs.retain(|run| run.clone().count() as u64 >= ASYNC_RUN_MIN);
            prop_assert_eq!(hot_set.hot_runs(&bitmap(&written)), runs);
        }
    }
}
