//! The staging buffer: copies of captured pages between the pause and the sink.
//!
//! A page that is captured in a pre-copy round and written again before the pause is overwritten in place, so that
//! the buffer never contains more than one copy of a page. Its memory is touched before the pause: a first touch
//! costs several times the copy itself.
//!
//! The buffer has a limit. Pages that do not fit are not captured at all: see [`crate::checkpoint`] for the way
//! round.

use std::ops::Range;

use stillframe_page::PAGE;
use thiserror::Error;

use crate::memory::Page;
use crate::memory::block::{Block, BlockError, Guest};
use crate::memory::page_buffer::PageBuffer;
use crate::tracking::fault_handler::Saved;
use crate::tracking::tracker::{Collected, Tracker};

const CHUNK_PAGES: u64 = 256;
/// Chunks kept for the next checkpoint, whatever this one needed: 64 MiB.
const CHUNKS_KEPT_MIN: usize = 64;
/// Chunks kept by a staging buffer that is not needed often: 8 MiB.
const CHUNKS_FEW: usize = 8;

/// Consecutive pages of a block in consecutive slots.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Extent {
    pages: Range<u64>,
    slot: u64,
}

/// Why pages could not be staged.
#[derive(Debug, Error)]
pub enum StagingError {
    /// They cannot be read.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// There are too many.
    #[error(
        "the VM wrote more than the {} MiB that may be held at once while a checkpoint was taken: allow more with --copy-buffer, or give the repository a faster disk", limit_bytes >> 20
    )]
    Full {
        /// How much would have fitted.
        limit_bytes: u64,
    },
}

/// Captured pages of all blocks.
#[derive(Debug, Default)]
pub struct StagingBuffer {
    chunks: Vec<PageBuffer>,
    slots_used: u64,
    /// No more than this.
    slots_max: u64,
    blocks: Vec<Vec<Extent>>,
}

impl StagingBuffer {
    /// Starts anew for `blocks` RAM blocks and at most `bytes_max` bytes; keeps memory for about as much
    /// as last time.
    pub fn reset(&mut self, blocks: usize, bytes_max: u64) {
        self.slots_max = bytes_max / PAGE as u64;
        let used_chunks = self.slots_used.div_ceil(CHUNK_PAGES) as usize;
        self.chunks.truncate(used_chunks.max(CHUNKS_KEPT_MIN));
        self.slots_used = 0;
        self.blocks.clear();
        self.blocks.resize(blocks, Vec::new());
    }

    /// Gives back most of its memory.
    pub fn keep_little(&mut self) {
        self.chunks.truncate(CHUNKS_FEW);
        self.slots_used = 0;
        self.blocks.clear();
    }

    /// Pages in the buffer.
    pub fn pages(&self) -> u64 {
        self.slots_used
    }

    /// Makes sure that `pages` more pages fit.
    pub fn expect_room(&self, pages: u64) -> Result<(), StagingError> {
        match self.slots_used + pages <= self.slots_max {
            true => Ok(()),
            false => Err(StagingError::Full {
                limit_bytes: self.slots_max * PAGE as u64,
            }),
        }
    }

    /// Has memory ready, touched, for `pages` more pages, as far as they fit.
    pub fn reserve(&mut self, pages: u64) {
        let slots = (self.slots_used + pages).min(self.slots_max.max(self.slots_used));
        let chunks = slots.div_ceil(CHUNK_PAGES) as usize;
        while self.chunks.len() < chunks {
            self.chunks.push(PageBuffer::touched(CHUNK_PAGES as usize));
        }
    }

    /// Copies everything a scan found.
    pub fn capture_all(
        &mut self,
        tracker: &Tracker,
        guest: Guest,
        found: &Collected,
    ) -> Result<(), StagingError> {
        for (index, tracked) in tracker.blocks().iter().enumerate() {
            self.capture(index, &tracked.block, guest, &found.written[index])?;
            self.capture_zero(index, &found.discarded[index])?;
        }
        Ok(())
    }

    /// Copies `ranges` of `block` (number `index`) into the buffer, over older copies.
    pub fn capture(
        &mut self,
        index: usize,
        block: &Block,
        guest: Guest,
        ranges: &[Range<u64>],
    ) -> Result<(), StagingError> {
        if ranges.is_empty() {
            return Ok(());
        }
        let mut pieces = self.place(index, ranges);
        self.expect_room(0)?;
        self.reserve(0);
        pieces.sort_unstable_by_key(|piece| piece.slot);
        let pieces = split_at_chunks(&pieces);
        let from: Vec<Range<u64>> = pieces.iter().map(|piece| piece.pages.clone()).collect();
        let mut into = allocate(&mut self.chunks, &pieces);
        Ok(block.read(guest, &mut into, &from)?)
    }

