//! The packer: it turns new blobs into packs.
//!
//! ```text
//!            frames, bounded                    in the order they were cut
//! put() --> [cut into frames] --> sealers x N --> one appender --> tmp/ --> packs/
//!                  ^              check ids,         write, hash,
//!                  |              encode, seal       finish packs
//!                  +---------- empty buffers <------------+
//! ```
//!
//! There is a fixed number of buffers. When all are in use, `put` waits (backpressure), so a slow disk slows the
//! capture down and memory stays bounded. The order of frames is kept, because blobs written in sequence
//! (neighbouring pages) are read in sequence.
//!
//! The first few frames are sealed and written without threads: for a small checkpoint this takes less time than
//! starting threads. Sealers run where the thread that puts may run, and move with it.

mod appender;
mod frame_job;
mod sealer;

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use rustix::thread::sched_getaffinity;
use stillframe_page::PAGE;
use stillframe_page::hash::ContentId;

use self::appender::Appender;
use self::frame_job::{FrameJob, PackInProgress, Shared};
use self::sealer::Sealer;
use crate::crypto::Keys;
use crate::error::RepoError;
use crate::format::layout::FormatError;
use crate::pack::IndexedPack;
use crate::pack::external_frame::ExternalPlace;
use crate::pack::{FRAME_PLAIN_TARGET, PackCipher, PackLimits, frame_entry_bytes, new_preamble};
use crate::store::local::{Area, LocalStore};
use crate::sync::lock;

/// Number of frame buffers: enough that no sealer waits for the next frame.
const BUFFERS: usize = 48;

const SEALERS_MAX: usize = 4;

/// Frames that the calling thread seals and writes itself: 256 KiB, less than 1 ms of work.
const FRAMES_ALONE: u64 = 4;

/// How many sealers keep the processors busy that the calling thread may run on.
pub(crate) fn sealers() -> usize {
    std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(SEALERS_MAX)
}

/// Counts the bytes that a part of a checkpoint takes in packs. It counts when they are written: it is complete when the
/// checkpoint is committed.
#[derive(Debug, Clone, Default)]
pub struct Meter(Arc<AtomicU64>);

