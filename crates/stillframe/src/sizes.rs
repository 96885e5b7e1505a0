//! Amounts of memory as they are typed: `256M`, `1.5G`, `64MiB`.

use thiserror::Error;

use crate::quantity;

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

#[cfg(test)]
mod tests {
    use super::*;

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
