//! Decides when iterations of streaming pre-copy have converged: the remaining pages are few enough for the pause,
//! or no longer get fewer.

use std::num::NonZeroU64;
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
    /// The remaining pages cross a link while the guest is stopped.
    Link {
        /// The bandwidth of the link.
        bytes_per_s: NonZeroU64,
        /// How long the guest may be stopped for it.
        downtime: Duration,
    },
}

impl Convergence {
    /// Pages that may be left.
    fn pages_max(self) -> u64 {
        let bytes = match self {
            Convergence::Buffer { bytes } => bytes / 2,
            Convergence::Link {
                bytes_per_s,
                downtime,
            } => (bytes_per_s.get() as f64 * downtime.as_secs_f64()) as u64,
        };
        bytes / PAGE_BYTES
    }

    /// Whether the pages that are left should be streamed in another iteration. `before` is how many the last
    /// iteration streamed, `done` how many iterations came after the bulk phase.
    pub fn iterates(self, left: u64, before: u64, done: u32) -> bool {
        let shrinks = left <= before / 4 * 3;
        done < ITERATIONS_MAX && left > self.pages_max() && shrinks
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
            if !convergence.iterates(left, before, done) {
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
            bytes_per_s: NonZeroU64::new(100 << 20).unwrap(),
            downtime: Duration::from_millis(100),
        };
        let carried = (10 << 20) / PAGE_BYTES;
        assert!(!link.iterates(carried, u64::MAX, 0));
        assert!(link.iterates(carried + 1, u64::MAX, 0));
    }
}
