//! The storing half: from the staging buffer into the repository.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::Instant;

use stillframe_repo::{
    BlockTable, CheckpointId, Committed, DiskTable, ImageId, Manifest, Meter, Note, PageCounts,
    RepoError, Repository, Tags, Writer,
};
use stillframe_sys::affinity::AffinityGuard;

use super::{
    Captured, CheckpointError, CheckpointOptions, CheckpointReport, DEVICE_STATE, Phases,
    StoredDisk,
};
use crate::attach::Parent;
use crate::capture::downtime::us;
use crate::disks::DiskView;
use crate::encoding::delta_cache::{Contents, DeltaCache};
use crate::encoding::page_encoder::PageEncoder;
use crate::memory::BlockShape;
use crate::memory::Page;
use crate::memory::outcome::Found;
use crate::sink::page_stream::{BATCH_PAGES, PageStream};
use crate::sink::repository::RepositoryPages;
use crate::{Progress, ProgressSink};

/// The store context: what storing knows of the last checkpoint of one attachment.
#[derive(Debug, Default)]
pub struct CheckpointWriter {
    pub(super) parent: Option<Parent>,
    /// The delta cache: contents of pages at the parent.
    pub(super) cache: DeltaCache,
    pub(super) encoder: PageEncoder,
}

/// A checkpoint that is durable.
#[derive(Debug)]
pub struct Stored {
    pub(super) report: CheckpointReport,
    /// The capture outcome of its pages.
    pub(super) found: Vec<Found>,
}

/// The transaction of one checkpoint that is being written.
pub(super) struct Transaction<'r> {
    pub(super) sink: RepositoryPages<'r>,
    pub(super) parent: Option<Parent>,
    pub(super) stream: PageStream,
    pub(super) missing_packs: Vec<String>,
    /// What the last checkpoint has of the disks, or one that an earlier engine took and QEMU knows what was written since.
    pub(super) disks_before: Vec<DiskTable>,
    /// The images that the content may need which it takes over from earlier checkpoints.
    pub(super) images: BTreeSet<ImageId>,
    pub(super) changed_images: Vec<String>,
    /// Deltas against the parent may be made: each page comes once.
    pub(super) deltas: bool,
    pub(super) tags: Tags,
    pub(super) note: Option<Note>,
}

impl CheckpointWriter {
    /// Whether an increment can be made.
    pub fn has_parent(&self) -> bool {
        self.parent.is_some()
    }

    /// The last checkpoint, and the id of its repository, if the VM's writes since are known.
    pub fn parent(&self) -> Option<(CheckpointId, &str)> {
        let parent = self.parent.as_ref()?;
        Some((parent.id, &parent.repository))
    }

    /// The contents of pages at the last checkpoint, as far as they are known, until they are given back.
    pub fn lend_contents(&mut self) -> Contents {
        std::mem::take(&mut self.cache).into()
    }

    /// Takes them back. Nothing is lost but the means to make deltas if a thread has them still.
    pub fn take_back(&mut self, contents: Contents) {
        self.cache = contents.into();
    }

    /// The next checkpoint has nothing to follow.
    pub fn forget_parent(&mut self) {
        self.parent = None;
        self.cache.clear();
    }

    /// Stores an increment of the last checkpoint.
    pub fn store(
        &mut self,
        captured: &Captured,
        repository: &mut Repository,
        options: &CheckpointOptions,
        progress: ProgressSink<'_>,
    ) -> Result<Stored, CheckpointError> {
        self.cache.set_budget(options.delta_cache_bytes);
        let id = repository.id().to_string();
        let writer = repository.begin(options.lock_wait)?;
        let mut transaction = self.begin_increment(writer, &id, &captured.blocks, options)?;
        transaction.deltas = true;
        let stored = self.finish(transaction, captured, id, progress)?;
        self.verified(stored, captured, repository, options, progress)
    }

