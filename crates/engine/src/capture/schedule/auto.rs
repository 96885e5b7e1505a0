//! `auto` chooses the schedule that suits this VM, by the measurements of its last checkpoints.

use std::collections::VecDeque;

use serde::Serialize;

use super::{Copied, ScheduleKind};
use crate::capture::downtime::DowntimeRecord;

/// Pauses after which the device state is timed anew.
const STATE_AGE_MAX: u32 = 64;
/// A pause is near the floor if it is at most this many times as long.
const NEAR: f64 = 2.5;
/// Checkpoints that predictions look back on.
const RECENT: usize = 8;
/// Consecutive checkpoints that must ask for the other tracking; doubled after each change.
const STREAK: u32 = 4;
/// The most of that.
const STREAK_MAX: u32 = 1024;
/// Copy-on-write must shorten the pause this much to be worth attaching anew.
const WORTH: f64 = 0.6;
/// Copy-on-write may take this share of the guest's time.
const GUEST_SHARE_MAX: f64 = 0.1;
/// A first write under asynchronous tracking, in microseconds.
const LIFT_US: f64 = 0.85;
/// A first write under synchronous tracking, on a machine that has other things to do: 70 to 100 for a guest that
/// compiles on two processors. On an idle machine it is 13 with the handler awake, 54 with it asleep.
const FAULT_US: f64 = 80.0;
/// Pages that a guest writes for each fault under copy-on-write: neighbours are unprotected
/// with it. Assumed until measured.
const PAGES_A_FAULT: f64 = 8.0;
/// Copying a page, in microseconds; believed until measured.
const COPY_US: f64 = 0.6;
/// Protecting a scattered page, in microseconds.
const PROTECT_US: f64 = 0.9;
/// Fewer pages do not show what one costs.
const PAGES_MIN: u64 = 64;

/// The measurements of one checkpoint.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// Its schedule.
    pub kind: ScheduleKind,
    /// Its pause.
    pub downtime: DowntimeRecord,
    /// Where its pages were copied.
    pub copied: Copied,
    /// How many different pages it copied.
    pub pages: u64,
    /// Time since the previous capture, in microseconds.
    pub interval_us: u64,
}

/// The prediction for one schedule.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Prediction {
    /// Microseconds of the pause.
    pub pause_us: u64,
    /// Microseconds in which the guest waits for first writes, an interval.
    pub guest_us: u64,
}

/// The chosen schedule, and all predictions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Plan {
    /// The schedule that suits best, of those the tracking in use allows.
    pub chosen: ScheduleKind,
    /// The time that QEMU itself takes, in microseconds.
    pub floor_us: u64,
    /// Everything in the pause.
    pub stop_copy: Prediction,
    /// Rounds before the pause.
    pub pre_copy: Prediction,
    /// Copying after the pause.
    pub copy_on_write: Prediction,
}

impl Plan {
    /// The prediction for a schedule.
    pub fn of(&self, kind: ScheduleKind) -> Prediction {
        match kind {
            ScheduleKind::StopCopy => self.stop_copy,
            ScheduleKind::PreCopy => self.pre_copy,
            ScheduleKind::CopyOnWrite => self.copy_on_write,
        }
    }
}

/// Observes checkpoints of one VM and chooses the schedule of the next.
#[derive(Debug)]
pub struct Auto {
    recent: VecDeque<Sample>,
    /// Time for the device state in pauses that waited for it, in microseconds; later ones count more.
    device_state_us: Option<f64>,
    /// Pauses since then.
    state_age: u32,
    /// The share of the pages that pre-copy left for the pause, when it was last in use. Bursts leave more than the
    /// writes of an interval suggest.
    left_share: Option<f64>,
    /// Memory cannot be tracked synchronously.
    asynchronous_only: bool,
    tracking: Tracking,
    /// Checkpoints in a row for which the other tracking was the better one.
    streak: u32,
    streak_needed: u32,
}

/// How first writes are noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tracking {
    /// The kernel handles faults: stop-copy and pre-copy.
    Asynchronous,
    /// The fault handler handles faults: copy-on-write.
    Synchronous,
}

