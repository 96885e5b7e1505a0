//! The delta cache: contents of pages at the last committed checkpoint (FITDOC, section III.C).
//!
//! Only a commit changes it, so that a delta against it is always one against the parent. Pages
//! that were written longest ago make space for others.

use std::num::NonZero;
use std::sync::Arc;

use lru::LruCache;
use stillframe_page::{GuestPage, PAGE};

use super::slab::{Slab, Slot};

/// A page in half the memory: its block and its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key(u32, u32);

impl From<GuestPage> for Key {
    /// A page table has less than 2^30 pages, and a VM some ten blocks.
    fn from(page: GuestPage) -> Key {
        Key(page.block as u32, page.page as u32)
    }
}

/// The contents of a cache, which other threads read; two of them are the same if they are of one cache.
#[derive(Debug, Clone, Default)]
pub struct Contents(Arc<DeltaCache>);

impl PartialEq for Contents {
    fn eq(&self, other: &Contents) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Contents {}

impl Contents {
    /// The content of the page, if it is known.
    pub fn get(&self, page: GuestPage) -> Option<&[u8; PAGE]> {
        self.0.get(page)
    }
}

impl From<DeltaCache> for Contents {
    fn from(cache: DeltaCache) -> Contents {
        Contents(Arc::new(cache))
    }
}

impl From<Contents> for DeltaCache {
    /// Empty, while another thread reads the contents.
    fn from(contents: Contents) -> DeltaCache {
        Arc::try_unwrap(contents.0).unwrap_or_default()
    }
}

/// Contents of pages, within a budget.
#[derive(Debug, Default)]
pub struct DeltaCache {
    /// Where each page is; `None` for a budget below one page: nothing is kept.
    pages: Option<LruCache<Key, Slot>>,
    slab: Slab,
}

impl DeltaCache {
    /// Keeps to `bytes` of page contents from now on, rounded up to 2 MiB; the index takes about 2 % on top.
    pub fn set_budget(&mut self, bytes: u64) {
        let pages = usize::try_from(bytes / PAGE as u64).unwrap_or(usize::MAX);
        self.pages = match (NonZero::new(pages), self.pages.take()) {
            (None, _) => {
                self.slab = Slab::default();
                None
            }
            (Some(pages), Some(mut kept)) => {
                let before = kept.len();
                kept.resize(pages);
                if kept.len() < before {
                    self.pack(&mut kept);
                }
                Some(kept)
            }
            // Unbounded at first, because a bounded one would allocate memory for all at once.
            (Some(pages), None) => {
                let mut new = LruCache::unbounded();
                new.resize(pages);
                Some(new)
            }
        };
    }

    /// Frees the slots of pages that are not kept any more. Pages for which there is no memory meanwhile are forgotten.
    fn pack(&mut self, kept: &mut LruCache<Key, Slot>) {
        let old = std::mem::take(&mut self.slab);
        let mut lost = Vec::new();
        for (key, slot) in kept.iter_mut() {
            match self.slab.take() {
                Some(new) => {
                    *self.slab.page_mut(new) = *old.page(*slot);
                    *slot = new;
                }
                None => lost.push(*key),
            }
        }
        for key in &lost {
            kept.pop(key);
        }
    }

    /// The content of the page at the last committed checkpoint, if that is known.
    pub fn get(&self, page: GuestPage) -> Option<&[u8; PAGE]> {
        let slot = self.pages.as_ref()?.peek(&page.into())?;
        Some(self.slab.page(*slot))
    }

    /// Sets the content of the page; evicts others if need be. Without memory it is not kept.
    pub fn put(&mut self, page: GuestPage, bytes: &[u8; PAGE]) {
        let Some(pages) = &mut self.pages else { return };
        let key = page.into();
        let known = pages.get_mut(&key).copied();
        let slot = known.or_else(|| {
            let slot = match pages.len() < pages.cap().get() {
                true => self.slab.take(),
                false => pages.pop_lru().map(|(_, slot)| slot),
            };
            slot.inspect(|&slot| {
                pages.push(key, slot);
            })
        });
        if let Some(slot) = slot {
            *self.slab.page_mut(slot) = *bytes;
        }
    }

    /// Sets the content of the page, only while there is space.
    pub fn put_if_room(&mut self, page: GuestPage, bytes: &[u8; PAGE]) {
        let room = |pages: &LruCache<_, _>| pages.len() < pages.cap().get();
        if self.pages.as_ref().is_some_and(room) {
            self.put(page, bytes);
        }
    }

    /// Forgets the content of the page.
    pub fn remove(&mut self, page: GuestPage) {
        let slot = self.pages.as_mut().and_then(|it| it.pop(&page.into()));
        if let Some(slot) = slot {
            self.slab.give_back(slot);
        }
    }

    /// Nothing is known any more.
    pub fn clear(&mut self) {
        if let Some(pages) = &mut self.pages {
            pages.clear();
        }
        self.slab = Slab::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full_of(byte: u8) -> [u8; PAGE] {
        [byte; PAGE]
    }

    fn page(block: usize, page: u64) -> GuestPage {
        GuestPage { block, page }
    }

    #[test]
    fn the_page_written_longest_ago_leaves_first() {
        let mut cache = DeltaCache::default();
        cache.set_budget(3 * PAGE as u64 + 1);
        for number in 0..3 {
            cache.put(page(0, number), &full_of(number as u8));
        }
        // A lookup does not count, a write does.
        assert_eq!(cache.get(page(0, 1)), Some(&full_of(1)));
        cache.put(page(0, 0), &full_of(10));
        cache.put(page(1, 0), &full_of(20));
        assert_eq!(cache.get(page(0, 1)), None);
        assert_eq!(cache.get(page(0, 0)), Some(&full_of(10)));
        assert_eq!(cache.get(page(1, 0)), Some(&full_of(20)));
        cache.put_if_room(page(0, 9), &full_of(9));
        assert_eq!(cache.get(page(0, 9)), None);
        cache.remove(page(0, 0));
        cache.put_if_room(page(0, 9), &full_of(9));
        assert_eq!(cache.get(page(0, 9)), Some(&full_of(9)));
        cache.set_budget(PAGE as u64);
        let kept = [page(0, 0), page(0, 1), page(0, 2), page(0, 9), page(1, 0)];
        let kept = kept.map(|page| cache.get(page).is_some());
        assert_eq!(kept, [false, false, false, true, false]);
        cache.clear();
        assert_eq!(cache.get(page(0, 9)), None);
    }

    #[test]
    fn less_than_a_page_is_no_cache() {
        let mut cache = DeltaCache::default();
        for bytes in [0, PAGE as u64 - 1] {
            cache.set_budget(bytes);
            cache.put(page(0, 0), &full_of(1));
            cache.put_if_room(page(0, 0), &full_of(1));
            assert_eq!(cache.get(page(0, 0)), None);
        }
    }
}
