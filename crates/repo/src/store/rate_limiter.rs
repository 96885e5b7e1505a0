//! The rate limiter: keeps writes below a rate, so that checkpoints leave the disk to other processes.

use std::num::NonZeroU64;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// A limit on the rate of writes that several threads share; no limit at first.
#[derive(Debug, Default)]
pub(crate) struct RateLimiter {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    bytes_per_s: Option<NonZeroU64>,
    /// The moment from which the bytes written so far are within the rate.
    paid: Option<Instant>,
}

impl RateLimiter {
    /// Sets the limit of later writes.
    pub(crate) fn limit(&self, bytes_per_s: Option<NonZeroU64>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        *state = State {
            bytes_per_s,
            paid: None,
        };
    }

    /// Waits, before a write of `bytes` bytes, until the writes before it are within the rate.
    pub(crate) fn wait(&self, bytes: usize) {
        thread::sleep(self.due(bytes, Instant::now()));
    }

    /// How long to wait at `now` before writing `bytes` more.
    fn due(&self, bytes: usize, now: Instant) -> Duration {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(rate) = state.bytes_per_s else {
            return Duration::ZERO;
        };
        let start = state.paid.map_or(now, |paid| paid.max(now));
        state.paid = Some(start + Duration::from_secs_f64(bytes as f64 / rate.get() as f64));
        start - now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_waits_until_those_before_it_are_within_the_rate() {
        let limiter = RateLimiter::default();
        let now = Instant::now();
        assert_eq!(limiter.due(1 << 30, now), Duration::ZERO);
        limiter.limit(NonZeroU64::new(1000));
        assert_eq!(limiter.due(500, now), Duration::ZERO);
        assert_eq!(limiter.due(250, now), Duration::from_millis(500));
        assert_eq!(limiter.due(0, now), Duration::from_millis(750));
        // Idle time gives no credit.
        let later = now + Duration::from_secs(10);
        assert_eq!(limiter.due(2000, later), Duration::ZERO);
        assert_eq!(limiter.due(1, later), Duration::from_secs(2));
        limiter.limit(None);
        assert_eq!(limiter.due(1, later), Duration::ZERO);
    }
}
