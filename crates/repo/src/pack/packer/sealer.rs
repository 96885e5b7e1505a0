//! Encodes and seals frames.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam_channel::{Receiver, Sender};
use rustix::thread::{CpuSet, sched_setaffinity};
use stillframe_page::PAGE;
use stillframe_page::encoding::{Compression, Encoder};
use stillframe_page::hash::ContentHasher;

use super::frame_job::{FrameJob, Shared};
use crate::crypto::Keys;
use crate::error::RepoError;
use crate::pack::{KIND_EXTERNAL, frame_entry_bytes};

/// How frames are compressed (figures: `docs/format.md`).
const COMPRESSION: Compression = Compression::Zstd(1);

/// The state of one sealer thread.
pub(super) struct Sealer {
    hasher: ContentHasher,
    encoder: Encoder,
    shared: Arc<Shared>,
    /// Where its thread may run, once it has been moved.
    processors: Option<CpuSet>,
}

impl Sealer {
    pub(super) fn new(keys: &Keys, shared: &Arc<Shared>) -> Result<Sealer, RepoError> {
        Ok(Sealer {
            hasher: keys.hasher(),
            encoder: Encoder::new(COMPRESSION)?,
            shared: shared.clone(),
            processors: None,
        })
    }

    pub(super) fn run(mut self, from: &Receiver<FrameJob>, to: &Sender<FrameJob>) {
        for mut job in from {
            self.follow(job.processors);
            // A failed job is passed on unsealed: the appender stops at it, and then every thread that waits for
            // the appender.
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

    /// Moves the calling thread to the processors of the thread that cut a frame: the VM's guest may have become busy, or
    /// idle, since this thread was started.
    fn follow(&mut self, processors: Option<CpuSet>) {
        if let Some(to) = processors.filter(|_| processors != self.processors) {
            // Where the kernel refuses, the thread stays: where it runs changes nothing but speed.
            let _ = sched_setaffinity(None, &to);
            self.processors = processors;
        }
    }

    /// Encodes and seals a frame within its job.
    pub(super) fn seal(&mut self, job: &mut FrameJob) -> Result<(), RepoError> {
        let kind = match job.external {
            None => self.encode(job)?,
            Some(place) => {
                let pages: Vec<&[u8; PAGE]> = job.plain.as_chunks().0.iter().collect();
                let ids = self.hasher.ids(&pages).into_iter();
                job.blobs.extend(ids.map(|id| (id, PAGE as u32)));
                job.sealed.extend_from_slice(&place.encode());
                KIND_EXTERNAL
            }
        };
        if let Some(pack) = &job.pack {
            let plain_bytes = job.plain.len() as u32;
            pack.cipher
                .seal_frame(job.number, kind, plain_bytes, &mut job.sealed);
            // Pages that compress well may take more space in the directory than in the frames.
            let stored = job.sealed.len() + frame_entry_bytes(job.blobs.len());
            pack.stored.fetch_add(stored as u64, Ordering::Relaxed);
        }
        job.kind = Some(kind);
        Ok(())
    }

    /// Compresses the content of a frame. Returns its kind.
    fn encode(&mut self, job: &mut FrameJob) -> Result<u8, RepoError> {
        // Hashing again costs little compared with compression. Bytes that changed after the caller hashed them
        // would be stored under a wrong id, and lost.
        let lengths = job.blobs.iter().map(|&(_, length)| length as usize);
        let found = self.hasher.ids_of(&job.plain, lengths).into_iter();
        let mut blobs = job.blobs.iter().zip(found);
        if let Some((&(id, _), _)) = blobs.find(|((id, _), found)| id != found) {
            return Err(RepoError::ContentMismatch { id });
        }
        Ok(self.encoder.encode(&job.plain, &mut job.sealed)?.number())
    }
}

#[cfg(test)]
mod tests {
    use rustix::thread::sched_getaffinity;

    use super::*;
    use crate::crypto::MasterKey;

    #[test]
    fn it_runs_where_the_thread_that_feeds_it_may_run() {
        let keys = Keys::derive(&MasterKey::new([7; 32]));
        let mut sealer = Sealer::new(&keys, &Arc::default()).unwrap();
        let thread = std::thread::spawn(move || {
            let before = sched_getaffinity(None).unwrap();
            let last = (0..CpuSet::MAX_CPU).rfind(|&number| before.is_set(number));
            let mut one = CpuSet::new();
            one.set(last.unwrap());
            for set in [one, before] {
                sealer.follow(Some(set));
                assert_eq!(sched_getaffinity(None).unwrap(), set);
                sealer.follow(None);
                assert_eq!(sched_getaffinity(None).unwrap(), set);
            }
        });
        thread.join().unwrap();
    }
}
