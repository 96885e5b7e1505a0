//! Which pages are hot: written with new content in one interval after the other.
//!
//! A first write to a protected page costs the vCPU a fault. A page that will be written anyway
//! gains nothing by it, so hot pages are left open after the pause: the next scan finds them
//! unprotected, takes them for written, and protects them again until that pause is over.
//!
//! ```text
//!   new content in the last two checkpoints  AND  written in this interval  ->  open
//!   open, but the content turns out unchanged  ->  protected again after the next checkpoint
//! ```

use stillframe_page::PageIndex;
use stillframe_page::bitmap::DirtyBitmap;

/// The heat of one block's pages.
#[derive(Debug)]
pub struct Heat {
    /// New content in the checkpoint under way.
    now: DirtyBitmap,
    /// New content in the last checkpoint.
    last: DirtyBitmap,
    /// New content in the last two checkpoints.
    both: DirtyBitmap,
}

impl Heat {
    /// All pages of a block of this many pages are cold.
    pub fn new(pages: u64) -> Heat {
        Heat {
            now: DirtyBitmap::new(pages),
            last: DirtyBitmap::new(pages),
            both: DirtyBitmap::new(pages),
        }
    }

    /// The checkpoint under way holds content of this page that the repository did not have.
    pub fn note_new(&mut self, page: u64) {
        self.now.set(PageIndex(page));
    }

    /// The checkpoint under way is durable; the next one begins.
    pub fn committed(&mut self) {
        // Their roles go round: `both` begins as the last checkpoint, and loses what this one has not.
        std::mem::swap(&mut self.last, &mut self.both);
        self.both.intersect_with(&self.now);
        std::mem::swap(&mut self.last, &mut self.now);
        self.now.clear_all();
    }

    /// The pages to be left open, of those written in this interval.
    pub fn hot(&self, written: &DirtyBitmap) -> DirtyBitmap {
        let mut hot = self.both.clone();
        hot.intersect_with(written);
        hot
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
        fn hot_is_new_twice_and_written_now(history in prop::collection::vec(pages(), 0..6), written in pages()) {
            let mut heat = Heat::new(PAGES);
            for checkpoint in &history {
                checkpoint.iter().for_each(|&page| heat.note_new(page));
                heat.committed();
            }
            let expected = match history.as_slice() {
                [.., before, last] => &(before & last) & &written,
                _ => BTreeSet::new(),
            };
            prop_assert_eq!(heat.hot(&bitmap(&written)), bitmap(&expected));
        }
    }

    /// A checkpoint that failed is not counted, and what its next attempt stores is.
    #[test]
    fn what_was_noted_before_a_failure_stays_noted() {
        let mut heat = Heat::new(PAGES);
        for _ in 0..2 {
            heat.note_new(7);
            heat.committed();
        }
        heat.note_new(9);
        let all = bitmap(&(0..PAGES).collect());
        assert_eq!(heat.hot(&all), bitmap(&BTreeSet::from([7])));
    }
}
