//! Verified reads of blobs.
//!
//! Reads go by frames: the wanted blobs are sorted by location, neighbouring frames are read with one call, each
//! frame is decrypted and decoded once, and every blob is hashed again before it is passed on. Memory is bounded
//! by a run of frames per thread, however many blobs are wanted.

pub(crate) mod frame_reader;

use std::iter::Peekable;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use stillframe_page::hash::ContentId;

use crate::blobs::frame_reader::FrameReader;
use crate::crypto::Keys;
use crate::error::RepoError;
use crate::images::Images;
use crate::index::reader::IndexReader;
use crate::pack::place::{Place, Wanted};
use crate::store::local::{Area, LocalStore};
use crate::sync::lock;

/// The committed blobs of a repository, as a [`crate::Reader`] or [`crate::Writer`] sees them.
#[derive(Clone, Copy)]
pub struct Blobs<'a> {
    pub(crate) store: &'a LocalStore,
    pub(crate) keys: &'a Keys,
    pub(crate) images: &'a Images,
    pub(crate) index: IndexReader<'a>,
}

/// One read call fetches at most this many bytes, and reads over no gap longer than [`GAP_BYTES_MAX`].
const RUN_BYTES_MAX: u32 = 1 << 20;
const GAP_BYTES_MAX: u32 = 64 << 10;
/// The frames of one run decode to at most this many bytes, so that all threads have work: frames of external packs are
/// a few bytes each, and those of an image of 1 GiB would be one run.
const RUN_PLAIN_BYTES_MAX: u32 = 4 << 20;

/// Receives blobs: the tag of the first, and the bytes of all.
pub type BlobSink<'s, T, E> = &'s (dyn Fn(T, &[u8]) -> Result<(), E> + Sync);

impl<'a> Blobs<'a> {
    /// The bytes of one blob, verified against its id.
    pub fn read(&self, id: &ContentId) -> Result<Vec<u8>, RepoError> {
        let mut found = self.read_many(std::slice::from_ref(id))?;
        found.pop().ok_or(RepoError::MissingBlob { id: *id })
    }

    /// The bytes of several blobs, in the order of `ids`. All of them are in memory at once.
    pub fn read_many(&self, ids: &[ContentId]) -> Result<Vec<Vec<u8>>, RepoError> {
        let found = Mutex::new(vec![Vec::new(); ids.len()]);
        let wanted = (0..).zip(ids).map(|(at, &id)| (id, at)).collect();
        self.read_sorted(wanted, 1, &|at: usize, bytes| {
            lock(&found)[at] = bytes.to_vec();
            Ok::<(), RepoError>(())
        })?;
        Ok(found
            .into_inner()
            .unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    /// Passes each wanted blob with its tag to `sink`, in the order of their locations, from up to `threads`
    /// threads at once. Each blob is verified against its id first. The first error, of a read or of `sink`, ends
    /// it; some blobs have been passed on by then.
    pub fn read_sorted<T: Copy + Send, E: From<RepoError> + Send>(
        &self,
        wanted: Vec<(ContentId, T)>,
        threads: usize,
        sink: BlobSink<'_, T, E>,
    ) -> Result<(), E> {
        self.read_joined(wanted, threads, |_, _| false, sink)
    }

    /// As [`Blobs::read_sorted`]; adjacent blobs whose tags `joins` accepts are passed in one call, with the tag
    /// of the first.
    pub(crate) fn read_joined<T: Copy + Send, E: From<RepoError> + Send>(
        &self,
        wanted: Vec<(ContentId, T)>,
        threads: usize,
        joins: fn(T, T) -> bool,
        sink: BlobSink<'_, T, E>,
    ) -> Result<(), E> {
        let at = Place::default();
        let wanted = wanted.into_iter().map(|(id, tag)| Wanted { at, id, tag });
        let mut located: Vec<Wanted<T>> = wanted.collect();
        self.index.find_all(&mut located)?;
        located.sort_unstable_by_key(|wanted| wanted.at.order());
        let runs = Mutex::new(Runs {
            rest: located.into_iter().peekable(),
        });
        let failed = AtomicBool::new(false);
        let work = || self.read_runs(&runs, &failed, joins, sink);
        if threads <= 1 {
            return work();
        }
        let failure: Mutex<Option<E>> = Mutex::new(None);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    if let Err(error) = work() {
                        failed.store(true, Ordering::Relaxed);
                        lock(&failure).get_or_insert(error);
                    }
                });
            }
        });
        let failure = failure
            .into_inner()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        failure.map_or(Ok(()), Err)
    }

    /// A reader of frames, for one thread.
    pub(crate) fn frame_reader(&self) -> Result<FrameReader<'a>, RepoError> {
        FrameReader::new(*self)
    }

    /// Whether a pack is gone, and a newer index may locate its blobs elsewhere.
    pub(crate) fn is_elsewhere(&self, pack: u32) -> Result<bool, RepoError> {
        let name = self.index.pack_name(pack).to_string();
        match self.store.length(Area::Packs, &name)? {
            Some(_) => Ok(false),
            None => self.index.renew(pack),
        }
    }

    /// Reads runs until there are none left or another thread has failed.
    fn read_runs<T: Copy, E: From<RepoError>>(
        &self,
        runs: &Mutex<Runs<T>>,
        failed: &AtomicBool,
        joins: fn(T, T) -> bool,
        sink: BlobSink<'_, T, E>,
    ) -> Result<(), E> {
        let mut reader = self.frame_reader()?;
        while !failed.load(Ordering::Relaxed) {
            let run = lock(runs).next_run();
            if run.is_empty() {
                break;
            }
            match reader.open_pack(run[0].at.pack) {
                Ok(()) => reader.read_run(&run, joins, sink)?,
                Err(error) => self.read_elsewhere(&mut reader, run, error, sink)?,
            }
        }
        Ok(())
    }

    /// Reads a run whose pack cannot be opened from the current locations of its blobs.
    fn read_elsewhere<T: Copy, E: From<RepoError>>(
        &self,
        reader: &mut FrameReader<'_>,
        run: Vec<Wanted<T>>,
        failure: RepoError,
        sink: BlobSink<'_, T, E>,
    ) -> Result<(), E> {
        if !self.is_elsewhere(run[0].at.pack)? {
            return Err(failure.into());
        }
        for mut wanted in run {
            wanted.at = self.index.find(&wanted.id)?;
            reader.read_run(&[wanted], |_, _| false, sink)?;
        }
        Ok(())
    }
}

