//! The delta cache: contents of pages at the last committed checkpoint (FITDOC, section III.C).
//!
//! Only a commit changes it, so that a delta against it is always one against the parent. Pages
//! that were written longest ago make space for others.

use std::num::NonZero;

use lru::LruCache;

use stillframe_page::{GuestPage, PAGE};

/// A page in half the memory: its block and its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key(u32, u32);

impl From<GuestPage> for Key {
    /// A page table has less than 2^30 pages, and a VM some ten blocks.
    fn from(page: GuestPage) -> Key {
        Key(page.block as u32, page.page as u32)
    }
}

/// Contents of pages, within a budget.
#[derive(Debug, Default)]
pub struct DeltaCache {
    /// `None` for a budget below one page: nothing is kept.
    pages: Option<LruCache<Key, Box<[u8; PAGE]>>>,
}

impl DeltaCache {
    /// Keeps to `bytes` of page contents from now on; the index takes about 2 % on top.
    pub fn set_budget(&mut self, bytes: u64) {
        let pages = usize::try_from(bytes / PAGE as u64).unwrap_or(usize::MAX);
        self.pages = match (NonZero::new(pages), self.pages.take()) {
            (None, _) => None,
            (Some(pages), Some(mut kept)) => {
                kept.resize(pages);
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

    /// The content of the page at the last committed checkpoint, if that is known.
    pub fn get(&self, page: GuestPage) -> Option<&[u8; PAGE]> {
        let old = self.pages.as_ref()?.peek(&page.into())?;
        Some(old)
    }

    /// Sets the content of the page; evicts others if need be.
    pub fn put(&mut self, page: GuestPage, bytes: &[u8; PAGE]) {
        let Some(pages) = &mut self.pages else { return };
        let key = page.into();
        match pages.get_mut(&key) {
            Some(kept) => **kept = *bytes,
            None => drop(pages.push(key, Box::new(*bytes))),
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
        if let Some(pages) = &mut self.pages {
            pages.pop(&page.into());
        }
    }

    /// Nothing is known any more.
    pub fn clear(&mut self) {
        if let Some(pages) = &mut self.pages {
            pages.clear();
        }
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
