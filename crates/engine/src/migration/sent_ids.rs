//! Ids of the pages as they were last sent: a page that was written and has the same content is *fake dirty*, and need not
//! be sent again (hash-based fake dirty prevention, Li et al. 2019). They reach further than the delta cache, because an
//! id takes 16 bytes and not a page.

use stillframe_page::{GuestPage, PAGE};
use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::memory::BlockShape;

/// The ids.
pub(super) struct SentIds {
    /// By block and page; 0 for a page that was not sent.
    ids: Vec<Vec<u128>>,
    /// A guest does not know it, so that it cannot look for two pages with one id.
    seed: u64,
}

impl SentIds {
    /// No page was sent yet. Memory is taken when ids come.
    pub fn new(blocks: &[BlockShape], seed: u64) -> SentIds {
        let none = blocks.iter().map(|block| vec![0; block.pages as usize]);
        SentIds {
            ids: none.collect(),
            seed,
        }
    }

    /// The page is about to be sent. Returns whether it has the content that was sent last.
    pub fn is_known(&mut self, page: GuestPage, bytes: &[u8; PAGE]) -> bool {
        // 0 is as good as 1.
        let id = xxh3_128_with_seed(bytes, self.seed).max(1);
        let known = &mut self.ids[page.block][page.page as usize];
        std::mem::replace(known, id) == id
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The slow twin keeps the pages themselves.
        #[test]
        fn a_page_is_known_when_it_is_as_it_was_sent(sent in prop::collection::vec((0..2usize, 0..9u64, 0..3u8), 0..200)) {
            let block = |pages| BlockShape { name: String::new(), pages };
            let mut ids = SentIds::new(&[block(9), block(9)], 7);
            let mut pages = BTreeMap::new();
            for (block, page, byte) in sent {
                let known = ids.is_known(GuestPage::new(block, page), &[byte; PAGE]);
                prop_assert_eq!(pages.insert((block, page), byte) == Some(byte), known);
            }
        }
    }
}
