//! What surrounds the schedule: the pass over all of memory for a first checkpoint, and the way of the
//! copies into the repository.

use std::ops::Range;

use stillframe_repo::Writer;
use stillframe_sys::affinity::Confined;

use super::CheckpointError;
use super::draft::Draft;
use crate::attach::Vm;
use crate::capture::block::{PAGE, PAGE_BYTES};
use crate::capture::cache::DeltaCache;
use crate::capture::ingest::{BATCH_PAGES, Tools};
use crate::capture::stage::Stage;
use crate::capture::tracker;
use crate::capture::verdict::Page;
use crate::{Progress, ProgressSink};

impl Vm {
    /// Reads every page that may have content straight into the repository, a batch at a time, so
    /// that memory stays bounded however large the guest is.
    pub(super) fn full_pass(
        &mut self,
        writer: &mut Writer<'_>,
        draft: &mut Draft,
        progress: ProgressSink<'_>,
    ) -> Result<(), CheckpointError> {
        let _aside = Confined::to(&draft.aside);
        // What was written before this pass is read by it.
        self.tracker.drop_pending();
        let populated = self.tracker.populated()?;
        let total = tracker::count(&populated);
        let mut buffer = vec![0u8; BATCH_PAGES * PAGE];
        for (index, ranges) in populated.iter().enumerate() {
            for batch in batches(ranges) {
                let pages = batch.iter().map(|range| range.end - range.start);
                let bytes = &mut buffer[..(pages.sum::<u64>() * PAGE_BYTES) as usize];
                let mut into = split(bytes, &batch);
                self.tracker.blocks()[index].block.read(&mut into, &batch)?;
                let numbers = batch.iter().flat_map(Clone::clone);
                let pages: Vec<Page<'_>> = numbers.zip(bytes.as_chunks().0).collect();
                self.store(writer, draft, index, &pages)?;
                for &(page, bytes) in &pages {
                    self.cache.put_if_room(index, page, bytes);
                }
                draft.copied.full_pass += pages.len() as u64;
                progress(Progress::FullPass {
                    done: draft.copied.full_pass,
                    total,
                });
            }
        }
        Ok(())
    }

    /// Stores everything on the stage.
    pub(super) fn ingest(
        &mut self,
        writer: &mut Writer<'_>,
        draft: &mut Draft,
        stage: &Stage,
        progress: ProgressSink<'_>,
    ) -> Result<(), CheckpointError> {
        let _aside = Confined::to(&draft.aside);
        let total = stage.pages();
        let mut done = 0;
        for index in 0..self.tracker.blocks().len() {
            let mut pages = stage.pages_of(index).peekable();
            while pages.peek().is_some() {
                let batch: Vec<Page<'_>> = pages.by_ref().take(BATCH_PAGES).collect();
                self.store(writer, draft, index, &batch)?;
                done += batch.len() as u64;
                progress(Progress::Storing { done, total });
            }
        }
        Ok(())
    }

    fn store(
        &mut self,
        writer: &mut Writer<'_>,
        draft: &mut Draft,
        block: usize,
        pages: &[Page<'_>],
    ) -> Result<(), CheckpointError> {
        // A first checkpoint follows none, and what the cache knows already is of this one itself.
        let nothing = DeltaCache::default();
        let mut tools = Tools {
            writer,
            tracker: &mut self.tracker,
            cache: match draft.parent {
                Some(_) => &self.cache,
                None => &nothing,
            },
            judge: &mut self.judge,
        };
        Ok(draft.ingested.batch(&mut tools, block, pages)?)
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