impl Tracking {
    fn of(kind: ScheduleKind) -> Tracking {
        match kind {
            ScheduleKind::StopCopy | ScheduleKind::PreCopy => Tracking::Asynchronous,
            ScheduleKind::CopyOnWrite => Tracking::Synchronous,
        }
    }
}

impl Default for Auto {
    /// Knows nothing yet: pre-copy, which is never far off.
    fn default() -> Auto {
        Auto {
            recent: VecDeque::new(),
            device_state_us: None,
            state_age: 0,
            left_share: None,
            asynchronous_only: false,
            tracking: Tracking::Asynchronous,
            streak: 0,
            streak_needed: STREAK,
        }
    }
}

impl Auto {
    /// Copy-on-write does not suit this VM: its memory has huge pages, faults of the kernel cannot be
    /// handled, or pages lose their protection. Where it is in use, other tracking is wanted at once.
    pub fn cannot_copy_on_write(&mut self) {
        self.asynchronous_only = true;
        if self.tracking == Tracking::Synchronous {
            self.streak = self.streak_needed;
        }
    }

    /// Whether the next pause should save the device state before anything else, because it is not
    /// known how long that takes by itself.
    pub fn should_time_device_state(&self) -> bool {
        self.device_state_us.is_none() || self.state_age >= STATE_AGE_MAX
    }

    /// The schedule of the next checkpoint, by the tracking in use; with the reasons, once there are
    /// any.
    pub fn next(&self) -> (ScheduleKind, Option<Plan>) {
        let plan = self.plan();
        let kind = match (&plan, self.tracking) {
            (Some(plan), _) => plan.chosen,
            (None, Tracking::Asynchronous) => ScheduleKind::PreCopy,
            (None, Tracking::Synchronous) => ScheduleKind::CopyOnWrite,
        };
        (kind, plan)
    }

    /// Takes note of a checkpoint.
    pub fn observe(&mut self, sample: Sample) {
        let downtime = &sample.downtime;
        if downtime.total == 0 {
            // The VM was paused already: this measures no pause of ours.
            return;
        }
        self.state_age += 1;
        // Else the answer may have been there for long when it was looked for.
        if downtime.wait * 4 > downtime.device_state {
            let state = downtime.device_state as f64;
            let before = self.device_state_us.unwrap_or(state);
            self.device_state_us = Some((before * 3.0 + state) / 4.0);
            self.state_age = 0;
        }
        if sample.kind == ScheduleKind::PreCopy && sample.pages >= PAGES_MIN {
            let share = sample.copied.pause as f64 / sample.pages as f64;
            let before = self.left_share.unwrap_or(share);
            self.left_share = Some((before * 3.0 + share) / 4.0);
        }
        self.recent.push_back(sample);
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
        self.streak = match self.plan() {
            Some(plan) if Tracking::of(self.best(&plan)) != self.tracking => self.streak + 1,
            _ => 0,
        };
    }

    /// The schedule that this VM should be attached to anew for, when that is worth it by now.
    pub fn wants(&self) -> Option<ScheduleKind> {
        let plan = self.plan()?;
        (self.streak >= self.streak_needed).then(|| self.best(&plan))
    }

    /// The VM was attached to anew, for this schedule.
    pub fn attached_for(&mut self, kind: ScheduleKind) {
        let tracking = Tracking::of(kind);
        if tracking != self.tracking {
            self.tracking = tracking;
            self.streak_needed = (self.streak_needed * 2).min(STREAK_MAX);
        }
        // Samples of the other tracking say little of this one, but more than nothing does.
        self.streak = 0;
    }

    fn plan(&self) -> Option<Plan> {
        let last = self.recent.back()?;
        let measured = Measured::of(self)?;
        let mut plan = Plan {
            chosen: last.kind,
            floor_us: measured.floor().round() as u64,
            stop_copy: measured.stop_copy(),
            pre_copy: measured.pre_copy(),
            copy_on_write: measured.copy_on_write(),
        };
        plan.chosen = match self.tracking {
            Tracking::Synchronous => ScheduleKind::CopyOnWrite,
            Tracking::Asynchronous => {
                cheapest(&plan, &[ScheduleKind::StopCopy, ScheduleKind::PreCopy])
            }
        };
        Some(plan)
    }

