//! The source's side of shared images: files that both hosts reach, and where each content of them is. Of a page whose content
//! is there, only the place is sent (Park et al., section 4: memory that is on disk already).
//!
//! A file is read once, in the format that it has: data that a format keeps as it is, as raw and uncompressed qcow2 do, is
//! found. It may change, as a disk that the VM writes to does: the destination compares what it reads with the page's id, and
//! says which pages it did not find.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use rustix::fs::OFlags;
use stillframe_page::hash::ContentId;
use stillframe_page::{PAGE, PAGE_BYTES, is_zero};
use stillframe_sys::affinity::{AffinityGuard, Processors};
use stillframe_sys::memory::data_extents;
use thiserror::Error;

use crate::connection::image_pages::ImagePlace;
use crate::connection::message::SharedImage;
use crate::sink::connection::transfer_hasher;

/// Images of one migration, at most.
pub const IMAGES_MAX: usize = 64;
/// Bytes of them that are no holes, at most. Each block takes about 40 bytes of memory.
const CONTENT_MAX: u64 = 64 << 30;
/// Bytes that are read at once.
const PIECE: u64 = 1 << 20;
const THREADS_MAX: usize = 4;
/// A place is the number of an image above that of a block, which has this number of bits.
const BLOCK_BITS: u32 = 48;

/// Why a shared image cannot be used.
#[derive(Debug, Error)]
pub enum SharedImageError {
    /// It cannot be read.
    #[error("cannot read the shared image {}", path.display())]
    Read {
        /// Its path.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// Its name cannot be sent.
    #[error("the path of the shared image {} is not UTF-8: give it another name", path.display())]
    Name {
        /// Its path.
        path: PathBuf,
    },
    /// There is too much in them.
    #[error(
        "the shared images have more than 64 GiB of content, which takes more than 640 MiB of memory to find: name fewer of them"
    )]
    TooMuch,
    /// There are too many.
    #[error("more than {IMAGES_MAX} shared images")]
    TooMany,
}

/// The files that the user has named, in the order of their numbers.
#[derive(Debug, Default)]
pub struct SharedFiles(Vec<Opened>);

impl SharedFiles {
    /// Opens them.
    ///
    /// # Errors
    /// There are too many, or one of them is none.
    pub fn open(paths: &[PathBuf]) -> Result<SharedFiles, SharedImageError> {
        if paths.len() > IMAGES_MAX {
            return Err(SharedImageError::TooMany);
        }
        let opened = paths.iter().map(|path| Opened::of(path));
        Ok(SharedFiles(opened.collect::<Result<_, _>>()?))
    }

    /// As the destination knows them.
    pub fn named(&self) -> Vec<SharedImage> {
        let images = self.0.iter().map(|image| SharedImage {
            name: image.name.clone(),
            bytes: image.bytes,
        });
        images.collect()
    }

    /// Those that are not `there`.
    pub fn lacking(&self, there: &[bool]) -> impl Iterator<Item = &str> {
        let is_there = |number| there.get(number).is_some_and(|there| *there);
        let images = self.0.iter().enumerate();
        images
            .filter(move |(number, _)| !is_there(*number))
            .map(|(_, image)| image.name.as_str())
    }

    /// Reads those that are `there`, on these processors, until `stop` is set.
    ///
    /// # Errors
    /// One of them cannot be read, or they are too large.
    pub(super) fn read(
        &self,
        there: &[bool],
        processors: &Processors,
        stop: &AtomicBool,
    ) -> Result<ImageFinder, SharedImageError> {
        let images = (0..).zip(&self.0).zip(there);
        let images = images.filter(|(_, there)| **there);
        let images = images.map(|((number, image), _)| (number, image, image.pieces()));
        let images: Vec<(u64, &Opened, Vec<Range<u64>>)> = images.collect();
        let pieces = images.iter().map(|(_, _, pieces)| pieces.len());
        if pieces.sum::<usize>() as u64 * PIECE > CONTENT_MAX {
            return Err(SharedImageError::TooMuch);
        }
        let mut places = HashMap::new();
        for (number, image, pieces) in images {
            let blocks = image.blocks(&pieces, processors, stop);
            let blocks = blocks.map_err(|source| SharedImageError::Read {
                path: image.name.clone().into(),
                source,
            })?;
            let blocks = blocks.into_iter();
            places.extend(blocks.map(|(key, block)| (key, number << BLOCK_BITS | block)));
        }
        Ok(ImageFinder { places })
    }
}

/// Finds the content of pages in the images that both hosts have.
#[derive(Debug, Default)]
pub struct ImageFinder {
    /// The beginning of an id, and a place where that content was. That two ids begin alike, the destination finds out.
    places: HashMap<u64, u64>,
}

