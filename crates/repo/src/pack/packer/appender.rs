//! Appends sealed frames to packs, in the order they were cut.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam_channel::{Receiver, Sender};

use super::frame_job::{FrameJob, PackInProgress, Shared};
use crate::crypto::TAG_BYTES;
use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::format::image_record::ImageId;
use crate::pack::IndexedPack;
use crate::pack::{Directory, Frame};
use crate::store::local::{Area, LocalStore, TemporaryFile};
use crate::sync::lock;

/// Writes packs.
pub(super) struct Appender {
    store: Arc<LocalStore>,
    shared: Arc<Shared>,
    open: Option<OpenPack>,
}

struct OpenPack {
    pack: Arc<PackInProgress>,
    file: TemporaryFile,
    hasher: blake3::Hasher,
    directory: Directory,
}

impl Appender {
    pub(super) fn new(store: Arc<LocalStore>, shared: Arc<Shared>) -> Appender {
        Appender {
            store,
            shared,
            open: None,
        }
    }

    /// Runs on a thread of its own. A failure ends it and closes its channels: the packer then receives no empty
    /// buffer, and takes the error from [`Shared`].
    pub(super) fn run(mut self, from: &Receiver<FrameJob>, recycle: &Sender<FrameJob>, first: u64) {
        if let Err(error) = self.append_all(from, recycle, first) {
            self.shared.fail(error);
        }
        self.finish()
    }

    /// Finishes the open pack, unless there was a failure.
    pub(super) fn finish(mut self) {
        let failed = lock(&self.shared.failure).is_some();
        if !failed && let Err(error) = self.finish_pack() {
            self.shared.fail(error);
        }
    }

    fn append_all(
        &mut self,
        from: &Receiver<FrameJob>,
        recycle: &Sender<FrameJob>,
        first: u64,
    ) -> Result<(), RepoError> {
        // Bounded by the number of buffers.
        let mut early: BTreeMap<u64, FrameJob> = BTreeMap::new();
        let mut next = first;
        for job in from {
            early.insert(job.sequence, job);
            while let Some(job) = early.remove(&next) {
                // Fails if the packer has ended and needs no buffer.
                let _ = recycle.send(self.append(job)?);
                next += 1;
            }
        }
        Ok(())
    }

    /// Writes a sealed frame. Returns its empty buffers.
    pub(super) fn append(&mut self, mut job: FrameJob) -> Result<FrameJob, RepoError> {
        let (Some(pack), Some(kind)) = (job.pack.take(), job.kind.take()) else {
            return Err(RepoError::WriterFailed);
        };
        if self
            .open
            .as_ref()
            .is_none_or(|open| !Arc::ptr_eq(&open.pack, &pack))
        {
            self.finish_pack()?;
            let image = job.external.map(|place| place.image);
            self.open = Some(self.start_pack(pack, image)?);
        }
        if let Some(open) = &mut self.open {
            open.write(&self.store, &job.sealed)?;
            open.directory.frames.push(Frame {
                kind,
                stored_bytes: job.sealed.len() as u32,
                plain_bytes: job.plain.len() as u32,
                blobs: std::mem::take(&mut job.blobs),
            });
        }
        self.count(job.sealed.len());
        job.meter.add(job.sealed.len());
        Ok(job.emptied())
    }

    fn count(&self, bytes: usize) {
        self.shared
            .stored_bytes
            .fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn start_pack(
        &self,
        pack: Arc<PackInProgress>,
        image: Option<ImageId>,
    ) -> Result<OpenPack, RepoError> {
        let mut open = OpenPack {
            file: self.store.create_temporary()?,
            hasher: blake3::Hasher::new(),
            directory: Directory {
                image,
                ..Directory::default()
            },
            pack,
        };
        let preamble = *open.pack.cipher.preamble();
        open.write(&self.store, &preamble)?;
        self.count(preamble.len());
        Ok(open)
    }

    fn finish_pack(&mut self) -> Result<(), RepoError> {
        let Some(mut open) = self.open.take() else {
            return Ok(());
        };
        let end = open.pack.cipher.seal_directory(&open.directory);
        debug_assert!(end.len() > TAG_BYTES);
        open.write(&self.store, &end)?;
        self.count(end.len());
        let pack = FileHash(*open.hasher.finalize().as_bytes());
        open.file
            .publish(&self.store, Area::Packs, &pack.to_string())?;
        self.shared.add_finished(IndexedPack {
            pack,
            directory: open.directory,
        });
        Ok(())
    }
}

impl OpenPack {
    fn write(&mut self, store: &LocalStore, bytes: &[u8]) -> Result<(), RepoError> {
        self.hasher.update(bytes);
        self.file.write(store, bytes)
    }
}
