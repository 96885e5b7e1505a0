//! Lengths of time that count back from a moment: `7 days`, `6 months`.

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Span, Timestamp};

/// A length of time before a moment: calendar months and seconds, not both zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Age {
    months: u32,
    seconds: u64,
}

impl Age {
    /// An age of these calendar months and seconds; `None` where both are zero.
    pub fn new(months: u32, seconds: u64) -> Option<Age> {
        let age = Age { months, seconds };
        (months > 0 || seconds > 0).then_some(age)
    }

    /// The moment this long before `time`, by the calendar of UTC: first the months are subtracted, then the
    /// seconds. A day that the month before does not have becomes its last: a month before March 31 is the end
    /// of February. The earliest [`Timestamp`] where the calendar does not reach back so far.
    pub fn before(self, time: Timestamp) -> Timestamp {
        self.checked_before(time).unwrap_or(Timestamp::MIN)
    }

    fn checked_before(self, time: Timestamp) -> Option<Timestamp> {
        let months = Span::new().try_months(self.months).ok()?;
        let civil = TimeZone::UTC.to_datetime(time).checked_sub(months).ok()?;
        let start = TimeZone::UTC.to_timestamp(civil).ok()?;
        let seconds = i64::try_from(self.seconds).ok()?;
        start.checked_sub(SignedDuration::from_secs(seconds)).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn before(months: u32, seconds: u64, time: &str) -> String {
        let age = Age::new(months, seconds).unwrap();
        age.before(time.parse().unwrap()).to_string()
    }

    #[test]
    fn months_are_those_of_the_calendar() {
        assert_eq!(
            before(1, 0, "2026-03-31T12:00:00.5Z"),
            "2026-02-28T12:00:00.5Z"
        );
        assert_eq!(
            before(13, 0, "2025-03-29T00:00:00Z"),
            "2024-02-29T00:00:00Z"
        );
        assert_eq!(
            before(12, 86400, "2026-03-01T00:00:00Z"),
            "2025-02-28T00:00:00Z"
        );
        assert_eq!(before(0, 1, "2026-01-01T00:00:00Z"), "2025-12-31T23:59:59Z");
    }

    #[test]
    fn nothing_lies_before_the_first_moment() {
        let first = Timestamp::MIN.to_string();
        assert_eq!(before(u32::MAX, 0, "2026-01-01T00:00:00Z"), first);
        assert_eq!(before(1, u64::MAX, "2026-01-01T00:00:00Z"), first);
        assert_eq!(before(0, 1 << 40, "2026-01-01T00:00:00Z"), first);
        assert_eq!(Age::new(0, 0), None);
    }
}
