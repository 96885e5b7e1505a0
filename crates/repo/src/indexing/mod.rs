//! Indexing an image: its blocks become blobs of the repository, without being copied.
//!
//! ```text
//! image --> reader, past the host's page cache --> cut into frames at zeros --> sealers: ids --> external packs
//! ```
//!
//! The image's own file comes last. So an indexing that is killed leaves external packs of an image that does not
//! exist: no block of them counts, and the next prune removes them.

mod image_reader;

use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use stillframe_page::hash::{ContentHasher, ContentId};
use stillframe_page::{PAGE, is_zero};

use crate::crypto::random;
use crate::crypto::sealed_file::seal_file;
use crate::error::RepoError;
use crate::format::image_record::{ImageId, ImageRecord};
use crate::format::layout::FileKind;
use crate::format::manifest::Manifest;
use crate::images::file::{ImageState, is_being_written, modified, open_regular, state_of};
use crate::index::recording::{ensure_recordable, record_packs};
use crate::indexing::image_reader::ImageReader;
use crate::pack::external_frame::ExternalPlace;
use crate::pack::packer::{Packer, discard};
use crate::pack::{FRAME_PLAIN_TARGET, IndexedPack};
use crate::progress::{Phase, Progress};
use crate::repository::Repository;
use crate::store::local::Area;
use crate::store::lock::Lock;

/// An image, and its state now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// What was recorded when it was indexed.
    pub record: ImageRecord,
    /// Its state.
    pub state: ImageState,
}

/// What an indexing found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Indexed {
    /// An image that the repository did not know.
    New,
    /// An image of a content that was indexed at this path before. It is read where it is now from here on.
    Moved {
        /// The path.
        from: String,
    },
    /// An image that has not changed since it was indexed; it was not read.
    Known,
}

/// What an indexing did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexReport {
    /// The image.
    pub image: ImageRecord,
    /// What was found.
    pub found: Indexed,
    /// Bytes of packs and index that were written.
    pub bytes_stored: u64,
}

impl Repository {
    /// Indexes an image, so that checkpoints need not store what is in it. Waits up to `wait` for the release of
    /// an exclusive lock.
    ///
    /// # Errors
    /// [`RepoError::Image`] where the image is no regular file, is being written by a VM, or changes meanwhile.
    pub fn index_image(
        &mut self,
        path: &Path,
        wait: Duration,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<IndexReport, RepoError> {
        let subject = Subject::open(path)?;
        let lock = self.writing_lock(wait)?;
        let known = self.images.ids()?;
        let records = known.into_iter().map(|id| self.images.record(id));
        let records = records.collect::<Result<Vec<ImageRecord>, _>>()?;
        let same_path = |record: &&ImageRecord| record.path == subject.path;
        let same = records.iter().filter(same_path);
        if let Some(record) = { same }.find(|record| state_of(record) == ImageState::Intact) {
            return Ok(IndexReport {
                image: record.clone(),
                found: Indexed::Known,
                bytes_stored: 0,
            });
        }
        self.writer_index.refresh()?;
        let (id, found, content, bytes_stored) =
            self.read_image(&subject, &records, &lock, progress)?;
        let image = subject.record(id, &content);
        lock.assert_held()?;
        let file = seal_file(FileKind::Image, &self.keys, image.encode())?;
        self.store.create(Area::Images, &id.to_string(), &file)?;
        self.images.forget_known();
        Ok(IndexReport {
            image,
            found,
            bytes_stored,
        })
    }

    /// Reads an image, and writes its external packs unless one of the `records` has its content.
    fn read_image(
        &mut self,
        subject: &Subject,
        records: &[ImageRecord],
        lock: &Lock,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(ImageId, Indexed, Content, u64), RepoError> {
        let mut run = Run {
            packer: self.packer()?,
            repository: self,
            lock,
            id: new_id()?,
            tally: Tally::default(),
            bytes_stored: 0,
        };
        if let Err(error) = run.read(subject, progress) {
            run.packer.abandon();
            return Err(error);
        }
        let Run {
            id,
            packer,
            mut tally,
            bytes_stored,
            ..
        } = run;
        let packs = packer.finish()?;
        if let Err(error) = subject.ensure_unchanged() {
            discard(&self.store, &packs);
            return Err(error);
        }
        tally.add_packs(&packs);
        let content = tally.finish(subject.data.len(), &self.hasher());
        let equal = records.iter().find(|record| record.content == content.id);
        if let Some(record) = equal {
            discard(&self.store, &packs);
            let from = record.path.clone();
            return Ok((record.id, Indexed::Moved { from }, content, bytes_stored));
        }
        let recorded = self.record_external(lock, packs)?;
        Ok((id, Indexed::New, content, bytes_stored + recorded))
    }

    fn record_external(&self, lock: &Lock, packs: Vec<IndexedPack>) -> Result<u64, RepoError> {
        ensure_recordable(&self.store, &self.writer_index, lock, &packs)?;
        record_packs(&self.store, &self.keys, packs)
    }
}

fn new_id() -> Result<ImageId, RepoError> {
    loop {
        // Zeros are no id, and come once in 2^128 times.
        if let Some(id) = ImageId::decode(random()?) {
            return Ok(id);
        }
    }
}

/// The image to index.
struct Subject {
    path: String,
    data: Metadata,
    modified: Timestamp,
}

impl Subject {
    fn open(path: &Path) -> Result<Subject, RepoError> {
        let shown = || path.display().to_string();
        let refuse = |what: &str| RepoError::ImageRefused {
            path: shown(),
            what: what.into(),
        };
        let whole = path
            .canonicalize()
            .map_err(|error| refuse(&error.to_string()))?;
        let file = open_regular(&whole).map_err(|error| refuse(&error.to_string()))?;
        let data = file
            .metadata()
            .map_err(|error| refuse(&error.to_string()))?;
        if is_being_written(&data) {
            return Err(refuse(
                "a VM may write to it: only an image that stays as it is can be indexed",
            ));
        }
        let modified = modified(&data);
        let modified = modified.ok_or_else(|| refuse("its time of change cannot be read"))?;
        let path = whole.into_os_string().into_string();
        let path = path.map_err(|_| refuse("its path is not UTF-8"))?;
        Ok(Subject {
            path,
            data,
            modified,
        })
    }

    fn record(&self, id: ImageId, content: &Content) -> ImageRecord {
        ImageRecord {
            id,
            path: self.path.clone(),
            bytes: self.data.len(),
            modified: self.modified,
            content: content.id,
            blocks: content.blocks,
            indexed: Timestamp::now(),
        }
    }

    /// An error if it changed since it was opened.
    fn ensure_unchanged(&self) -> Result<(), RepoError> {
        let data = PathBuf::from(&self.path).metadata();
        let same = data.is_ok_and(|data| {
            data.len() == self.data.len() && modified(&data) == Some(self.modified)
        });
        match same && !is_being_written(&self.data) {
            true => Ok(()),
            false => Err(RepoError::ImageRefused {
                path: self.path.clone(),
                what: "it changed while it was read; nothing was recorded".into(),
            }),
        }
    }
}

/// What an image has.
struct Content {
    id: ContentId,
    blocks: u64,
}

/// Collects what an image has.
#[derive(Default)]
struct Tally {
    /// The ids of the blocks in their order, hashed.
    ids: blake3::Hasher,
    /// Where they lie, hashed.
    places: blake3::Hasher,
    blocks: u64,
}

impl Tally {
    fn add_frame(&mut self, offset: u64, bytes: &[u8]) {
        self.places.update(&offset.to_le_bytes());
        self.places.update(&(bytes.len() as u32).to_le_bytes());
    }

    fn add_packs(&mut self, packs: &[IndexedPack]) {
        let frames = packs.iter().flat_map(|entry| &entry.directory.frames);
        for (id, _) in frames.flat_map(|frame| &frame.blobs) {
            self.ids.update(&id.0);
            self.blocks += 1;
        }
    }

    fn finish(&self, bytes: u64, hasher: &ContentHasher) -> Content {
        let mut all = bytes.to_le_bytes().to_vec();
        all.extend_from_slice(self.places.finalize().as_bytes());
        all.extend_from_slice(self.ids.finalize().as_bytes());
        Content {
            id: hasher.id(&all),
            blocks: self.blocks,
        }
    }
}

/// The reading of one image.
struct Run<'a> {
    repository: &'a mut Repository,
    lock: &'a Lock,
    id: ImageId,
    packer: Packer,
    tally: Tally,
    /// Bytes of packs and index that were written.
    bytes_stored: u64,
}

impl Run<'_> {
    fn read(
        &mut self,
        subject: &Subject,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), RepoError> {
        let total = subject.data.len();
        let mut reader = ImageReader::start(&subject.path, total)?;
        while let Some((offset, piece)) = reader.next()? {
            progress(Progress {
                phase: Phase::Image,
                done: offset,
                total,
            });
            self.add(offset, piece.bytes())?;
            reader.give_back(piece);
        }
        Ok(())
    }

