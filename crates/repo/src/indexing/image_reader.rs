//! Reads an image from its start to its end, on a thread of its own.
//!
//! Large images would push everything else out of the host's page cache, other VMs' disks among it. So they are read with
//! `O_DIRECT`. On a file system without it the kernel is advised to drop what was read.

use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, bounded};
use rustix::fs::{Advice, OFlags, fadvise};
use rustix::io::Errno;
use stillframe_page::PAGE;

use crate::error::RepoError;
use crate::images::file::open_regular;

/// Bytes that one read fetches.
const PIECE_BYTES: usize = 1 << 20;
/// Number of pieces in memory.
const PIECES: usize = 4;

/// A piece of an image, at an address that `O_DIRECT` takes.
pub(crate) struct Piece {
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl Piece {
    fn new() -> Piece {
        let memory = vec![0; PIECE_BYTES + PAGE];
        let start = memory.as_ptr().align_offset(PAGE);
        Piece {
            memory,
            start,
            bytes: 0,
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.bytes]
    }

    fn buffer(&mut self, bytes: usize) -> &mut [u8] {
        self.bytes = bytes;
        &mut self.memory[self.start..self.start + bytes]
    }
}

/// The pieces of an image in their order.
pub(crate) struct ImageReader {
    path: String,
    from: Receiver<io::Result<(u64, Piece)>>,
    back: Sender<Piece>,
    thread: Option<JoinHandle<()>>,
}

impl ImageReader {
    /// Begins to read the whole blocks of an image of `bytes` bytes.
    pub(crate) fn start(path: &str, bytes: u64) -> Result<ImageReader, RepoError> {
        let (to, from) = bounded(PIECES);
        let (back, empty) = bounded(PIECES);
        for _ in 0..PIECES {
            // The receiver exists, and there is room.
            let _ = back.send(Piece::new());
        }
        let source = Source::open(Path::new(path)).map_err(|error| failed(path, &error))?;
        let end = bytes - bytes % PAGE as u64;
        let thread = std::thread::Builder::new()
            .name("image reader".into())
            .spawn(move || source.read_all(end, &empty, &to))
            .map_err(|source| RepoError::System {
                what: "a thread",
                source,
            })?;
        Ok(ImageReader {
            path: path.into(),
            from,
            back,
            thread: Some(thread),
        })
    }

    /// The next piece and its offset; none at the end.
    pub(crate) fn next(&mut self) -> Result<Option<(u64, Piece)>, RepoError> {
        match self.from.recv() {
            Ok(Ok(next)) => Ok(Some(next)),
            Ok(Err(error)) => Err(failed(&self.path, &error)),
            Err(_) => match self.thread.take().map(JoinHandle::join) {
                Some(Err(_)) => Err(RepoError::WriterFailed),
                _ => Ok(None),
            },
        }
    }

    /// Returns the memory of a piece.
    pub(crate) fn give_back(&self, piece: Piece) {
        // Fails if the thread has read all.
        let _ = self.back.send(piece);
    }
}

fn failed(path: &str, error: &io::Error) -> RepoError {
    RepoError::ImageRefused {
        path: path.into(),
        what: error.to_string(),
    }
}

/// The file, as it can be read.
enum Source {
    Direct { direct: File, file: File },
    Cached(File),
}

impl Source {
    fn open(path: &Path) -> io::Result<Source> {
        let file = open_regular(path)?;
        let direct = OpenOptions::new()
            .read(true)
            .custom_flags((OFlags::DIRECT | OFlags::NONBLOCK).bits() as i32)
            .open(path);
        Ok(match direct {
            Ok(direct) => Source::Direct { direct, file },
            Err(_) => Source::Cached(file),
        })
    }

    fn read_all(
        mut self,
        end: u64,
        empty: &Receiver<Piece>,
        to: &Sender<io::Result<(u64, Piece)>>,
    ) {
        let mut offset = 0;
        while offset < end {
            // The end of the other side ends this one.
            let Ok(mut piece) = empty.recv() else { return };
            let bytes = (end - offset).min(PIECE_BYTES as u64);
            let read = self.read(piece.buffer(bytes as usize), offset);
            if to.send(read.map(|()| (offset, piece))).is_err() {
                return;
            }
            offset += bytes;
        }
    }

    fn read(&mut self, into: &mut [u8], offset: u64) -> io::Result<()> {
        if let Source::Direct { direct, file } = self {
            match direct.read_exact_at(into, offset) {
                // The file system takes the flag, and refuses the read.
                Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
                    *self = Source::Cached(file.try_clone()?);
                }
                read => return read,
            }
        }
        let (Source::Cached(file) | Source::Direct { file, .. }) = self;
        file.read_exact_at(into, offset)?;
        // Only advice: where it is not taken, the cache grows.
        let _ = fadvise(
            &*file,
            offset,
            NonZeroU64::new(into.len() as u64),
            Advice::DontNeed,
        );
        Ok(())
    }
}
