//! Content ids: a blob's name, made from its content.
//!
//! The hash is keyed. So a reader of a repository who has no key cannot test whether a known page is in it.

mod together;

use std::fmt;

use zeroize::Zeroizing;

use crate::PAGE;

/// The keyed BLAKE3 hash of a blob: equal ids mean equal bytes (within one repository).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContentId(pub [u8; 32]);

impl ContentId {
    /// 64 lower-case hexadecimal digits.
    pub fn to_hex(&self) -> String {
        self.to_string()
    }

    /// The inverse of [`ContentId::to_hex`]; `None` unless `text` is exactly 64 lower-case digits.
    pub fn from_hex(text: &str) -> Option<ContentId> {
        let digits: &[u8; 64] = text.as_bytes().try_into().ok()?;
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.as_chunks::<2>().0) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Some(ContentId(bytes))
    }
}

fn digit(ascii: u8) -> Option<u8> {
    match ascii {
        b'0'..=b'9' => Some(ascii - b'0'),
        b'a'..=b'f' => Some(ascii - b'a' + 10),
        _ => None,
    }
}

impl fmt::Display for ContentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ContentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ContentId({self})")
    }
}

/// Makes content ids under one repository's key. Cheap to clone and free of locks, so that every
/// capture thread can own one. The key is wiped when it is dropped.
#[derive(Clone)]
pub struct ContentHasher {
    key: Zeroizing<[u8; 32]>,
}

impl ContentHasher {
    /// A hasher under `key`, which must be secret and belong to one repository only.
    pub fn keyed(key: [u8; 32]) -> ContentHasher {
        ContentHasher {
            key: Zeroizing::new(key),
        }
    }

    /// The id of `blob`.
    pub fn id(&self, blob: &[u8]) -> ContentId {
        ContentId(*blake3::keyed_hash(&self.key, blob).as_bytes())
    }

    /// The ids of pages, in their order: several times as fast as one by one, where there are many.
    pub fn ids(&self, pages: &[&[u8; PAGE]]) -> Vec<ContentId> {
        let mut key = Zeroizing::new([0; 8]);
        for (word, bytes) in key.iter_mut().zip(self.key.as_chunks().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        let mut ids = Vec::with_capacity(pages.len());
        let rest = together::hash_together(&key, pages, &mut ids);
        ids.extend(rest.iter().map(|page| self.id(&page[..])));
        ids
    }

    /// The ids of blobs of these lengths, which lie one after the other in `bytes` and fill it: as [`ContentHasher::ids`]
    /// where all of them are pages.
    pub fn ids_of(
        &self,
        mut bytes: &[u8],
        lengths: impl Iterator<Item = usize> + Clone,
    ) -> Vec<ContentId> {
        let (pages, rest) = bytes.as_chunks();
        if rest.is_empty() && lengths.clone().all(|length| length == PAGE) {
            return self.ids(&pages.iter().collect::<Vec<_>>());
        }
        let next = |length: usize| {
            let (blob, rest) = bytes.split_at(length.min(bytes.len()));
            bytes = rest;
            self.id(blob)
        };
        lengths.map(next).collect()
    }
}

// The key must not reach a log through a derived `Debug`.
impl fmt::Debug for ContentHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ContentHasher(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn another_key_gives_another_id() {
        let page = [7; 4096];
        let first = ContentHasher::keyed([1; 32]);
        assert_eq!(first.id(&page), first.clone().id(&page));
        assert_ne!(first.id(&page), ContentHasher::keyed([2; 32]).id(&page));
        assert_ne!(first.id(&page), first.id(&page[1..]));
    }

    #[test]
    fn only_exact_lower_case_hex_is_an_id() {
        let id = ContentId([0xa5; 32]);
        assert_eq!(ContentId::from_hex(&id.to_hex()), Some(id));
        assert_eq!(ContentId::from_hex(&id.to_hex().to_uppercase()), None);
        assert_eq!(ContentId::from_hex(&id.to_hex()[1..]), None);
        assert_eq!(ContentId::from_hex(&format!("{id}0")), None);
    }

    #[test]
    fn debug_hides_the_key() {
        let text = format!("{:?}", ContentHasher::keyed([0x11; 32]));
        assert!(!text.contains("17") && !text.contains("11"));
    }

    proptest! {
        /// Compared with one by one.
        #[test]
        fn pages_hashed_together_have_their_ids(
            pages in prop::collection::vec((any::<u8>(), 0..PAGE, any::<u8>()), 0..70),
            key: [u8; 32],
        ) {
            let hasher = ContentHasher::keyed(key);
            let pages: Vec<[u8; PAGE]> = pages
                .into_iter()
                .map(|(fill, at, other)| {
                    let mut page = [fill; PAGE];
                    page[at] = other;
                    page
                })
                .collect();
            let one_by_one: Vec<ContentId> = pages.iter().map(|page| hasher.id(page)).collect();
            prop_assert_eq!(hasher.ids(&pages.iter().collect::<Vec<_>>()), one_by_one.clone());
            let lengths = pages.iter().map(|page| page.len());
            prop_assert_eq!(hasher.ids_of(pages.as_flattened(), lengths), one_by_one);
        }

        #[test]
        fn blobs_of_any_length_have_their_ids(lengths in prop::collection::vec(1..9000_usize, 0..12), key: [u8; 32]) {
            let hasher = ContentHasher::keyed(key);
            let bytes: Vec<u8> = (0..lengths.iter().sum::<usize>()).map(|at| (at / 7) as u8).collect();
            let mut start = 0;
            let one_by_one: Vec<ContentId> = lengths
                .iter()
                .map(|length| {
                    start += length;
                    hasher.id(&bytes[start - length..start])
                })
                .collect();
            prop_assert_eq!(hasher.ids_of(&bytes, lengths.into_iter()), one_by_one);
        }

        #[test]
        fn hex_round_trip(bytes: [u8; 32]) {
            prop_assert_eq!(ContentId::from_hex(&ContentId(bytes).to_hex()), Some(ContentId(bytes)));
        }

        #[test]
        fn any_text_is_parsed_without_panic(text in ".{0,70}") {
            if let Some(id) = ContentId::from_hex(&text) {
                prop_assert_eq!(id.to_hex(), text);
            }
        }
    }
}
