//! A checkpoint that follows none: all of memory.

use std::ops::Range;
use std::time::Instant;

use stillframe_repo::{MemoryEditor, Repository};
use stillframe_sys::affinity::Confined;

use super::store::Draft;
use super::{CheckpointError, CheckpointOptions, CheckpointReport, Shelf};
use crate::attach::Vm;
use crate::capture::aside;
use crate::capture::block::{PAGE, PAGE_BYTES};
use crate::capture::ingest::{BATCH_PAGES, Ingested};
use crate::capture::pause::us;
use crate::capture::tracker;
use crate::capture::verdict::Page;
use crate::{Progress, ProgressSink};

impl Vm {
    /// Stores all of memory while the guest runs, then captures what it wrote meanwhile.
    pub(super) fn first_checkpoint(
        &mut self,
        shelf: &mut Shelf,
        repository: &mut Repository,
        options: &CheckpointOptions,
        progress: ProgressSink<'_>,
    ) -> Result<CheckpointReport, CheckpointError> {
        let begin = Instant::now();
        // What is pending against an old parent is dropped by the pass, so there can be none any more,
        // not even when this fails; nor can what is known of it.
        shelf.forget_parent();
        shelf.cache.set_budget(options.delta_cache_bytes);
        let id = repository.id().to_string();
        let writer = repository.begin(options.lock_wait)?;
        let blocks = self.tracker.shape();
        let memory = blocks.iter().map(|block| MemoryEditor::new(block.pages));
        let hasher = writer.hasher().clone();
        let mut draft = Draft {
            ingested: Ingested::new(
                memory.collect(),
                &blocks,
                hasher.clone(),
                false,
                options.dedup,
            ),
            parent: None,
            missing_packs: writer.missing_packs(),
            writer,
        };
        let copied = self.full_pass(shelf, &mut draft, progress)?;
        let copying = us(begin);
        let mut captured = self.capture(&hasher, options)?;
        self.launch();
        captured.begin = begin;
        captured.copying += copying;
        captured.copied.full_pass = copied;
        let stored = shelf.finish(draft, &captured, id, progress);
        let stored = stored
            .and_then(|stored| shelf.verified(stored, &captured, repository, options, progress));
        self.settle(captured, stored)
    }

    /// Reads every page that may have content straight into the repository, a batch at a time, so
    /// that memory stays bounded however large the guest is. How many pages it were.
    fn full_pass(
        &mut self,
        shelf: &mut Shelf,
        draft: &mut Draft<'_>,
        progress: ProgressSink<'_>,
    ) -> Result<u64, CheckpointError> {
        let _aside = Confined::to(&aside::processors(&self.target.process));
        // What was written before this pass is read by it.
        self.tracker.drop_pending();
        let populated = self.tracker.populated()?;
        let total = tracker::count(&populated);
        let mut done = 0;
        let mut buffer = vec![0u8; BATCH_PAGES * PAGE];
        for (index, ranges) in populated.iter().enumerate() {
            for batch in batches(ranges) {
                let pages = batch.iter().map(|range| range.end - range.start);
                let bytes = &mut buffer[..(pages.sum::<u64>() * PAGE_BYTES) as usize];
                let mut into = split(bytes, &batch);
                self.tracker.blocks()[index].block.read(&mut into, &batch)?;
                let numbers = batch.iter().flat_map(Clone::clone);
                let pages: Vec<Page<'_>> = numbers.zip(bytes.as_chunks().0).collect();
                shelf.put(draft, index, &pages)?;
                for &(page, bytes) in &pages {
                    shelf.cache.put_if_room(index, page, bytes);
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
