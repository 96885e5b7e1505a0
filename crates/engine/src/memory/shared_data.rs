//! The pages that a shared block has data for, followed without looking at each of them.
//!
//! To find a hole (lseek(2), SEEK_HOLE) the kernel looks at one page of the file after the other: 30 ms for 1.5 GiB, at
//! each scan, the one in the pause included. A file gets new pages only where it had holes, so only these are asked. If
//! it has as many pages then as are known, no known page was discarded. Else every page is looked at.

use std::ops::Range;

use crate::memory::block::{Block, BlockError};
use crate::memory::ranges::{length, subtract};

/// What is known of one block since the last look.
#[derive(Debug, Default)]
pub struct SharedData {
    known: Vec<Range<u64>>,
}

impl SharedData {
    /// For a shared block: the pages that have data now, all others are zero. `None` for a private one.
    ///
    /// A page that is discarded while this looks may be missed, and is found by the next look: by the one in the pause
    /// at the latest, where nothing is discarded.
    pub fn look(&mut self, block: &Block) -> Result<Option<&[Range<u64>]>, BlockError> {
        self.known = match self.grown(block)? {
            Some(grown) => grown,
            None => match block.data_pages()? {
                Some(data) => data,
                None => return Ok(None),
            },
        };
        Ok(Some(&self.known))
    }

    /// The known pages and those that have appeared in the holes; `None` where only looking at all of them tells.
    fn grown(&self, block: &Block) -> Result<Option<Vec<Range<u64>>>, BlockError> {
        if block.allocated_pages()?.is_none() {
            return Ok(None);
        }
        let mut grown = self.known.clone();
        for hole in subtract(&block.whole(), &self.known) {
            grown.extend(block.data_pages_among(&hole)?.unwrap_or_default());
        }
        // Counted last: what appears meanwhile only has all pages looked at.
        let complete = block.allocated_pages()? == Some(length(&grown));
        Ok(complete.then(|| joined(grown)))
    }
}

/// Sorted, and neighbours as one: else each page of a filled hole would stay a range of its own.
fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, last| {
        let near = next.start == last.end;
        if near {
            last.end = next.end;
        }
        near
    });
    ranges
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fakes::FakeMemory;

    const PAGES: u64 = 40;

    #[derive(Debug, Clone)]
    enum Step {
        Write(u64),
        Discard(u64),
        Look,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..PAGES).prop_map(Step::Write),
            2 => (0..PAGES).prop_map(Step::Discard),
            2 => Just(Step::Look),
        ]
    }

    proptest! {
        #[test]
        fn a_look_finds_what_looking_at_each_page_finds(steps in prop::collection::vec(step(), 1..80)) {
            let memory = FakeMemory::new("block", &[0; PAGES as usize]);
            let block = memory.block();
            let mut data = SharedData::default();
            let mut lost = false;
            for step in steps {
                match step {
                    Step::Write(page) => memory.write(page, 1),
                    Step::Discard(page) => {
                        lost |= data.known.iter().any(|range| range.contains(&page));
                        memory.discard(page);
                    }
                    Step::Look => {
                        let grown = data.grown(&block).unwrap();
                        prop_assert!(grown.is_some() || lost, "each page was looked at, and none was discarded");
                        let slow = block.data_pages().unwrap().unwrap();
                        prop_assert_eq!(data.look(&block).unwrap().unwrap(), slow);
                        lost = false;
                    }
                }
            }
        }
    }

    /// Its count says less than its holes: the pages that were never touched are counted.
    #[test]
    fn a_file_whose_pages_were_reserved_is_looked_at_whole() {
        let memory = FakeMemory::new("block", &[1, 0, 1, 0]);
        memory.reserve();
        let block = memory.block();
        let mut data = SharedData::default();
        for discarded in [2, 0] {
            assert_eq!(data.grown(&block).unwrap(), None);
            let found = data.look(&block).unwrap().unwrap().to_vec();
            assert_eq!(found, block.data_pages().unwrap().unwrap());
            memory.discard(discarded);
        }
        assert_eq!(data.look(&block).unwrap().unwrap(), []);
    }
}