    /// Begins a checkpoint that follows none.
    pub(super) fn begin_first<'r>(
        writer: Writer<'r>,
        blocks: &[BlockShape],
        options: &CheckpointOptions,
    ) -> Result<Transaction<'r>, RepoError> {
        Ok(Transaction {
            missing_packs: writer.missing_packs(),
            changed_images: writer.changed_images()?,
            images: BTreeSet::new(),
            sink: RepositoryPages::first(sharing(writer, options), blocks, options.dedup),
            stream: PageStream::new(blocks),
            disks_before: Vec::new(),
            parent: None,
            deltas: false,
            tags: options.tags.clone(),
            note: options.note.clone(),
        })
    }

    /// Begins an increment of the last checkpoint.
    pub(super) fn begin_increment<'r>(
        &mut self,
        writer: Writer<'r>,
        repository: &str,
        blocks: &[BlockShape],
        options: &CheckpointOptions,
    ) -> Result<Transaction<'r>, CheckpointError> {
        let missing_packs = writer.missing_packs();
        // The writer's lock keeps the parent from being pruned from here on; but the parent must not
        // need what the repository has lost since.
        let parent = match &self.parent {
            Some(parent)
                if parent.repository == repository
                    && missing_packs
                        .iter()
                        .all(|pack| parent.missing_packs.contains(pack))
                    && writer.has_images(&parent.images)
                    && writer.has_manifest(&parent.id)? =>
            {
                parent.clone()
            }
            _ => {
                self.forget_parent();
                return Err(CheckpointError::ParentGone);
            }
        };
        Ok(Transaction {
            sink: RepositoryPages::after(sharing(writer, options), &parent.tables, options.dedup),
            stream: PageStream::new(blocks),
            disks_before: parent.disks.clone(),
            images: parent.images.clone(),
            changed_images: Vec::new(),
            parent: Some(parent),
            missing_packs,
            deltas: false,
            tags: options.tags.clone(),
            note: options.note.clone(),
        })
    }

    /// Stores the pages of the staging buffer, and makes a checkpoint of all pages.
    pub(super) fn finish(
        &mut self,
        mut transaction: Transaction<'_>,
        captured: &Captured,
        repository: String,
        progress: ProgressSink<'_>,
    ) -> Result<Stored, CheckpointError> {
        let _placement = AffinityGuard::to(&captured.spare);
        let total = captured.staging.pages();
        let mut done = 0;
        for block in 0..captured.blocks.len() {
            let mut pages = captured.staging.pages_of(block).peekable();
            while pages.peek().is_some() {
                let batch: Vec<Page<'_>> = pages.by_ref().take(BATCH_PAGES).collect();
                self.put(&mut transaction, block, &batch)?;
                done += batch.len() as u64;
                progress(Progress::Storing { done, total });
            }
        }
        for (block, free) in captured.left_out.iter().enumerate() {
            let Transaction { sink, stream, .. } = &mut transaction;
            stream.put_zeros(sink, block, free)?;
        }
        let begin = Instant::now();
        let ram = transaction.sink.finish(&captured.blocks)?;
        let mut commit = us(begin);
        let (disks, metered) = self.put_disks(&mut transaction, captured, progress)?;
        let begin = Instant::now();
        let mut manifest = transaction.manifest(captured, ram)?;
        manifest.disks = disks;
        let committed = transaction.sink.writer.commit(manifest.clone())?;
        let stored_disks = metered.into_iter().map(Metered::stored).collect();
        commit += us(begin);
        transaction
            .stream
            .remember(&captured.staging, &mut self.cache);
        self.parent = Some(Parent {
            id: committed.id,
            repository,
            tables: manifest.ram.clone(),
            disks: manifest.disks.clone(),
            images: committed.images.clone(),
            missing_packs: transaction.missing_packs.clone(),
        });
        Ok(Stored {
            report: report(
                captured,
                manifest,
                committed,
                commit,
                &transaction.stream,
                Lost {
                    missing_packs: transaction.missing_packs,
                    changed_images: transaction.changed_images,
                },
                stored_disks,
            ),
            found: transaction.stream.outcome,
        })
    }

    /// Stores the disks of a capture; QEMU shows them as they were at the pause.
    fn put_disks(
        &mut self,
        transaction: &mut Transaction<'_>,
        captured: &Captured,
        progress: ProgressSink<'_>,
    ) -> Result<(Vec<DiskTable>, Vec<Metered>), CheckpointError> {
        let mut views = captured
            .disks
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let pages = |view: &DiskView| view.shape().pages;
        let total = views.iter().map(pages).sum();
        let (mut done, mut tables, mut stored) = (0, Vec::new(), Vec::new());
        let nothing = DeltaCache::default();
        for view in views.iter_mut() {
            let shape = [view.shape()];
            let meter = transaction.sink.writer.meter()?;
            match view.is_increment() {
                true => {
                    let mut tables = transaction.disks_before.iter();
                    let before = tables.find(|disk| {
                        disk.table.name == shape[0].name && disk.bytes == view.bytes()
                    });
                    let Some(before) = before else {
                        // The next one must not fail for the same reason.
                        self.forget_parent();
                        return Err(CheckpointError::ParentGone);
                    };
                    transaction.sink.follow(std::slice::from_ref(&before.table));
                }
                false => transaction.sink.begin(&shape),
            }
            let mut stream = PageStream::new(&shape);
            let read = view.read(captured.disk_limit, &mut |pages: &[Page<'_>]| {
                let sink = &mut transaction.sink;
                stream.put(sink, &mut self.encoder, &nothing, 0, pages)?;
                let at = pages.last().map_or(0, |page| page.number + 1);
                progress(Progress::StoringDisks {
                    done: done + at,
                    total,
                });
                Ok::<(), CheckpointError>(())
            })?;
            done += shape[0].pages;
            let bytes = view.bytes();
            let finished = transaction.sink.finish(&shape)?.into_iter();
            tables.extend(finished.map(|table| DiskTable {
                bytes,
                bitmap: Some(view.bitmap().to_owned()),
                table,
            }));
            let disk = StoredDisk {
                device: view.device().to_owned(),
                bytes,
                schedule: view.schedule(),
                bytes_read: read.bytes,
                bytes_stored: 0,
                pages: stream.counts.into(),
            };
            stored.push(Metered { disk, meter });
        }
        if !stored.is_empty() {
            // The rest is no disk's.
            transaction.sink.writer.meter()?;
        }
        Ok((tables, stored))
    }

    /// Compares the checkpoint just made with the image taken in its pause, where there is one.
    pub(super) fn verified(
        &self,
        mut stored: Stored,
        captured: &Captured,
        repository: &mut Repository,
        options: &CheckpointOptions,
        progress: ProgressSink<'_>,
    ) -> Result<Stored, CheckpointError> {
        if let (Some(image), Some(made)) = (&captured.image, &self.parent) {
            let reader = repository.reader(options.lock_wait)?;
            stored.report.verify = Some(image.compare(&reader, &made.tables, progress)?);
        }
        Ok(stored)
    }

    /// Stores a batch of ascending pages of one block.
    pub(super) fn put(
        &mut self,
        transaction: &mut Transaction<'_>,
        block: usize,
        pages: &[Page<'_>],
    ) -> Result<(), RepoError> {
        let nothing = DeltaCache::default();
        let cache = match transaction.deltas {
            true => &self.cache,
            false => &nothing,
        };
        let encoder = &mut self.encoder;
        transaction
            .stream
            .put(&mut transaction.sink, encoder, cache, block, pages)?;
        Ok(())
    }
}

