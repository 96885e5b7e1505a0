//! Reads points in time and ages, and prints times.

use std::collections::BTreeSet;

use jiff::civil::Date;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp, ToSpan as _};
use stillframe_repo::Age;
use thiserror::Error;

/// Upper bound on the months of an age; keeps all later arithmetic in range.
const MONTHS_MAX: u64 = 12_000;

/// Upper bound on the rest of an age, in seconds: a thousand years.
const SECONDS_MAX: u64 = 1000 * 366 * 24 * 3600;

/// Length of a date: `2026-11-24`.
const DATE_BYTES: usize = 10;

/// Why a text is not an age or a point in time.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TimeError {
    /// There are no numbers with known units.
    #[error(
        "'{0}' is not an age: give whole numbers with units (s, min, h, d, w, mo, y), such as 12h, 7d or 1y6mo"
    )]
    Age(String),
    /// `m`, which means minutes here and months in other backup programs: too dangerous to guess.
    #[error("in '{0}', m may mean minutes or months: write min or mo")]
    Minutes(String),
    /// Zero.
    #[error("'{0}' is zero: give a longer age")]
    Zero(String),
    /// Longer than a thousand years.
    #[error("'{0}' is longer than a thousand years: give a shorter age")]
    TooLong(String),
    /// Neither a date, nor a date with a time, nor an age.
    #[error(
        "'{0}' is not a point in time: give a date (2026-11-24), a date with time and zone (2026-11-24T13:00:00+01:00), or an age (2h, 3d)"
    )]
    Moment(String),
}

/// Reads an age: `90s`, `30min`, `12h`, `7d`, `2w`, `6mo`, `1y`, and several in a row, such as `1y6mo`.
pub fn parse_age(text: &str) -> Result<Age, TimeError> {
    let malformed = || TimeError::Age(text.to_owned());
    let too_long = || TimeError::TooLong(text.to_owned());
    let (mut months, mut seconds) = (0_u64, 0_u64);
    let mut rest = text;
    while !rest.is_empty() {
        let (digits, after) = split(rest, |c| c.is_ascii_digit());
        let (unit, after) = split(after, |c| !c.is_ascii_digit());
        rest = after;
        let (sum, length) = match unit {
            "s" => (&mut seconds, 1),
            "min" => (&mut seconds, 60),
            "h" => (&mut seconds, 3600),
            "d" => (&mut seconds, 24 * 3600),
            "w" => (&mut seconds, 7 * 24 * 3600),
            "mo" => (&mut months, 1),
            "y" => (&mut months, 12),
            "m" => return Err(TimeError::Minutes(text.to_owned())),
            _ => return Err(malformed()),
        };
        if digits.is_empty() {
            return Err(malformed());
        }
        // A number that overflows is too long in any unit.
        let number: u64 = digits.parse().map_err(|_| too_long())?;
        let added = number
            .checked_mul(length)
            .and_then(|more| more.checked_add(*sum));
        *sum = added.ok_or_else(too_long)?;
    }
    if months > MONTHS_MAX || seconds > SECONDS_MAX {
        return Err(too_long());
    }
    let zero = match text.is_empty() {
        true => malformed(),
        false => TimeError::Zero(text.to_owned()),
    };
    let months = u32::try_from(months).map_err(|_| too_long())?;
    Age::new(months, seconds).ok_or(zero)
}

/// The longest prefix of matching characters, and the rest.
fn split(text: &str, matches: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(|c| !matches(c)).unwrap_or(text.len()))
}

/// A point in time on the command line. It covers a span: a date covers a day, a time one unit of its last digit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// A time with its zone.
    At {
        /// Start of the span.
        time: Timestamp,
        /// Length of the span, in nanoseconds.
        length_ns: i64,
    },
    /// A day in the user's time zone.
    Day(Date),
    /// A length of time before now.
    Ago(Age),
}

/// Reads a date, a date with time and zone (RFC 3339; the T may be a space), or an age.
pub fn parse_moment(text: &str) -> Result<Moment, TimeError> {
    if let Ok(time) = text.parse::<Timestamp>() {
        let length_ns = 10_i64.pow(9 - decimals(text));
        return Ok(Moment::At { time, length_ns });
    }
    if text.len() == DATE_BYTES
        && let Ok(date) = text.parse::<Date>()
    {
        return Ok(Moment::Day(date));
    }
    match parse_age(text) {
        Ok(age) => Ok(Moment::Ago(age)),
        Err(TimeError::Age(_)) => Err(TimeError::Moment(text.to_owned())),
        Err(error) => Err(error),
    }
}

