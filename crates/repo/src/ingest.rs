//! The way of new blobs into packs.
//!
//! ```text
//!            frames, bounded                    in the order they were cut
//! put() --> [cut into frames] --> workers x N --> one appender --> tmp/ --> packs/
//!                  ^              check ids,         write, hash,
//!                  |              encode, seal       finish packs
//!                  +---------- empty buffers <------------+
//! ```
//!
//! There is a fixed number of buffers; when all are under way `put` waits, so a slow disk slows
//! the capture down instead of filling memory. The order of frames is kept, because blobs written
//! together (neighbouring pages) are read together.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use stillframe_page::encoding::{Encoder, Kind};
use stillframe_page::hash::{ContentHasher, ContentId};

use crate::blobs::lock;
use crate::crypto::{Keys, TAG_BYTES};
use crate::error::RepoError;
use crate::index_file::IndexedPack;
use crate::layout::FormatError;
use crate::local::{Area, LocalStore, TemporaryFile};
use crate::pack::{
    Directory, FRAME_PLAIN_TARGET, FileHash, Frame, PACK_BYTES_TARGET, PackCipher,
    frame_entry_bytes, new_preamble,
};

/// Zstandard level for frames (figures: `docs/format.md`).
const LEVEL: i32 = 1;

/// Frames under way at once: enough that no worker waits for the next one.
const BUFFERS: usize = 48;

/// A buffer that grew beyond this for one large blob is not kept.
const BUFFER_BYTES_KEPT: usize = 1 << 20;

const WORKERS_MAX: usize = 4;

/// A pack being filled. Made where frames are cut, so that workers know its key; `stored` tells
/// the cutter how long the file has become meanwhile.
struct PackInProgress {
    cipher: PackCipher,
    stored: AtomicU64,
}

/// A frame on its way, and its two buffers.
#[derive(Default)]
struct Job {
    /// Counts frames over all packs of this ingest.
    sequence: u64,
    number: u32,
    pack: Option<Arc<PackInProgress>>,
    blobs: Vec<(ContentId, u32)>,
    plain: Vec<u8>,
    kind: Option<Kind>,
    sealed: Vec<u8>,
}

/// Takes blobs and makes packs of them.
pub(crate) struct Ingest {
    store: Arc<LocalStore>,
    keys: Arc<Keys>,
    current: Job,
    pack: Option<Arc<PackInProgress>>,
    frames_in_pack: u32,
    sequence: u64,
    jobs: Option<Sender<Job>>,
    empty: Receiver<Job>,
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    appender: Option<JoinHandle<Vec<IndexedPack>>>,
}

/// What the threads tell the cutter.
struct Shared {
    stored_bytes: AtomicU64,
    failure: Mutex<Option<RepoError>>,
}

impl Shared {
    fn fail(&self, error: RepoError) {
        lock(&self.failure).get_or_insert(error);
    }
}

impl Ingest {
    pub(crate) fn start(store: Arc<LocalStore>, keys: Arc<Keys>) -> Result<Ingest, RepoError> {
        let shared = Arc::new(Shared {
            stored_bytes: AtomicU64::new(0),
            failure: Mutex::new(None),
        });
        let (jobs, to_workers) = bounded(BUFFERS);
        let (done, to_appender) = bounded(BUFFERS);
        let (recycle, empty) = unbounded();
        for _ in 1..BUFFERS {
            // The receiver is in hand: this cannot fail.
            let _ = recycle.send(Job::default());
        }
        let appender = Appender {
            store: store.clone(),
            recycle,
            shared: shared.clone(),
            open: None,
            finished: Vec::new(),
        };
        let mut ingest = Ingest {
            current: Job::default(),
            pack: None,
            frames_in_pack: 0,
            sequence: 0,
            jobs: Some(jobs),
            empty,
            workers: Vec::new(),
            appender: Some(spawn("pack writer", move || appender.run(&to_appender))?),
            shared,
            store,
            keys,
        };
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        for _ in 0..count.min(WORKERS_MAX) {
            let worker = Worker {
                hasher: ingest.keys.hasher(),
                encoder: Encoder::new(LEVEL)?,
                shared: ingest.shared.clone(),
            };
            let (from, to) = (to_workers.clone(), done.clone());
            ingest
                .workers
                .push(spawn("frame sealer", move || worker.run(&from, &to))?);
        }
        Ok(ingest)
    }

