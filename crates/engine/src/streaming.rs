//! Streaming pre-copy, into any sink. Pages leave while the guest runs, a batch at a time, until the remaining
//! pages are few enough for the pause or no longer get fewer.

mod read_ahead;

use stillframe_page::hash::ContentHasher;
use stillframe_qemu::monitor::Monitor;
use stillframe_sys::process::Process;
use thiserror::Error;

use crate::attach::Vm;
use crate::capture::convergence::Convergence;
use crate::encoding::page_encoder::EncodedPages;
use crate::memory::Page;
use crate::memory::block::{Block, BlockError};
use crate::memory::ranges::subtract_all;
use crate::tracking::error::TrackerError;
use crate::tracking::tracker::{Collected, Tracker};
use crate::{Progress, ProgressSink};

use self::read_ahead::read_ahead;

/// The pages of an iteration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Iteration {
    /// Every page that may have content.
    Bulk,
    /// The pages written since the last checkpoint, or the last iteration.
    Written,
}

/// Why an iteration failed. The VM runs on, and the sink has some of its pages.
#[derive(Debug, Error)]
pub(crate) enum StreamingError<E> {
    /// Tracking failed.
    #[error("cannot capture the VM's memory")]
    Tracker(#[from] TrackerError),
    /// Reading memory failed.
    #[error("cannot read the VM's memory")]
    Block(#[from] BlockError),
    /// No thread.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// The sink failed.
    #[error(transparent)]
    Sink(E),
}

/// Takes a batch of ascending pages of one block, given by its number, and what they are stored as.
pub(crate) type TakePages<'t, E> =
    &'t mut dyn FnMut(Iteration, usize, &[Page<'_>], EncodedPages) -> Result<(), E>;

/// The parts of a VM that its pages are streamed from.
pub(crate) struct Streaming<'v> {
    pub tracker: &'v mut Tracker,
    pub monitor: &'v mut Monitor,
    pub process: &'v Process,
}

impl Vm {
    /// Streams iterations, beginning with `first`, until they have converged. The next capture finds the remaining
    /// pages. Returns how many were streamed, each counted as often as it was.
    pub(crate) fn stream<E>(
        &mut self,
        first: Iteration,
        convergence: Convergence,
        hasher: &ContentHasher,
        take: TakePages<'_, E>,
        progress: ProgressSink<'_>,
    ) -> Result<u64, StreamingError<E>> {
        let mut streaming = Streaming {
            tracker: &mut self.tracker,
            monitor: &mut self.monitor,
            process: &self.target.process,
        };
        let mut wanted = streaming.wanted(first)?;
        let (mut streamed, mut iteration) = (0, first);
        // The pages written during an iteration may be too many again; as long as they get fewer, iterate.
        for done in 0.. {
            let pages = streaming.iterate(iteration, &wanted, hasher, take, progress)?;
            streamed += pages;
            iteration = Iteration::Written;
            wanted = streaming.wanted(iteration)?;
            if !convergence.iterates(wanted.pages(), pages, done) {
                break;
            }
        }
        Ok(streamed)
    }
}

impl Streaming<'_> {
    /// The remaining pages of a VM that is stopped.
    pub fn rest(&mut self) -> Result<Collected, TrackerError> {
        let found = self.tracker.collect_stopped()?;
        Ok(self.pending(found))
    }

    /// All that is pending, by the last scan.
    pub fn pending(&self, mut found: Collected) -> Collected {
        found.written = subtract_all(&self.tracker.pending(), &found.discarded);
        found
    }

    /// The pages of an iteration. The next scan finds the writes from here on.
    pub fn wanted(&mut self, iteration: Iteration) -> Result<Collected, TrackerError> {
        Ok(match iteration {
            Iteration::Bulk => {
                // The bulk phase reads pages that were written before it.
                self.tracker.drop_pending();
                let wanted = self.tracker.populated()?.drained(self.monitor)?;
                // A page that is discarded before the pause has been streamed with its content.
                self.tracker.expect_content(&wanted.written);
                wanted
            }
            Iteration::Written => {
                let found = self.found()?;
                self.pending(found)
            }
        })
    }

    /// The pages written since the last scan. The next one finds the writes from here on.
    pub fn found(&mut self) -> Result<Collected, TrackerError> {
        self.tracker.collect_running()?.drained(self.monitor)
    }

    /// One iteration, a batch at a time. Returns how many pages that were.
    fn iterate<E>(
        &mut self,
        iteration: Iteration,
        wanted: &Collected,
        hasher: &ContentHasher,
        take: TakePages<'_, E>,
        progress: ProgressSink<'_>,
    ) -> Result<u64, StreamingError<E>> {
        if iteration == Iteration::Written {
            self.tracker.streamed(wanted);
        }
        let total = wanted.pages();
        let mut done = 0;
        let blocks = self.tracker.blocks().iter();
        let blocks: Vec<&Block> = blocks.map(|tracked| &*tracked.block).collect();
        let parts = (&blocks[..], wanted);
        read_ahead(self.process, parts, hasher, &mut |block, pages, encoded| {
            take(iteration, block, pages, encoded)?;
            done += pages.len() as u64;
            progress(Progress::FullPass { done, total });
            Ok(())
        })?;
        Ok(done)
    }
}
