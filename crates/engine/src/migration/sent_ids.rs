//! Ids of the pages as they were last sent: a page that was written and has the same content is *fake dirty*, and need not
//! be sent again (hash-based fake dirty prevention, Li et al. 2019). They reach further than the delta cache, because an
//! id takes 16 bytes and not a page.

use std::io::Cursor;

use md5::Md5;
use serde::{Deserialize, Serialize};
use sha1::{Digest, Sha1};
use stillframe_page::hash::ContentHasher;
use stillframe_page::{GuestPage, PAGE};
use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::memory::BlockShape;

/// Makes ids. All but BLAKE3 and XXH3 are here to be compared with: D-Track measures SHA-1, MD5 and Murmur3.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PageHash {
    /// With a secret seed, so that no guest can look for two pages with one id; 30 GB/s.
    Xxh3,
    /// With a secret key; 2.7 GB/s.
    Blake3,
    /// 2.1 GB/s.
    Sha1,
    /// 0.7 GB/s.
    Md5,
    /// The 128-bit variant for 64-bit processors; 4.6 GB/s.
    Murmur3,
}

/// No id.
const NONE: u128 = 0;

/// The ids.
pub(super) struct SentIds {
    /// By block and page; [`NONE`] for a page that was not sent.
    ids: Vec<Vec<u128>>,
    hash: PageHash,
    seed: u64,
    keyed: ContentHasher,
}

impl SentIds {
    /// No page was sent yet. Memory is taken when ids come. The seed is a secret.
    pub fn new(blocks: &[BlockShape], hash: PageHash, seed: u64) -> SentIds {
        let none = blocks.iter().map(|block| vec![0; block.pages as usize]);
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        SentIds {
            ids: none.collect(),
            hash,
            seed,
            keyed: ContentHasher::keyed(key),
        }
    }

    /// Whether the page was not sent yet.
    pub fn is_new(&self, page: GuestPage) -> bool {
        self.ids[page.block][page.page as usize] == NONE
    }

    /// The page is about to be sent. Returns whether it has the content that was sent last.
    pub fn is_known(&mut self, page: GuestPage, bytes: &[u8; PAGE]) -> bool {
        let id = self.id(bytes);
        let known = &mut self.ids[page.block][page.page as usize];
        let before = std::mem::replace(known, id);
        before == id && id != NONE
    }

    /// The id of a content; [`NONE`] has no content, and one that hashes to it is sent each time.
    fn id(&self, bytes: &[u8; PAGE]) -> u128 {
        match self.hash {
            PageHash::Xxh3 => xxh3_128_with_seed(bytes, self.seed),
            PageHash::Blake3 => first_of(&self.keyed.id(bytes).0),
            PageHash::Sha1 => first_of(&Sha1::digest(bytes)),
            PageHash::Md5 => first_of(&Md5::digest(bytes)),
            // Reading from memory does not fail; if it did, the page would be sent.
            PageHash::Murmur3 => {
                murmur3::murmur3_x64_128(&mut Cursor::new(bytes), self.seed as u32).unwrap_or(NONE)
            }
        }
    }
}

/// 128 bits of a longer hash.
fn first_of(hash: &[u8]) -> u128 {
    let mut first = [0; 16];
    first.copy_from_slice(&hash[..16]);
    u128::from_le_bytes(first)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const ALL: [PageHash; 5] = [
        PageHash::Xxh3,
        PageHash::Blake3,
        PageHash::Sha1,
        PageHash::Md5,
        PageHash::Murmur3,
    ];

    proptest! {
        /// The slow twin keeps the pages themselves.
        #[test]
        fn a_page_is_known_when_it_is_as_it_was_sent(sent in prop::collection::vec((0..2usize, 0..9u64, 0..3u8), 0..200)) {
            for hash in ALL {
                let block = |pages| BlockShape { name: String::new(), pages };
                let mut ids = SentIds::new(&[block(9), block(9)], hash, 7);
                let mut pages = BTreeMap::new();
                for &(block, page, byte) in &sent {
                    let known = ids.is_known(GuestPage::new(block, page), &[byte; PAGE]);
                    prop_assert_eq!(pages.insert((block, page), byte) == Some(byte), known);
                }
            }
        }
    }

    #[test]
    fn the_hashes_are_those_of_their_names() {
        let ids = |hash| SentIds::new(&[], hash, 0).id(&[0; PAGE]);
        // As sha1sum and md5sum give them for a page of zeros.
        let text = |id: u128| format!("{:032x}", id.swap_bytes());
        assert_eq!(
            text(ids(PageHash::Sha1)),
            "1ceaf73df40e531df3bfb26b4fb7cd95"
        );
        assert_eq!(text(ids(PageHash::Md5)), "620f0b67a91f7f74151bc5be745b7110");
        let all: std::collections::BTreeSet<u128> = ALL.into_iter().map(ids).collect();
        assert_eq!(all.len(), ALL.len());
    }
}