impl ImageFinder {
    /// Where the content of each page is, and its id. That of zeros is nowhere.
    pub fn find(&self, pages: &[&[u8; PAGE]]) -> Vec<Option<(ImagePlace, ContentId)>> {
        let ids = transfer_hasher().ids(pages);
        ids.into_iter().map(|id| self.place(id)).collect()
    }

    fn place(&self, id: ContentId) -> Option<(ImagePlace, ContentId)> {
        let place = *self.places.get(&key(&id))?;
        let place = ImagePlace {
            image: (place >> BLOCK_BITS) as u32,
            block: place & ((1 << BLOCK_BITS) - 1),
        };
        Some((place, id))
    }
}

/// An image that is open.
#[derive(Debug)]
struct Opened {
    name: String,
    file: File,
    bytes: u64,
}

impl Opened {
    fn of(path: &Path) -> Result<Opened, SharedImageError> {
        let name = path.to_str().ok_or_else(|| SharedImageError::Name {
            path: path.to_owned(),
        })?;
        let (file, bytes) = open(path).map_err(|source| SharedImageError::Read {
            path: path.to_owned(),
            source,
        })?;
        Ok(Opened {
            name: name.to_owned(),
            file,
            bytes,
        })
    }

    /// The beginnings of the ids of all whole blocks that are not zero, with their numbers, in any order.
    fn blocks(
        &self,
        pieces: &[Range<u64>],
        processors: &Processors,
        stop: &AtomicBool,
    ) -> io::Result<Vec<(u64, u64)>> {
        let next = AtomicUsize::new(0);
        let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let work = || {
            let _placement = AffinityGuard::to(processors);
            self.work(pieces, &next, stop)
        };
        let found = thread::scope(|scope| {
            let threads: Vec<_> = (0..threads.min(THREADS_MAX))
                .map(|_| scope.spawn(work))
                .collect();
            let ended = threads.into_iter().map(|thread| {
                let ended = thread.join();
                ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            ended.collect::<io::Result<Vec<_>>>()
        })?;
        Ok(found.concat())
    }

    /// The parts of the file that are no holes, cut into pieces.
    fn pieces(&self) -> Vec<Range<u64>> {
        let whole = 0..self.bytes - self.bytes % PAGE_BYTES;
        let end = whole.end;
        // What cannot tell, as a block device, is read as a whole.
        let extents = data_extents(&self.file, 0, end);
        let extents = extents.unwrap_or_else(|_| vec![whole]);
        let mut pieces: Vec<Range<u64>> = Vec::new();
        for extent in extents {
            let after = pieces.last().map_or(0, |last| last.end);
            let mut first = (extent.start - extent.start % PAGE_BYTES).max(after);
            let stop = extent.end.next_multiple_of(PAGE_BYTES).min(end);
            while first < stop {
                let next = (first + PIECE).min(stop);
                pieces.push(first..next);
                first = next;
            }
        }
        pieces
    }

    fn work(
        &self,
        pieces: &[Range<u64>],
        next: &AtomicUsize,
        stop: &AtomicBool,
    ) -> io::Result<Vec<(u64, u64)>> {
        let hasher = transfer_hasher();
        let mut buffer = vec![0; PIECE as usize];
        let mut found = Vec::new();
        while !stop.load(Ordering::Relaxed)
            && let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed))
        {
            let bytes = &mut buffer[..(piece.end - piece.start) as usize];
            self.file.read_exact_at(bytes, piece.start)?;
            let first = piece.start / PAGE_BYTES;
            let blocks = (first..).zip(bytes.as_chunks::<PAGE>().0);
            let (numbers, pages): (Vec<u64>, Vec<_>) =
                blocks.filter(|(_, page)| !is_zero(&page[..])).unzip();
            let ids = hasher.ids(&pages);
            found.extend(ids.iter().map(key).zip(numbers));
        }
        Ok(found)
    }
}

/// Opens a file or a block device, with its length in bytes. A pipe is refused, not waited for.
///
/// # Errors
/// It cannot be opened, or has no length.
pub(super) fn open(path: &Path) -> io::Result<(File, u64)> {
    let mut options = OpenOptions::new();
    options.custom_flags(OFlags::NONBLOCK.bits() as i32);
    let mut file = options.read(true).open(path)?;
    let kind = file.metadata()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        // A folder has a length, too, beyond all bounds.
        return Err(io::Error::other("it is neither a file nor a block device"));
    }
    let bytes = file.seek(SeekFrom::End(0))?;
    Ok((file, bytes))
}

