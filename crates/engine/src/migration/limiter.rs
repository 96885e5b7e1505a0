//! Keeps all connections of a migration to one bandwidth.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A bandwidth, shared by the threads that send.
#[derive(Debug)]
pub(super) struct Limiter {
    bytes_per_s: Option<NonZeroU64>,
    begin: Instant,
    sent: AtomicU64,
    lifted: AtomicBool,
}

/// A thread that waits looks this often whether the limit was lifted.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

impl Limiter {
    /// Begins now.
    pub fn new(bytes_per_s: Option<NonZeroU64>) -> Limiter {
        Limiter {
            bytes_per_s,
            begin: Instant::now(),
            sent: AtomicU64::new(0),
            lifted: AtomicBool::new(false),
        }
    }

    /// Counts bytes that were sent; sleeps until the bandwidth allows all that were, or the limit is lifted.
    pub fn wait(&self, bytes: u64) {
        let end = self.begin.elapsed() + self.left(bytes, self.begin.elapsed());
        while !self.lifted.load(Ordering::Relaxed) {
            match end.saturating_sub(self.begin.elapsed()) {
                Duration::ZERO => return,
                left => std::thread::sleep(left.min(LOOK_AGAIN)),
            }
        }
    }

    /// There is no limit from here on: the VM is stopped.
    pub fn lift(&self) {
        self.lifted.store(true, Ordering::Relaxed);
    }

    fn left(&self, bytes: u64, since: Duration) -> Duration {
        let Some(bytes_per_s) = self.bytes_per_s else {
            return Duration::ZERO;
        };
        let sent = self.sent.fetch_add(bytes, Ordering::Relaxed) + bytes;
        Duration::from_secs_f64(sent as f64 / bytes_per_s.get() as f64).saturating_sub(since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_count_towards_one_bandwidth() {
        let limiter = Limiter::new(NonZeroU64::new(1000));
        let second = Duration::from_secs(1);
        assert_eq!(limiter.left(2000, Duration::ZERO), 2 * second);
        assert_eq!(limiter.left(1000, second), 2 * second);
        assert_eq!(limiter.left(0, 5 * second), Duration::ZERO);
        let free = Limiter::new(None);
        assert_eq!(free.left(u64::MAX, Duration::ZERO), Duration::ZERO);
    }
}