/// Wanted blobs in the order of their locations, split into runs of one read call each.
struct Runs<T> {
    rest: Peekable<std::vec::IntoIter<Wanted<T>>>,
}

impl<T> Runs<T> {
    /// The next blobs that one read call fetches; empty at the end.
    fn next_run(&mut self) -> Vec<Wanted<T>> {
        let mut run = Vec::new();
        let Some(first) = self.rest.next() else {
            return run;
        };
        let (pack, start, mut end) = (first.at.pack, first.at.info.offset, first.at.frame_end());
        let mut plain_bytes = first.at.info.plain_bytes;
        run.push(first);
        while let Some(next) = self.rest.next_if(|Wanted { at, .. }| {
            at.pack == pack && {
                let near = at.info.offset.saturating_sub(end) <= GAP_BYTES_MAX;
                let short = at.frame_end() - start <= RUN_BYTES_MAX
                    && plain_bytes.saturating_add(at.info.plain_bytes) <= RUN_PLAIN_BYTES_MAX;
                at.frame_end() == end || (near && short)
            }
        }) {
            if next.at.frame_end() != end {
                plain_bytes = plain_bytes.saturating_add(next.at.info.plain_bytes);
            }
            end = next.at.frame_end();
            run.push(next);
        }
        run
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pack::place::FrameInfo;

    /// One blob in each of some frames that lie one behind the other.
    fn runs(frames: u32, stored_bytes: u32, plain_bytes: u32) -> Vec<usize> {
        let wanted = (0..frames).map(|frame| Wanted {
            at: Place {
                frame,
                info: FrameInfo {
                    offset: frame * stored_bytes,
                    stored_bytes,
                    plain_bytes,
                    kind: 0,
                },
                bytes: plain_bytes,
                ..Place::default()
            },
            id: ContentId([0; 32]),
            tag: (),
        });
        let mut runs = Runs {
            rest: wanted.collect::<Vec<_>>().into_iter().peekable(),
        };
        std::iter::from_fn(|| Some(runs.next_run().len()).filter(|&frames| frames > 0)).collect()
    }

    #[test]
    fn frames_of_an_image_are_split_by_what_they_decode_to() {
        assert_eq!(runs(130, 56, 64 << 10), [64, 64, 2]);
    }

    #[test]
    fn frames_with_content_are_split_by_what_is_read() {
        assert_eq!(runs(30, 100_000, 100_000), [10, 10, 10]);
    }

    #[test]
    fn a_frame_that_exceeds_a_run_is_one() {
        assert_eq!(runs(3, 8 << 20, 16 << 20), [1, 1, 1]);
    }
}
