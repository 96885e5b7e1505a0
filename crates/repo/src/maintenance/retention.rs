//! Which checkpoints a keep policy keeps: a pure function from summaries to reasons.

use std::collections::BTreeMap;
use std::fmt;

use jiff::Timestamp;
use jiff::civil::{Date, Weekday};
use jiff::tz::TimeZone;

use crate::format::annotation::Tag;
use crate::format::manifest::{CheckpointId, Summary};
use crate::maintenance::age::Age;

/// Which checkpoints of each VM to keep. A checkpoint is kept when any rule keeps it.
///
/// The rules from hourly to yearly each keep the newest checkpoint of that many hours, days, weeks, months or
/// years, newest first; periods without a checkpoint are not counted. Hours, days, weeks (from Monday), months
/// and years are those of UTC, so that the result depends on no setting of the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeepPolicy {
    /// The number of newest checkpoints.
    pub last: u32,
    /// The number of hours.
    pub hourly: u32,
    /// The number of days.
    pub daily: u32,
    /// The number of weeks.
    pub weekly: u32,
    /// The number of months.
    pub monthly: u32,
    /// The number of years.
    pub yearly: u32,
    /// Keeps all checkpoints younger than this, counted back from the newest one. A checkpoint of the future,
    /// taken while a clock was wrong, does not count as the newest: all others would be forgotten.
    pub within: Option<Age>,
    /// Keeps all checkpoints that have one of these tags.
    pub tags: Vec<Tag>,
}

impl KeepPolicy {
    /// Whether there is no rule. Such a policy forgets nothing.
    pub fn is_empty(&self) -> bool {
        *self == KeepPolicy::default()
    }
}

/// Why a checkpoint is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeepReason {
    /// One of the newest.
    Last,
    /// The newest of its hour.
    Hourly,
    /// The newest of its day.
    Daily,
    /// The newest of its week.
    Weekly,
    /// The newest of its month.
    Monthly,
    /// The newest of its year.
    Yearly,
    /// Younger than the age of the policy, counted back from the newest.
    Within,
    /// It has a tag.
    Tag,
}

impl fmt::Display for KeepReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KeepReason::Last => "last",
            KeepReason::Hourly => "hourly",
            KeepReason::Daily => "daily",
            KeepReason::Weekly => "weekly",
            KeepReason::Monthly => "monthly",
            KeepReason::Yearly => "yearly",
            KeepReason::Within => "within",
            KeepReason::Tag => "tag",
        })
    }
}

/// The checkpoints of one VM that the policy keeps, with the reasons in the order of [`KeepReason`]. A checkpoint
/// later than `now` is one of the future.
pub fn select(
    policy: &KeepPolicy,
    checkpoints: &[&Summary],
    now: Timestamp,
) -> BTreeMap<CheckpointId, Vec<KeepReason>> {
    let mut newest_first = checkpoints.to_vec();
    newest_first.sort_unstable_by_key(|summary| std::cmp::Reverse((summary.time, summary.id)));
    let mut kept: BTreeMap<CheckpointId, Vec<KeepReason>> = BTreeMap::new();
    for summary in newest_first.iter().take(policy.last as usize) {
        kept.entry(summary.id).or_default().push(KeepReason::Last);
    }
    let rules: [(u32, KeepReason, SlotOf); 5] = [
        (policy.hourly, KeepReason::Hourly, hour),
        (policy.daily, KeepReason::Daily, day),
        (policy.weekly, KeepReason::Weekly, week),
        (policy.monthly, KeepReason::Monthly, month),
        (policy.yearly, KeepReason::Yearly, year),
    ];
    for (count, reason, slot_of) in rules {
        for summary in newest_of_slots(&newest_first, slot_of, count) {
            kept.entry(summary.id).or_default().push(reason);
        }
    }
    let newest = newest_first.iter().find(|summary| summary.time <= now);
    let is_within = |time: Timestamp| match (policy.within, newest) {
        (Some(age), Some(newest)) => time > age.before(newest.time),
        // All are of the future, so no age is known.
        (Some(_), None) => true,
        (None, _) => false,
    };
    for summary in &newest_first {
        if is_within(summary.time) {
            kept.entry(summary.id).or_default().push(KeepReason::Within);
        }
        if summary.tags.has_any(&policy.tags) {
            kept.entry(summary.id).or_default().push(KeepReason::Tag);
        }
    }
    kept
}

/// The newest checkpoint of each of the first `count` slots.
fn newest_of_slots<'s>(
    newest_first: &[&'s Summary],
    slot_of: SlotOf,
    count: u32,
) -> impl Iterator<Item = &'s Summary> {
    let slots = newest_first.chunk_by(move |a, b| slot_of(a.time) == slot_of(b.time));
    slots.map(|slot| slot[0]).take(count as usize)
}

/// A period: the day on which it begins, and the hour where that matters.
type Slot = (Date, i8);

type SlotOf = fn(Timestamp) -> Slot;

