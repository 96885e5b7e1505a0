//! What a destination lacks when the VM is stopped at the source (post-copy), and may not use.

use std::ops::Range;

use stillframe_page::bitmap::DirtyBitmap;
use stillframe_page::hash::ContentId;
use stillframe_sys::pagemap::Pagemap;
use stillframe_sys::process::{AddressRange, Process};

use super::Wire;
use super::error::ReceiveError;
use crate::connection::ConnectionError;
use crate::connection::message::{Control, Message};
use crate::guardian::Guardian;
use crate::memory::block::Block;
use crate::populate::eager;

/// Which pages are here, by block.
#[derive(Debug)]
pub(super) struct Lacking {
    /// They are, with the content that they have at the source.
    pub present: Vec<DirtyBitmap>,
    /// They may have content at the source.
    pub content: Vec<DirtyBitmap>,
    /// What was outdated, in the order of the messages.
    outdated: Vec<(usize, Range<u64>)>,
}

impl Lacking {
    /// All that is in memory now, of which nothing is known to be outdated.
    ///
    /// # Errors
    /// Memory cannot be inspected.
    pub fn new(process: &Process, blocks: &[Block]) -> Result<Lacking, ReceiveError> {
        let pagemap = Pagemap::open(process).map_err(eager::PopulateError::from)?;
        let mut present = Vec::with_capacity(blocks.len());
        for block in blocks {
            let mut here = DirtyBitmap::new(block.pages());
            for range in eager::in_use(&pagemap, block)? {
                here.set_range(range);
            }
            present.push(here);
        }
        Ok(Lacking::except(present))
    }

    /// These pages came. The others are zero, or are read from a checkpoint.
    pub fn except(present: Vec<DirtyBitmap>) -> Lacking {
        let content = present.iter().map(|block| DirtyBitmap::new(block.pages()));
        Lacking {
            content: content.collect(),
            present,
            outdated: Vec::new(),
        }
    }

    /// What came into memory since, which nothing is known of, is discarded. Its pages cause faults from here on, so that
    /// nothing comes any more.
    ///
    /// # Errors
    /// Memory cannot be inspected, or its pages not be discarded.
    pub fn discard_others(
        &self,
        blocks: &[Block],
        qemu: (&Guardian, &Process),
    ) -> Result<(), ReceiveError> {
        let now = Lacking::new(qemu.1, blocks)?;
        for ((block, mut others), known) in blocks.iter().zip(now.present).zip(&self.present) {
            others.subtract(known);
            let others: Vec<Range<u64>> = others.ranges().collect();
            discard(block, &others, qemu)?;
        }
        Ok(())
    }

    /// The pages of a block that were written last come first, each once; no more than this.
    pub fn first(&self, block: usize, count: usize) -> Vec<u32> {
        let mut listed = DirtyBitmap::new(self.content[block].pages());
        let of_it = self.outdated.iter().filter(|(other, _)| *other == block);
        let pages = of_it.rev().flat_map(|(_, range)| range.clone());
        let mut once = Vec::new();
        for page in pages {
            if once.len() == count {
                break;
            }
            if listed.set(page) {
                // A block has less than 2^30 pages.
                once.push(page as u32);
            }
        }
        once
    }

    /// What is here may not be used: the source has sent nothing.
    ///
    /// # Errors
    /// Its pages cannot be discarded.
    pub fn discard_all(
        &mut self,
        blocks: &[Block],
        qemu: (&Guardian, &Process),
    ) -> Result<(), ReceiveError> {
        for (block, present) in blocks.iter().zip(&mut self.present) {
            let pages: Vec<Range<u64>> = present.ranges().collect();
            discard(block, &pages, qemu)?;
            present.clear_all();
        }
        Ok(())
    }

    /// Takes what the source says, until it has said all.
    ///
    /// # Errors
    /// The connection failed, or outdated pages cannot be discarded.
    pub fn hear(
        &mut self,
        wire: &mut Wire,
        blocks: &[Block],
        qemu: (&Guardian, &Process),
    ) -> Result<(), ReceiveError> {
        loop {
            match wire.receive_message()? {
                Message::Control(Control::Content { block, ranges }) => {
                    // The end of the list has the number behind the last block.
                    if block < blocks.len() {
                        for range in within(&blocks[block], ranges)? {
                            self.content[block].set_range(range);
                        }
                    }
                }
                Message::Control(Control::Outdated { block, ranges }) if block < blocks.len() => {
                    let ranges = within(&blocks[block], ranges)?;
                    let stale = self.outdated(block, ranges);
                    discard(&blocks[block], &stale, qemu)?;
                }
                Message::Control(Control::Sync) => wire.send_control(&Control::Synced)?,
                Message::Control(Control::Alive) => {}
                Message::Control(Control::Last) => return Ok(()),
                other => return Err(other.unexpected().into()),
            }
        }
    }