    /// The best of all three, whatever the tracking in use.
    fn best(&self, plan: &Plan) -> ScheduleKind {
        let free = cheapest(plan, &[ScheduleKind::StopCopy, ScheduleKind::PreCopy]);
        let interval = self.recent.back().map_or(0, |sample| sample.interval_us) as f64;
        let copy_on_write = plan.copy_on_write;
        let near = (plan.of(free).pause_us as f64) <= NEAR * plan.floor_us as f64;
        let shorter = copy_on_write.pause_us as f64 <= WORTH * plan.of(free).pause_us as f64;
        let bearable = copy_on_write.guest_us as f64 <= GUEST_SHARE_MAX * interval;
        match !self.asynchronous_only && !near && shorter && bearable {
            true => ScheduleKind::CopyOnWrite,
            false => free,
        }
    }
}

/// The schedule near the floor that takes least of the guest's time, or the one with the shortest pause.
fn cheapest(plan: &Plan, kinds: &[ScheduleKind]) -> ScheduleKind {
    let near = |kind: &ScheduleKind| plan.of(*kind).pause_us as f64 <= NEAR * plan.floor_us as f64;
    let cost = |kind: &ScheduleKind| {
        let Prediction { pause_us, guest_us } = plan.of(*kind);
        match near(kind) {
            true => (0, pause_us + guest_us),
            false => (1, pause_us),
        }
    };
    kinds
        .iter()
        .copied()
        .min_by_key(cost)
        .unwrap_or(ScheduleKind::PreCopy)
}

/// Medians over the recent checkpoints, in microseconds and pages.
struct Measured {
    stop: f64,
    resume: f64,
    device_state: f64,
    /// A scan under asynchronous tracking.
    scan: f64,
    /// Copying a page in the pause.
    copy: f64,
    /// Pages written in an interval.
    pages: f64,
    interval: f64,
    /// Pages that pre-copy leaves for the pause, as far as is known.
    left: Option<f64>,
    /// The work of copy-on-write in the pause, and its faults; when it was in use.
    copy_on_write: Option<(f64, f64)>,
}

impl Measured {
    fn of(auto: &Auto) -> Option<Measured> {
        let all = || auto.recent.iter();
        let kind = |kind: ScheduleKind| move |sample: &&Sample| sample.kind == kind;
        let asynchronous = |sample: &&Sample| Tracking::of(sample.kind) == Tracking::Asynchronous;
        let copying = all()
            .filter(asynchronous)
            .filter(|sample| sample.copied.pause >= PAGES_MIN);
        let cow = || all().filter(kind(ScheduleKind::CopyOnWrite));
        let armed =
            median(cow().map(|sample| (sample.downtime.scan + sample.downtime.copy) as f64));
        let faults = median(cow().map(|sample| sample.copied.faults as f64));
        let pages = median(all().map(|sample| sample.pages as f64))?;
        Some(Measured {
            stop: median(all().map(|sample| sample.downtime.stop as f64))?,
            resume: median(all().map(|sample| sample.downtime.resume as f64))?,
            device_state: auto.device_state_us?,
            scan: median(
                all()
                    .filter(asynchronous)
                    .map(|sample| sample.downtime.scan as f64),
            )
            .unwrap_or_default(),
            copy: median(
                copying.map(|sample| sample.downtime.copy as f64 / sample.copied.pause as f64),
            )
            .unwrap_or(COPY_US),
            pages,
            interval: median(all().map(|sample| sample.interval_us as f64))?.max(1.0),
            left: auto.left_share.map(|share| share * pages),
            copy_on_write: armed.zip(faults),
        })
    }

    fn floor(&self) -> f64 {
        self.stop + self.device_state + self.resume
    }

    fn pause(&self, beside: f64) -> f64 {
        self.stop + self.device_state.max(beside) + self.resume
    }