fn hour(time: Timestamp) -> Slot {
    let civil = TimeZone::UTC.to_datetime(time);
    (civil.date(), civil.hour())
}

fn day(time: Timestamp) -> Slot {
    (hour(time).0, 0)
}

fn week(time: Timestamp) -> Slot {
    let (date, _) = day(time);
    // Only the first days of the calendar, ten thousand years ago, have no Monday before them.
    let monday = match date.weekday() {
        Weekday::Monday => date,
        _ => date.nth_weekday(-1, Weekday::Monday).unwrap_or(date),
    };
    (monday, 0)
}

fn month(time: Timestamp) -> Slot {
    (hour(time).0.first_of_month(), 0)
}

fn year(time: Timestamp) -> Slot {
    (hour(time).0.first_of_year(), 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::annotation::Tags;
    use proptest::prelude::*;

    fn checkpoint(number: u32, time: Timestamp, tags: &[&str]) -> Summary {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&number.to_be_bytes());
        let tags: Vec<Tag> = tags.iter().map(|tag| tag.parse().unwrap()).collect();
        Summary {
            id: CheckpointId(bytes),
            vm: "vm".into(),
            time,
            tags: Tags::try_from(tags).unwrap(),
        }
    }

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    /// The untagged checkpoints at these times that are kept, by their indices.
    fn kept(policy: &KeepPolicy, times: &[&str], now: &str) -> Vec<usize> {
        let all: Vec<Summary> = (0..)
            .zip(times)
            .map(|(number, time)| checkpoint(number, at(time), &[]))
            .collect();
        let kept = select(policy, &all.iter().collect::<Vec<_>>(), at(now));
        let places = 0..all.len();
        places.filter(|&n| kept.contains_key(&all[n].id)).collect()
    }

    /// The slow reference model of [`Age::before`]: the digits of the date, with a day subtracted until there is
    /// such a date.
    fn months_before(time: Timestamp, months: i64, seconds: i64) -> Timestamp {
        let text = time.to_string();
        let number = |range: std::ops::Range<usize>| text[range].parse::<i64>().unwrap();
        let (year, month, mut day) = (number(0..4), number(5..7), number(8..10));
        let months = year * 12 + month - 1 - months;
        loop {
            let (year, month) = (months / 12, months % 12 + 1);
            let text = format!("{year:04}-{month:02}-{day:02}{}", &text[10..]);
            if let Ok(time) = text.parse::<Timestamp>() {
                return Timestamp::from_second(time.as_second() - seconds).unwrap();
            }
            day -= 1;
        }
    }

    /// The slow reference model: for each checkpoint, count the slots that begin after its own. Hours, days and
    /// weeks are divisions of the seconds since 1970 (a Thursday), months and years are digits.
    fn is_kept(
        policy: &KeepPolicy,
        months: i64,
        seconds: i64,
        all: &[Summary],
        at: usize,
        now: Timestamp,
    ) -> Vec<KeepReason> {
        let key = |i: usize| (all[i].time, all[i].id);
        let newer: Vec<usize> = (0..all.len()).filter(|&i| key(i) > key(at)).collect();
        let mut reasons = Vec::new();
        if newer.len() < policy.last as usize {
            reasons.push(KeepReason::Last);
        }
        let divided = |i: usize, length: i64, shift: i64| {
            (all[i].time.as_second() + shift)
                .div_euclid(length)
                .to_string()
        };
        let digits = |i: usize, count: usize| all[i].time.to_string()[..count].to_owned();
        type Rule<'a> = (u32, KeepReason, &'a dyn Fn(usize) -> String);
        let rules: [Rule<'_>; 5] = [
            (policy.hourly, KeepReason::Hourly, &|i| divided(i, 3600, 0)),
            (policy.daily, KeepReason::Daily, &|i| divided(i, 86400, 0)),
            (policy.weekly, KeepReason::Weekly, &|i| {
                divided(i, 7 * 86400, 3 * 86400)
            }),
            (policy.monthly, KeepReason::Monthly, &|i| digits(i, 7)),
            (policy.yearly, KeepReason::Yearly, &|i| digits(i, 4)),
        ];
        for (count, reason, slot) in rules {
            let mut newer_slots: Vec<String> = newer.iter().map(|&i| slot(i)).collect();
            newer_slots.sort_unstable();
            newer_slots.dedup();
            if !newer_slots.contains(&slot(at)) && newer_slots.len() < count as usize {
                reasons.push(reason);
            }
        }
        let past = all.iter().filter(|one| one.time <= now);
        let newest = past.map(|one| one.time).max();
        let limit = newest.map(|newest| months_before(newest, months, seconds));
        if (months, seconds) != (0, 0) && limit.is_none_or(|limit| all[at].time > limit) {
            reasons.push(KeepReason::Within);
        }
        let is_kept = |tag: &Tag| policy.tags.iter().any(|kept| kept.as_str() == tag.as_str());
        if all[at].tags.iter().any(is_kept) {
            reasons.push(KeepReason::Tag);
        }
        reasons
    }

    /// Seconds since 1970, over hours, months and decades, so that every rule applies.
    fn seconds() -> impl Strategy<Value = i64> {
        prop_oneof![
            0..20_000_000_i64,
            0..50_000_i64,
            -9000..9000_i64,
            0..1_500_000_000_i64
        ]
    }

    fn rules() -> impl Strategy<Value = KeepPolicy> {
        let counts = (0..5_u32, 0..6_u32, 0..6_u32, 0..6_u32, 0..6_u32, 0..6_u32);
        let tags = prop::sample::subsequence(vec!["a", "b", "c"], 0..=2);
        (counts, tags).prop_map(|((last, hourly, daily, weekly, monthly, yearly), tags)| {
            let tags = tags.iter().map(|tag| tag.parse().unwrap()).collect();
            KeepPolicy {
                last,
                hourly,
                daily,
                weekly,
                monthly,
                yearly,
                within: None,
                tags,
            }
        })
    }

    proptest! {
        #[test]
        fn keeps_what_the_reference_model_keeps(
            checkpoints in prop::collection::vec(
                (seconds(), prop::sample::subsequence(vec!["a", "b", "c", "d"], 0..=2)), 0..60),
            mut policy in rules(),
            months in prop_oneof![Just(0), 0..30_u32],
            seconds in prop_oneof![Just(0), 0..10_000_u64, 0..10_000_000_u64],
            now in prop_oneof![Just(i64::from(u32::MAX)), seconds()],
        ) {
            policy.within = Age::new(months, seconds);
            let now = Timestamp::from_second(now).unwrap();
            let all: Vec<Summary> = (0..).zip(&checkpoints)
                .map(|(n, (s, tags))| checkpoint(n, Timestamp::from_second(*s).unwrap(), tags))
                .collect();
            let kept = select(&policy, &all.iter().collect::<Vec<_>>(), now);
            let (months, seconds) = (i64::from(months), seconds as i64);
            for at in 0..all.len() {
                let reasons = kept.get(&all[at].id).cloned().unwrap_or_default();
                prop_assert_eq!(reasons, is_kept(&policy, months, seconds, &all, at, now));
            }
        }
    }

    #[test]
    fn a_week_begins_on_monday() {
        let policy = KeepPolicy {
            weekly: 2,
            ..KeepPolicy::default()
        };
        let (sunday, monday) = ("2026-03-01T23:59:59Z", "2026-03-02T00:00:00Z");
        let times = [sunday, monday, "2026-03-08T12:00:00Z"];
        assert_eq!(kept(&policy, &times, "2026-04-01T00:00:00Z"), [0, 2]);
    }

    #[test]
    fn months_and_years_are_those_of_the_calendar() {
        let times = [
            "2024-12-31T23:59:59Z",
            "2025-01-01T00:00:00Z",
            "2025-12-31T23:59:59Z",
            "2026-01-01T00:00:00Z",
            "2026-01-31T23:59:59Z",
            "2026-02-01T00:00:00Z",
        ];
        let now = "2026-04-01T00:00:00Z";
        let mut policy = KeepPolicy {
            monthly: 3,
            ..KeepPolicy::default()
        };
        assert_eq!(kept(&policy, &times, now), [2, 4, 5]);
        (policy.monthly, policy.yearly) = (0, 3);
        assert_eq!(kept(&policy, &times, now), [0, 2, 5]);
    }

    #[test]
    fn empty_slots_are_not_counted() {
        let policy = KeepPolicy {
            daily: 2,
            ..KeepPolicy::default()
        };
        let times = ["2026-01-01T00:00:00Z", "2026-06-01T00:00:00Z"];
        assert_eq!(kept(&policy, &times, "2026-07-01T00:00:00Z"), [0, 1]);
    }

    #[test]
    fn an_age_counts_back_from_the_newest_and_is_not_part_of_it() {
        let policy = KeepPolicy {
            within: Age::new(0, 7 * 86400),
            ..KeepPolicy::default()
        };
        let times = [
            "2026-03-01T11:59:59Z",
            "2026-03-01T12:00:00Z",
            "2026-03-01T12:00:01Z",
            "2026-03-08T12:00:00Z",
        ];
        // The current time does not matter.
        for now in ["2026-03-08T12:00:00Z", "2031-01-01T00:00:00Z"] {
            assert_eq!(kept(&policy, &times, now), [2, 3]);
        }
    }

    #[test]
    fn a_wrong_clock_forgets_nothing() {
        let policy = KeepPolicy {
            within: Age::new(1, 0),
            ..KeepPolicy::default()
        };
        let times = [
            "2026-01-01T00:00:00Z",
            "2026-03-01T00:00:00Z",
            "2099-01-01T00:00:00Z",
        ];
        assert_eq!(kept(&policy, &times, "2026-03-02T00:00:00Z"), [1, 2]);
        // If the current time is wrong, all are kept.
        assert_eq!(kept(&policy, &times, "1970-01-02T00:00:00Z"), [0, 1, 2]);
    }
}
