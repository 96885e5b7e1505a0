//! Reads and prints lengths of time: `500ms`, `2s`, `1.5m`. [`times`] has ages and points in time.

pub mod times;

use std::time::Duration;

use thiserror::Error;

use crate::quantity;

/// Upper bound on a length of time; keeps all later arithmetic in range.
const DURATION_MAX: Duration = Duration::from_secs(366 * 24 * 3600);

/// Why a text is not a length of time.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum DurationError {
    /// There is no number, or no known unit.
    #[error(
        "'{0}' is not a length of time: give a number with a unit (ms, s, m, h, d), such as 500ms, 2s or 5m"
    )]
    Malformed(String),
    /// Longer than a year.
    #[error("'{0}' is longer than a year")]
    TooLong(String),
    /// Zero, where a positive length is required.
    #[error("'{0}' is zero: give a longer time")]
    Zero(String),
}

/// Reads `500ms`, `2s`, `1.5m`, `3h`, `1d`, and a bare `0`.
pub fn parse(text: &str) -> Result<Duration, DurationError> {
    let malformed = || DurationError::Malformed(text.to_owned());
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let (number, unit) = quantity::split(text).ok_or_else(malformed)?;
    let unit_s = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 24.0 * 3600.0,
        _ => return Err(malformed()),
    };
    match Duration::try_from_secs_f64(number * unit_s) {
        Ok(parsed) if parsed <= DURATION_MAX => Ok(parsed),
        _ => Err(DurationError::TooLong(text.to_owned())),
    }
}

/// Like [`parse`], but refuses zero.
pub fn parse_positive(text: &str) -> Result<Duration, DurationError> {
    match parse(text)? {
        Duration::ZERO => Err(DurationError::Zero(text.to_owned())),
        parsed => Ok(parsed),
    }
}

/// The length in words, with three digits at most and a fitting unit.
pub fn human(duration: Duration) -> String {
    let us = duration.as_micros();
    let seconds = duration.as_secs_f64();
    match us {
        0..1_000 => format!("{us} us"),
        1_000..10_000 => format!("{:.1} ms", seconds * 1e3),
        10_000..1_000_000 => format!("{:.0} ms", seconds * 1e3),
        1_000_000..60_000_000 => format!("{seconds:.2} s"),
        _ => match duration.as_secs() {
            s @ 0..3600 => format!("{} min {} s", s / 60, s % 60),
            s => format!("{} h {} min", s / 3600, s % 3600 / 60),
        },
    }
}

/// [`human`] of this many microseconds.
pub fn human_us(us: u64) -> String {
    human(Duration::from_micros(us))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_read() {
        let read = |text| parse(text).unwrap();
        assert_eq!(read("500ms"), Duration::from_millis(500));
        assert_eq!(read("2s"), Duration::from_secs(2));
        assert_eq!(read("1.5m"), Duration::from_secs(90));
        assert_eq!(read("3h"), Duration::from_secs(3 * 3600));
        assert_eq!(read("1d"), Duration::from_secs(86400));
        assert_eq!(read("0"), Duration::ZERO);
        assert_eq!(read("0s"), Duration::ZERO);
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "", "2", "s", "2 s", "-2s", "2sec", "1.s", ".5s", "1.2.3s", "1e3s", "2S", "²s", "inf",
            "NaNs",
        ] {
            assert_eq!(
                parse(text),
                Err(DurationError::Malformed(text.to_owned())),
                "{text}"
            );
        }
        for text in ["367d", "99999999999999999999999999h"] {
            assert_eq!(
                parse(text),
                Err(DurationError::TooLong(text.to_owned())),
                "{text}"
            );
        }
        assert_eq!(
            parse_positive("0"),
            Err(DurationError::Zero("0".to_owned()))
        );
        assert_eq!(parse_positive("1ms"), Ok(Duration::from_millis(1)));
    }

    #[test]
    fn a_fitting_unit_is_chosen() {
        assert_eq!(human_us(0), "0 us");
        assert_eq!(human_us(999), "999 us");
        assert_eq!(human_us(3_412), "3.4 ms");
        assert_eq!(human_us(34_120), "34 ms");
        assert_eq!(human_us(1_340_000), "1.34 s");
        assert_eq!(human_us(61_000_000), "1 min 1 s");
        assert_eq!(human_us(3_660_000_000), "1 h 1 min");
    }
}