    /// Adds `ranges` of block number `index` as zero pages, without reading them.
    pub fn capture_zero(
        &mut self,
        index: usize,
        ranges: &[Range<u64>],
    ) -> Result<(), StagingError> {
        let mut pieces = self.place(index, ranges);
        self.expect_room(0)?;
        self.reserve(0);
        pieces.sort_unstable_by_key(|piece| piece.slot);
        for memory in allocate(&mut self.chunks, &split_at_chunks(&pieces)) {
            memory.fill(0);
        }
        Ok(())
    }

    /// Takes pages that were saved already; sorts them.
    pub fn put_all(&mut self, saved: &mut [Saved]) {
        saved.sort_unstable_by_key(|saved| (saved.block, saved.page));
        for of_block in saved.chunk_by(|a, b| a.block == b.block) {
            let block = of_block[0].block;
            let runs = of_block.iter().map(|saved| saved.page..saved.page + 1);
            let mut pieces = self.place(block, &runs.collect::<Vec<_>>());
            self.reserve(0);
            pieces.sort_unstable_by_key(|piece| piece.slot);
            for (memory, piece) in allocate(&mut self.chunks, &pieces).into_iter().zip(&pieces) {
                let at = of_block.partition_point(|saved| saved.page < piece.pages.start);
                memory.copy_from_slice(&of_block[at].bytes[..]);
            }
        }
    }

    /// Gives every page of `ranges` a slot: its old one if it is in the buffer, else the next free one.
    fn place(&mut self, index: usize, ranges: &[Range<u64>]) -> Vec<Extent> {
        let staged = &self.blocks[index];
        let mut pieces = Vec::with_capacity(ranges.len());
        let mut fresh = Vec::new();
        let mut at = 0;
        for range in ranges {
            let mut next = range.start;
            while at < staged.len() && staged[at].pages.end <= next {
                at += 1;
            }
            let mut look = at;
            while next < range.end {
                let over = staged
                    .get(look)
                    .filter(|extent| extent.pages.start < range.end);
                let gap_end = over.map_or(range.end, |extent| extent.pages.start.max(next));
                if gap_end > next {
                    fresh.push(Extent {
                        pages: next..gap_end,
                        slot: self.slots_used,
                    });
                    self.slots_used += gap_end - next;
                    next = gap_end;
                }
                if let Some(extent) = over {
                    let end = extent.pages.end.min(range.end);
                    pieces.push(Extent {
                        pages: next..end,
                        slot: extent.slot + (next - extent.pages.start),
                    });
                    next = end;
                    look += 1;
                }
            }
        }
        pieces.extend(fresh.iter().cloned());
        let staged = &mut self.blocks[index];
        staged.extend(fresh);
        staged.sort_unstable_by_key(|extent| extent.pages.start);
        pieces
    }

    /// Every page of block `index` in the buffer, in page order.
    pub fn pages_of(&self, index: usize) -> impl Iterator<Item = Page<'_>> {
        self.blocks[index].iter().flat_map(move |extent| {
            extent.pages.clone().map(move |number| {
                let slot = extent.slot + (number - extent.pages.start);
                let (pages, _) = self.chunks[(slot / CHUNK_PAGES) as usize].as_chunks();
                let bytes = &pages[(slot % CHUNK_PAGES) as usize];
                Page { number, bytes }
            })
        })
    }
}

fn split_at_chunks(pieces: &[Extent]) -> Vec<Extent> {
    let mut split = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let mut rest = piece.clone();
        while rest.pages.start < rest.pages.end {
            let room = CHUNK_PAGES - rest.slot % CHUNK_PAGES;
            let end = rest.pages.end.min(rest.pages.start + room);
            split.push(Extent {
                pages: rest.pages.start..end,
                slot: rest.slot,
            });
            rest.slot += end - rest.pages.start;
            rest.pages.start = end;
        }
    }
    split
}

/// Allocates the memory of each piece; `pieces` are sorted by slot, and none crosses a chunk.
fn allocate<'s>(chunks: &'s mut [PageBuffer], pieces: &[Extent]) -> Vec<&'s mut [u8]> {
    let mut allocated = Vec::with_capacity(pieces.len());
    let mut pieces = pieces.iter().peekable();
    for (number, chunk) in chunks.iter_mut().enumerate() {
        let mut rest: &mut [u8] = chunk;
        let mut offset = 0;
        while let Some(piece) = pieces.next_if(|piece| piece.slot / CHUNK_PAGES == number as u64) {
            let start = (piece.slot % CHUNK_PAGES) as usize * PAGE;
            let bytes = (piece.pages.end - piece.pages.start) as usize * PAGE;
            let (_, tail) = rest.split_at_mut(start - offset);
            let (mine, tail) = tail.split_at_mut(bytes);
            allocated.push(mine);
            rest = tail;
            offset = start + bytes;
        }
    }
    allocated
}

