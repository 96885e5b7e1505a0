//! Reading blobs.
//!
//! Reads go by frames: the wanted blobs are sorted by where they lie, neighbouring frames are read
//! with one call, each frame is decrypted and decoded once, and every blob is hashed again before
//! it is handed out. Memory is bounded by a run of frames per thread, whatever is asked for.

use std::fs::File;
use std::io;
use std::iter::Peekable;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use stillframe_page::encoding::Decoder;
use stillframe_page::hash::{ContentHasher, ContentId};

use crate::crypto::Keys;
use crate::error::RepoError;
use crate::index::Index;
use crate::layout::FormatError;
use crate::local::{Area, LocalStore};
use crate::pack::{FileHash, PREAMBLE_BYTES, PackCipher};
use crate::places::{FrameInfo, Location};

/// The committed blobs of a repository, as a [`crate::Reader`] or [`crate::Writer`] sees them.
#[derive(Clone, Copy)]
pub struct Blobs<'a> {
    pub(crate) store: &'a LocalStore,
    pub(crate) keys: &'a Keys,
    pub(crate) index: &'a Index,
}

/// One read call fetches at most this much, and skips over no gap longer than [`GAP_BYTES_MAX`].
const RUN_BYTES_MAX: u32 = 1 << 20;
const GAP_BYTES_MAX: u32 = 64 << 10;

/// A blob to read and what the caller calls it.
struct Wanted<T> {
    at: Location,
    id: ContentId,
    tag: T,
}

impl<'a> Blobs<'a> {
    /// The bytes of one blob, verified against its id.
    pub fn read(&self, id: &ContentId) -> Result<Vec<u8>, RepoError> {
        let mut found = self.read_many(std::slice::from_ref(id))?;
        found.pop().ok_or(RepoError::MissingBlob { id: *id })
    }

