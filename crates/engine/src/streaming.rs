//! Streaming pre-copy, into any sink. Pages leave while the guest runs, a batch at a time, until the remaining
//! pages are few enough for the pause or no longer get fewer.

use std::ops::Range;
use std::time::Instant;

use stillframe_page::{PAGE, PAGE_BYTES};
use stillframe_qemu::monitor::{Monitor, MonitorError};
use stillframe_sys::affinity::AffinityGuard;
use stillframe_sys::process::Process;
use thiserror::Error;

use crate::attach::Vm;
use crate::capture::convergence::{Convergence, Pace};
use crate::memory::Page;
use crate::memory::block::{BlockError, Guest};
use crate::memory::ranges::subtract_all;
use crate::placement;
use crate::sink::page_stream::BATCH_PAGES;
use crate::tracking::error::TrackerError;
use crate::tracking::tracker::{Collected, Tracker};
use crate::{Progress, ProgressSink, Round, RoundSink};

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
    /// QEMU failed a command.
    #[error("QEMU failed a command")]
    Monitor(#[from] MonitorError),
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

/// What was streamed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Streamed {
    /// Pages, each counted as often as it was streamed.
    pub pages: u64,
    /// Iterations.
    pub iterations: u32,
    /// Pages that were left after them.
    pub left: u64,
    /// How quickly they were streamed.
    pub pace: Pace,
}

/// The parts of a VM that its pages are streamed from.
pub(crate) struct Streaming<'v> {
    pub tracker: &'v mut Tracker,
    pub monitor: &'v mut Monitor,
    pub process: &'v Process,
}

impl Vm {
    /// Streams iterations, beginning with `first`, until they have converged. The next capture finds the remaining
    /// pages.
    pub(crate) fn stream<E>(
        &mut self,
        first: Iteration,
        convergence: Convergence,
        take: TakeBatch<'_, E>,
        progress: ProgressSink<'_>,
        rounds: RoundSink<'_>,
    ) -> Result<Streamed, StreamingError<E>> {
        let mut streaming = Streaming {
            tracker: &mut self.tracker,
            monitor: &mut self.monitor,
            process: &self.target.process,
        };
        let mut wanted = streaming.wanted(first)?;
        let mut streamed = Streamed::default();
        let mut iteration = first;
        // The pages written during an iteration may be too many again; as long as they get fewer, iterate.
        for done in 0.. {
            let begin = Instant::now();
            let pages = streaming.iterate(iteration, &wanted, Guest::Running, take, progress)?;
            let time = begin.elapsed();
            streamed.pages += pages;
            streamed.iterations += 1;
            streamed.pace.pages += pages;
            streamed.pace.time += time;
            iteration = Iteration::Written;
            wanted = streaming.wanted(iteration)?;
            streamed.left = wanted.pages();
            let left = streamed.left;
            let written = Pace { pages: left, time };
            rounds(Round {
                number: streamed.iterations,
                left,
                written_per_s: written.per_s(),
                streamed_per_s: streamed.pace.per_s(),
            });
            if !convergence.iterates(streamed.left, pages, done, streamed.pace) {
                break;
            }
        }
        Ok(streamed)
    }
}

impl Streaming<'_> {
    /// Streams the remaining pages of a VM that is stopped. Returns how many pages that were.
    pub fn rest<E>(
        &mut self,
        take: TakeBatch<'_, E>,
        progress: ProgressSink<'_>,
    ) -> Result<u64, StreamingError<E>> {
        let found = self.tracker.collect_stopped()?;
        let wanted = self.pending(found);
        self.iterate(Iteration::Written, &wanted, Guest::Stopped, take, progress)
    }

    /// All that is pending, by the last scan.
    fn pending(&self, mut found: Collected) -> Collected {
        found.written = subtract_all(&self.tracker.pending(), &found.discarded);
        found
    }

    /// The pages of an iteration. The next scan finds the writes from here on.
    fn wanted<E>(&mut self, iteration: Iteration) -> Result<Collected, StreamingError<E>> {
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
                let found = self.tracker.collect_running()?;
                let found = found.drained(self.monitor)?;
                self.pending(found)
            }
        })
    }

    /// One iteration, a batch at a time, so that memory stays bounded however large the guest is. Returns how many
    /// pages that were.
    fn iterate<E>(
        &mut self,
        iteration: Iteration,
        wanted: &Collected,
        guest: Guest,
        take: TakeBatch<'_, E>,
        progress: ProgressSink<'_>,
    ) -> Result<u64, StreamingError<E>> {
        let _placement = AffinityGuard::to(&placement::processors(self.process));
        if iteration == Iteration::Written {
            self.tracker.streamed(wanted);
        }
        let total = wanted.pages();
        let mut done = 0;
        let mut buffer = vec![0u8; BATCH_PAGES * PAGE];
        for (index, tracked) in self.tracker.blocks().iter().enumerate() {
            let read = batches(&wanted.written[index]).into_iter();
            let zero = batches(&wanted.discarded[index]).into_iter();
            for (batch, is_zero) in read
                .map(|batch| (batch, false))
                .chain(zero.map(|batch| (batch, true)))
            {
                let pages = batch.iter().map(|range| range.end - range.start);
                let bytes = &mut buffer[..(pages.sum::<u64>() * PAGE_BYTES) as usize];
                match is_zero {
                    true => bytes.fill(0),
                    false => {
                        let into = &mut split(bytes, &batch);
                        tracked.block.read(guest, into, &batch)?;
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

/// Divides a buffer among ranges of pages.
fn split<'b>(bytes: &'b mut [u8], ranges: &[Range<u64>]) -> Vec<&'b mut [u8]> {
    let mut rest = bytes;
    let mut parts = Vec::with_capacity(ranges.len());
    for range in ranges {
        let (part, tail) = rest.split_at_mut(((range.end - range.start) * PAGE_BYTES) as usize);
        parts.push(part);
        rest = tail;
    }
    parts
}
