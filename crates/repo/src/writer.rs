//! Writing one checkpoint.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use stillframe_page::hash::{ContentHasher, ContentId};

use crate::blobs::Blobs;
use crate::crypto::sealed_file::seal_file;
use crate::error::RepoError;
use crate::format::image_record::ImageId;
use crate::format::layout::FileKind;
use crate::format::manifest::{CheckpointId, MANIFEST_BYTES_MAX, Manifest, Stream};
use crate::index::blob_table::BlobTable;
use crate::index::compact::merge_small_index_files;
use crate::index::in_memory::Index;
use crate::index::on_demand::Origin;
use crate::index::reader::IndexReader;
use crate::index::recording::{ensure_recordable, record_packs};
use crate::pack::BLOB_BYTES_MAX;
use crate::pack::IndexedPack;
use crate::pack::packer::{Meter, Packer};
use crate::repository::Repository;
use crate::store::local::Area;
use crate::store::lock::Lock;

/// Length in bytes of the pieces that a stream is split into.
pub const PIECE_BYTES: usize = 4096;

/// What [`Writer::put`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// The blob is new and will be stored.
    New,
    /// The repository, or this writer, has it already.
    Duplicate,
}

/// A checkpoint that was recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Its id.
    pub id: CheckpointId,
    /// Bytes of packs and index that were written for it, as its manifest says.
    pub bytes_stored: u64,
    /// The images that may have some of its pages, as its manifest says.
    pub images: BTreeSet<ImageId>,
}

/// Writes one checkpoint. A drop without [`Writer::commit`] removes what was written. The next prune removes what
/// cannot be removed then: packs of a large checkpoint that index files describe already.
pub struct Writer<'a> {
    repository: &'a mut Repository,
    lock: Arc<Lock>,
    hasher: ContentHasher,
    /// The blobs that were given to the packer and that no index file describes yet, in this order.
    fresh: BlobTable,
    packer: Option<Packer>,
    bytes_stored: u64,
    /// Which copies make it unnecessary to store a blob.
    origin: Origin,
    meter: Meter,
    /// The images that have blobs which this writer did not store for this reason.
    images: BTreeSet<ImageId>,
}

impl Repository {
    /// Begins a checkpoint: waits up to `wait` for the release of an exclusive lock, takes a shared one, and
    /// reads new index files.
    pub fn begin(&mut self, wait: Duration) -> Result<Writer<'_>, RepoError> {
        Writer::begin(self, wait)
    }
}

impl<'a> Writer<'a> {
    fn begin(repository: &'a mut Repository, wait: Duration) -> Result<Writer<'a>, RepoError> {
        let lock = repository.writing_lock(wait)?;
        // A prune may have left it.
        repository.index = Index::default();
        repository.writer_index.refresh()?;
        Ok(Writer {
            hasher: repository.hasher(),
            lock,
            fresh: BlobTable::default(),
            packer: None,
            bytes_stored: 0,
            origin: Origin::Any,
            meter: Meter::default(),
            images: BTreeSet::new(),
            repository,
        })
    }

    /// Whether there is a checkpoint of this id. It cannot be removed while this writer exists.
    pub fn has_manifest(&self, id: &CheckpointId) -> Result<bool, RepoError> {
        self.repository.has_manifest(id)
    }

    /// All checkpoints ([`Repository::manifests`]). None of them can be removed while this writer exists.
    pub fn manifests(&self) -> Result<Vec<(CheckpointId, Manifest)>, RepoError> {
        self.repository.manifests()
    }

    /// Whether a blob is in the repository or was put by this writer.
    pub fn contains(&self, id: &ContentId) -> Result<bool, RepoError> {
        Ok(self.fresh.find(id).is_some() || self.repository.writer_index.contains(id)?)
    }

    /// The packs of the index that are missing or cut short, by their paths in the repository. Earlier
    /// checkpoints may need them. Their blobs count as absent and are stored again by [`Writer::put`].
    pub fn missing_packs(&self) -> Vec<String> {
        let repository = &self.repository;
        let names = repository.writer_index.missing_packs().iter();
        names
            .map(|name| repository.store.label(Area::Packs, &name.to_string()))
            .collect()
    }

    /// The hasher that makes this repository's ids.
    pub fn hasher(&self) -> &ContentHasher {
        &self.hasher
    }

    /// The blobs committed before this writer began. Its own are not among them, or only some.
    pub fn blobs(&self) -> Blobs<'_> {
        Blobs {
            index: IndexReader::Writer(&self.repository.writer_index),
            ..self.repository.blobs()
        }
    }

