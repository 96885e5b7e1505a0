//! Decides when iterations of streaming pre-copy into a repository have converged: the remaining pages are few enough for
//! the pause, or no longer get fewer. (A migration has its own rule: `migration/convergence`.)

use stillframe_page::PAGE_BYTES;

/// Iterations after the bulk phase, at most.
const ITERATIONS_MAX: u32 = 8;

/// How much may be left for the pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Convergence {
    /// Room for staged pages, in bytes. The remaining pages go there while the guest writes more: half of it.
    pub buffer_bytes: u64,
}

impl Convergence {
    /// Whether the pages that are left should be streamed in another iteration. `before` is how many the last
    /// iteration streamed, `done` how many iterations came after the bulk phase.
    pub fn iterates(self, left: u64, before: u64, done: u32) -> bool {
        let shrinks = left <= before / 4 * 3;
        done < ITERATIONS_MAX && left > self.buffer_bytes / 2 / PAGE_BYTES && shrinks
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
        let buffer = Convergence {
            buffer_bytes: 8 << 20,
        };
        assert_eq!(iterations(buffer, 1 << 20, 0.1), (3, 104));
        assert_eq!(iterations(buffer, 1 << 20, 0.0001), (0, 104));
        assert_eq!(iterations(buffer, 1 << 20, 0.9).0, 0);
        // Eight at most, however slowly it shrinks.
        assert_eq!(iterations(buffer, 1 << 40, 0.74).0, ITERATIONS_MAX);
    }
}