impl Meter {
    /// Bytes so far: of compressed and encrypted frames, without what is added once for a pack.
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn add(&self, bytes: usize) {
        self.0.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Turns blobs into packs.
pub(crate) struct Packer {
    store: Arc<LocalStore>,
    keys: Arc<Keys>,
    current: FrameJob,
    pack: Option<Arc<PackInProgress>>,
    frames_in_pack: u32,
    /// Length in bytes of the plain directory of the pack so far.
    directory_bytes: usize,
    limits: PackLimits,
    /// How many sealer threads there will be.
    sealers: usize,
    sequence: u64,
    meter: Meter,
    line: Line,
    shared: Arc<Shared>,
}

/// What seals and writes frames.
enum Line {
    /// The calling thread.
    Alone(Box<Sealer>, Box<Appender>),
    Threads(Threads),
    /// Nothing: the packer has ended.
    Ended,
}

struct Threads {
    jobs: Sender<FrameJob>,
    empty: Receiver<FrameJob>,
    sealers: Vec<JoinHandle<()>>,
    appender: JoinHandle<()>,
}

impl Packer {
    pub(crate) fn start(
        store: Arc<LocalStore>,
        keys: Arc<Keys>,
        limits: PackLimits,
        sealers: usize,
    ) -> Result<Packer, RepoError> {
        let shared = Arc::new(Shared::default());
        let sealer = Box::new(Sealer::new(&keys, &shared)?);
        let appender = Box::new(Appender::new(store.clone(), shared.clone()));
        Ok(Packer {
            store,
            keys,
            current: FrameJob::default(),
            pack: None,
            frames_in_pack: 0,
            directory_bytes: 0,
            limits,
            sealers,
            sequence: 0,
            meter: Meter::default(),
            line: Line::Alone(sealer, appender),
            shared,
        })
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

    /// Blobs that are added from here on are counted by this meter: a frame has those of one.
    pub(crate) fn count_by(&mut self, meter: Meter) -> Result<(), RepoError> {
        self.cut()?;
        self.meter = meter;
        Ok(())
    }

    /// Adds up to 64 KiB of whole pages of an image, whose content is not stored. A packer takes those of one image,
    /// and nothing else.
    pub(crate) fn add_external(
        &mut self,
        place: ExternalPlace,
        pages: &[u8],
    ) -> Result<(), RepoError> {
        self.current.external = Some(place);
        self.current.plain.extend_from_slice(pages);
        self.cut()
    }

    /// Bytes written into packs so far.
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.shared.stored_bytes.load(Ordering::Relaxed)
    }

    /// Length in bytes of the plain directories of the packs that can be taken.
    pub(crate) fn finished_bytes(&self) -> usize {
        self.shared.finished_bytes()
    }

    /// Takes the packs that are complete and durable by now: those of the first blobs, in order.
    pub(crate) fn take_finished(&self) -> Vec<IndexedPack> {
        self.shared.take_finished()
    }

    /// Closes the current frame and passes it on.
    fn cut(&mut self) -> Result<(), RepoError> {
        if self.current.plain.is_empty() {
            return Ok(());
        }
        if self.sequence == FRAMES_ALONE {
            self.start_threads()?;
        }
        let pack = self.pack_for_next_frame()?;
        let mut job = mem::take(&mut self.current);
        job.sequence = self.sequence;
        job.number = self.frames_in_pack;
        job.pack = Some(pack);
        job.meter = self.meter.clone();
        self.sequence += 1;
        self.frames_in_pack += 1;
        let blobs = match job.external {
            Some(_) => job.plain.len() / PAGE,
            None => job.blobs.len(),
        };
        self.directory_bytes += frame_entry_bytes(blobs);
        self.current = self.line.take(job).map_err(|error| match error {
            Stopped::Here(error) => error,
            Stopped::InThread => self.failure(),
        })?;
        Ok(())
    }

    fn start_threads(&mut self) -> Result<(), RepoError> {
        if let Line::Alone(sealer, appender) = mem::replace(&mut self.line, Line::Ended) {
            let mut sealers = vec![*sealer];
            for _ in 1..self.sealers {
                sealers.push(Sealer::new(&self.keys, &self.shared)?);
            }
            self.line = Line::Threads(Threads::start(sealers, *appender, self.sequence)?);
        }
        Ok(())
    }

    fn pack_for_next_frame(&mut self) -> Result<Arc<PackInProgress>, RepoError> {
        if let Some(pack) = &self.pack
            && pack.stored.load(Ordering::Relaxed) < self.limits.stored_bytes
            && self.directory_bytes < self.limits.directory_bytes
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
        self.directory_bytes = 0;
        self.pack = Some(pack.clone());
        Ok(pack)
    }

    fn failure(&self) -> RepoError {
        lock(&self.shared.failure)
            .take()
            .unwrap_or(RepoError::WriterFailed)
    }

    /// Waits until everything is on disk. Returns the packs that were written and not taken yet.
    pub(crate) fn finish(mut self) -> Result<Vec<IndexedPack>, RepoError> {
        if let Err(error) = self.cut() {
            self.shared.fail(error);
        }
        self.end();
        let packs = self.shared.take_finished();
        let failure = lock(&self.shared.failure).take();
        match failure {
            None => Ok(packs),
            Some(error) => {
                discard(&self.store, &packs);
                Err(error)
            }
        }
    }

    /// Ends the threads and removes the packs that were not taken.
    pub(crate) fn abandon(mut self) {
        self.shared.fail(RepoError::WriterFailed);
        self.end();
        discard(&self.store, &self.shared.take_finished());
    }

    fn end(&mut self) {
        match mem::replace(&mut self.line, Line::Ended) {
            Line::Alone(_, appender) => appender.finish(),
            Line::Threads(threads) => threads.join(&self.shared),
            Line::Ended => self.shared.fail(RepoError::WriterFailed),
        }
    }
}

/// Why a frame was not passed on.
enum Stopped {
    /// This thread failed to seal or write it.
    Here(RepoError),
    /// The threads have ended, and left the error in [`Shared`].
    InThread,
}

impl Line {
    /// Takes a frame. Returns an empty buffer for the next.
    fn take(&mut self, mut job: FrameJob) -> Result<FrameJob, Stopped> {
        match self {
            Line::Alone(sealer, appender) => sealer
                .seal(&mut job)
                .and_then(|()| appender.append(job))
                .map_err(Stopped::Here),
            Line::Threads(threads) => {
                job.processors = sched_getaffinity(None).ok();
                let next = threads.empty.recv().map_err(|_| Stopped::InThread)?;
                threads.jobs.send(job).map_err(|_| Stopped::InThread)?;
                Ok(next)
            }
            Line::Ended => Err(Stopped::InThread),
        }
    }
}

impl Threads {
    /// `first` is the sequence number of the first frame.
    fn start(sealers: Vec<Sealer>, appender: Appender, first: u64) -> Result<Threads, RepoError> {
        let (jobs, to_sealers) = bounded::<FrameJob>(BUFFERS);
        let (done, to_appender) = bounded(BUFFERS);
        let (recycle, empty) = unbounded();
        for _ in 1..BUFFERS {
            // The receiver exists, so this cannot fail.
            let _ = recycle.send(FrameJob::default());
        }
        let sealers: Result<Vec<_>, RepoError> = sealers
            .into_iter()
            .map(|sealer| {
                let (from, to) = (to_sealers.clone(), done.clone());
                spawn("frame sealer", move || sealer.run(&from, &to))
            })
            .collect();
        Ok(Threads {
            jobs,
            empty,
            sealers: sealers?,
            appender: spawn("pack writer", move || {
                appender.run(&to_appender, &recycle, first)
            })?,
        })
    }

    fn join(self, shared: &Shared) {
        drop(self.jobs);
        for thread in self.sealers.into_iter().chain([self.appender]) {
            if thread.join().is_err() {
                shared.fail(RepoError::WriterFailed);
            }
        }
    }
}

/// Removes packs that no index file describes. Prune removes those that cannot be removed now.
pub(crate) fn discard(store: &LocalStore, packs: &[IndexedPack]) {
    for entry in packs {
        let _ = store.remove(Area::Packs, &entry.pack.to_string());
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, RepoError> {
    std::thread::Builder::new()
        .name(name.into())
        .spawn(work)
        .map_err(|source| RepoError::System {
            what: "a thread",
            source,
        })
}