    /// Adds a blob of 1 byte to `BLOB_BYTES_MAX`.
    pub(crate) fn add(&mut self, id: ContentId, blob: &[u8]) -> Result<(), RepoError> {
        let together = self.current.plain.len() + blob.len();
        if together > FRAME_PLAIN_TARGET {
            self.cut()?;
        }
        self.current.plain.extend_from_slice(blob);
        // The caller has bounded it far below 4 GiB.
        self.current.blobs.push((id, blob.len() as u32));
        if self.current.plain.len() >= FRAME_PLAIN_TARGET {
            self.cut()?;
        }
        Ok(())
    }

    /// Bytes written into packs so far.
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.shared.stored_bytes.load(Ordering::Relaxed)
    }

    /// Sends the current frame on its way.
    fn cut(&mut self) -> Result<(), RepoError> {
        if self.current.blobs.is_empty() {
            return Ok(());
        }
        let pack = self.pack_for_next_frame()?;
        let Ok(next) = self.empty.recv() else {
            return Err(self.failure());
        };
        let mut job = std::mem::replace(&mut self.current, next);
        job.sequence = self.sequence;
        job.number = self.frames_in_pack;
        job.pack = Some(pack);
        self.sequence += 1;
        self.frames_in_pack += 1;
        match self.jobs.as_ref().map(|jobs| jobs.send(job)) {
            Some(Ok(())) => Ok(()),
            _ => Err(self.failure()),
        }
    }

    fn pack_for_next_frame(&mut self) -> Result<Arc<PackInProgress>, RepoError> {
        if let Some(pack) = &self.pack
            && pack.stored.load(Ordering::Relaxed) < PACK_BYTES_TARGET
        {
            return Ok(pack.clone());
        }
        let cipher = PackCipher::new(&self.keys, new_preamble()?)
            .map_err(|error: FormatError| RepoError::format("a new pack", &error))?;
        let pack = Arc::new(PackInProgress {
            cipher,
            stored: AtomicU64::new(0),
        });
        self.frames_in_pack = 0;
        self.pack = Some(pack.clone());
        Ok(pack)
    }

    fn failure(&self) -> RepoError {
        lock(&self.shared.failure)
            .take()
            .unwrap_or(RepoError::WriterFailed)
    }

    /// Waits until everything is on disk; the packs that were written.
    pub(crate) fn finish(mut self) -> Result<Vec<IndexedPack>, RepoError> {
        let cut = self.cut();
        let packs = self.join();
        let failure = cut.err().or_else(|| lock(&self.shared.failure).take());
        match failure {
            None => Ok(packs),
            Some(error) => {
                discard(&self.store, &packs);
                Err(error)
            }
        }
    }

    /// Ends the threads and removes what they wrote.
    pub(crate) fn abandon(mut self) {
        self.shared.fail(RepoError::WriterFailed);
        let packs = self.join();
        discard(&self.store, &packs);
    }

    fn join(&mut self) -> Vec<IndexedPack> {
        drop(self.jobs.take());
        for worker in self.workers.drain(..) {
            if worker.join().is_err() {
                self.shared.fail(RepoError::WriterFailed);
            }
        }
        match self.appender.take().map(JoinHandle::join) {
            Some(Ok(packs)) => packs,
            _ => {
                self.shared.fail(RepoError::WriterFailed);
                Vec::new()
            }
        }
    }
}

/// Removes packs no index file tells of. What cannot be removed now, prune removes.
pub(crate) fn discard(store: &LocalStore, packs: &[IndexedPack]) {
    for entry in packs {
        let _ = store.remove(Area::Packs, &entry.pack.to_string());
    }
}

fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>, RepoError> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(work)
        .map_err(|source| RepoError::System {
            what: "a thread",
            source,
        })
}

struct Worker {
    hasher: ContentHasher,
    encoder: Encoder,
    shared: Arc<Shared>,
}