    /// The images that are not as they were indexed, by their paths. Earlier checkpoints may need them. Their
    /// blocks count as absent, like the blobs of [`Writer::missing_packs`].
    pub fn changed_images(&self) -> Result<Vec<String>, RepoError> {
        self.repository.images.changed()
    }

    /// Whether each of these images was as it was indexed when this writer began, or was first inquired about.
    pub fn has_images(&self, images: &BTreeSet<ImageId>) -> bool {
        images
            .iter()
            .all(|&id| self.repository.images.is_intact(id))
    }

    /// Stores a blob of 1 byte to 32 MiB under its id. A later call may report a failure to write; after an error
    /// the writer can only be dropped.
    pub fn put(&mut self, id: ContentId, bytes: &[u8]) -> Result<Put, RepoError> {
        if self.fresh.find(&id).is_some() {
            return Ok(Put::Duplicate);
        }
        self.put_unless(self.origin, id, bytes)
    }

    /// As [`Writer::put`], but stores the blob even if the repository has it already. One that an image has is not
    /// stored, unless images are ignored.
    pub fn put_again(&mut self, id: ContentId, bytes: &[u8]) -> Result<Put, RepoError> {
        match self.origin {
            Origin::Any => self.put_unless(Origin::Image, id, bytes),
            _ => self.store(id, bytes),
        }
    }

    /// Stores a blob of which there is no copy of this origin.
    fn put_unless(
        &mut self,
        origin: Origin,
        id: ContentId,
        bytes: &[u8],
    ) -> Result<Put, RepoError> {
        let index = &self.repository.writer_index;
        match index.get_of(&id, origin)?.filter(|found| found.whole) {
            Some(found) => {
                self.images.extend(index.pack_image(found.place.pack));
                Ok(Put::Duplicate)
            }
            None => self.store(id, bytes),
        }
    }

    /// From here on, what an image has is stored, too: the checkpoint comes to need no image for it.
    pub fn ignore_images(&mut self) {
        self.origin = Origin::Repository;
    }

    /// Counts what is stored from here on, until the next call.
    ///
    /// # Errors
    /// That of what was put before.
    pub fn meter(&mut self) -> Result<Meter, RepoError> {
        self.meter = Meter::default();
        if let Some(packer) = &mut self.packer {
            packer.count_by(self.meter.clone())?;
        }
        Ok(self.meter.clone())
    }

    fn store(&mut self, id: ContentId, bytes: &[u8]) -> Result<Put, RepoError> {
        if bytes.is_empty() || bytes.len() > BLOB_BYTES_MAX {
            return Err(RepoError::BlobSize {
                bytes: bytes.len(),
                max: BLOB_BYTES_MAX,
            });
        }
        let packer = match &mut self.packer {
            Some(packer) => packer,
            // A checkpoint in which nothing changed starts no threads.
            none => {
                let packer = none.insert(self.repository.packer()?);
                packer.count_by(self.meter.clone())?;
                packer
            }
        };
        packer.add(id, bytes)?;
        self.fresh.add(&id, |_| false);
        if packer.finished_bytes() >= self.repository.pack_limits.directory_bytes {
            let packs = packer.take_finished();
            self.record_early(packs)?;
        }
        Ok(Put::New)
    }

    /// Describes packs by an index file before the checkpoint ends, so that their directories need not stay in
    /// memory. Another writer may rely on them from then on, so they stay even if this checkpoint is never
    /// recorded; a prune removes them, as after a crash between index file and manifest.
    fn record_early(&mut self, packs: Vec<IndexedPack>) -> Result<(), RepoError> {
        self.ensure_recordable(&packs)?;
        let blobs = packs.iter().map(|entry| entry.directory.blobs()).sum();
        self.record_packs(packs)?;
        // It finds these blobs from now on.
        self.repository.writer_index.refresh_files()?;
        self.fresh.forget_first(blobs);
        Ok(())
    }

