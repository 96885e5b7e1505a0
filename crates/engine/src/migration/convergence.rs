//! When the rounds of a migration have converged: the remaining pages can be sent in the downtime that the user allows,
//! or waiting for a better moment is no use.
//!
//! The expected pause follows from the last round, because rounds differ: the first sends whole pages, the later ones
//! mostly small deltas. A guest that writes all the time in the same way never gets below its own rate. But few
//! guests do: so rounds go on while the expected pause still gets shorter, and then a little longer, for a moment at
//! which the guest writes less.

use std::time::Duration;

/// Rounds of fewer pages say little about the time that a page takes.
const ROUND_PAGES_MIN: u64 = 256;
/// An expected pause that is shorter by this share is progress.
const PROGRESS: f64 = 0.9;
/// Rounds and time without progress, after both of which the next good moment is taken.
const PATIENCE_ROUNDS: u32 = 3;
const PATIENCE: Duration = Duration::from_secs(1);
/// Time of all rounds but the first, progress or not, after which the same applies; the time of the first round if that
/// is longer.
const PATIENCE_IN_ALL: Duration = Duration::from_secs(2);
/// An expected pause of more than this many times the allowed one is worth the faults of a VM that lacks pages.
const FAR: u32 = 5;
/// What is expected while no page was sent: more than any limit.
const UNKNOWN: Duration = Duration::from_secs(1 << 32);
/// What counts as such a moment, against the best so far. After twice the patience every moment does.
const AS_GOOD: f64 = 1.2;

/// One round.
#[derive(Debug, Clone, Copy)]
pub struct Round {
    /// Pages that were gone through: sent, or found to be the same. Not those of which the place in an image was sent: that
    /// takes no time, which says nothing of the pages that are left.
    pub pages: u64,
    /// How long that took.
    pub time: Duration,
    /// Pages that are left.
    pub left: u64,
}

/// What to do after a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Another round.
    Round,
    /// Stop the VM, and send the rest.
    Stop,
    /// Stop the VM; the rest is fetched when it runs at the destination.
    Switch,
}

/// Whether pages may be fetched when the VM runs at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switch {
    /// They may not.
    Never,
    /// If the pause would be much longer than is allowed.
    IfNeeded,
    /// After the first round, in any case.
    AfterFirst,
}

/// Judges the rounds of one migration.
#[derive(Debug)]
pub struct Convergence {
    downtime: Duration,
    switch: Switch,
    /// Of all rounds.
    pages: u64,
    time: Duration,
    /// Pages, and the time that they took.
    pace: (u64, Duration),
    expected: Duration,
    best: Option<Duration>,
    /// The time of the first round.
    first: Option<Duration>,
    /// Since the best.
    rounds_since: u32,
    time_since: Duration,
}

impl Convergence {
    /// Begins. The VM may be stopped for `downtime` for its remaining pages.
    pub fn new(downtime: Duration, switch: Switch) -> Convergence {
        Convergence {
            downtime,
            switch,
            pages: 0,
            time: Duration::ZERO,
            pace: (0, Duration::ZERO),
            expected: Duration::MAX,
            best: None,
            first: None,
            rounds_since: 0,
            time_since: Duration::ZERO,
        }
    }

    /// The destination has said whether it can have pages later.
    pub fn may_switch(&mut self, switch: Switch) {
        self.switch = switch;
    }

    /// How long the VM would be stopped for the pages that the last round has left.
    pub fn expected(&self) -> Duration {
        self.expected
    }

    /// The same, if any page was sent that tells it.
    pub fn known(&self) -> Option<Duration> {
        Some(self.expected).filter(|expected| *expected < UNKNOWN)
    }

    /// Time that this number of pages takes.
    pub fn time_for(&self, pages: u64) -> Duration {
        match self.pace {
            (0, _) if pages > 0 => UNKNOWN,
            (0, _) => Duration::ZERO,
            (all, time) => time.mul_f64(pages as f64 / all as f64),
        }
    }

    /// Pages a second, in all rounds.
    pub fn pages_per_s(&self) -> u64 {
        match self.time.as_secs_f64() {
            0.0 => 0,
            taken => (self.pages as f64 / taken) as u64,
        }
    }

    /// Whether it is to be tried with a few pages whether later versions are smaller than the first ones. If not, the
    /// pages had better be fetched later.
    pub fn wants_trial(&self) -> bool {
        self.switch == Switch::IfNeeded && self.is_far()
    }

    /// Whether the expected pause is worth the faults of a VM that runs there before all its pages are there.
    fn is_far(&self) -> bool {
        self.expected > self.downtime.saturating_mul(FAR)
    }

