//! Whether the guest waits for pages that cannot be had.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use stillframe_repo::RepoError;

use crate::in_words;

/// What the threads that serve faults tell the one that looks after the VM.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    now: Mutex<Now>,
}

#[derive(Debug, Default)]
struct Now {
    /// Threads that cannot have the page they are after.
    threads: usize,
    since: Option<Instant>,
    words: String,
}

impl Trouble {
    /// A thread cannot have a page. `told` is whether it has said so before, for this page.
    pub(super) fn of_a_page(&self, error: &RepoError, told: &mut bool) {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        now.words = in_words(error);
        if !std::mem::replace(told, true) {
            now.threads += 1;
            now.since.get_or_insert_with(Instant::now);
        }
    }

    /// A thread has the page that it could not have.
    pub(super) fn is_over(&self) {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        now.threads = now.threads.saturating_sub(1);
        if now.threads == 0 {
            now.since = None;
        }
    }

    /// The guest has waited for a page for this long, because of this.
    pub(super) fn for_how_long(&self) -> Option<(Duration, String)> {
        let now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        now.since.map(|since| (since.elapsed(), now.words.clone()))
    }
}