/// The number of digits after the decimal point of a time, 9 at most.
fn decimals(text: &str) -> u32 {
    let after = text.split_once(['.', ',']).map_or("", |(_, after)| after);
    let digits = after.bytes().take_while(u8::is_ascii_digit);
    digits.take(9).count() as u32
}

impl Moment {
    /// The first nanosecond of the span.
    pub fn first(self, now: Timestamp, zone: &TimeZone) -> Timestamp {
        match self {
            Moment::At { time, .. } => time,
            Moment::Day(date) => midnight(date, zone).unwrap_or(Timestamp::MIN),
            Moment::Ago(age) => age.before(now),
        }
    }

    /// The last nanosecond of the span.
    pub fn last(self, now: Timestamp, zone: &TimeZone) -> Timestamp {
        let end = match self {
            Moment::At { time, length_ns } => {
                time.checked_add(SignedDuration::from_nanos(length_ns)).ok()
            }
            Moment::Day(date) => date.tomorrow().ok().and_then(|next| midnight(next, zone)),
            Moment::Ago(age) => return age.before(now),
        };
        let last = end.and_then(|end| end.checked_sub(1.nanosecond()).ok());
        last.unwrap_or(Timestamp::MAX)
    }
}

/// The start of a day; `None` at the ends of the calendar.
fn midnight(date: Date, zone: &TimeZone) -> Option<Timestamp> {
    Some(date.to_zoned(zone.clone()).ok()?.timestamp())
}

/// A time in the user's time zone, with its offset: `2026-11-24 13:00:00+01:00`.
pub fn local(time: Timestamp) -> String {
    shown(time, &TimeZone::system(), "%Y-%m-%d %H:%M:%S%:z")
}

/// The times of a table like [`local`], with milliseconds if two of one VM would look the same without.
pub fn local_column<'v>(times: impl Iterator<Item = (&'v str, Timestamp)>) -> Vec<String> {
    column(times, &TimeZone::system())
}

fn column<'v>(times: impl Iterator<Item = (&'v str, Timestamp)>, zone: &TimeZone) -> Vec<String> {
    let times: Vec<(&str, Timestamp)> = times.collect();
    let seconds = times.iter().map(|(vm, time)| (vm, time.as_second()));
    let format = match seconds.collect::<BTreeSet<_>>().len() == times.len() {
        true => "%Y-%m-%d %H:%M:%S%:z",
        false => "%Y-%m-%d %H:%M:%S%.3f%:z",
    };
    let shown = times.iter().map(|&(_, time)| shown(time, zone, format));
    shown.collect()
}

