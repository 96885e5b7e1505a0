//! Back-pressure: how many captures may be in flight, by their memory and by their age.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// No more captures are added while one has been in flight for this long. Now and then the repository merges layers
/// and index files, which takes up to 100 ms: many of the shortest intervals. But a checkpoint should not be
/// durable much later than the next one was due.
const LAG_MAX: Duration = Duration::from_millis(250);

#[derive(Debug)]
struct Waiting {
    since: Instant,
    bytes: u64,
}

/// The captures in flight, the oldest first.
#[derive(Debug)]
pub(super) struct InFlight {
    captures: VecDeque<Waiting>,
    bytes_max: u64,
}

impl InFlight {
    /// None yet. `bytes_max` bounds their bytes together; a single capture may have more.
    pub(super) fn new(bytes_max: u64) -> InFlight {
        InFlight {
            captures: VecDeque::new(),
            bytes_max,
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.captures.len() as u64
    }

    pub(super) fn is_empty(&self) -> bool {
        self.captures.is_empty()
    }

    /// Whether a capture of `bytes` bytes may be added.
    pub(super) fn has_room(&self, bytes: u64, now: Instant) -> bool {
        let Some(oldest) = self.captures.front() else {
            return true;
        };
        let held: u64 = self.captures.iter().map(|waiting| waiting.bytes).sum();
        now.saturating_duration_since(oldest.since) < LAG_MAX && held + bytes <= self.bytes_max
    }

    pub(super) fn push(&mut self, bytes: u64, now: Instant) {
        self.captures.push_back(Waiting { since: now, bytes });
    }

    pub(super) fn pop(&mut self) {
        self.captures.pop_front();
    }

    pub(super) fn clear(&mut self) {
        self.captures.clear();
    }
}
