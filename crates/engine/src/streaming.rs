//! Streaming pre-copy, into any sink. Pages leave while the guest runs, a batch at a time, until the remaining
//! pages are few enough for the pause or no longer get fewer.

use std::ops::Range;

use stillframe_page::PAGE_BYTES;
use stillframe_qemu::monitor::Monitor;
use stillframe_sys::process::Process;
use thiserror::Error;

use crate::attach::Vm;
use crate::capture::convergence::Convergence;
use crate::memory::Page;
use crate::memory::block::{BlockError, Guest};
use crate::memory::page_buffer::PageBuffer;
use crate::memory::ranges::{length, split, subtract_all};
use crate::placement::WhereIdle;
use crate::sink::page_stream::BATCH_PAGES;
use crate::tracking::error::TrackerError;
use crate::tracking::tracker::{Collected, Tracker};
use crate::{Progress, ProgressSink};

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
    /// The sink failed.
    #[error(transparent)]
    Sink(E),
}

/// Takes a batch of ascending pages of one block, given by its number.
pub(crate) type TakeBatch<'t, E> =
    &'t mut dyn FnMut(Iteration, usize, &[Page<'_>]) -> Result<(), E>;

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
        take: TakeBatch<'_, E>,
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
            let pages = streaming.iterate(iteration, &wanted, take, progress)?;
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

    /// One iteration, a batch at a time, so that memory stays bounded however large the guest is. Returns how many
    /// pages that were.
    fn iterate<E>(
        &mut self,
        iteration: Iteration,
        wanted: &Collected,
        take: TakeBatch<'_, E>,
        progress: ProgressSink<'_>,
    ) -> Result<u64, StreamingError<E>> {
        let mut placement = WhereIdle::confined(self.process);
        if iteration == Iteration::Written {
            self.tracker.streamed(wanted);
        }
        let total = wanted.pages();
        let mut done = 0;
        let mut buffer = PageBuffer::new(BATCH_PAGES);
        for (index, tracked) in self.tracker.blocks().iter().enumerate() {
            let read = batches(&wanted.written[index]).into_iter();
            let zero = batches(&wanted.discarded[index]).into_iter();
            for (batch, is_zero) in read
                .map(|batch| (batch, false))
                .chain(zero.map(|batch| (batch, true)))
            {
                placement.look();
                let bytes = &mut buffer[..(length(&batch) * PAGE_BYTES) as usize];
                match is_zero {
                    true => bytes.fill(0),
                    false => {
                        let into = &mut split(bytes, &batch);
                        tracked.block.read(Guest::Running, into, &batch)?;
                    }
                }
                let numbers = batch.iter().flat_map(Clone::clone);
                let contents = numbers.zip(bytes.as_chunks().0);
                let pages = contents.map(|(number, bytes)| Page { number, bytes });
                let pages: Vec<Page<'_>> = pages.collect();
                take(iteration, index, &pages).map_err(StreamingError::Sink)?;
                done += pages.len() as u64;
                progress(Progress::FullPass { done, total });
            }
        }
        Ok(done)
    }
}

/// Cuts ranges into batches of at most [`BATCH_PAGES`] pages.
pub(crate) fn batches(ranges: &[Range<u64>]) -> Vec<Vec<Range<u64>>> {
    let mut all = Vec::new();
    let mut batch: Vec<Range<u64>> = Vec::new();
    let mut room = BATCH_PAGES as u64;
    for range in ranges {
        let mut next = range.start;
        while next < range.end {
            let end = range.end.min(next + room);
            batch.push(next..end);
            room -= end - next;
            next = end;
            if room == 0 {
                all.push(std::mem::take(&mut batch));
                room = BATCH_PAGES as u64;
            }
        }
    }
    if !batch.is_empty() {
        all.push(batch);
    }
    all
}