    /// The bytes of several blobs, in the order asked for. Holds all of them in memory.
    pub fn read_many(&self, ids: &[ContentId]) -> Result<Vec<Vec<u8>>, RepoError> {
        let found = Mutex::new(vec![Vec::new(); ids.len()]);
        let wanted = (0..).zip(ids).map(|(at, &id)| (id, at)).collect();
        self.read_sorted(wanted, 1, &|at: usize, bytes| {
            lock(&found)[at] = bytes.to_vec();
            Ok(())
        })?;
        Ok(found
            .into_inner()
            .unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    /// Hands each wanted blob to `sink`, in the order they lie in the repository, from up to
    /// `threads` threads at once. Each blob is verified against its id first. The first error
    /// ends it; some blobs have been handed over by then.
    pub fn read_sorted<T: Send>(
        &self,
        wanted: Vec<(ContentId, T)>,
        threads: usize,
        sink: &(dyn Fn(T, &[u8]) -> io::Result<()> + Sync),
    ) -> Result<(), RepoError> {
        let mut located = Vec::with_capacity(wanted.len());
        for (id, tag) in wanted {
            let at = self.index.get(&id).ok_or(RepoError::MissingBlob { id })?;
            located.push(Wanted { at, id, tag });
        }
        located.sort_unstable_by_key(|wanted| wanted.at.blob);
        let runs = Mutex::new(Runs {
            index: self.index,
            rest: located.into_iter().peekable(),
        });
        match threads {
            0 | 1 => self.read_runs(&runs, &AtomicBool::new(false), sink),
            _ => self.read_runs_at_once(&runs, threads, sink),
        }
    }

    fn read_runs_at_once<T: Send>(
        &self,
        runs: &Mutex<Runs<'_, T>>,
        threads: usize,
        sink: &(dyn Fn(T, &[u8]) -> io::Result<()> + Sync),
    ) -> Result<(), RepoError> {
        let failed = AtomicBool::new(false);
        let failure: Mutex<Option<RepoError>> = Mutex::new(None);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    if let Err(error) = self.read_runs(runs, &failed, sink) {
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

    /// Takes runs until there are none left or another thread failed.
    fn read_runs<T>(
        &self,
        runs: &Mutex<Runs<'_, T>>,
        failed: &AtomicBool,
        sink: &(dyn Fn(T, &[u8]) -> io::Result<()> + Sync),
    ) -> Result<(), RepoError> {
        let mut reader = FrameReader::new(*self)?;
        while !failed.load(Ordering::Relaxed) {
            let run = lock(runs).next_run();
            if run.is_empty() {
                break;
            }
            reader.read_run(run, sink)?;
        }
        Ok(())
    }
}

/// Wanted blobs in the order they lie, handed out in runs that one read call serves.
struct Runs<'a, T> {
    index: &'a Index,
    rest: Peekable<std::vec::IntoIter<Wanted<T>>>,
}

impl<T> Runs<'_, T> {
    /// The next blobs that lie close enough together; none when there are none left.
    fn next_run(&mut self) -> Vec<Wanted<T>> {
        let mut run = Vec::new();
        let Some(first) = self.rest.next() else {
            return run;
        };
        let pack = self.index.pack_of(first.at);
        let (start, mut end) = extent(self.index, first.at);
        run.push(first);
        while let Some(next) = self.rest.next_if(|next| {
            self.index.pack_of(next.at) == pack && {
                let (next_start, next_end) = extent(self.index, next.at);
                let near = next_start.saturating_sub(end) <= GAP_BYTES_MAX;
                next_end == end || (near && next_end - start <= RUN_BYTES_MAX)
            }
        }) {
            (_, end) = extent(self.index, next.at);
            run.push(next);
        }
        run
    }
}

/// Where the frame of a blob begins and ends in its pack.
fn extent(index: &Index, at: Location) -> (u32, u32) {
    let (_, frame) = index.frame(at);
    (frame.offset, frame.offset + frame.stored_bytes)
}

/// Reads and decodes frames; the state of one thread.
pub(crate) struct FrameReader<'a> {
    from: Blobs<'a>,
    hasher: ContentHasher,
    decoder: Decoder,
    pack: Option<OpenPack>,
    sealed: Vec<u8>,
    plain: Vec<u8>,
}

struct OpenPack {
    number: u32,
    file: File,
    label: String,
    cipher: PackCipher,
}

impl<'a> FrameReader<'a> {
    pub(crate) fn new(from: Blobs<'a>) -> Result<FrameReader<'a>, RepoError> {
        Ok(FrameReader {
            from,
            hasher: from.keys.hasher(),
            decoder: Decoder::new()?,
            pack: None,
            sealed: Vec::new(),
            plain: Vec::new(),
        })
    }

    /// Reads a run of neighbouring frames and hands over the blobs wanted from them.
    fn read_run<T>(
        &mut self,
        run: Vec<Wanted<T>>,
        sink: &(dyn Fn(T, &[u8]) -> io::Result<()> + Sync),
    ) -> Result<(), RepoError> {
        let (Some(first), Some(last)) = (run.first(), run.last()) else {
            return Ok(());
        };
        let start = self.from.index.frame(first.at).1.offset;
        let end = self.from.index.frame(last.at).1;
        // Offsets and lengths of one pack stay below 1 GiB.
        let bytes = (end.offset + end.stored_bytes - start) as usize;
        self.open_pack(self.from.index.pack_of(first.at))?;
        self.fetch(start, bytes)?;
        let mut decoded = None;
        let mut verified: Option<(ContentId, Location)> = None;
        for wanted in run {
            let at = wanted.at;
            if decoded != Some(at.frame) {
                self.decode(at, start)?;
                decoded = Some(at.frame);
            }
            let blob = self.slice(at)?;
            // The same blob wanted many times over is hashed once.
            if verified.is_none_or(|(id, place)| id != wanted.id || place.frame != at.frame) {
                self.verify(&wanted.id, blob)?;
                verified = Some((wanted.id, at));
            }
            sink(wanted.tag, blob).map_err(|source| RepoError::Sink {
                id: wanted.id,
                source,
            })?;
        }
        Ok(())
    }

    fn open_pack(&mut self, number: u32) -> Result<(), RepoError> {
        if self.pack.as_ref().is_some_and(|pack| pack.number == number) {
            return Ok(());
        }
        let name = self.from.index.packs()[number as usize].name;
        let (file, cipher, label) = open_pack(self.from.store, self.from.keys, name)?;
        self.pack = Some(OpenPack {
            number,
            file,
            label,
            cipher,
        });
        Ok(())
    }

    fn fetch(&mut self, offset: u32, bytes: usize) -> Result<(), RepoError> {
        let Some(pack) = &self.pack else {
            return Ok(());
        };
        self.sealed.resize(bytes, 0);
        read_exact_at(&pack.file, &mut self.sealed, offset.into(), &pack.label)
    }

    /// Decodes the frame of `at` out of a fetched run that starts at `run_start` in the file.
    fn decode(&mut self, at: Location, run_start: u32) -> Result<(), RepoError> {
        let (info, frame) = self.from.index.frame(at);
        let Some(pack) = &self.pack else {
            return Ok(());
        };
        let from = (frame.offset - run_start) as usize;
        let sealed = &mut self.sealed[from..from + frame.stored_bytes as usize];
        decode_frame(
            &pack.cipher,
            info.frame_number(at),
            frame,
            sealed,
            &mut self.decoder,
            &mut self.plain,
        )
        .map_err(|error| RepoError::format(&pack.label, &error))
    }

    fn slice(&self, at: Location) -> Result<&[u8], RepoError> {
        let range = at.offset as usize..at.offset as usize + at.bytes as usize;
        self.plain
            .get(range)
            .ok_or_else(|| self.damaged("a blob reaches beyond its frame"))
    }

    fn verify(&self, id: &ContentId, blob: &[u8]) -> Result<(), RepoError> {
        match self.hasher.id(blob) == *id {
            true => Ok(()),
            false => Err(self.damaged(&format!("blob {id} has other contents"))),
        }
    }

    fn damaged(&self, what: &str) -> RepoError {
        let label = self.pack.as_ref().map(|pack| pack.label.clone());
        RepoError::Damaged {
            file: label.unwrap_or_default(),
            what: what.into(),
        }
    }
}

/// Opens a pack and reads its start.
pub(crate) fn open_pack(
    store: &LocalStore,
    keys: &Keys,
    name: FileHash,
) -> Result<(File, PackCipher, String), RepoError> {
    let text = name.to_string();
    let label = store.label(Area::Packs, &text);
    let file = match store.open(Area::Packs, &text) {
        Err(error) if error.is_absent() => {
            return Err(RepoError::Damaged {
                file: label,
                what: "it is missing".into(),
            });
        }
        other => other?,
    };
    let mut preamble = [0; PREAMBLE_BYTES];
    read_exact_at(&file, &mut preamble, 0, &label)?;
    let cipher =
        PackCipher::new(keys, preamble).map_err(|error| RepoError::format(&label, &error))?;
    Ok((file, cipher, label))
}

/// Opens a sealed frame and decodes it into `plain`.
pub(crate) fn decode_frame(
    cipher: &PackCipher,
    number: u32,
    frame: FrameInfo,
    sealed: &mut [u8],
    decoder: &mut Decoder,
    plain: &mut Vec<u8>,
) -> Result<(), FormatError> {
    let payload = cipher.open_frame(number, frame.kind, frame.plain_bytes, sealed)?;
    decoder
        .decode(frame.kind, payload, frame.plain_bytes as usize, plain)
        .map_err(|error| FormatError::invalid(format!("frame {number}: {error}")))
}

/// Reads exactly, telling a file that is too short from one that cannot be read.
pub(crate) fn read_exact_at(
    file: &File,
    into: &mut [u8],
    offset: u64,
    label: &str,
) -> Result<(), RepoError> {
    file.read_exact_at(into, offset)
        .map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => RepoError::Damaged {
                file: label.into(),
                what: "it is too short".into(),
            },
            _ => RepoError::io("read", label.as_ref(), error),
        })
}

/// Takes a lock whose data stays whole even if another thread panicked while holding it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}