    /// Returns the pages that are in memory and are not here any more.
    fn outdated(&mut self, block: usize, ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
        let present = &mut self.present[block];
        let mut in_memory = present.clone();
        let mut stale = DirtyBitmap::new(present.pages());
        for range in ranges {
            self.content[block].set_range(range.clone());
            stale.set_range(range.clone());
            self.outdated.push((block, range));
        }
        present.subtract(&stale);
        in_memory.intersect_with(&stale);
        in_memory.ranges().collect()
    }
}

/// Ids of pages, by block.
#[derive(Debug, Default)]
pub(super) struct SplitIds {
    /// Those of all pages.
    pub all: Vec<Vec<Option<ContentId>>>,
    /// The pages that are here.
    pub present: Vec<Vec<Range<u64>>>,
}

/// Splits the ids of all pages: those of pages that are not present become none.
pub(super) fn take_ids(present: &[DirtyBitmap], ids: &mut [Option<ContentId>]) -> SplitIds {
    let mut split = SplitIds::default();
    let mut first = 0;
    for present in present {
        let end = ids.len().min(first + present.pages() as usize);
        let of_block = &mut ids[first..end];
        split.all.push(of_block.to_vec());
        let here = of_block.iter_mut().zip(0..);
        here.for_each(|(id, page)| *id = id.filter(|_| present.get(page)));
        split.present.push(present.ranges().collect());
        first = end;
    }
    split
}

/// The ranges of a message, which is not trusted.
fn within(block: &Block, ranges: Vec<(u64, u64)>) -> Result<Vec<Range<u64>>, ConnectionError> {
    let inside = |&(start, end): &(u64, u64)| start < end && end <= block.pages();
    match ranges.iter().all(inside) {
        true => Ok(ranges.into_iter().map(|(start, end)| start..end).collect()),
        false => Err(ConnectionError::Malformed {
            what: "pages outside their block".to_owned(),
        }),
    }
}

/// Makes pages missing in QEMU.
pub(super) fn discard(
    block: &Block,
    pages: &[Range<u64>],
    (guardian, process): (&Guardian, &Process),
) -> Result<(), ReceiveError> {
    if block.is_shared() {
        return Ok(pages.iter().try_for_each(|range| block.punch(range))?);
    }
    let ranges: Vec<AddressRange> = pages.iter().map(|range| block.addresses(range)).collect();
    Ok(guardian.discard(process, &ranges)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block of 20 pages, of which the first ten are here.
    fn half() -> Lacking {
        let mut present = DirtyBitmap::new(20);
        present.set_range(0..10);
        Lacking {
            present: vec![present],
            content: vec![DirtyBitmap::new(20)],
            outdated: Vec::new(),
        }
    }

    /// First and end of each range.
    fn ends(ranges: impl IntoIterator<Item = Range<u64>>) -> Vec<(u64, u64)> {
        let ranges = ranges.into_iter();
        ranges.map(|range| (range.start, range.end)).collect()
    }

    fn outdated(lacking: &mut Lacking, ranges: &[(u64, u64)]) -> Vec<(u64, u64)> {
        let ranges = ranges.iter().map(|&(start, end)| start..end);
        ends(lacking.outdated(0, ranges.collect()))
    }

    #[test]
    fn what_is_outdated_is_discarded_once_and_fetched_in_the_end() {
        let mut lacking = half();
        assert_eq!(outdated(&mut lacking, &[(2, 6), (12, 13)]), [(2, 6)]);
        assert_eq!(outdated(&mut lacking, &[(4, 8)]), [(6, 8)]);
        assert_eq!(ends(lacking.present[0].ranges()), [(0, 2), (8, 10)]);
        assert_eq!(ends(lacking.content[0].ranges()), [(2, 8), (12, 13)]);
    }

    #[test]
    fn what_was_written_last_comes_first_and_once() {
        let mut lacking = half();
        outdated(&mut lacking, &[(2, 6), (12, 13)]);
        outdated(&mut lacking, &[(4, 8)]);
        assert_eq!(lacking.first(0, 100), [4, 5, 6, 7, 12, 2, 3]);
        assert_eq!(lacking.first(0, 3), [4, 5, 6]);
    }

    #[test]
    fn ids_of_pages_that_are_not_here_are_kept_for_later() {
        let lacking = half();
        let id = |page: u8| Some(ContentId([page; 32]));
        let all: Vec<_> = (0..20).map(id).collect();
        let mut ids = all.clone();
        let split = take_ids(&lacking.present, &mut ids);
        assert_eq!(split.all.concat(), all);
        assert_eq!(ends(split.present.into_iter().flatten()), [(0, 10)]);
        assert_eq!(ids[..10], all[..10]);
        assert_eq!(ids[10..], [None; 10]);
    }
}
