//! For how long whoever asks for a page of the working set is held for the next ones.
//!
//! A fault costs about as much as filling a page, so who runs through many pages is better off when it gets
//! several at once. But who asks now and then would wait for what it does not need. Which of the two
//! it is shows in how soon it asks again.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// At first.
const SHORTEST: Duration = Duration::from_micros(250);
/// For who asks again and again.
const LONGEST: Duration = Duration::from_millis(2);
/// Who asks again within this time after it was let go runs through many pages.
const SOON: Duration = Duration::from_micros(500);

/// How the guest has asked lately; for all fault servers.
#[derive(Debug, Default)]
pub(super) struct Holding(Mutex<Lately>);

#[derive(Debug, Default)]
struct Lately {
    let_go: Option<Instant>,
    held: Duration,
}

impl Holding {
    /// How long to hold who asks now.
    pub(super) fn time(&self, now: Instant) -> Duration {
        let mut lately = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let soon = |at: Instant| now.saturating_duration_since(at) <= SOON;
        lately.held = match lately.let_go.is_some_and(soon) {
            true => (lately.held * 2).clamp(SHORTEST, LONGEST),
            false => SHORTEST,
        };
        lately.held
    }

    /// Notes that who was held is let go.
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
        let holding = Holding::default();
        let mut now = Instant::now();
        let mut held = |pause: Duration| {
            now += pause;
            let time = holding.time(now);
            now += time;
            holding.let_go(now);
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
