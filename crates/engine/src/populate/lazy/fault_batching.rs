//! Fault batching: for how long a thread that faults on a page of the working set is held for the next pages.
//!
//! A fault costs about as much as populating a page, so a thread that runs through many pages gains when it gets
//! several at once. A thread that faults now and then would wait for pages that it does not need. The time
//! until the next fault distinguishes the two.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The first hold.
const SHORTEST: Duration = Duration::from_micros(250);
/// The longest hold, for a thread that faults again and again.
const LONGEST: Duration = Duration::from_millis(2);
/// A thread that faults again within this time after it was woken runs through many pages.
const SOON: Duration = Duration::from_micros(500);

/// The guest's latest faults; for all fault handlers.
#[derive(Debug, Default)]
pub(super) struct FaultBatching(Mutex<Lately>);

#[derive(Debug, Default)]
struct Lately {
    let_go: Option<Instant>,
    held: Duration,
}

impl FaultBatching {
    /// How long to hold a thread that faults now.
    pub(super) fn time(&self, now: Instant) -> Duration {
        let mut lately = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let soon = |at: Instant| now.saturating_duration_since(at) <= SOON;
        lately.held = match lately.let_go.is_some_and(soon) {
            true => (lately.held * 2).clamp(SHORTEST, LONGEST),
            false => SHORTEST,
        };
        lately.held
    }

    /// Notes that the held thread is woken.
    pub(super) fn let_go(&self, now: Instant) {
        let mut lately = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lately.let_go = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_again_soon_is_held_longer() {
        let batching = FaultBatching::default();
        let mut now = Instant::now();
        let mut held = |pause: Duration| {
            now += pause;
            let time = batching.time(now);
            now += time;
            batching.let_go(now);
            time
        };
        let times: Vec<Duration> = (0..6).map(|_| held(SOON / 2)).collect();
        let expected = [1, 2, 4, 8, 8, 8].map(|times| SHORTEST * times);
        assert_eq!(times, expected);
        assert_eq!(times[5], LONGEST);
        assert_eq!(held(SOON * 2), SHORTEST);
        assert_eq!(held(SOON), SHORTEST * 2);
    }
}
