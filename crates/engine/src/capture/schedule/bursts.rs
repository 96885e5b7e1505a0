//! Bursts of writes: a pause does not begin in the middle of one.
//!
//! A guest that writes now and then, and much each time, is stopped best between two bursts. In a burst, pages
//! written after the last round are copied in the pause. QEMU also needs several milliseconds to halt a vCPU that
//! takes one fault after the other. 7 of 100 pauses of a guest that writes 4500 pages five times a second took 12
//! to 15 ms instead of 2 to 3.

use std::thread;
use std::time::{Duration, Instant};

use super::FEW_PAGES;
use crate::tracking::error::TrackerError;
use crate::tracking::tracker::Tracker;

/// The longest wait for the end of a burst.
const WAIT_MAX: Duration = Duration::from_millis(50);
/// A wait takes at most the interval between captures divided by this.
const INTERVAL_SHARE: u32 = 16;
/// Less than this is not worth a scan of all memory.
const WAIT_MIN: Duration = Duration::from_millis(5);
/// Between two looks, besides the scan that a look is.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// A guest writes no more than this between two looks when its burst is over, in pages.
const CALM_PAGES: u64 = 32;
/// The most captures that do not wait after one that waited in vain.
const SKIPPED_MAX: u32 = 64;

/// Waits for the end of bursts, and learns where they have none.
#[derive(Debug, Default)]
pub struct Bursts {
    /// Captures that still do not wait.
    skipping: u32,
    /// How many did not after the last wait in vain; doubled by the next.
    skipped: u32,
    /// How long this capture may wait; none where it does not.
    wait: Option<Duration>,
    /// When its wait ends; none before its first look.
    deadline: Option<Instant>,
}

/// The result of a wait.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    /// No burst.
    Calm,
    /// One that ended.
    Ended,
    /// Writes that did not end in time.
    Endless,
}

impl Bursts {
    /// A capture begins, `interval` after the one before.
    pub fn begin(&mut self, interval: Duration) {
        let wait = WAIT_MAX.min(interval / INTERVAL_SHARE);
        self.wait = (wait >= WAIT_MIN && !self.skips()).then_some(wait);
        self.deadline = None;
    }

    /// Waits for the end of a burst, if the guest is in one. Returns true if there was one, so that its pages
    /// should be collected before the next look; false if the pause may begin.
    ///
    /// # Errors
    /// [`TrackerError`] of a scan.
    pub fn outlast(&mut self, tracker: &Tracker) -> Result<bool, TrackerError> {
        let Some(wait) = self.wait else {
            return Ok(false);
        };
        let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + wait);
        let late = || Instant::now() >= deadline;
        if late() {
            return Ok(false);
        }
        let seen = watch(|| tracker.written_pages(), late)?;
        self.learn(&seen);
        Ok(seen != Seen::Calm)
    }

    fn learn(&mut self, seen: &Seen) {
        match seen {
            Seen::Calm => self.skipped = 0,
            Seen::Ended => {}
            Seen::Endless => {
                self.skipped = (self.skipped * 2).clamp(1, SKIPPED_MAX);
                self.skipping = self.skipped;
            }
        }
    }

    /// Whether this capture is one of those that do not wait.
    fn skips(&mut self) -> bool {
        let skips = self.skipping > 0;
        self.skipping = self.skipping.saturating_sub(1);
        skips
    }
}

/// Polls the number of written pages until it stays about the same, or until it is `late`.
fn watch<E>(
    mut written: impl FnMut() -> Result<u64, E>,
    late: impl Fn() -> bool,
) -> Result<Seen, E> {
    let mut before = written()?;
    if before <= FEW_PAGES {
        return Ok(Seen::Calm);
    }
    while !late() {
        thread::sleep(LOOK_EVERY);
        let now = written()?;
        if now.saturating_sub(before) <= CALM_PAGES {
            return Ok(Seen::Ended);
        }
        before = now;
    }
    Ok(Seen::Endless)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The result of a watch that may poll this often, with these numbers of written pages.
    fn seen(looks: usize, numbers: &[u64]) -> Seen {
        let left = std::cell::Cell::new(looks);
        let mut numbers = numbers.iter().copied();
        let written = || {
            left.set(left.get().saturating_sub(1));
            Ok::<_, ()>(numbers.next().expect("a look too many"))
        };
        watch(written, || left.get() == 0).expect("numbers only")
    }

    #[test]
    fn a_pause_waits_for_the_end_of_a_burst() {
        assert_eq!(seen(9, &[0]), Seen::Calm);
        assert_eq!(seen(9, &[FEW_PAGES]), Seen::Calm);
        assert_eq!(seen(9, &[600, 900, 1500, 1510]), Seen::Ended);
        // Written before, and nothing since.
        assert_eq!(seen(9, &[4000, 4000]), Seen::Ended);
        // Pages that are taken away (a discard) are no burst either.
        assert_eq!(seen(9, &[4000, 100]), Seen::Ended);
    }

    #[test]
    fn a_pause_does_not_wait_for_ever() {
        assert_eq!(seen(3, &[1000, 2000, 3000]), Seen::Endless);
        assert_eq!(seen(1, &[1000]), Seen::Endless);
    }

    #[test]
    fn a_wait_in_vain_is_not_repeated_at_once() {
        let mut bursts = Bursts::default();
        let mut waits = |seen: Option<Seen>| {
            bursts.begin(Duration::from_secs(2));
            if let Some(seen) = seen {
                bursts.learn(&seen);
            }
            bursts.wait.is_some()
        };
        assert!(waits(Some(Seen::Endless)));
        assert!(!waits(None));
        assert!(waits(Some(Seen::Endless)));
        assert!(!waits(None) && !waits(None));
        assert!(waits(Some(Seen::Calm)));
        assert!(waits(Some(Seen::Endless)));
        assert!(!waits(None));
        assert!(waits(None));
    }

    #[test]
    fn captures_in_quick_succession_do_not_wait() {
        let mut bursts = Bursts::default();
        for (interval_ms, wait_ms) in [(10, None), (79, None), (160, Some(10)), (2000, Some(50))] {
            bursts.begin(Duration::from_millis(interval_ms));
            assert_eq!(bursts.wait, wait_ms.map(Duration::from_millis));
        }
    }
}
