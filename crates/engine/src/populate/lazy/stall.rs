//! Stalls: whether the guest waits for pages that cannot be read.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::in_words;
use crate::source::SourceError;

/// A page takes this long on storage that is slow; on one that hangs, longer.
const SLOW: Duration = Duration::from_millis(500);

/// Stalls that the fault handlers report to the supervisor of the VM.
#[derive(Debug)]
pub(super) struct Stall {
    now: Mutex<Now>,
    begun: Instant,
    /// For each thread, since when it handles its fault, in microseconds from `begun`; 0 for none.
    serving: Vec<AtomicU64>,
}

#[derive(Debug, Default)]
struct Now {
    /// Threads that cannot read their page.
    threads: usize,
    since: Option<Instant>,
    words: String,
}

impl Stall {
    /// A stall detector for this many threads.
    pub(super) fn new(threads: usize) -> Stall {
        Stall {
            now: Mutex::default(),
            begun: Instant::now(),
            serving: (0..threads).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// A thread handles a fault from here on. It may never report anything more: a read from storage
    /// that hangs does not return.
    pub(super) fn begins(&self, thread: usize) {
        let now = self.begun.elapsed().as_micros() as u64;
        self.serving[thread].store(now.max(1), Ordering::Relaxed);
    }

    /// The thread has handled its fault.
    pub(super) fn ends(&self, thread: usize) {
        self.serving[thread].store(0, Ordering::Relaxed);
    }

    /// The longest time for which a thread has handled its present fault.
    fn slowest(&self) -> Option<Duration> {
        let begun = self.serving.iter().map(|at| at.load(Ordering::Relaxed));
        let first = begun.filter(|&at| at > 0).min()?;
        let time = self.begun.elapsed();
        Some(time.saturating_sub(Duration::from_micros(first)))
    }

    /// A thread cannot read a page. `reported` is whether it has reported this before, for this page.
    pub(super) fn of_a_page(&self, error: &SourceError, reported: &mut bool) {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        now.words = in_words(error);
        if !std::mem::replace(reported, true) {
            now.threads += 1;
            now.since.get_or_insert_with(Instant::now);
        }
    }

    /// A thread has read the page that it could not read.
    pub(super) fn is_over(&self) {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        now.threads = now.threads.saturating_sub(1);
        if now.threads == 0 {
            now.since = None;
        }
    }

    /// How long the guest has waited for a page, and why.
    pub(super) fn for_how_long(&self) -> Option<(Duration, String)> {
        let now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(since) = now.since {
            return Some((since.elapsed(), now.words.clone()));
        }
        let slow = self.slowest().filter(|&time| time > SLOW)?;
        Some((slow, "the repository does not answer".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_that_does_not_return_is_a_stall_until_it_does() {
        let stall = Stall::new(2);
        stall.begins(1);
        assert!(stall.for_how_long().is_none(), "every page takes a moment");
        std::thread::sleep(SLOW + Duration::from_millis(20));
        stall.begins(0);
        let (time, _) = stall.for_how_long().unwrap();
        assert!(time > SLOW);
        stall.ends(1);
        assert!(stall.for_how_long().is_none());
    }
}
