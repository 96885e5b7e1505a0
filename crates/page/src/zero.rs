//! The all-zero test, the cheapest and most frequent question about a page.

/// Number of bytes that are folded together before one branch. It is wide enough for the widest vector registers,
/// and narrow enough that a page with data near its start is given up at once.
const STRIDE: usize = 256;

/// Whether every byte is zero. An empty slice is zero.
pub fn is_zero(page: &[u8]) -> bool {
    let (strides, rest) = page.as_chunks::<STRIDE>();
    strides.iter().all(|stride| fold(stride) == 0) && fold(rest) == 0
}

fn fold(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |all, byte| all | byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_set_bit_anywhere_is_seen() {
        for len in [0_usize, 1, 255, 256, 257, 4096, 4099] {
            let mut page = vec![0_u8; len];
            assert!(is_zero(&page));
            for at in 0..len {
                page[at] = 0x80;
                assert!(!is_zero(&page), "byte {at} of {len}");
                page[at] = 0;
            }
        }
    }
}