    /// Cuts a piece of the image into frames: adjacent blocks, none of them zero.
    fn add(&mut self, offset: u64, piece: &[u8]) -> Result<(), RepoError> {
        let (blocks, _) = piece.as_chunks::<PAGE>();
        let mut at = offset;
        for run in blocks.chunk_by(|a, b| is_zero(a) == is_zero(b)) {
            let bytes = run.as_flattened();
            if !is_zero(&run[0]) {
                let frames = bytes.chunks(FRAME_PLAIN_TARGET);
                for (number, frame) in (0..).zip(frames) {
                    self.add_frame(at + number * FRAME_PLAIN_TARGET as u64, frame)?;
                }
            }
            at += bytes.len() as u64;
        }
        Ok(())
    }

    fn add_frame(&mut self, offset: u64, bytes: &[u8]) -> Result<(), RepoError> {
        self.tally.add_frame(offset, bytes);
        let image = self.id;
        self.packer
            .add_external(ExternalPlace { image, offset }, bytes)?;
        if self.packer.finished_bytes() >= self.repository.pack_limits.directory_bytes {
            let packs = self.packer.take_finished();
            self.tally.add_packs(&packs);
            self.bytes_stored += self.repository.record_external(self.lock, packs)?;
            self.repository.writer_index.refresh_files()?;
        }
        Ok(())
    }
}

impl Repository {
    /// All indexed images, by their paths.
    pub fn images(&self) -> Result<Vec<Image>, RepoError> {
        let ids = self.images.ids()?.into_iter();
        let mut found = ids
            .map(|id| self.image(id))
            .collect::<Result<Vec<_>, RepoError>>()?;
        found.sort_by(|a, b| (&a.record.path, a.record.id).cmp(&(&b.record.path, b.record.id)));
        Ok(found)
    }

    /// An error if an image that a checkpoint may need is not as it was indexed. Reading it may fail then, at any of its pages.
    pub fn require_images(&self, manifest: &Manifest) -> Result<(), RepoError> {
        self.images.ensure_intact(&manifest.images)
    }

    /// An indexed image.
    pub fn image(&self, id: ImageId) -> Result<Image, RepoError> {
        let record = self.images.record(id)?;
        let state = state_of(&record);
        Ok(Image { record, state })
    }
}
