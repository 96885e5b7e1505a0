//! Storing captures, one after the other, on a thread of its own, while the guest runs and more are made.
//!
//! ```text
//!   watch --captures--> [ some, waiting ] --> store, commit --landings--> watch
//! ```
//!
//! Each is an increment of the one before. So when one cannot be stored, those behind it are not stored
//! either, and come back as they are.

use std::collections::VecDeque;
use std::io;
use std::panic;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use stillframe_engine::capture::aside;
use stillframe_engine::checkpoint::{Captured, CheckpointError, CheckpointOptions, Shelf, Stored};
use stillframe_repo::Repository;

use crate::interrupt::{Interrupted, Interrupts};

/// No more captures are added while one has been under way for so long. What the repository does now
/// and then, merging layers and index files, takes up to 100 ms, many intervals of the shortest; but no
/// checkpoint should be durable much later than the next one was due.
const LAG_MAX: Duration = Duration::from_millis(250);

/// So long the repository stays locked for the next capture.
const LOCK_KEPT: Duration = Duration::from_millis(50);

/// The repository, and what storing knows.
pub struct Shore {
    pub repository: Repository,
    pub shelf: Shelf,
}

/// What became of a capture.
pub struct Landing {
    pub captured: Captured,
    /// `None`: one before it could not be stored.
    pub stored: Option<Result<Result<Stored, CheckpointError>, Interrupted>>,
}

struct Waiting {
    since: Instant,
    bytes: u64,
}

/// The thread, and what is under way.
pub struct Storing {
    captures: Sender<Captured>,
    landings: Receiver<Landing>,
    thread: JoinHandle<Shore>,
    /// Those under way, the oldest first.
    under_way: VecDeque<Waiting>,
    /// So much memory may be under way, unless it is of one alone.
    bytes_max: u64,
}

impl Storing {
    /// Starts the thread.
    pub fn start(
        shore: Shore,
        options: &CheckpointOptions,
        interrupts: &Interrupts,
    ) -> io::Result<Storing> {
        let (captures, from) = channel();
        let (to, landings) = channel();
        let thread = {
            let (options, interrupts) = (options.clone(), interrupts.clone());
            let work = move || store_all(shore, &from, &to, &options, &interrupts);
            thread::Builder::new().name("store".to_owned()).spawn(work)
        };
        Ok(Storing {
            captures,
            landings,
            thread: thread?,
            under_way: VecDeque::new(),
            // The other half is for the capture being made.
            bytes_max: options.copy_buffer_bytes / 2,
        })
    }

    /// How many are under way.
    pub fn under_way(&self) -> u64 {
        self.under_way.len() as u64
    }

    /// Whether one more may be under way.
    pub fn has_room(&self, captured: &Captured) -> bool {
        let Some(oldest) = self.under_way.front() else {
            return true;
        };
        let bytes: u64 = self.under_way.iter().map(|waiting| waiting.bytes).sum();
        oldest.since.elapsed() < LAG_MAX && bytes + captured.bytes() <= self.bytes_max
    }

    /// Has one stored, after those under way.
    pub fn store(&mut self, captured: Captured) {
        self.under_way.push_back(Waiting {
            since: Instant::now(),
            bytes: captured.bytes(),
        });
        // A thread that is gone is found out by who waits for it.
        let _ = self.captures.send(captured);
    }

    /// The oldest of those under way, if it has arrived.
    pub fn arrived(&mut self) -> Option<Landing> {
        let landing = self.landings.try_recv().ok()?;
        self.under_way.pop_front();
        Some(landing)
    }

    /// Waits for the oldest of those under way; `None` when there is none.
    pub fn wait(&mut self) -> Option<Landing> {
        self.under_way.pop_front()?;
        self.landings.recv().ok()
    }

    /// Ends the thread when all is stored.
    pub fn end(self) -> Shore {
        drop(self.captures);
        self.thread
            .join()
            .unwrap_or_else(|panic| panic::resume_unwind(panic))
    }
}

fn store_all(
    mut shore: Shore,
    captures: &Receiver<Captured>,
    landings: &Sender<Landing>,
    options: &CheckpointOptions,
    interrupts: &Interrupts,
) -> Shore {
    aside::step_back();
    let mut failed = false;
    while let Some(captured) = next(captures, &mut shore.repository) {
        let Shore { repository, shelf } = &mut shore;
        let stored = (!failed).then(|| {
            interrupts.interruptible(|| {
                shelf.store(&captured, repository, options, &mut |_| interrupts.step())
            })
        });
        failed |= !matches!(stored, Some(Ok(Ok(_))));
        // Whoever does not want it any more is ending the watch.
        let _ = landings.send(Landing { captured, stored });
    }
    shore
}

/// Waits for the next capture. While they come quickly the repository stays locked against removal.
fn next(captures: &Receiver<Captured>, repository: &mut Repository) -> Option<Captured> {
    let captured = match captures.recv_timeout(LOCK_KEPT) {
        Err(RecvTimeoutError::Timeout) => {
            repository.keep_lock(false);
            captures.recv().ok()
        }
        soon => soon.ok(),
    };
    repository.keep_lock(captured.is_some());
    captured
}
