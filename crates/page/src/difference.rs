//! How much of a page has changed since an older version of it (FITDOC, section II.B and table I).

/// Bytes compared at once: FITDOC's line.
pub const WORD_BYTES: usize = 8;

/// The difference between two versions of a page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Difference {
    /// Bytes that differ.
    pub bytes: u32,
    /// Words of eight bytes, aligned, of which every byte differs.
    pub whole_words: u32,
}

/// Compares two versions of a page. Of versions of different lengths, the shorter one counts.
pub fn difference(old: &[u8], new: &[u8]) -> Difference {
    let (old_words, old_rest) = old.as_chunks::<WORD_BYTES>();
    let (new_words, new_rest) = new.as_chunks::<WORD_BYTES>();
    let mut found = Difference::default();
    for (old, new) in old_words.iter().zip(new_words) {
        let bytes = nonzero_bytes(u64::from_le_bytes(*old) ^ u64::from_le_bytes(*new));
        found.bytes += bytes;
        found.whole_words += u32::from(bytes == WORD_BYTES as u32);
    }
    for (old, new) in old_rest.iter().zip(new_rest) {
        found.bytes += u32::from(old != new);
    }
    found
}

/// How many bytes of a word are not zero.
fn nonzero_bytes(word: u64) -> u32 {
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    // The sum carries into a byte's top bit when any of its low bits is set; no carry leaves a byte.
    ((((word & LOW) + LOW) | word) & !LOW).count_ones()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The slow reference model: byte by byte.
    fn model(old: &[u8], new: &[u8]) -> Difference {
        let differs: Vec<bool> = old.iter().zip(new).map(|(old, new)| old != new).collect();
        Difference {
            bytes: differs.iter().filter(|&&differs| differs).count() as u32,
            whole_words: differs
                .chunks_exact(WORD_BYTES)
                .filter(|word| word.iter().all(|&differs| differs))
                .count() as u32,
        }
    }

    proptest! {
        #[test]
        fn counts_what_its_model_counts(
            old in prop::collection::vec(any::<u8>(), 0..200),
            // Mostly the same byte, by mask; 0x80 and 0x01 are the ends of the carry.
            masks in prop::collection::vec(prop_oneof![4 => Just(0u8), 1 => Just(0x80), 1 => Just(1), 2 => any::<u8>()], 200),
            whole in 0..30usize,
        ) {
            let mut new: Vec<u8> = old.iter().zip(&masks).map(|(byte, mask)| byte ^ mask).collect();
            for byte in new.iter_mut().skip(whole * WORD_BYTES).take(WORD_BYTES) {
                *byte = !*byte;
            }
            prop_assert_eq!(difference(&old, &new), model(&old, &new));
        }
    }

    #[test]
    fn every_value_of_a_byte_counts_once() {
        for value in 1..=255u8 {
            for at in 0..WORD_BYTES {
                let mut new = [0; WORD_BYTES];
                new[at] = value;
                let found = difference(&[0; WORD_BYTES], &new);
                assert_eq!((found.bytes, found.whole_words), (1, 0));
            }
        }
    }
}