#[cfg(test)]
mod tests {
    //! The placing logic against a plain map from page to slot.

    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;
    use crate::memory::ranges::runs;

    fn to_ranges(pages: &BTreeSet<u64>) -> Vec<Range<u64>> {
        runs(&pages.iter().copied().collect::<Vec<_>>())
    }

    #[test]
    fn what_does_not_fit_is_refused_and_takes_no_memory() {
        let mut staging = StagingBuffer::default();
        staging.reset(1, 10 * PAGE as u64 + 1);
        staging.capture_zero(0, &[0..4, 6..12]).unwrap();
        staging.capture_zero(0, &[1..2, 2..3]).unwrap();
        assert!(staging.expect_room(1).is_err());
        staging.reserve(1 << 40);
        let full = staging.capture_zero(0, &[0..1 << 40, 1 << 41..1 << 42]);
        let full = full.unwrap_err();
        assert!(matches!(full, StagingError::Full { limit_bytes } if limit_bytes == 10 << 12));
        assert_eq!(staging.chunks.len(), 1);
    }

    proptest! {
        #[test]
        fn every_page_keeps_one_slot(rounds in prop::collection::vec(prop::collection::btree_set(0u64..600, 0..200), 1..5)) {
            let mut staging = StagingBuffer::default();
            staging.reset(1, u64::MAX);
            let mut model: BTreeMap<u64, u64> = BTreeMap::new();
            for round in &rounds {
                let pieces = staging.place(0, &to_ranges(round));
                let mut covered = BTreeSet::new();
                for piece in pieces {
                    for page in piece.pages.clone() {
                        let slot = piece.slot + (page - piece.pages.start);
                        prop_assert!(covered.insert(page));
                        let known = *model.entry(page).or_insert(slot);
                        prop_assert_eq!(known, slot);
                    }
                }
                prop_assert_eq!(&covered, round);
            }
            let slots: BTreeSet<u64> = model.values().copied().collect();
            prop_assert_eq!(slots.len(), model.len());
            prop_assert_eq!(staging.pages(), model.len() as u64);
            staging.reserve(0);
            let listed: Vec<u64> = staging.pages_of(0).map(|page| page.number).collect();
            prop_assert_eq!(listed, model.keys().copied().collect::<Vec<_>>());
        }

        #[test]
        fn saved_pages_lie_beside_captured_ones(pages in prop::collection::btree_map(0u64..700, any::<bool>(), 0..400)) {
            let mut staging = StagingBuffer::default();
            staging.reset(2, u64::MAX);
            let on_stage: BTreeSet<u64> = pages.iter().filter(|(_, kept)| **kept).map(|(&page, _)| page).collect();
            staging.capture_zero(1, &to_ranges(&on_stage)).unwrap();
            let mut saved: Vec<Saved> = pages.iter().rev().filter(|(_, kept)| !**kept)
                .map(|(&page, _)| Saved { block: 1, page, bytes: Box::new([page as u8 | 1; PAGE]) })
                .collect();
            staging.put_all(&mut saved);
            let found: Vec<(u64, u8)> = staging.pages_of(1).map(|page| (page.number, page.bytes[PAGE - 1])).collect();
            let expected: Vec<(u64, u8)> = pages.iter()
                .map(|(&page, &kept)| (page, if kept { 0 } else { page as u8 | 1 }))
                .collect();
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn carved_memory_is_the_slot_of_the_page(rounds in prop::collection::vec(prop::collection::btree_set(0u64..700, 0..300), 1..4)) {
            let mut staging = StagingBuffer::default();
            staging.reset(1, u64::MAX);
            for round in &rounds {
                let mut pieces = staging.place(0, &to_ranges(round));
                staging.reserve(0);
                pieces.sort_unstable_by_key(|piece| piece.slot);
                let pieces = split_at_chunks(&pieces);
                for (memory, piece) in allocate(&mut staging.chunks, &pieces).into_iter().zip(&pieces) {
                    for (page, bytes) in piece.pages.clone().zip(memory.chunks_mut(PAGE)) {
                        bytes[..8].copy_from_slice(&page.to_le_bytes());
                    }
                }
            }
            for Page { number, bytes } in staging.pages_of(0) {
                prop_assert_eq!(u64::from_le_bytes(bytes[..8].try_into().unwrap()), number);
            }
        }
    }
}
