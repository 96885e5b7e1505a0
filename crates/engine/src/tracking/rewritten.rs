//! Pages that are written again between the scan that found them and the moment when they are to be sent. To send such
//! a page is in vain: the next scan finds it once more (D-Track, section 4.3: most *fake dirty pages* are of this kind,
//! because a page is sent with a write that was already seen, and is sent again because of that write).
//!
//! The paper's thread reads the dirty log again and again. A look at just the pages that are about to be sent finds more
//! of them, because it is never late, and costs the guest nothing: it protects nothing.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use stillframe_page::bitmap::DirtyBitmap;

use super::error::TrackerError;
use super::tracker::Peek;

/// Pages whose gap is smaller are looked for with one call: about as long as the call itself.
const NEAR_PAGES: u64 = 256;
/// The pause of the thread between two looks at all memory, where it has one (D-Track's second version).
pub const THREAD_DELAY: Duration = Duration::from_millis(50);

/// How pages that were written again are found.
#[derive(Debug, Clone)]
pub enum Rewritten {
    /// Not at all.
    Unknown,
    /// By a look at each batch before it is read.
    Look(Peek),
    /// By a thread that looks at all memory, again and again.
    Thread(Arc<Watcher>),
}

impl Rewritten {
    /// A thread that looks, with a pause of `delay` after each look.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn by_thread(peek: Peek, delay: Duration) -> std::io::Result<Rewritten> {
        Watcher::start(peek, delay).map(|watcher| Rewritten::Thread(Arc::new(watcher)))
    }

    /// All pages found until now are protected again: a round begins.
    pub fn begin_round(&self) {
        if let Rewritten::Thread(watcher) = self {
            watcher.shared.begin_round();
        }
    }

    /// Those of these pages that were written again, and maybe others.
    ///
    /// # Errors
    /// The pages cannot be looked at.
    pub fn among(
        &self,
        block: usize,
        pages: &[Range<u64>],
    ) -> Result<Vec<Range<u64>>, TrackerError> {
        match self {
            Rewritten::Unknown => Ok(Vec::new()),
            Rewritten::Look(peek) => {
                let looks = joined(pages).into_iter();
                let found = looks.map(|near| peek.written(block, near));
                Ok(found.collect::<Result<Vec<_>, _>>()?.concat())
            }
            Rewritten::Thread(watcher) => {
                let written = watcher.shared.written();
                let bitmap = &written[block];
                let each = pages.iter().cloned().flatten();
                let found = each.filter(|&page| bitmap.get(page));
                Ok(found.map(|page| page..page + 1).collect())
            }
        }
    }
}

/// Ranges, those joined that are near each other.
fn joined(pages: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in pages {
        match joined.last_mut() {
            Some(last) if range.start - last.end <= NEAR_PAGES => last.end = range.end,
            _ => joined.push(range.clone()),
        }
    }
    joined
}

/// A thread that looks. It ends when this is dropped.
#[derive(Debug)]
pub struct Watcher {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// Written since the round began, by block.
    written: Mutex<Vec<DirtyBitmap>>,
    /// What was seen in an earlier round says nothing of this one.
    round: AtomicU64,
    ends: AtomicBool,
}

impl Shared {
    fn written(&self) -> MutexGuard<'_, Vec<DirtyBitmap>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin_round(&self) {
        let mut written = self.written();
        self.round.fetch_add(1, Ordering::SeqCst);
        written.iter_mut().for_each(DirtyBitmap::clear_all);
    }

    /// Takes what was seen of a block, if the round is still that in which the look began.
    fn seen(&self, round: u64, block: usize, found: &[Range<u64>]) {
        let mut written = self.written();
        if self.round.load(Ordering::SeqCst) == round {
            found
                .iter()
                .for_each(|range| written[block].set_range(range.clone()));
        }
    }
}

impl Watcher {
    fn start(peek: Peek, delay: Duration) -> std::io::Result<Watcher> {
        let bitmaps = peek.blocks().iter();
        let bitmaps = bitmaps.map(|block| DirtyBitmap::new(block.pages()));
        let shared = Arc::new(Shared {
            written: Mutex::new(bitmaps.collect()),
            round: AtomicU64::new(0),
            ends: AtomicBool::new(false),
        });
        let own = shared.clone();
        let thread = std::thread::Builder::new().name("dirty pages".to_owned());
        let thread = thread.spawn(move || watch(&peek, &own, delay))?;
        Ok(Watcher {
            shared,
            thread: Some(thread),
        })
    }
}

/// Looks until the end. A look that fails finds nothing: then pages are sent that need not be.
fn watch(peek: &Peek, shared: &Shared, delay: Duration) {
    while !shared.ends.load(Ordering::Relaxed) {
        for (number, block) in peek.blocks().iter().enumerate() {
            let round = shared.round.load(Ordering::SeqCst);
            let found = peek.written(number, 0..block.pages());
            shared.seen(round, number, &found.unwrap_or_default());
        }
        std::thread::sleep(delay);
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_pages_are_looked_for_together() {
        assert!(joined(&[]).is_empty());
        let far = 2 + NEAR_PAGES + 1;
        let pages = [0..1, 1 + NEAR_PAGES..2 + NEAR_PAGES, 2 * far..2 * far + 1];
        assert_eq!(joined(&pages), [0..2 + NEAR_PAGES, 2 * far..2 * far + 1]);
    }

    #[test]
    fn what_was_seen_before_a_round_says_nothing_of_it() {
        let shared = Shared {
            written: Mutex::new(vec![DirtyBitmap::new(8)]),
            round: AtomicU64::new(0),
            ends: AtomicBool::new(false),
        };
        shared.seen(0, 0, &[1..2, 3..4]);
        assert_eq!(shared.written()[0].count(), 2);
        shared.begin_round();
        assert_eq!(shared.written()[0].count(), 0);
        shared.seen(0, 0, &[1..2, 3..4]);
        assert_eq!(shared.written()[0].count(), 0);
        shared.seen(1, 0, &[4..5, 6..7]);
        assert_eq!(shared.written()[0].count(), 2);
    }
}