    /// Takes a round into account.
    pub fn after(&mut self, round: Round) -> Next {
        self.pages += round.pages;
        self.time += round.time;
        let (pages, time) = match round.pages {
            ROUND_PAGES_MIN.. => (round.pages, round.time),
            _ => (self.pages, self.time),
        };
        self.pace = (pages, time);
        self.expected = self.time_for(round.left);
        let below = |share: f64| {
            self.best
                .is_none_or(|best| self.expected <= best.mul_f64(share))
        };
        let (progress, good) = (below(PROGRESS), below(AS_GOOD));
        if progress {
            self.best = Some(self.expected);
            (self.rounds_since, self.time_since) = (0, Duration::ZERO);
        } else {
            self.rounds_since += 1;
            self.time_since += round.time;
        }
        let first = *self.first.get_or_insert(round.time);
        let more = self.time.saturating_sub(first);
        let waited = |times: u32| {
            self.rounds_since >= PATIENCE_ROUNDS * times && self.time_since >= PATIENCE * times
                || more >= PATIENCE_IN_ALL.max(first) * times
        };
        let stop = self.expected <= self.downtime || waited(2) || waited(1) && good;
        match self.switch {
            Switch::AfterFirst => Next::Switch,
            Switch::IfNeeded if self.is_far() && stop => Next::Switch,
            _ if stop => Next::Stop,
            _ => Next::Round,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn round(pages: u64, ms: u32, left: u64) -> Round {
        Round {
            pages,
            time: ms * MS,
            left,
        }
    }

    #[test]
    fn what_can_be_sent_in_the_downtime_ends_it() {
        let mut rounds = Convergence::new(10 * MS, Switch::Never);
        // 50 pages take a millisecond.
        assert_eq!(rounds.after(round(50_000, 1000, 501)), Next::Round);
        assert_eq!(rounds.after(round(501, 10, 500)), Next::Stop);
        assert_eq!(rounds.pages_per_s(), 50_000);
    }

    #[test]
    fn a_round_of_deltas_counts_by_itself() {
        let mut rounds = Convergence::new(10 * MS, Switch::Never);
        rounds.after(round(100_000, 10_000, 30_000));
        assert_eq!(rounds.expected(), 3000 * MS);
        assert_eq!(rounds.after(round(30_000, 300, 1000)), Next::Stop);
        assert_eq!(rounds.expected(), 10 * MS);
        // A few pages are no measure.
        rounds.after(round(10, 100, 10));
        assert!(rounds.expected() < 10 * MS);
    }

    #[test]
    fn a_guest_that_never_rests_is_stopped_after_a_while() {
        let mut rounds = Convergence::new(10 * MS, Switch::Never);
        let ended = (1..).find(|_| rounds.after(round(30_000, 100, 30_000)) == Next::Stop);
        assert_eq!(ended, Some(1 + 10));
        let mut rounds = Convergence::new(10 * MS, Switch::Never);
        let ended = (1..).find(|_| rounds.after(round(30_000, 5000, 30_000)) == Next::Stop);
        assert_eq!(ended, Some(2));
    }

    #[test]
    fn nothing_is_expected_of_a_round_in_which_no_page_was_sent() {
        let mut rounds = Convergence::new(10 * MS, Switch::Never);
        assert_eq!(rounds.after(round(0, 200, 50_000)), Next::Round);
        assert_eq!(rounds.after(round(50_000, 500, 100)), Next::Stop);
        let mut rounds = Convergence::new(10 * MS, Switch::IfNeeded);
        rounds.after(round(0, 200, 50_000));
        assert!(rounds.wants_trial());
        assert_eq!(rounds.known(), None);
        rounds.after(round(50_000, 500, 100));
        assert_eq!(rounds.known(), Some(MS));
    }

    #[test]
    fn progress_without_end_ends_when_as_long_as_the_first_round() {
        let mut rounds = Convergence::new(MS, Switch::Never);
        assert_eq!(rounds.after(round(100_000, 3000, 90_000)), Next::Round);
        let mut left = 90_000;
        let ended = (2..).find(|_| {
            left = left / 8 * 7;
            rounds.after(round(left, left as u32 / 100, left / 8 * 7)) == Next::Stop
        });
        // 787, 689, 602, 527 and 461 ms.
        assert_eq!(ended, Some(6));
    }

    #[test]
    fn a_bad_moment_is_waited_out_for_so_long() {
        let mut rounds = Convergence::new(MS, Switch::Never);
        assert_eq!(rounds.after(round(10_000, 100, 5000)), Next::Round);
        let ended = (1..).find(|_| rounds.after(round(10_000, 100, 9000)) == Next::Stop);
        assert_eq!(ended, Some(20));
    }

    #[test]
    fn without_progress_the_rest_is_fetched_later_if_it_may_and_is_much() {
        let mut rounds = Convergence::new(10 * MS, Switch::IfNeeded);
        assert_eq!(rounds.after(round(100_000, 1000, 30_000)), Next::Round);
        assert!(rounds.wants_trial());
        let ended = (1..).find(|_| rounds.after(round(30_000, 300, 30_000)) != Next::Round);
        assert!(ended.is_some_and(|rounds| rounds > 3), "{ended:?}");
        assert_eq!(rounds.after(round(30_000, 300, 30_000)), Next::Switch);
        let mut rounds = Convergence::new(10 * MS, Switch::IfNeeded);
        assert_eq!(rounds.after(round(100_000, 1000, 4000)), Next::Round);
        // 40 ms are not far from 10 ms.
        assert!(!rounds.wants_trial());
        let ended = (1..).find_map(|_| match rounds.after(round(4000, 40, 4000)) {
            Next::Round => None,
            next => Some(next),
        });
        assert_eq!(ended, Some(Next::Stop));
        let mut rounds = Convergence::new(10 * MS, Switch::AfterFirst);
        assert_eq!(rounds.after(round(100_000, 1000, 0)), Next::Switch);
    }
}
