//! Small numbers in few bytes: LEB128, of at most 32 bits.

use thiserror::Error;

/// Why a number cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum VarintError {
    /// The bytes end inside it.
    #[error("it ends inside a number")]
    Truncated,
    /// It has more than 32 bits, or more bytes than those need.
    #[error("a number is too large")]
    TooLarge,
}

/// Appends `value` to `out`: 1 to 5 bytes.
pub fn put(out: &mut Vec<u8>, mut value: u32) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Takes a number from the front of `from`.
pub fn take(from: &mut &[u8]) -> Result<u32, VarintError> {
    let mut value = 0u64;
    for shift in (0..35).step_by(7) {
        let (byte, rest) = from.split_first().ok_or(VarintError::Truncated)?;
        *from = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return u32::try_from(value).map_err(|_| VarintError::TooLarge);
        }
    }
    Err(VarintError::TooLarge)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_number_comes_back_and_nothing_of_what_follows_is_taken(value: u32, shift in 0..32u32, tail: u8) {
            let value = value >> shift;
            let mut bytes = Vec::new();
            put(&mut bytes, value);
            prop_assert!(bytes.len() <= 5);
            bytes.push(tail);
            let mut from = bytes.as_slice();
            prop_assert_eq!(take(&mut from), Ok(value));
            prop_assert_eq!(from, &[tail][..]);
            let mut cut = &bytes[..bytes.len() - 2];
            prop_assert_eq!(take(&mut cut), Err(VarintError::Truncated));
        }
    }

    #[test]
    fn numbers_beyond_32_bits_are_refused() {
        for bytes in [[0xff, 0xff, 0xff, 0xff, 0x1f], [0x80; 5]] {
            assert_eq!(take(&mut bytes.as_slice()), Err(VarintError::TooLarge));
        }
    }
}
