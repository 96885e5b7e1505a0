//! Reads sizes: `256M`, `1.5G`, `64MiB`.

use std::num::NonZeroU64;

use thiserror::Error;

use crate::quantity;

/// Lower bound on the copy buffer, in bytes.
const COPY_BUFFER_MIN: u64 = 16 << 20;

/// Why a text is not a size.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SizeError {
    /// There is no number, or no known unit.
    #[error(
        "'{0}' is not a size: give a number with a unit (K, M, G, T: powers of 1024), such as 256M"
    )]
    Malformed(String),
    /// Does not fit 63 bits.
    #[error("'{0}' is too large")]
    TooLarge(String),
    /// Zero, where a positive size is required.
    #[error("0 is too small: give a positive size")]
    Zero,
    /// Less than a pause may need.
    #[error("'{0}' is too small: give at least 16M")]
    CopyBuffer(String),
}

/// Reads `64K`, `256M`, `256MiB`, `1.5G`, `1T`, and a bare `0`. In bytes.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    let malformed = || SizeError::Malformed(text.to_owned());
    if text == "0" {
        return Ok(0);
    }
    let (number, unit) = quantity::split(text).ok_or_else(malformed)?;
    let shift = match unit {
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        "T" | "TiB" => 40,
        _ => return Err(malformed()),
    };
    let bytes = number * (1u64 << shift) as f64;
    match bytes < (1u64 << 63) as f64 {
        true => Ok(bytes as u64),
        false => Err(SizeError::TooLarge(text.to_owned())),
    }
}

/// Like [`parse`], but refuses zero.
pub fn parse_positive(text: &str) -> Result<NonZeroU64, SizeError> {
    NonZeroU64::new(parse(text)?).ok_or(SizeError::Zero)
}

/// Like [`parse`], but refuses less than a pause of a small guest needs.
pub fn parse_copy_buffer(text: &str) -> Result<u64, SizeError> {
    match parse(text)? {
        bytes if bytes < COPY_BUFFER_MIN => Err(SizeError::CopyBuffer(text.to_owned())),
        bytes => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_below_the_minimum_are_refused() {
        assert_eq!(parse_positive("0"), Err(SizeError::Zero));
        assert_eq!(parse_positive("1M"), Ok(NonZeroU64::new(1 << 20).unwrap()));
        let small = "15M".to_owned();
        assert_eq!(
            parse_copy_buffer(&small),
            Err(SizeError::CopyBuffer(small.clone()))
        );
        assert_eq!(parse_copy_buffer("16M"), Ok(COPY_BUFFER_MIN));
    }

    #[test]
    fn sizes_are_read_with_their_units() {
        let sizes = [
            ("0", 0),
            ("0M", 0),
            ("4K", 4096),
            ("256M", 256 << 20),
            ("256MiB", 256 << 20),
            ("1.5G", 3 << 29),
            ("2T", 2 << 40),
        ];
        for (text, bytes) in sizes {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "", "M", "5", "5 M", "-5M", "1.M", ".5M", "1.2.3M", "5m", "5MB", "5Mx",
        ] {
            assert_eq!(parse(text), Err(SizeError::Malformed(text.to_owned())));
        }
        let large = "9999999999999T".to_owned();
        assert_eq!(parse(&large), Err(SizeError::TooLarge(large.clone())));
    }
}