impl Transaction<'_> {
    /// Iterations come before the pages of the staging buffer.
    pub(super) fn pages_may_come_twice(&mut self, blocks: &[BlockShape]) {
        self.stream.pages_may_come_twice(blocks);
    }

    /// Stores what the pages are and the device state, and describes it all.
    fn manifest(
        &mut self,
        captured: &Captured,
        ram: Vec<BlockTable>,
    ) -> Result<Manifest, CheckpointError> {
        let stream = self.sink.writer.put_whole_stream(&captured.device_state)?;
        Ok(Manifest {
            vm: captured.record.label.clone(),
            time: captured.time,
            parent: self.parent.as_ref().map(|parent| parent.id),
            tags: self.tags.clone(),
            note: self.note.clone(),
            ram,
            disks: Vec::new(),
            images: std::mem::take(&mut self.images),
            streams: BTreeMap::from([(DEVICE_STATE.to_owned(), stream)]),
            pages: PageCounts {
                free: captured.free_pages.as_ref().map_or(0, |free| free.left_out),
                ..self.stream.counts.into()
            },
            bytes_stored: self.sink.writer.bytes_stored(),
            vm_record: serde_json::to_value(&captured.record).map_err(CheckpointError::Encode)?,
            downtime_us: serde_json::to_value(captured.downtime)
                .map_err(CheckpointError::Encode)?,
        })
    }
}

/// A disk whose bytes are counted as they are written.
struct Metered {
    disk: StoredDisk,
    meter: Meter,
}

impl Metered {
    /// The disk of a checkpoint that is committed.
    fn stored(self) -> StoredDisk {
        StoredDisk {
            bytes_stored: self.meter.bytes(),
            ..self.disk
        }
    }
}

/// A writer that finds content where the options let it.
fn sharing<'r>(mut writer: Writer<'r>, options: &CheckpointOptions) -> Writer<'r> {
    if !options.images {
        writer.ignore_images();
    }
    writer
}

/// What the repository has lost.
struct Lost {
    missing_packs: Vec<String>,
    changed_images: Vec<String>,
}

fn report(
    captured: &Captured,
    manifest: Manifest,
    committed: Committed,
    commit: u64,
    stream: &PageStream,
    lost: Lost,
    disks: Vec<StoredDisk>,
) -> CheckpointReport {
    CheckpointReport {
        clock_taken_us: 0,
        clock: None,
        checkpoint: committed.id.to_string(),
        vm: manifest.vm,
        time: manifest.time,
        parent: manifest.parent.map(|id| id.to_string()),
        schedule: captured.schedule,
        instead_of: captured.instead_of,
        plan: captured.plan,
        downtime_us: captured.downtime,
        pages: manifest.pages,
        copied: captured.copied,
        free_pages: captured.free_pages.clone(),
        balloon: captured.balloon.clone(),
        disks,
        disks_left_out: captured.disks_left_out.clone(),
        bytes_stored: committed.bytes_stored,
        total_us: us(captured.begin),
        phases_us: Phases {
            copy: captured.copying,
            encode: stream.encoding.as_micros() as u64,
            write: stream.writing.as_micros() as u64,
            commit,
        },
        obstacles: captured.record.obstacles.clone(),
        missing_packs: lost.missing_packs,
        changed_images: lost.changed_images,
        verify: None,
    }
}
