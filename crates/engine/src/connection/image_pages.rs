//! Pages whose content both hosts have in a file, as the payload of a frame: where it is there, in place of the content.
//!
//! ```text
//!   block u32 | pages u32                                                   little-endian
//!   each page: number u32 | image u32 | block of the image u64 | id 32 B    numbers ascending
//! ```
//!
//! Blocks of an image are as long as a page. The receiver reads its own file, and takes what it finds there only if it has
//! this id.

use stillframe_page::hash::ContentId;

use super::batch::PAGES_MAX;
use super::{ConnectionError, malformed};
use crate::memory::BlockShape;

const HEAD_BYTES: usize = 8;
/// Bytes of a page's entry.
pub const ENTRY_BYTES: usize = 48;

/// A payload is not longer.
pub const PAYLOAD_BYTES_MAX: usize = HEAD_BYTES + PAGES_MAX * ENTRY_BYTES;

/// A block of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImagePlace {
    /// The number of the image, in the order of the greeting.
    pub image: u32,
    /// The number of the block.
    pub block: u64,
}

/// A page that is in an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImagePage {
    /// Its number.
    pub page: u64,
    /// Where its content is.
    pub place: ImagePlace,
    /// The id of its content.
    pub id: ContentId,
}

/// Pages of one block.
#[derive(Debug, PartialEq, Eq)]
pub struct ImagePages {
    /// The number of the block.
    pub block: usize,
    /// The pages, ascending.
    pub pages: Vec<ImagePage>,
}

impl ImagePages {
    /// The payload.
    pub fn encode(&self) -> Vec<u8> {
        let mut payload = Vec::with_capacity(HEAD_BYTES + self.pages.len() * ENTRY_BYTES);
        // A VM has less than 2^32 blocks, a block less than 2^30 pages.
        payload.extend((self.block as u32).to_le_bytes());
        payload.extend((self.pages.len() as u32).to_le_bytes());
        for ImagePage { page, place, id } in &self.pages {
            payload.extend((*page as u32).to_le_bytes());
            payload.extend(place.image.to_le_bytes());
            payload.extend(place.block.to_le_bytes());
            payload.extend(id.0);
        }
        payload
    }

    /// Reads a payload; trusts nothing of it.
    ///
    /// # Errors
    /// [`ConnectionError::Malformed`]: it is none, or does not fit these blocks.
    pub fn decode(payload: &[u8], blocks: &[BlockShape]) -> Result<ImagePages, ConnectionError> {
        let cut_off = || malformed("places of pages that are cut off");
        let (head, entries) = payload
            .split_first_chunk::<HEAD_BYTES>()
            .ok_or_else(cut_off)?;
        let block = u32_at(head, 0) as usize;
        let shape = blocks.get(block);
        let shape = shape.ok_or_else(|| malformed("pages of a block that the VM does not have"))?;
        let count = u32_at(head, 4) as usize;
        let (entries, rest) = entries.as_chunks::<ENTRY_BYTES>();
        if count > PAGES_MAX || entries.len() != count || !rest.is_empty() {
            return Err(cut_off());
        }
        let pages: Vec<ImagePage> = entries.iter().map(entry).collect();
        let ascend = pages.is_sorted_by(|one, next| one.page < next.page);
        if !ascend || pages.last().is_some_and(|last| last.page >= shape.pages) {
            return Err(malformed(
                "pages that do not ascend, or lie outside their block",
            ));
        }
        Ok(ImagePages { block, pages })
    }
}

fn entry(bytes: &[u8; ENTRY_BYTES]) -> ImagePage {
    let mut id = [0; 32];
    id.copy_from_slice(&bytes[16..]);
    ImagePage {
        page: u32_at(bytes, 0).into(),
        place: ImagePlace {
            image: u32_at(bytes, 4),
            block: u64::from(u32_at(bytes, 8)) | u64::from(u32_at(bytes, 12)) << 32,
        },
        id: ContentId(id),
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shapes() -> Vec<BlockShape> {
        let shape = |pages| BlockShape {
            name: String::new(),
            pages,
        };
        [10, 5000].map(shape).to_vec()
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(
            numbers in prop::collection::btree_map(0..5000u64, (any::<u32>(), any::<u64>(), any::<[u8; 32]>()), 0..60),
        ) {
            let pages = numbers.into_iter().map(|(page, (image, block, id))| ImagePage {
                page, place: ImagePlace { image, block }, id: ContentId(id),
            });
            let pages = ImagePages { block: 1, pages: pages.collect() };
            let payload = pages.encode();
            prop_assert_eq!(&ImagePages::decode(&payload, &shapes()).unwrap(), &pages);
            // Cut anywhere, or with more behind it, it is none.
            for end in 0..payload.len() {
                prop_assert!(ImagePages::decode(&payload[..end], &shapes()).is_err());
            }
            prop_assert!(ImagePages::decode(&[&payload[..], &[0]].concat(), &shapes()).is_err());
        }
    }

    #[test]
    fn pages_that_cannot_be_are_refused() {
        let with = |block, numbers: &[u64]| {
            let page = |&page: &u64| ImagePage {
                page,
                place: ImagePlace { image: 0, block: 0 },
                id: ContentId([1; 32]),
            };
            let pages = numbers.iter().map(page).collect();
            ImagePages::decode(&ImagePages { block, pages }.encode(), &shapes()).is_ok()
        };
        assert!(with(0, &[0, 9]));
        assert!(!with(0, &[0, 10]), "outside");
        assert!(!with(0, &[3, 3]), "twice");
        assert!(!with(0, &[3, 2]), "descending");
        assert!(!with(2, &[0]), "no such block");
        let most: Vec<u64> = (0..PAGES_MAX as u64).collect();
        assert!(with(1, &most));
        let more: Vec<u64> = (0..=PAGES_MAX as u64).collect();
        assert!(!with(1, &more), "too many");
    }
}
