//! A checkpoint by streaming pre-copy: of more pages than the staging buffer takes. These are all of memory, because it
//! follows no checkpoint, or the pages of a guest that writes faster than the repository stores. Pages are streamed
//! into the repository while the guest runs, a batch at a time; then what it wrote meanwhile is captured.

use std::time::Instant;

use stillframe_page::GuestPage;
use stillframe_repo::{Manifest, RepoError, Repository};

use super::store::Transaction;
use super::{Captured, CheckpointError, CheckpointOptions, CheckpointReport, CheckpointWriter};
use crate::ProgressSink;
use crate::attach::Vm;
use crate::capture::convergence::Convergence;
use crate::capture::downtime::us;
use crate::memory::Page;
use crate::memory::ranges::count;
use crate::streaming::Iteration;

impl Vm {
    /// Streams iterations while the guest runs, then captures what it wrote meanwhile.
    pub(super) fn streaming(
        &mut self,
        first: Iteration,
        checkpoints: &mut CheckpointWriter,
        repository: &mut Repository,
        options: &CheckpointOptions,
        progress: ProgressSink<'_>,
    ) -> Result<CheckpointReport, CheckpointError> {
        let begin = Instant::now();
        if first == Iteration::Bulk {
            // The bulk phase drops what is pending against an old parent, so there can be no parent any more,
            // not even when this fails; nor can the delta cache of it be used.
            checkpoints.forget_parent();
            self.disks.start_over();
        }
        checkpoints.cache.set_budget(options.delta_cache_bytes);
        let id = repository.id().to_string();
        let writer = repository.begin(options.lock_wait)?;
        let blocks = self.tracker.shape();
        let mut transaction = match first {
            Iteration::Written => checkpoints.begin_increment(writer, &id, &blocks, options)?,
            Iteration::Bulk => CheckpointWriter::begin_first(writer, &blocks, options)?,
        };
        transaction.pages_may_come_twice(&blocks);
        // The writer's lock keeps that checkpoint from being pruned. What the repository has lost it may need.
        if first == Iteration::Bulk && self.disks.has_left() && transaction.missing_packs.is_empty()
        {
            let writer = &transaction.sink.writer;
            let mut manifests = writer.manifests()?;
            manifests.retain(|(_, manifest)| writer.has_images(&manifest.images));
            transaction.disks_before = self.disks.go_on(&manifests);
            let before = &transaction.disks_before;
            let goes_on =
                |manifest: &Manifest| manifest.disks.iter().any(|disk| before.contains(disk));
            let needed = manifests
                .into_iter()
                .filter(|(_, manifest)| goes_on(manifest));
            transaction.images = needed.flat_map(|(_, manifest)| manifest.images).collect();
        }
        let captured =
            self.stream_and_capture(first, checkpoints, &mut transaction, options, progress);
        let mut captured = captured.inspect_err(|_| self.tracker.rolled_back())?;
        captured.begin = begin;
        self.mark_in_flight();
        let stored = checkpoints.finish(transaction, &captured, id, progress);
        let stored = stored.and_then(|stored| {
            checkpoints.verified(stored, &captured, repository, options, progress)
        });
        let mut report = self.settle(captured, stored)?;
        if let Some(balloon) = &mut report.balloon {
            // The checkpoint is stored; a QEMU that does not answer shows at the next command.
            let _ = balloon.await_memory(&mut self.monitor);
        }
        Ok(report)
    }

    fn stream_and_capture(
        &mut self,
        first: Iteration,
        checkpoints: &mut CheckpointWriter,
        transaction: &mut Transaction<'_>,
        options: &CheckpointOptions,
        progress: ProgressSink<'_>,
    ) -> Result<Captured, CheckpointError> {
        let begin = Instant::now();
        let convergence = Convergence {
            buffer_bytes: options.copy_buffer_bytes / 2,
        };
        let balloon = match (first, options.balloon) {
            (Iteration::Bulk, Some(limit)) => Some(self.squeeze(limit)?),
            _ => None,
        };
        if options.free_pages {
            self.find_free_pages(first)?;
        }
        let hasher = transaction.sink.writer.hasher().clone();
        let mut take = |iteration, block, pages: &[Page<'_>], encoded| {
            let Transaction { sink, stream, .. } = transaction;
            stream.put_encoded(sink, block, pages, encoded)?;
            checkpoints.note(iteration, block, pages);
            Ok::<(), RepoError>(())
        };
        let streamed = self.stream(first, convergence, &hasher, &mut take, progress)?;
        let copying = us(begin);
        let mut captured = self.capture_kept(&hasher, options)?;
        captured.copying += copying;
        captured.balloon = balloon;
        captured.copied.full_pass = streamed;
        if let (Iteration::Bulk, Some(report)) = (first, &mut captured.free_pages) {
            // They were not read at all.
            report.left_out = count(&self.tracker.free());
        }
        Ok(captured)
    }
}

impl CheckpointWriter {
    /// What the delta cache is to know of pages that an iteration has streamed.
    fn note(&mut self, iteration: Iteration, block: usize, pages: &[Page<'_>]) {
        for &Page { number, bytes } in pages {
            let page = GuestPage::new(block, number);
            match iteration {
                Iteration::Bulk => self.cache.put_if_room(page, bytes),
                // It may change once more before the checkpoint; and a cache that knows nothing of
                // a page is never wrong about it.
                Iteration::Written => self.cache.remove(page),
            }
        }
    }
}
