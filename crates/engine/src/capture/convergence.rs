//! Decides when iterations of streaming pre-copy have converged: the remaining pages are few enough for the pause,
//! or no longer get fewer.

use std::time::Duration;

use stillframe_page::PAGE_BYTES;

/// Iterations after the bulk phase, at most.
const ITERATIONS_MAX: u32 = 8;

/// How much may be left for the pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Convergence {
    /// The remaining pages go into the staging buffer while the guest writes more: half of this many bytes.
    Buffer {
        /// Room for staged pages.
        bytes: u64,
    },
    /// The remaining pages cross a link while the guest is stopped, as quickly as those before.
    Link {
        /// How long the guest may be stopped for it.
        downtime: Duration,
    },
}

/// How quickly pages were streamed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pace {
    /// Pages.
    pub pages: u64,
    /// In this time.
    pub time: Duration,
}

impl Pace {
    /// Pages that take this time.
    fn pages_in(self, time: Duration) -> u64 {
        // Without a pace nothing is known: all pages.
        match self.time.as_secs_f64() {
            0.0 => u64::MAX,
            taken => (self.pages as f64 / taken * time.as_secs_f64()) as u64,
        }
    }

    /// Time that pages take.
    pub fn time_for(self, pages: u64) -> Duration {
        match self.pages {
            0 => Duration::ZERO,
            all => self.time.mul_f64(pages as f64 / all as f64),
        }
    }

    /// Pages in a second.
    pub fn per_s(self) -> u64 {
        self.pages_in(Duration::from_secs(1))
    }
}

impl Convergence {
    /// Pages that may be left.
    fn pages_max(self, pace: Pace) -> u64 {
        match self {
            Convergence::Buffer { bytes } => bytes / 2 / PAGE_BYTES,
            Convergence::Link { downtime } => pace.pages_in(downtime),
        }
    }

    /// Whether the pages that are left should be streamed in another iteration. `before` is how many the last
    /// iteration streamed, `done` how many iterations came after the bulk phase, `pace` that of all of them.
    pub fn iterates(self, left: u64, before: u64, done: u32, pace: Pace) -> bool {
        let shrinks = left <= before / 4 * 3;
        done < ITERATIONS_MAX && left > self.pages_max(pace) && shrinks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Iterations for a guest that writes `rate` pages for each page that is streamed.
    fn iterations(convergence: Convergence, bulk: u64, rate: f64) -> (u32, u64) {
        let (mut before, mut done) = (bulk, 0);
        loop {
            let left = (before as f64 * rate) as u64;
            if !convergence.iterates(left, before, done, Pace::default()) {
                return (done, left);
            }
            (before, done) = (left, done + 1);
        }
    }

    #[test]
    fn a_guest_that_writes_little_converges_and_one_that_writes_much_is_given_up() {
        let buffer = Convergence::Buffer { bytes: 8 << 20 };
        assert_eq!(iterations(buffer, 1 << 20, 0.1), (3, 104));
        assert_eq!(iterations(buffer, 1 << 20, 0.0001), (0, 104));
        assert_eq!(iterations(buffer, 1 << 20, 0.9).0, 0);
        // Eight at most, however slowly it shrinks.
        assert_eq!(iterations(buffer, 1 << 40, 0.74).0, ITERATIONS_MAX);
    }

    #[test]
    fn a_link_leaves_what_it_carries_in_the_downtime() {
        let link = Convergence::Link {
            downtime: Duration::from_millis(100),
        };
        let pace = Pace {
            pages: 50_000,
            time: Duration::from_secs(2),
        };
        assert!(!link.iterates(2500, u64::MAX, 0, pace));
        assert!(link.iterates(2501, u64::MAX, 0, pace));
        assert_eq!(pace.time_for(2500), Duration::from_millis(100));
        assert_eq!(pace.per_s(), 25_000);
    }

    #[test]
    fn without_a_pace_nothing_takes_time() {
        let none = Pace::default();
        assert_eq!(none.time_for(7), Duration::ZERO);
        let link = Convergence::Link {
            downtime: Duration::from_millis(1),
        };
        assert!(!link.iterates(u64::MAX - 1, u64::MAX, 0, none));
    }
}
