//! Looks at the guest in the middle of the first round: one that writes a large part of its memory meanwhile will have to
//! be fetched anyway, and all that is not sent yet had better be fetched with it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::page_sender::{LITTLE, Ongoing};
use crate::memory::ranges::length;
use crate::tracking::tracker::Peek;

/// The time before the first look, and at least between two of them.
const EVERY: Duration = Duration::from_millis(100);
/// The pause between two looks is at least this multiple of the time that a look takes, which is long in a VM with much memory.
const RESTS: u32 = 9;
/// A round is not cut short if the VM would lack pages for longer than this at the destination.
const LACKING_MAX: Duration = Duration::from_secs(10);
/// The guest's writes are foreseen for this multiple of the time since the round began, at most.
const FORESIGHT: f64 = 10.0;
/// A large part is more than one page in this number.
const LARGE: f64 = 3.0;

/// A thread that looks at the guest during a round, which it cuts short. It ends when this is dropped.
pub(super) struct Looking {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Looking {
    /// Looks at a round of `pages` pages, which begins now. It is left alone while they leave as `changes`, which are little.
    ///
    /// # Errors
    /// There is no thread.
    pub fn begin(
        peek: Peek,
        (pages, changes): (u64, bool),
        round: Arc<Ongoing>,
    ) -> std::io::Result<Looking> {
        let look = Look {
            peek,
            pages,
            changes,
            round,
            begun: Instant::now(),
            last: None,
        };
        let ends = Arc::new(AtomicBool::new(false));
        let own = Arc::clone(&ends);
        let thread = thread::Builder::new().name("look".to_owned());
        let thread = thread.spawn(move || look.until(&own))?;
        Ok(Looking {
            ends,
            thread: Some(thread),
        })
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// The looks of a round.
struct Look {
    peek: Peek,
    /// Of the round.
    pages: u64,
    /// The destination has what many of them are changes of.
    changes: bool,
    round: Arc<Ongoing>,
    begun: Instant,
    last: Option<Seen>,
}

/// What one of them has found.
#[derive(Debug, Clone, Copy)]
struct Seen {
    /// Since the round began.
    at: Duration,
    /// Pages that were written since then.
    written: u64,
    /// Pages that have left.
    sent: u64,
    /// And their bytes.
    bytes: u64,
}

impl Seen {
    /// Whether most pages have left as changes, or none has left.
    fn are_little(&self) -> bool {
        self.bytes <= self.sent * LITTLE
    }
}

impl Look {
    /// Looks again and again, until the guest is found to be busy.
    fn until(mut self, ends: &AtomicBool) {
        let mut next = EVERY;
        while !ends.load(Ordering::Relaxed) {
            let at = self.begun.elapsed();
            if at < next {
                thread::park_timeout(next - at);
                continue;
            }
            if self.is_busy(at) {
                self.round.cut_short.store(true, Ordering::Relaxed);
                return;
            }
            let took = self.begun.elapsed() - at;
            next = at + took + EVERY.max(took * RESTS);
        }
    }

    fn is_busy(&mut self, at: Duration) -> bool {
        let blocks = self.peek.blocks().iter().enumerate();
        let written = blocks.map(|(block, memory)| self.peek.written(block, 0..memory.pages()));
        let seen = Seen {
            at,
            // A look that fails finds nothing. The round's end looks again.
            written: written.flatten().map(|written| length(&written)).sum(),
            sent: self.round.sent.load(Ordering::Relaxed),
            bytes: self.round.bytes.load(Ordering::Relaxed),
        };
        let busy = is_busy(self.last.replace(seen), seen, self.pages);
        busy && !(self.changes && seen.are_little())
    }
}

/// Whether the guest will have written a large part of a round of `pages` pages, if it goes on as between these looks; after
/// the first look, whether it has. One that writes the same pages over and over again will not.
fn is_busy(last: Option<Seen>, seen: Seen, pages: u64) -> bool {
    let left = pages.saturating_sub(seen.sent) as f64;
    let watched = seen.at.as_secs_f64();
    let takes = left * watched / (seen.sent as f64).max(1.0);
    if left == 0.0 || takes > LACKING_MAX.as_secs_f64() {
        return false;
    }
    let foreseen = takes.min(watched * FORESIGHT);
    let more = last.map_or(0.0, |last| {
        let more = seen.written.saturating_sub(last.written) as f64;
        more / (seen.at - last.at).as_secs_f64() * foreseen
    });
    (seen.written as f64 + more) * LARGE > pages as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 48 000 pages take 1.6 s.
    const PAGES: u64 = 48_000;

    fn seen(ms: u64, written: u64, sent: u64) -> Seen {
        Seen {
            at: Duration::from_millis(ms),
            written,
            sent,
            bytes: 0,
        }
    }

    #[test]
    fn changes_are_less_than_a_page() {
        let seen = |sent, bytes| Seen {
            bytes,
            ..seen(100, 0, sent)
        };
        assert!(seen(0, 0).are_little());
        assert!(seen(1000, 100_000).are_little());
        assert!(!seen(1000, 1_000_000).are_little());
    }

    fn after_two(first: Seen, second: Seen) -> bool {
        is_busy(Some(first), second, PAGES)
    }

    #[test]
    fn a_guest_is_busy_if_it_will_have_written_a_third() {
        assert!(is_busy(None, seen(100, 16_001, 3000), PAGES));
        assert!(!is_busy(None, seen(100, 15_999, 3000), PAGES));
        assert!(after_two(seen(100, 1100, 3000), seen(200, 2200, 6000)));
        assert!(!after_two(seen(100, 900, 3000), seen(200, 1800, 6000)));
    }

    #[test]
    fn few_pages_written_over_and_over_again_are_not_busy() {
        assert!(!after_two(seen(100, 8000, 3000), seen(200, 8000, 6000)));
        assert!(!after_two(seen(100, 0, 3000), seen(200, 0, 6000)));
    }

    /// What a guest writes in the first moments says nothing of the minutes that a slow link takes.
    #[test]
    fn a_slow_link_leaves_the_round_alone() {
        assert!(!after_two(seen(100, 20_000, 200), seen(200, 30_000, 400)));
        assert!(after_two(seen(100, 20_000, 700), seen(200, 30_000, 1400)));
        // 6.5 s are left, of which two are foreseen.
        assert!(after_two(seen(100, 800, 700), seen(200, 1600, 1400)));
        assert!(!after_two(seen(100, 600, 700), seen(200, 1200, 1400)));
    }

    #[test]
    fn a_round_that_is_over_is_not_cut_short() {
        assert!(!is_busy(None, seen(100, PAGES, PAGES), PAGES));
    }
}