impl Worker {
    fn run(mut self, from: &Receiver<Job>, to: &Sender<Job>) {
        for mut job in from {
            // A job that failed goes on unsealed: the appender stops when it comes to it, and so
            // does everyone who waits for the appender.
            match catch_unwind(AssertUnwindSafe(|| self.seal(&mut job))) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => self.shared.fail(error),
                Err(_) => self.shared.fail(RepoError::WriterFailed),
            }
            if to.send(job).is_err() {
                return;
            }
        }
    }

    fn seal(&mut self, job: &mut Job) -> Result<(), RepoError> {
        // Hashing again costs little next to compressing, and what is stored under a wrong id is
        // lost: bytes that changed under the caller's hands must not get that far.
        let mut start = 0;
        for &(id, length) in &job.blobs {
            let end = start + length as usize;
            if self.hasher.id(&job.plain[start..end]) != id {
                return Err(RepoError::ContentMismatch { id });
            }
            start = end;
        }
        let kind = self.encoder.encode(&job.plain, &mut job.sealed)?;
        if let Some(pack) = &job.pack {
            let plain_bytes = job.plain.len() as u32;
            pack.cipher
                .seal_frame(job.number, kind, plain_bytes, &mut job.sealed);
            // Pages that compress well may take more room in the directory than in the frames.
            let stored = job.sealed.len() + frame_entry_bytes(job.blobs.len());
            pack.stored.fetch_add(stored as u64, Ordering::Relaxed);
        }
        job.kind = Some(kind);
        Ok(())
    }
}

/// Appends sealed frames to packs, in order. Ends, giving up its channel ends, when anything
/// fails: the cutter then finds no empty buffer and asks for the failure.
struct Appender {
    store: Arc<LocalStore>,
    recycle: Sender<Job>,
    shared: Arc<Shared>,
    open: Option<OpenPack>,
    finished: Vec<IndexedPack>,
}

struct OpenPack {
    pack: Arc<PackInProgress>,
    file: TemporaryFile,
    hasher: blake3::Hasher,
    directory: Directory,
}

impl Appender {
    fn run(mut self, from: &Receiver<Job>) -> Vec<IndexedPack> {
        if let Err(error) = self.append_all(from) {
            self.shared.fail(error);
        }
        self.finished
    }

    fn append_all(&mut self, from: &Receiver<Job>) -> Result<(), RepoError> {
        // Bounded by the number of buffers there are.
        let mut early: BTreeMap<u64, Job> = BTreeMap::new();
        let mut next = 0;
        for job in from {
            early.insert(job.sequence, job);
            while let Some(job) = early.remove(&next) {
                self.append(job)?;
                next += 1;
            }
        }
        // The pack of an abandoned writer must not be finished.
        let failed = lock(&self.shared.failure).is_some();
        match failed {
            true => Ok(()),
            false => self.finish_pack(),
        }
    }

    fn append(&mut self, mut job: Job) -> Result<(), RepoError> {
        let (Some(pack), Some(kind)) = (job.pack.take(), job.kind.take()) else {
            return Err(RepoError::WriterFailed);
        };
        if self
            .open
            .as_ref()
            .is_none_or(|open| !Arc::ptr_eq(&open.pack, &pack))
        {
            self.finish_pack()?;
            self.open = Some(self.start_pack(pack)?);
        }
        if let Some(open) = &mut self.open {
            open.write(&self.store, &job.sealed)?;
            open.directory.frames.push(Frame {
                kind: kind.number(),
                stored_bytes: job.sealed.len() as u32,
                plain_bytes: job.plain.len() as u32,
                blobs: std::mem::take(&mut job.blobs),
            });
        }
        self.count(job.sealed.len());
        self.recycle(job);
        Ok(())
    }

    fn recycle(&self, mut job: Job) {
        job.plain.clear();
        job.sealed.clear();
        if job.plain.capacity() + job.sealed.capacity() > 2 * BUFFER_BYTES_KEPT {
            job = Job::default();
        }
        // The cutter may be gone already; then nobody needs the buffer.
        let _ = self.recycle.send(job);
    }

    fn count(&self, bytes: usize) {
        self.shared
            .stored_bytes
            .fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn start_pack(&self, pack: Arc<PackInProgress>) -> Result<OpenPack, RepoError> {
        let mut open = OpenPack {
            file: self.store.create_temporary()?,
            hasher: blake3::Hasher::new(),
            directory: Directory::default(),
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
        self.finished.push(IndexedPack {
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
