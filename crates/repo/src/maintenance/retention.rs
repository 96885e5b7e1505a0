//! Which checkpoints a keep policy keeps. Pure: ids and times in, reasons out.

use std::collections::BTreeMap;
use std::fmt;

use jiff::Timestamp;
use jiff::civil::{Date, Weekday};
use jiff::tz::TimeZone;

use crate::format::manifest::CheckpointId;

/// How many checkpoints of each VM to keep. A checkpoint is kept when any rule keeps it.
///
/// The hourly, daily and weekly rules each keep the newest checkpoint of that many hours, days or
/// weeks, newest first, counting only those in which there is a checkpoint. Hours, days and weeks
/// (from Monday) are those of UTC, so that the answer depends on the repository alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KeepPolicy {
    /// The newest so many.
    pub last: u32,
    /// The newest of each of so many hours.
    pub hourly: u32,
    /// The newest of each of so many days.
    pub daily: u32,
    /// The newest of each of so many weeks.
    pub weekly: u32,
}

impl KeepPolicy {
    /// Whether no rule keeps anything. Such a policy is none: it forgets nothing.
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
}

impl fmt::Display for KeepReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KeepReason::Last => "last",
            KeepReason::Hourly => "hourly",
            KeepReason::Daily => "daily",
            KeepReason::Weekly => "weekly",
        })
    }
}

/// Which of the checkpoints of one VM the policy keeps, and why.
pub fn select(
    policy: &KeepPolicy,
    checkpoints: &[(CheckpointId, Timestamp)],
) -> BTreeMap<CheckpointId, Vec<KeepReason>> {
    let mut newest_first = checkpoints.to_vec();
    newest_first.sort_unstable_by_key(|&(id, time)| std::cmp::Reverse((time, id)));
    let mut kept: BTreeMap<CheckpointId, Vec<KeepReason>> = BTreeMap::new();
    for &(id, _) in newest_first.iter().take(policy.last as usize) {
        kept.entry(id).or_default().push(KeepReason::Last);
    }
    let rules: [(u32, KeepReason, SlotOf); 3] = [
        (policy.hourly, KeepReason::Hourly, hour),
        (policy.daily, KeepReason::Daily, day),
        (policy.weekly, KeepReason::Weekly, week),
    ];
    for (count, reason, slot_of) in rules {
        let mut slots_left = count;
        let mut current = None;
        for &(id, time) in &newest_first {
            let slot = slot_of(time);
            if current == Some(slot) {
                continue;
            }
            if slots_left == 0 {
                break;
            }
            slots_left -= 1;
            current = Some(slot);
            kept.entry(id).or_default().push(reason);
        }
    }
    kept
}

/// A stretch of time: the day it begins, and the hour where that matters.
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id(number: u32) -> CheckpointId {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&number.to_be_bytes());
        CheckpointId(bytes)
    }

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    /// The slow reference model: for each checkpoint, count the slots that begin after its own, by plain
    /// division of the seconds since 1970 (a Thursday).
    fn is_kept(
        policy: &KeepPolicy,
        all: &[(CheckpointId, Timestamp)],
        at: usize,
    ) -> Vec<KeepReason> {
        let key = |i: usize| (all[i].1, all[i].0);
        let newer: Vec<usize> = (0..all.len()).filter(|&i| key(i) > key(at)).collect();
        let mut reasons = Vec::new();
        if newer.len() < policy.last as usize {
            reasons.push(KeepReason::Last);
        }
        let rules = [
            (policy.hourly, KeepReason::Hourly, 3600, 0),
            (policy.daily, KeepReason::Daily, 86400, 0),
            (policy.weekly, KeepReason::Weekly, 7 * 86400, 3 * 86400),
        ];
        for (count, reason, length, shift) in rules {
            let slot = |i: usize| (all[i].1.as_second() + shift).div_euclid(length);
            let mut newer_slots: Vec<i64> = newer.iter().map(|&i| slot(i)).collect();
            newer_slots.sort_unstable();
            newer_slots.dedup();
            if !newer_slots.contains(&slot(at)) && newer_slots.len() < count as usize {
                reasons.push(reason);
            }
        }
        reasons
    }

    proptest! {
        #[test]
        fn keeps_what_its_twin_keeps(
            seconds in prop::collection::vec(prop_oneof![0..20_000_000_i64, 0..50_000_i64, -9000..9000_i64], 0..60),
            last in 0..5_u32, hourly in 0..6_u32, daily in 0..6_u32, weekly in 0..6_u32,
        ) {
            let policy = KeepPolicy { last, hourly, daily, weekly };
            let all: Vec<_> = (0..).zip(&seconds)
                .map(|(n, &s)| (id(n), Timestamp::from_second(s).unwrap()))
                .collect();
            let kept = select(&policy, &all);
            for at in 0..all.len() {
                prop_assert_eq!(kept.get(&all[at].0).cloned().unwrap_or_default(), is_kept(&policy, &all, at));
            }
        }
    }

    #[test]
    fn a_week_begins_on_monday() {
        let sunday = at("2026-03-01T23:59:59Z");
        let monday = at("2026-03-02T00:00:00Z");
        let next_sunday = at("2026-03-08T12:00:00Z");
        let all = [(id(1), sunday), (id(2), monday), (id(3), next_sunday)];
        let kept = select(
            &KeepPolicy {
                weekly: 2,
                ..KeepPolicy::default()
            },
            &all,
        );
        assert_eq!(kept.into_keys().collect::<Vec<_>>(), [id(1), id(3)]);
    }

    #[test]
    fn empty_slots_are_not_counted() {
        let all = [
            (id(1), at("2026-01-01T00:00:00Z")),
            (id(2), at("2026-06-01T00:00:00Z")),
        ];
        let kept = select(
            &KeepPolicy {
                daily: 2,
                ..KeepPolicy::default()
            },
            &all,
        );
        assert_eq!(kept.len(), 2);
    }
}