fn key(id: &ContentId) -> u64 {
    let mut key = [0; 8];
    key.copy_from_slice(&id.0[..8]);
    u64::from_le_bytes(key)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use stillframe_sys::affinity::of_this_thread;

    use super::*;

    fn page(filling: u8) -> [u8; PAGE] {
        [filling; PAGE]
    }

    fn read(paths: &[PathBuf], there: &[bool]) -> Result<ImageFinder, SharedImageError> {
        let stop = AtomicBool::new(false);
        SharedFiles::open(paths)?.read(there, &of_this_thread(), &stop)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Each block that is not zero is found where it is, whatever holes and parts of a block there are; no other.
        #[test]
        fn each_block_is_found_where_it_is(
            images in prop::collection::vec((prop::collection::vec(0..40u8, 0..30), 0..4096usize, any::<bool>()), 1..4),
        ) {
            let folder = tempfile::tempdir().unwrap();
            let mut paths = Vec::new();
            for (number, (fillings, tail, _)) in images.iter().enumerate() {
                let path = folder.path().join(number.to_string());
                let file = File::create(&path).unwrap();
                for (at, &filling) in (0..).zip(fillings) {
                    // Nothing is written where a hole can be.
                    if filling > 10 {
                        file.write_all_at(&page(filling), at * PAGE_BYTES).unwrap();
                    }
                }
                file.write_all_at(&vec![7; *tail], fillings.len() as u64 * PAGE_BYTES).unwrap();
                paths.push(path);
            }
            let files = SharedFiles::open(&paths).unwrap();
            for (image, (fillings, tail, _)) in files.named().iter().zip(&images) {
                let last = fillings.iter().rposition(|filling| *filling > 10).map_or(0, |at| at + 1);
                let pages = if *tail > 0 { fillings.len() } else { last };
                prop_assert_eq!(image.bytes, (pages * PAGE + tail) as u64);
            }
            let there: Vec<bool> = images.iter().map(|(_, _, there)| *there).collect();
            prop_assert_eq!(files.lacking(&there).count(), there.iter().filter(|there| !**there).count());
            let finder = read(&paths, &there).unwrap();
            for filling in 0..40 {
                let found = finder.find(&[&page(filling)])[0];
                let has = |(fillings, _, there): &(Vec<u8>, usize, bool)| *there && fillings.contains(&filling);
                prop_assert_eq!(found.is_some(), filling > 10 && images.iter().any(has));
                if let Some((place, id)) = found {
                    let (fillings, _, there) = &images[place.image as usize];
                    prop_assert!(*there);
                    prop_assert_eq!(fillings[place.block as usize], filling);
                    prop_assert_eq!(id, transfer_hasher().id(&page(filling)));
                }
            }
        }
    }

    fn pipe(folder: &Path) -> PathBuf {
        use rustix::fs::{CWD, FileType, mknodat};
        let pipe = folder.join("pipe");
        mknodat(CWD, &pipe, FileType::Fifo, 0o600.into(), 0).unwrap();
        pipe
    }

    #[test]
    fn more_than_there_is_memory_for_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let file = File::create(&path).unwrap();
        file.set_len(1 << 40).unwrap();
        assert!(read(std::slice::from_ref(&path), &[true]).is_ok(), "a hole");
        let pieces = 0..=CONTENT_MAX / PIECE;
        for piece in pieces {
            file.write_all_at(&[1], piece * 4 * PIECE).unwrap();
        }
        // A file system may make every stretch longer than what was written, but none shorter.
        assert!(matches!(
            read(&[path], &[true]),
            Err(SharedImageError::TooMuch)
        ));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let open = |path: PathBuf| SharedFiles::open(&[path]);
        let error = open(folder.path().join("missing.img")).unwrap_err();
        assert!(error.to_string().contains("missing.img"), "{error}");
        for path in [
            folder.path().to_owned(),
            "/dev/zero".into(),
            pipe(folder.path()),
        ] {
            let error = open(path).unwrap_err();
            assert!(matches!(error, SharedImageError::Read { .. }), "{error}");
        }
        let many = vec![folder.path().join("image"); IMAGES_MAX + 1];
        assert!(matches!(
            SharedFiles::open(&many),
            Err(SharedImageError::TooMany)
        ));
    }

    #[test]
    fn reading_stops_when_stop_is_set() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        std::fs::write(&path, page(11)).unwrap();
        let files = SharedFiles::open(&[path]).unwrap();
        let finder = files.read(&[true], &of_this_thread(), &AtomicBool::new(true));
        assert_eq!(finder.unwrap().find(&[&page(11)]), [None]);
    }
}