    /// Pages that rounds leave: as seen, or those written during the second of two rounds by a guest that
    /// writes evenly.
    fn left(&self) -> f64 {
        let written_in = |time: f64| self.pages * (time / self.interval).min(1.0);
        let evenly = || {
            let first = written_in(self.scan + self.pages * self.copy);
            written_in(self.scan + first * self.copy)
        };
        self.left.unwrap_or_else(evenly)
    }

    fn stop_copy(&self) -> Prediction {
        prediction(
            self.pause(self.scan + self.pages * self.copy),
            self.pages * LIFT_US,
        )
    }

    fn pre_copy(&self) -> Prediction {
        let left = self.left();
        prediction(
            self.pause(self.scan + left * self.copy),
            (self.pages + left) * LIFT_US,
        )
    }

    fn copy_on_write(&self) -> Prediction {
        // While a round protects its pages, the guest can write no more than one page a fault.
        let left = self.left().min(self.pages * PROTECT_US / FAULT_US);
        let believed = (self.scan + left * PROTECT_US, self.pages / PAGES_A_FAULT);
        let (armed, faults) = self.copy_on_write.unwrap_or(believed);
        prediction(self.pause(armed), faults * FAULT_US)
    }
}

fn prediction(pause_us: f64, guest_us: f64) -> Prediction {
    Prediction {
        pause_us: pause_us.round() as u64,
        guest_us: guest_us.round() as u64,
    }
}

