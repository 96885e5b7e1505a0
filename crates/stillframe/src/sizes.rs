//! Amounts of memory as they are typed: `256M`, `1.5G`, `64MiB`.

use std::num::NonZeroU64;

use thiserror::Error;

use crate::quantity;

/// The smallest copy buffer, in bytes.
const COPY_BUFFER_MIN: u64 = 16 << 20;

/// Why a text is no size.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SizeError {
    /// No number, or no unit that is known.
    #[error(
        "'{0}' is no size; write a number and its unit (K, M, G, T: powers of 1024), like 256M"
    )]
    Malformed(String),
    /// More than fits 64 bits.
    #[error("'{0}' is more than any machine has")]
    TooLarge(String),
    /// 0 where something is needed.
    #[error("0 is too little")]
    Nothing,
    /// Less than one pause may need.
    #[error("'{0}' is too little: at least 16M")]
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

/// As [`parse`], but not nothing.
pub fn parse_positive(text: &str) -> Result<NonZeroU64, SizeError> {
    NonZeroU64::new(parse(text)?).ok_or(SizeError::Nothing)
}

/// As [`parse`], but enough for a pause of a small guest.
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
    fn less_than_is_of_use_is_refused() {
        assert_eq!(parse_positive("0"), Err(SizeError::Nothing));
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
    fn anything_else_is_named() {
        for text in [
            "", "M", "5", "5 M", "-5M", "1.M", ".5M", "1.2.3M", "5m", "5MB", "5Mx",
        ] {
            assert_eq!(parse(text), Err(SizeError::Malformed(text.to_owned())));
        }
        let large = "9999999999999T".to_owned();
        assert_eq!(parse(&large), Err(SizeError::TooLarge(large.clone())));
    }
}
