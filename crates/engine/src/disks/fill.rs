//! The content of a checkpoint's disk on its way into a new image, which QEMU writes in whatever format it has.
//!
//! ```text
//!   threads: repository ── pieces of 16 MiB, one ahead ──> this thread: NBD ──> QEMU ──> image
//!   threads: repository ── pieces of 16 MiB ──> image, where that is nothing but the disk's content
//! ```

use std::fs::File;
use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::thread;

use stillframe_nbd::{Client, NbdError};
use stillframe_page::{PAGE, PAGE_BYTES};
use stillframe_repo::{PageMap, RepoError};
use thiserror::Error;

use super::SILENCE_LIMIT;
use super::view::{ALLOCATION, ZERO};

/// Pages that are read at a time.
const PIECE_PAGES: u64 = 4096;

/// Threads that read a piece: decoding and verifying take longer than QEMU's writing.
const THREADS_MAX: usize = 4;

/// Pages with content after which the image is flushed: all at the end could take longer than QEMU may be silent.
const FLUSH_PAGES: u64 = 1 << 16;

/// Why a disk was not written.
#[derive(Debug, Error)]
pub enum FillError {
    /// The repository does not give its content.
    #[error(transparent)]
    Repo(#[from] RepoError),
    /// QEMU does not take it.
    #[error("cannot write the image of disk {device}")]
    Write {
        /// The disk.
        device: String,
        /// QEMU's error, or that of the connection.
        #[source]
        source: NbdError,
    },
    /// The image's file does not take it.
    #[error("cannot write the image of disk {device}")]
    WriteFile {
        /// The disk.
        device: String,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// No thread.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
}

/// A piece of a disk.
struct Piece {
    /// Its pages.
    pages: Range<u64>,
    /// Those that are not zero, ascending.
    with_content: Vec<u64>,
    /// Their bytes.
    bytes: Vec<u8>,
}

/// Writes all of a disk with this length into the export. What reads as zeros there already, as in a new image that has
/// nothing below it, stays a hole. Returns the number of pages with content. `progress` gets the number of pages that were gone through.
///
/// # Errors
/// The repository does not give a page, or QEMU does not take it. The image is of no use then.
pub(crate) fn fill(
    (device, bytes): (&str, u64),
    map: &PageMap<'_>,
    (socket, export): (UnixStream, &str),
    progress: &mut dyn FnMut(u64),
) -> Result<u64, FillError> {
    let failed = |source| FillError::Write {
        device: device.to_owned(),
        source,
    };
    let mut client = Client::open(socket, export, &[ALLOCATION], SILENCE_LIMIT).map_err(failed)?;
    let zeros = client.extents(0, 0..bytes).map_err(failed)?;
    let zeros = zeros.into_iter().filter(|extent| extent.flags & ZERO != 0);
    let zeros: Vec<Range<u64>> = zeros.map(|extent| extent.bytes).collect();
    let mut writer = client.writer().map_err(failed)?;
    let mut written = 0;
    let threads = threads();
    thread::scope(|scope| {
        let (sender, pieces) = sync_channel(1);
        let thread = thread::Builder::new().name("disk".to_owned());
        let read = thread.spawn_scoped(scope, move || {
            for start in (0..map.pages()).step_by(PIECE_PAGES as usize) {
                let pages = start..map.pages().min(start + PIECE_PAGES);
                let piece = Piece::read(map, pages, threads);
                let last = piece.is_err();
                // It has ended after an error, which it returns.
                if sender.send(piece).is_err() || last {
                    break;
                }
            }
        });
        read.map_err(FillError::Thread)?;
        for piece in pieces {
            let piece = piece?;
            piece.each_run(|start, content| {
                let at = start * PAGE_BYTES;
                match content {
                    // The last page may be filled up.
                    Run::Bytes(content) => {
                        let length = content.len().min((bytes - at) as usize);
                        writer.write(at, &content[..length])
                    }
                    Run::Zeros(pages) => {
                        let range = at..bytes.min(at + pages * PAGE_BYTES);
                        let mut others = outside(range, &zeros).into_iter();
                        others.try_for_each(|range| writer.write_zeros(range))
                    }
                }
                .map_err(failed)
            })?;
            let before = written / FLUSH_PAGES;
            written += piece.with_content.len() as u64;
            if written / FLUSH_PAGES > before {
                writer.flush().map_err(failed)?;
            }
            progress(piece.pages.end);
        }
        Ok::<(), FillError>(())
    })?;
    writer.finish().map_err(failed)?;
    client.close().map_err(failed)?;
    Ok(written)
}

/// The same into the file of a new raw image, which has nothing but zeros: several threads write it, and QEMU, which has it
/// open, nothing.
///
/// # Errors
/// The repository does not give a page, or the file does not take it. The image is of no use then.
pub(crate) fn fill_file(
    (device, bytes): (&str, u64),
    map: &PageMap<'_>,
    file: &File,
    progress: &mut dyn FnMut(u64),
) -> Result<u64, FillError> {
    let failed = |source| FillError::WriteFile {
        device: device.to_owned(),
        source,
    };
    let next = AtomicU64::new(0);
    let write = |sender: &Sender<Result<Piece, FillError>>| {
        loop {
            let start = next.fetch_add(PIECE_PAGES, Ordering::Relaxed);
            if start >= map.pages() {
                break;
            }
            let pages = start..map.pages().min(start + PIECE_PAGES);
            let piece = Piece::read(map, pages, 1).map_err(FillError::from);
            let piece = piece.and_then(|mut piece| {
                piece.write(file, bytes).map_err(failed)?;
                // Its pages are there: only their number counts from here on.
                piece.bytes = Vec::new();
                Ok(piece)
            });
            let last = piece.is_err();
            // The receiver has ended after an error, which it returns.
            if sender.send(piece).is_err() || last {
                break;
            }
        }
    };
    let (mut done, mut written) = (0, 0);
    thread::scope(|scope| {
        let (sender, pieces) = channel();
        for _ in 0..threads() {
            let (sender, write) = (sender.clone(), &write);
            let thread = thread::Builder::new().name("disk".to_owned());
            let begun = thread.spawn_scoped(scope, move || write(&sender));
            begun.map_err(FillError::Thread)?;
        }
        drop(sender);
        for piece in pieces {
            let piece = piece?;
            let before = written / FLUSH_PAGES;
            written += piece.with_content.len() as u64;
            if written / FLUSH_PAGES > before {
                // While the threads go on: less is left for the end.
                file.sync_data().map_err(failed)?;
            }
            done += piece.pages.end - piece.pages.start;
            progress(done);
        }
        Ok::<(), FillError>(())
    })?;
    file.sync_all().map_err(failed)?;
    Ok(written)
}

fn threads() -> usize {
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    threads.min(THREADS_MAX)
}

/// The parts of a range that are in none of these ascending ones.
fn outside(range: Range<u64>, ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut parts = Vec::new();
    let mut at = range.start;
    let first = ranges.partition_point(|one| one.end <= range.start);
    for one in ranges[first..]
        .iter()
        .take_while(|one| one.start < range.end)
    {
        if at < one.start {
            parts.push(at..one.start);
        }
        at = one.end;
    }
    if at < range.end {
        parts.push(at..range.end);
    }
    parts
}

/// Neighbouring pages.
#[derive(Debug, PartialEq, Eq)]
enum Run<'p> {
    /// With content.
    Bytes(&'p [u8]),
    /// This number of zeros.
    Zeros(u64),
}

impl Piece {
    fn read(map: &PageMap<'_>, pages: Range<u64>, threads: usize) -> Result<Piece, RepoError> {
        let mut with_content = Vec::new();
        for page in pages.clone() {
            if !map.is_zero(page)? {
                with_content.push(page);
            }
        }
        let bytes = map.read_together_by(threads, &with_content)?;
        Ok(Piece {
            pages,
            with_content,
            bytes,
        })
    }

    /// Writes what is not zero into a file of this length.
    fn write(&self, file: &File, bytes: u64) -> io::Result<()> {
        self.each_run(|start, run| match run {
            Run::Bytes(content) => {
                let at = start * PAGE_BYTES;
                // The last page may be filled up.
                let length = content.len().min((bytes - at) as usize);
                file.write_all_at(&content[..length], at)
            }
            Run::Zeros(_) => Ok(()),
        })
    }

    /// Hands over the runs of pages in ascending order, each with its first page. Together they are all pages.
    fn each_run<E>(&self, mut take: impl FnMut(u64, Run<'_>) -> Result<(), E>) -> Result<(), E> {
        let (mut at, mut from) = (self.pages.start, 0);
        for run in self.with_content.chunk_by(|one, next| one + 1 == *next) {
            let (first, pages) = (run[0], run.len());
            if at < first {
                take(at, Run::Zeros(first - at))?;
            }
            let to = from + pages * PAGE;
            take(first, Run::Bytes(&self.bytes[from..to]))?;
            (at, from) = (first + pages as u64, to);
        }
        match at < self.pages.end {
            true => take(at, Run::Zeros(self.pages.end - at)),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fakes::checkpoints::NO_WAIT;
    use crate::fakes::{FakeRepository, pages, vm_record};

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// Whatever the disk has, and wherever it ends: the file has it, and holes where it is zero.
        #[test]
        fn a_file_gets_all_of_a_disk(
            fillings in prop::collection::vec(prop_oneof![3 => Just(0u8), 2 => 1..9u8], 1..60),
            cut in 0..4096u64,
        ) {
            let mut repository = FakeRepository::new();
            let blocks = [("disk", pages(&fillings))];
            let (_, manifest) = repository.checkpoint(&vm_record("vm", &[]), &blocks, &[]);
            let reader = repository.repository.reader(NO_WAIT).unwrap();
            let map = PageMap::open(&reader, &manifest.ram[0]).unwrap();
            map.read_rest().unwrap();
            let bytes = fillings.len() as u64 * PAGE_BYTES - cut;
            let mut file = tempfile::tempfile().unwrap();
            file.set_len(bytes).unwrap();
            let mut done = 0;
            let written = fill_file(("disk", bytes), &map, &file, &mut |now| done = now).unwrap();
            prop_assert_eq!(written, fillings.iter().filter(|filling| **filling > 0).count() as u64);
            prop_assert_eq!(done, fillings.len() as u64);
            let mut content = Vec::new();
            io::Read::read_to_end(&mut file, &mut content).unwrap();
            prop_assert!(content == pages(&fillings)[..bytes as usize]);
        }
    }

    #[test]
    fn a_disk_of_several_pieces_is_whole() {
        let piece = PIECE_PAGES as usize;
        let mut fillings = vec![0; 2 * piece + 1];
        for page in [0, piece - 1, piece, 2 * piece - 1, 2 * piece] {
            fillings[page] = 7;
        }
        let mut repository = FakeRepository::new();
        let blocks = [("disk", pages(&fillings))];
        let (_, manifest) = repository.checkpoint(&vm_record("vm", &[]), &blocks, &[]);
        let reader = repository.repository.reader(NO_WAIT).unwrap();
        let map = PageMap::open(&reader, &manifest.ram[0]).unwrap();
        let bytes = fillings.len() as u64 * PAGE_BYTES;
        let mut file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        fill_file(("disk", bytes), &map, &file, &mut |_| ()).unwrap();
        let mut content = Vec::new();
        io::Read::read_to_end(&mut file, &mut content).unwrap();
        assert!(content == pages(&fillings));
    }

    #[test]
    fn a_file_that_cannot_be_written_is_an_error_with_the_disks_name() {
        let mut repository = FakeRepository::new();
        let blocks = [("disk", pages(&[1; 5000]))];
        let (_, manifest) = repository.checkpoint(&vm_record("vm", &[]), &blocks, &[]);
        let reader = repository.repository.reader(NO_WAIT).unwrap();
        let map = PageMap::open(&reader, &manifest.ram[0]).unwrap();
        let full = File::options().write(true).open("/dev/full").unwrap();
        let error = fill_file(("sda", 5000 * PAGE_BYTES), &map, &full, &mut |_| ()).unwrap_err();
        assert!(
            matches!(&error, FillError::WriteFile { device, .. } if device == "sda"),
            "{error}"
        );
    }

    proptest! {
        /// A byte is in a part if and only if it is in the range and in none of the others.
        #[test]
        fn parts_are_what_is_outside(
            lengths in prop::collection::vec((0u64..9, 1u64..9), 0..9),
            start in 0u64..40,
            length in 0u64..40,
        ) {
            let mut at = 0;
            let ranges: Vec<Range<u64>> = lengths.iter().map(|&(gap, length)| {
                let range = at + gap..at + gap + length;
                at = range.end;
                range
            }).collect();
            let parts = outside(start..start + length, &ranges);
            prop_assert!(parts.iter().all(|part| !part.is_empty()));
            for byte in 0..100 {
                let inside = |all: &[Range<u64>]| all.iter().any(|one| one.contains(&byte));
                let expected = (start..start + length).contains(&byte) && !inside(&ranges);
                prop_assert_eq!(inside(&parts), expected, "{}", byte);
            }
        }

        /// Every page is in one run, in order, with its bytes.
        #[test]
        fn runs_are_all_pages(kinds in prop::collection::vec(0u8..3, 1..60), start in 0u64..9) {
            let pages = start..start + kinds.len() as u64;
            let of = |page: u64| kinds[(page - start) as usize];
            let with_content: Vec<u64> = pages.clone().filter(|&page| of(page) > 0).collect();
            let bytes = with_content.iter().flat_map(|&page| [of(page); PAGE]).collect();
            let piece = Piece { pages: pages.clone(), with_content, bytes };
            let mut at = start;
            piece.each_run(|first, run| {
                prop_assert_eq!(first, at);
                match run {
                    Run::Zeros(count) => {
                        prop_assert!(count > 0 && (at..at + count).all(|page| of(page) == 0));
                        at += count;
                    }
                    Run::Bytes(bytes) => {
                        prop_assert!(!bytes.is_empty());
                        for page in bytes.chunks(PAGE) {
                            prop_assert!(page.iter().all(|&byte| byte == of(at)) && of(at) > 0);
                            at += 1;
                        }
                    }
                }
                Ok(())
            })?;
            prop_assert_eq!(at, pages.end);
        }
    }
}