    fn ensure_recordable(&self, packs: &[IndexedPack]) -> Result<(), RepoError> {
        let Repository {
            store,
            writer_index,
            ..
        } = &*self.repository;
        ensure_recordable(store, writer_index, &self.lock, packs)
    }

    fn record_packs(&mut self, packs: Vec<IndexedPack>) -> Result<(), RepoError> {
        self.bytes_stored += record_packs(&self.repository.store, &self.repository.keys, packs)?;
        Ok(())
    }

    /// Stores a blob under the id of its bytes, which it returns.
    pub fn put_unnamed(&mut self, bytes: &[u8]) -> Result<ContentId, RepoError> {
        let id = self.hasher.id(bytes);
        self.put(id, bytes)?;
        Ok(id)
    }

    /// Stores a byte string in pieces of 4 KiB, so that pieces which checkpoints share are stored once. Returns
    /// the ids of the pieces.
    pub fn put_stream(&mut self, bytes: &[u8]) -> Result<Vec<ContentId>, RepoError> {
        bytes
            .chunks(PIECE_BYTES)
            .map(|piece| self.put_unnamed(piece))
            .collect()
    }

    /// As [`Writer::put_stream`], in the form that a manifest takes.
    pub fn put_whole_stream(&mut self, bytes: &[u8]) -> Result<Stream, RepoError> {
        Ok(Stream {
            bytes: bytes.len() as u64,
            pieces: self.put_stream(bytes)?,
        })
    }

    /// Bytes written so far; what is still in memory is not counted.
    pub fn bytes_stored(&self) -> u64 {
        self.packer.as_ref().map_or(0, Packer::stored_bytes)
    }

    /// Records the checkpoint. When this returns, it is on disk: packs first, then the index files that describe
    /// them, then the manifest, each made durable before the next is begun. Sets `manifest.bytes_stored`, and adds to
    /// `manifest.images`, which names those of the checkpoints whose tables it goes on with. After
    /// an error there is no new checkpoint, unless only the last fsync, of the folder `manifests/`, has failed;
    /// then the checkpoint may exist, and is complete.
    pub fn commit(mut self, mut manifest: Manifest) -> Result<Committed, RepoError> {
        let packs = match self.packer.take() {
            Some(packer) => packer.finish()?,
            None => Vec::new(),
        };
        self.ensure_recordable(&packs)?;
        // Once an index file may name the packs, they stay: they are complete and durable, and another writer may
        // already rely on them.
        self.record_packs(packs)?;
        manifest.images.append(&mut self.images);
        let images = manifest.images.clone();
        let id = self.record_manifest(manifest)?;
        // From here on the checkpoint exists; merging index files is housekeeping.
        let Repository {
            store,
            keys,
            writer_index,
            ..
        } = &mut *self.repository;
        merge_small_index_files(store, keys, writer_index, &self.lock);
        Ok(Committed {
            id,
            bytes_stored: self.bytes_stored,
            images,
        })
    }

    fn record_manifest(&self, mut manifest: Manifest) -> Result<CheckpointId, RepoError> {
        let repository = &*self.repository;
        repository.images.ensure_intact(&manifest.images)?;
        manifest.bytes_stored = self.bytes_stored;
        let body = manifest
            .encode()
            .map_err(|what| RepoError::BadManifest { what })?;
        let file = seal_file(FileKind::Manifest, &repository.keys, body)?;
        if file.len() as u64 > MANIFEST_BYTES_MAX {
            let what = format!("it is {} bytes long", file.len());
            return Err(RepoError::BadManifest { what });
        }
        let id = CheckpointId(repository.keys.checkpoint_id(&file));
        self.lock.assert_held()?;
        let (store, name) = (&repository.store, id.to_hex());
        store.create(Area::Manifests, &name, &file)?;
        // If the lock was lost in between, a prune may have removed blobs that this manifest needs. A prune that
        // began later has seen the manifest.
        if let Err(error) = self.lock.assert_held() {
            store.remove(Area::Manifests, &name)?;
            store.sync_area(Area::Manifests)?;
            return Err(error);
        }
        Ok(id)
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        if let Some(packer) = self.packer.take() {
            packer.abandon();
        }
    }
}

impl<'a> From<&'a Writer<'_>> for Blobs<'a> {
    fn from(writer: &'a Writer<'_>) -> Blobs<'a> {
        writer.blobs()
    }
}