fn shown(time: Timestamp, zone: &TimeZone, format: &str) -> String {
    time.to_zoned(zone.clone()).strftime(format).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: u64 = 24 * 3600;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    /// One hour ahead of UTC in winter, two in summer.
    fn berlin() -> TimeZone {
        TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap()
    }

    #[test]
    fn every_unit_of_an_age_is_read() {
        let ages = [
            ("90s", 0, 90),
            ("30min", 0, 1800),
            ("12h", 0, 12 * 3600),
            ("7d", 0, 7 * DAY),
            ("2w", 0, 14 * DAY),
            ("6mo", 6, 0),
            ("1y", 12, 0),
            ("1y6mo2w3d4h5min6s", 18, 17 * DAY + 4 * 3600 + 306),
            ("0y1d", 0, DAY),
            ("1000y", 12_000, 0),
        ];
        for (text, months, seconds) in ages {
            assert_eq!(
                parse_age(text),
                Ok(Age::new(months, seconds).unwrap()),
                "{text}"
            );
        }
    }

    #[test]
    fn other_ages_are_refused() {
        for text in [
            "", "d", "7", "7 d", "-7d", "1.5d", "7D", "7days", "d7", "7d5", "1e3d", "²d",
        ] {
            assert_eq!(
                parse_age(text),
                Err(TimeError::Age(text.to_owned())),
                "{text}"
            );
        }
        for text in ["5m", "1y5m3d"] {
            assert_eq!(parse_age(text), Err(TimeError::Minutes(text.to_owned())));
        }
        for text in ["0d", "0s", "0y0mo"] {
            assert_eq!(parse_age(text), Err(TimeError::Zero(text.to_owned())));
        }
        for text in [
            "1001y",
            "366001d",
            "99999999999999999999999d",
            "18446744073709551615w",
        ] {
            assert_eq!(parse_age(text), Err(TimeError::TooLong(text.to_owned())));
        }
    }

    #[test]
    fn a_moment_covers_its_span() {
        let now = at("2026-11-24T12:00:00Z");
        let spans = [
            (
                "2026-11-24",
                "2026-11-23T23:00:00Z",
                "2026-11-24T22:59:59.999999999Z",
            ),
            // A day of 25 hours.
            (
                "2026-10-25",
                "2026-10-24T22:00:00Z",
                "2026-10-25T22:59:59.999999999Z",
            ),
            (
                "2026-11-24T13:00:00+01:00",
                "2026-11-24T12:00:00Z",
                "2026-11-24T12:00:00.999999999Z",
            ),
            (
                "2026-11-24 13:00:00.120+01:00",
                "2026-11-24T12:00:00.12Z",
                "2026-11-24T12:00:00.120999999Z",
            ),
            (
                "2026-11-24T12:00:00.123456789Z",
                "2026-11-24T12:00:00.123456789Z",
                "2026-11-24T12:00:00.123456789Z",
            ),
            ("2h", "2026-11-24T10:00:00Z", "2026-11-24T10:00:00Z"),
            ("3d", "2026-11-21T12:00:00Z", "2026-11-21T12:00:00Z"),
            ("1mo", "2026-10-24T12:00:00Z", "2026-10-24T12:00:00Z"),
        ];
        for (text, first, last) in spans {
            let moment = parse_moment(text).unwrap();
            assert_eq!(moment.first(now, &berlin()), at(first), "{text}");
            assert_eq!(moment.last(now, &berlin()), at(last), "{text}");
        }
    }

    #[test]
    fn other_moments_are_refused() {
        for text in [
            "",
            "yesterday",
            "2026",
            "2026-11",
            "2026-13-01",
            "2026-02-30",
            "20261124",
            "24.11.2026",
            "2026-11-24T13:00:00",
            "13:00",
            "2026-11-24T25:00:00Z",
            "-2h",
            "1732450000",
        ] {
            assert_eq!(
                parse_moment(text),
                Err(TimeError::Moment(text.to_owned())),
                "{text}"
            );
        }
        assert_eq!(parse_moment("5m"), Err(TimeError::Minutes("5m".to_owned())));
        assert_eq!(parse_moment("0d"), Err(TimeError::Zero("0d".to_owned())));
    }

    #[test]
    fn the_ends_of_the_calendar_are_moments() {
        for text in ["0000-01-01", "9999-12-31"] {
            let moment = parse_moment(text).unwrap();
            let now = Timestamp::now();
            assert!(moment.first(now, &berlin()) < moment.last(now, &berlin()));
        }
    }

    #[test]
    fn milliseconds_are_shown_if_times_would_look_the_same() {
        let [early, late] = ["2026-07-01T10:00:00.25Z", "2026-07-01T10:00:00.9999Z"].map(at);
        let next = at("2026-12-01T10:00:01Z");
        let shown = |times: &[(&'static str, Timestamp)]| column(times.iter().copied(), &berlin());
        assert_eq!(
            shown(&[("a", early), ("b", late), ("a", next)]),
            [
                "2026-07-01 12:00:00+02:00",
                "2026-07-01 12:00:00+02:00",
                "2026-12-01 11:00:01+01:00"
            ]
        );
        assert_eq!(
            shown(&[("a", early), ("a", late), ("b", next)]),
            [
                "2026-07-01 12:00:00.250+02:00",
                "2026-07-01 12:00:00.999+02:00",
                "2026-12-01 11:00:01.000+01:00"
            ]
        );
        assert_eq!(shown(&[]), [""; 0]);
    }

    #[test]
    fn a_printed_time_can_be_read() {
        let time = at("2026-07-01T10:00:00Z");
        let moment = parse_moment(&local(time)).unwrap();
        assert_eq!(moment.first(time, &TimeZone::UTC), time);
    }
}
