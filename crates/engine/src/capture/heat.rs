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

use stillframe_page::bitmap::DirtyBitmap;

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
        fn hot_is_new_twice_and_written_now(history in prop::collection::vec(pages(), 0..6), written in pages()) {
            let mut heat = Heat::new(PAGES);
            for checkpoint in &history {
                heat.committed(&bitmap(checkpoint));
            }
            let expected = match history.as_slice() {
                [.., before, last] => &(before & last) & &written,
                _ => BTreeSet::new(),
            };
            prop_assert_eq!(heat.hot(&bitmap(&written)), bitmap(&expected));
        }
    }
}
