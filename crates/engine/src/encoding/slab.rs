//! Room for the contents of many pages.
//!
//! An allocator would take memory from the kernel page by page, each with a system call and a fault: a third of the time
//! that the first round of a migration takes its source.

use memmap2::{MmapMut, MmapOptions};
use stillframe_page::PAGE;

/// Pages of a piece, which comes from the kernel at once.
const PIECE_PAGES: usize = 512;

/// A place for a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot(u32);

/// Places for pages. They take memory as they are needed, and free it all together.
#[derive(Debug, Default)]
pub struct Slab {
    pieces: Vec<MmapMut>,
    /// Slots that were never used are those from here on.
    used: usize,
    free: Vec<Slot>,
}

impl Slab {
    /// A slot with any content; `None` if there is no memory.
    pub fn take(&mut self) -> Option<Slot> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        if self.used == self.pieces.len() * PIECE_PAGES {
            let bytes = PIECE_PAGES * PAGE;
            let piece = MmapOptions::new().len(bytes).populate().map_anon();
            self.pieces.push(piece.ok()?);
        }
        let slot = u32::try_from(self.used).ok()?;
        self.used += 1;
        Some(Slot(slot))
    }

    /// The slot may be taken again.
    pub fn give_back(&mut self, slot: Slot) {
        self.free.push(slot);
    }

    /// The page in this slot.
    pub fn page(&self, Slot(slot): Slot) -> &[u8; PAGE] {
        let slot = slot as usize;
        &self.pieces[slot / PIECE_PAGES].as_chunks().0[slot % PIECE_PAGES]
    }

    /// The same, to be changed.
    pub fn page_mut(&mut self, Slot(slot): Slot) -> &mut [u8; PAGE] {
        let slot = slot as usize;
        &mut self.pieces[slot / PIECE_PAGES].as_chunks_mut().0[slot % PIECE_PAGES]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_keep_their_pages_apart_and_are_taken_again() {
        let mut slab = Slab::default();
        let slots: Vec<Slot> = (0..PIECE_PAGES + 3).map_while(|_| slab.take()).collect();
        assert_eq!(slots.len(), PIECE_PAGES + 3);
        for (number, &slot) in slots.iter().enumerate() {
            *slab.page_mut(slot) = [number as u8; PAGE];
        }
        for (number, &slot) in slots.iter().enumerate() {
            assert_eq!(slab.page(slot), &[number as u8; PAGE]);
        }
        slab.give_back(slots[7]);
        assert_eq!(slab.take(), Some(slots[7]));
        assert_eq!(slab.pieces.len(), 2);
    }
}
