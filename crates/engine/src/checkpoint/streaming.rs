//! Streaming pre-copy: a checkpoint of more pages than the staging buffer takes. These are all of memory, because it
//! follows no checkpoint, or the pages of a guest that writes faster than the repository stores. Pages are streamed
//! into the repository while the guest runs, a batch at a time; then what it wrote meanwhile is captured.

use std::ops::Range;
use std::time::Instant;

use stillframe_repo::Repository;
use stillframe_sys::affinity::Confined;

use super::store::Transaction;
use super::{Captured, CheckpointError, CheckpointOptions, CheckpointReport, CheckpointWriter};
use crate::attach::Vm;
use crate::capture::convergence::Convergence;
use crate::capture::downtime::us;
use crate::memory::Page;
use crate::memory::block::{Guest, PAGE, PAGE_BYTES};
use crate::memory::ranges::subtract_all;
use crate::placement;
use crate::sink::page_stream::{BATCH_PAGES, PageStream};
use crate::sink::repository::RepositoryPages;
use crate::tracking::tracker::Collected;
use crate::{Progress, ProgressSink};

/// The pages of an iteration, which comes before the capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Iteration {
    /// Every page that may have content.
    Bulk,
    /// What was written since the last checkpoint.
    Written,
}

impl Vm {
    /// Streams iterations while the guest runs, then captures what it wrote meanwhile.
    pub(super) fn streaming(
        &mut self,
        iterate: Iteration,
        checkpoints: &mut CheckpointWriter,
        repository: &mut Repository,
        options: &CheckpointOptions,
        progress: ProgressSink<'_>,
    ) -> Result<CheckpointReport, CheckpointError> {
        let begin = Instant::now();
        if iterate == Iteration::Bulk {
            // The bulk phase drops what is pending against an old parent, so there can be no parent any more,
            // not even when this fails; nor can the delta cache of it be used.
            checkpoints.forget_parent();
        }
        checkpoints.cache.set_budget(options.delta_cache_bytes);
        let id = repository.id().to_string();
        let writer = repository.begin(options.lock_wait)?;
        let blocks = self.tracker.shape();
        let mut transaction = match iterate {
            Iteration::Written => checkpoints.transaction(writer, &id, &blocks, options)?,
            Iteration::Bulk => Transaction {
                missing_packs: writer.missing_packs(),
                sink: RepositoryPages::first(writer, &blocks, options.dedup),
                stream: PageStream::new(&blocks),
                parent: None,
                deltas: false,
            },
        };
        transaction.pages_may_come_twice(&blocks);
        let captured =
            self.pass_and_capture(iterate, checkpoints, &mut transaction, options, progress);
        let mut captured = captured.inspect_err(|_| self.tracker.rolled_back())?;
        captured.begin = begin;
        self.mark_in_flight();
        let stored = checkpoints.finish(transaction, &captured, id, progress);
        let stored = stored.and_then(|stored| {
            checkpoints.verified(stored, &captured, repository, options, progress)
        });
        self.settle(captured, stored)
    }

    fn pass_and_capture(
        &mut self,
        iterate: Iteration,
        checkpoints: &mut CheckpointWriter,
        transaction: &mut Transaction<'_>,
        options: &CheckpointOptions,
        progress: ProgressSink<'_>,
    ) -> Result<Captured, CheckpointError> {
        let begin = Instant::now();
        let mut wanted = self.wanted(iterate)?;
        let mut copied = self.iterate(iterate, &wanted, checkpoints, transaction, progress)?;
        // What a guest wrote during an iteration may be too much again; as long as it gets less, iterate.
        let convergence = Convergence::Buffer {
            bytes: options.copy_buffer_bytes / 2,
        };
        for done in 0.. {
            let before = wanted.pages();
            wanted = self.wanted(Iteration::Written)?;
            if !convergence.iterates(wanted.pages(), before, done) {
                break;
            }
            copied += self.iterate(
                Iteration::Written,
                &wanted,
                checkpoints,
                transaction,
                progress,
            )?;
        }
        let copying = us(begin);
        let mut captured = self.capture(&transaction.sink.writer.hasher().clone(), options)?;
        captured.copying += copying;
        captured.copied.full_pass = copied;
        Ok(captured)
    }

    /// The pages of an iteration. The next scan finds what is written from here on.
    fn wanted(&mut self, iterate: Iteration) -> Result<Collected, CheckpointError> {
        Ok(match iterate {
            Iteration::Bulk => {
                // The bulk phase reads what was written before it.
                self.tracker.drop_pending();
                let wanted = self.tracker.populated()?.drained(&mut self.monitor)?;
                // A page that is discarded before the pause has been stored with its content.
                self.tracker.expect_content(&wanted.written);
                wanted
            }
            Iteration::Written => {
                let found = self.tracker.collect_running()?;
                let mut wanted = found.drained(&mut self.monitor)?;
                wanted.written = subtract_all(&self.tracker.pending(), &wanted.discarded);
                wanted
            }
        })
    }

    /// One iteration: streams pages into the repository, a batch at a time, so that memory stays bounded however
    /// large the guest is. Returns how many pages that were.
    fn iterate(
        &mut self,
        iterate: Iteration,
        wanted: &Collected,
        checkpoints: &mut CheckpointWriter,
        transaction: &mut Transaction<'_>,
        progress: ProgressSink<'_>,
    ) -> Result<u64, CheckpointError> {
        let _aside = Confined::to(&placement::processors(&self.target.process));
        if iterate == Iteration::Written {
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
                        tracked.block.read(Guest::Running, into, &batch)?;
                    }
                }
                let numbers = batch.iter().flat_map(Clone::clone);
                let pages: Vec<Page<'_>> = numbers.zip(bytes.as_chunks().0).collect();
                checkpoints.put(transaction, index, &pages)?;
                for &(page, bytes) in &pages {
                    match iterate {
                        Iteration::Bulk => checkpoints.cache.put_if_room(index, page, bytes),
                        // It may change once more before the checkpoint; and a cache that knows nothing of
                        // a page is never wrong about it.
                        Iteration::Written => checkpoints.cache.remove(index, page),
                    }
                }
                done += pages.len() as u64;
                progress(Progress::FullPass { done, total });
            }
        }
        Ok(done)
    }
}

/// Cuts ranges into batches of at most [`BATCH_PAGES`] pages.
fn batches(ranges: &[Range<u64>]) -> Vec<Vec<Range<u64>>> {
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