/// The middle one; `None` of none.
fn median(samples: impl Iterator<Item = f64>) -> Option<f64> {
    let mut samples: Vec<f64> = samples.collect();
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000;

    /// A checkpoint of a guest that writes `pages` an interval and `left` during the last round.
    fn sample(kind: ScheduleKind, pages: u64, left: u64) -> Sample {
        let copied = match kind {
            ScheduleKind::StopCopy => Copied {
                pause: pages,
                ..Copied::default()
            },
            ScheduleKind::PreCopy => Copied {
                pre_copy: pages,
                pause: left,
                ..Copied::default()
            },
            ScheduleKind::CopyOnWrite => Copied {
                after: pages,
                faults: pages / 10,
                ..Copied::default()
            },
        };
        let beside = 300 + copied.pause / 2;
        let device_state = 1500;
        let downtime = DowntimeRecord {
            stop: 500,
            disks: 0,
            scan: 300,
            copy: copied.pause / 2,
            device_state: beside.max(device_state),
            wait: u64::saturating_sub(device_state, beside),
            resume: 400,
            total: 900 + beside.max(device_state),
            verify: 0,
        };
        Sample {
            kind,
            downtime,
            copied,
            pages,
            interval_us: 10 * SECOND,
        }
    }

    /// Checkpoints of such a guest, until the other tracking is wanted or there were enough.
    fn watch(auto: &mut Auto, pages: u64, left: u64, checkpoints: u32) -> Option<ScheduleKind> {
        for _ in 0..checkpoints {
            let (kind, _) = auto.next();
            let mut sample = sample(kind, pages, left);
            if auto.should_time_device_state() {
                sample.downtime.device_state = 1500;
                sample.downtime.wait = 1500;
            }
            auto.observe(sample);
            if let Some(wanted) = auto.wants() {
                return Some(wanted);
            }
        }
        None
    }

    #[test]
    fn what_copies_beside_the_device_state_is_stopped_for_at_once() {
        let mut auto = Auto::default();
        assert_eq!(auto.next(), (ScheduleKind::PreCopy, None));
        assert_eq!(watch(&mut auto, 100, 0, 20), None);
        let (kind, plan) = auto.next();
        let plan = plan.unwrap();
        assert_eq!(kind, ScheduleKind::StopCopy, "{plan:?}");
        assert_eq!(plan.floor_us, 2400);
        assert_eq!(plan.stop_copy.pause_us, plan.floor_us);
    }

    #[test]
    fn much_is_copied_before_the_pause() {
        let mut auto = Auto::default();
        assert_eq!(watch(&mut auto, 16_000, 100, 20), None);
        let (kind, plan) = auto.next();
        let plan = plan.unwrap();
        assert_eq!(kind, ScheduleKind::PreCopy, "{plan:?}");
        assert!(plan.stop_copy.pause_us > 9_000 && plan.pre_copy.pause_us < 4_000);
    }

    #[test]
    fn what_rounds_do_not_get_done_with_is_copied_after_the_pause() {
        let mut auto = Auto::default();
        let wanted = watch(&mut auto, 40_000, 30_000, 20);
        assert_eq!(wanted, Some(ScheduleKind::CopyOnWrite));
        auto.attached_for(ScheduleKind::CopyOnWrite);
        assert_eq!(auto.next().0, ScheduleKind::CopyOnWrite);
        assert_eq!(watch(&mut auto, 40_000, 30_000, 100), None);
        // Back, when the guest is quiet again: not at once, and at last.
        assert_eq!(watch(&mut auto, 10, 0, 8), None);
        let wanted = watch(&mut auto, 10, 0, 20).unwrap();
        assert_ne!(wanted, ScheduleKind::CopyOnWrite);
    }

    #[test]
    fn each_change_of_tracking_takes_twice_as_long_as_the_one_before() {
        let mut auto = Auto::default();
        let mut took = Vec::new();
        // The predictions look back further than it takes to learn that the guest has changed.
        for (pages, left) in [(40_000, 30_000), (10, 0)].into_iter().cycle().take(6) {
            let (mut checkpoints, mut asked) = (0, 0);
            let wanted = loop {
                checkpoints += 1;
                let wanted = watch(&mut auto, pages, left, 1);
                asked += u32::from(auto.streak > 0);
                if let Some(wanted) = wanted {
                    break wanted;
                }
                assert!(checkpoints < 1000);
            };
            auto.attached_for(wanted);
            took.push(asked);
        }
        assert_eq!(took, [4, 8, 16, 32, 64, 128]);
    }

    #[test]
    fn huge_pages_are_never_copied_on_write() {
        let mut auto = Auto::default();
        auto.cannot_copy_on_write();
        assert_eq!(watch(&mut auto, 40_000, 30_000, 100), None);
    }

    #[test]
    fn copy_on_write_that_fails_is_left_at_once() {
        let mut auto = Auto::default();
        let wanted = watch(&mut auto, 40_000, 30_000, 100);
        assert_eq!(wanted, Some(ScheduleKind::CopyOnWrite));
        auto.attached_for(ScheduleKind::CopyOnWrite);
        auto.observe(sample(ScheduleKind::CopyOnWrite, 40_000, 30_000));
        assert_eq!(auto.wants(), None);
        auto.cannot_copy_on_write();
        assert!(matches!(
            auto.wants(),
            Some(ScheduleKind::StopCopy | ScheduleKind::PreCopy)
        ));
    }

    #[test]
    fn a_paused_vm_teaches_nothing() {
        let mut auto = Auto::default();
        let mut paused = sample(ScheduleKind::PreCopy, 10, 0);
        paused.downtime.total = 0;
        auto.observe(paused);
        assert_eq!(auto.next(), (ScheduleKind::PreCopy, None));
    }

    proptest! {
        /// With any input, it plans only a schedule that the tracking allows, and changes rarely.
        #[test]
        fn tracking_changes_rarely(guests in prop::collection::vec((0u64..100_000, 0u64..100_000), 1..60)) {
            let mut auto = Auto::default();
            let mut tracking = Tracking::Asynchronous;
            let mut changes = 0;
            for (pages, left) in guests {
                for _ in 0..4 {
                    let (kind, _) = auto.next();
                    prop_assert_eq!(Tracking::of(kind), tracking);
                    auto.observe(sample(kind, pages, left.min(pages)));
                }
                if let Some(wanted) = auto.wants() {
                    prop_assert_ne!(Tracking::of(wanted), tracking);
                    auto.attached_for(wanted);
                    tracking = Tracking::of(wanted);
                    changes += 1;
                }
            }
            // 4 + 8 + 16 + 32 + 64 + 128 = 252 checkpoints for six changes.
            prop_assert!(changes <= 6, "{changes} changes");
        }
    }
}
