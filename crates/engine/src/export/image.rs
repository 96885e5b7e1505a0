//! One disk of a checkpoint as an image of any format that QEMU makes: `qemu-img` reads the disk from an NBD server of ours.
//!
//! ```text
//!   repository ──> Disk ──> server ──unix socket──> qemu-img convert ──> file
//! ```
//!
//! The socket lies in a directory for this user alone. The file has no name until it is whole, as any export.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use stillframe_nbd::{Export, Extent, Server};
use stillframe_page::{PAGE, PAGE_BYTES};
use stillframe_qemu::qemu_img;
use stillframe_repo::{PageMap, RepoError};

use super::{ExportError, Output};
use crate::runtime::OwnSocket;
use crate::{Progress, ProgressSink};

/// The disk's name for `qemu-img`.
const EXPORT: &str = "disk";
/// What the socket is for, in its name.
const SOCKET: &str = "export";
/// How often the end of `qemu-img`, and of its connections, is looked for.
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// Upper bound on the pages that are described at once.
const DESCRIBED_MAX: u64 = 1 << 18;

/// What a checkpoint has of a disk, for a server.
struct Disk<'m, 'r> {
    map: &'m PageMap<'r>,
    bytes: u64,
    /// Pages that were read.
    pages: AtomicU64,
    failed: Mutex<Option<RepoError>>,
}

impl Disk<'_, '_> {
    /// The client learns only that it failed.
    fn failed(&self, error: RepoError) -> io::Error {
        let words = error.to_string();
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.get_or_insert(error);
        io::Error::other(words)
    }
}

impl Export for Disk<'_, '_> {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let end = offset + into.len() as u64;
        let pages: Vec<u64> = (offset / PAGE_BYTES..end.div_ceil(PAGE_BYTES)).collect();
        let content = self.map.read_together(&pages);
        let content = content.map_err(|error| self.failed(error))?;
        let skipped = offset as usize % PAGE;
        into.copy_from_slice(&content[skipped..skipped + into.len()]);
        self.pages.fetch_add(pages.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn allocation(&self, range: Range<u64>) -> io::Result<Vec<Extent>> {
        let first = range.start / PAGE_BYTES;
        let after = range.end.div_ceil(PAGE_BYTES).min(first + DESCRIBED_MAX);
        let mut extents: Vec<Extent> = Vec::new();
        for page in first..after {
            let zero = self.map.is_zero(page).map_err(|error| self.failed(error))?;
            let flags = match zero {
                true => Extent::HOLE | Extent::ZERO,
                false => 0,
            };
            let end = self.bytes.min((page + 1) * PAGE_BYTES);
            match extents.last_mut() {
                Some(last) if last.flags == flags => last.bytes.end = end,
                _ => extents.push(Extent {
                    bytes: range.start.max(page * PAGE_BYTES)..end,
                    flags,
                }),
            }
        }
        Ok(extents)
    }
}

/// Ends the thread that takes connections, also where the user gives the export up.
struct Ending<'e>(&'e AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Has `qemu-img` write a disk of this length into the file.
pub(super) fn convert(
    map: &PageMap<'_>,
    bytes: u64,
    (output, format): (&Output, &str),
    progress: ProgressSink<'_>,
) -> Result<(), ExportError> {
    let serve = |source| ExportError::Serve { source };
    let (socket, listener) = OwnSocket::bind(SOCKET).map_err(serve)?;
    listener.set_nonblocking(true).map_err(serve)?;
    let disk = Arc::new(Disk {
        map,
        bytes,
        pages: AtomicU64::new(0),
        failed: Mutex::new(None),
    });
    let exports = BTreeMap::from([(EXPORT.to_owned(), Arc::clone(&disk) as Arc<dyn Export + '_>)]);
    let server = Server::new(exports);
    let from = format!("nbd+unix:///{EXPORT}?socket={}", socket.path().display());
    let ended = AtomicBool::new(false);
    let converted = thread::scope(|scope| {
        let serve = || {
            while !ended.load(Ordering::Relaxed) {
                match listener.accept() {
                    // The client's own error is the one to report.
                    Ok((client, _)) => drop(scope.spawn(|| server.serve(client))),
                    Err(_) => thread::sleep(LOOK_AGAIN),
                }
            }
        };
        scope.spawn(serve);
        let _ending = Ending(&ended);
        let total = map.pages();
        qemu_img::convert_raw(&from, format, &output.reachable(), &mut || {
            let done = disk.pages.load(Ordering::Relaxed).min(total);
            progress(Progress::Exporting { done, total });
            thread::sleep(LOOK_AGAIN);
        })
    });
    let failed = disk
        .failed
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .take();
    if let Some(error) = failed {
        return Err(error.into());
    }
    converted.map_err(|why| ExportError::Converted {
        file: output.path().to_owned(),
        format: format.to_owned(),
        why,
    })
}
