//! Disks of a checkpoint that a VM uses before their images have all content: our NBD server shows what is missing.
//!
//! ```text
//!   guest ── image, qcow2 ── what it lacks: NBD ──> Content ── page table ──> repository
//! ```
//!
//! No read fails. One that cannot be answered waits until it can be, or until QEMU finds another server: it keeps a request
//! for as long as [`RECONNECT_SECONDS`]. An I/O error would be the guest's to see, and could make it give its disk up.

use std::collections::BTreeMap;
use std::io;
use std::net::Shutdown;
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::json;
use stillframe_nbd::{Export, Extent, Server};
use stillframe_page::PAGE_BYTES;
use stillframe_qemu::monitor::LAZY_EXPORT;
use stillframe_repo::{DiskTable, PageMap, Reader, RepoError};

use crate::in_words;

/// How long QEMU looks for a server before a read fails: ten years.
const RECONNECT_SECONDS: u32 = 315_360_000;
/// How long a read that has failed waits until it is tried again.
const TRY_AGAIN: Duration = Duration::from_millis(500);
/// A read takes this long on storage that is slow; on one that hangs, longer.
const SLOW: Duration = Duration::from_millis(500);
/// Upper bound on the pages that are described at once.
const TOLD_PAGES: u64 = 1 << 16;

/// A disk whose image lacks content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LazyDisk {
    /// The drive or device.
    pub device: String,
    /// The image.
    pub image: PathBuf,
}

/// The name that the server has for a disk of this checkpoint. An image of another checkpoint finds none.
pub(crate) fn export_name(checkpoint: &str, number: usize) -> String {
    let short = checkpoint.get(..16).unwrap_or(checkpoint);
    format!("{LAZY_EXPORT}{short}/{number}")
}

/// The backing file of an image whose content the server at `socket` has, as QEMU reads it in the image.
pub(crate) fn backing(socket: &Path, export: &str) -> String {
    let options = json!({
        "driver": "raw",
        "file": {
            "driver": "nbd",
            "server": { "type": "unix", "path": socket },
            "export": export,
            "reconnect-delay": RECONNECT_SECONDS,
        },
    });
    format!("json:{options}")
}

/// A socket that the server will take connections from. The file goes when it is dropped.
#[derive(Debug)]
pub(crate) struct ServerSocket {
    listener: UnixListener,
    path: PathBuf,
    has_file: AtomicBool,
}

impl ServerSocket {
    /// Listens there. Only root, or the user that QEMU runs as, can connect.
    ///
    /// # Errors
    /// The path is too long for a socket, or is taken by another file; the directory is not there.
    pub fn bind(path: &Path, owner: Option<(u32, u32)>) -> io::Result<ServerSocket> {
        let metadata = std::fs::symlink_metadata(path);
        // One of a process that was killed: no other listens for connections to this image.
        if metadata.is_ok_and(|it| it.file_type().is_socket()) {
            std::fs::remove_file(path)?;
        }
        let listener = UnixListener::bind(path)?;
        let socket = ServerSocket {
            listener,
            path: path.to_owned(),
            has_file: AtomicBool::new(true),
        };
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        if let Some((uid, gid)) = owner.filter(|_| rustix::process::geteuid().is_root()) {
            chown(path, Some(uid), Some(gid))?;
        }
        Ok(socket)
    }
}

impl ServerSocket {
    /// Removes the file: no client will connect any more.
    fn remove(&self) {
        if self.has_file.swap(false, Ordering::Relaxed) {
            // One that stays is replaced when the restore goes on.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Drop for ServerSocket {
    fn drop(&mut self) {
        self.remove();
    }
}

/// The server of the disks of one VM.
pub(crate) struct LazyDisks<'r> {
    disks: Vec<LazyDisk>,
    server: Server<'r>,
    contents: Vec<Arc<Content<'r>>>,
    reads: Arc<Reads>,
    socket: ServerSocket,
    connections: Mutex<Vec<UnixStream>>,
    ended: AtomicBool,
}

impl<'r> LazyDisks<'r> {
    /// Shows these disks of a checkpoint, whose tables are in the same order.
    ///
    /// # Errors
    /// The root of a table cannot be read.
    pub fn open<'t>(
        checkpoint: &str,
        disks: Vec<LazyDisk>,
        tables: impl IntoIterator<Item = &'t DiskTable>,
        socket: ServerSocket,
        reader: &'r Reader<'r>,
    ) -> Result<LazyDisks<'r>, RepoError> {
        let reads = Arc::new(Reads::default());
        let contents = tables.into_iter().map(|disk| {
            Ok(Arc::new(Content {
                map: PageMap::open(reader, &disk.table)?,
                bytes: disk.bytes,
                reads: Arc::clone(&reads),
                pages: AtomicU64::new(0),
            }))
        });
        let contents = contents.collect::<Result<Vec<_>, RepoError>>()?;
        let named = contents.iter().enumerate().map(|(number, content)| {
            let export: Arc<dyn Export + 'r> = content.clone();
            (export_name(checkpoint, number), export)
        });
        Ok(LazyDisks {
            disks,
            server: Server::new(named.collect()),
            contents,
            reads,
            socket,
            connections: Mutex::default(),
            ended: AtomicBool::new(false),
        })
    }

    /// Takes connections until what it returns is dropped, which is to happen before the scope ends.
    ///
    /// # Errors
    /// There is no thread.
    pub fn serve<'s>(&'s self, scope: &'s Scope<'s, '_>) -> io::Result<Serving<'s, 'r>> {
        let thread = thread::Builder::new().name("disk server".to_owned());
        thread.spawn_scoped(scope, move || {
            // It ends by an error when the socket is shut down.
            while let Ok((socket, _)) = self.socket.listener.accept() {
                let Ok(clone) = socket.try_clone() else {
                    continue;
                };
                let mut connections = lock(&self.connections);
                if self.ended.load(Ordering::Relaxed) {
                    break;
                }
                connections.push(clone);
                drop(connections);
                let thread = thread::Builder::new().name("disk connection".to_owned());
                // Without a thread, or after an error, QEMU connects again.
                let _ = thread.spawn_scoped(scope, move || {
                    let _ = self.server.serve(socket);
                });
            }
        })?;
        Ok(Serving(self))
    }

    /// The disks.
    pub fn disks(&self) -> &[LazyDisk] {
        &self.disks
    }

    /// How long the oldest read has not been answered, and why, if that is longer than usual.
    pub fn stall(&self) -> Option<(Duration, String)> {
        self.reads.stall()
    }

    /// No image lacks content any more. Called before the record of the restore is removed: later, no process would remove the
    /// socket of one that is killed.
    pub fn remove_socket(&self) {
        self.socket.remove();
    }

    /// Pages with content of each disk that were read, in the order of the tables.
    pub fn pages_read(&self) -> Vec<u64> {
        let of = |content: &Arc<Content<'_>>| content.pages.load(Ordering::Relaxed);
        self.contents.iter().map(of).collect()
    }
}

/// The server at work. Dropped, it ends without an answer to reads that wait: QEMU keeps them.
pub(crate) struct Serving<'s, 'r>(&'s LazyDisks<'r>);

impl Drop for Serving<'_, '_> {
    fn drop(&mut self) {
        let connections = lock(&self.0.connections);
        self.0.ended.store(true, Ordering::Relaxed);
        for connection in &*connections {
            // It fails if QEMU has closed it already.
            let _ = connection.shutdown(Shutdown::Both);
        }
        drop(connections);
        // After that: what they say now reaches no client.
        self.0.reads.end();
        let listener = &self.0.socket.listener;
        let _ = rustix::net::shutdown(listener, rustix::net::Shutdown::Both);
    }
}

/// The content of one disk.
struct Content<'r> {
    map: PageMap<'r>,
    bytes: u64,
    reads: Arc<Reads>,
    /// Pages with content that were read.
    pages: AtomicU64,
}

impl Content<'_> {
    fn read_pages(&self, offset: u64, into: &mut [u8]) -> Result<u64, RepoError> {
        let end = offset + into.len() as u64;
        let mut with_content = Vec::new();
        for page in offset / PAGE_BYTES..end.div_ceil(PAGE_BYTES) {
            if !self.map.is_zero(page)? {
                with_content.push(page);
            }
        }
        into.fill(0);
        let bytes = self.map.read_together(&with_content)?;
        for (page, content) in with_content.iter().zip(bytes.chunks(PAGE_BYTES as usize)) {
            let start = page * PAGE_BYTES;
            let (from, to) = (start.max(offset), (start + PAGE_BYTES).min(end));
            let part = &content[(from - start) as usize..(to - start) as usize];
            into[(from - offset) as usize..(to - offset) as usize].copy_from_slice(part);
        }
        Ok(with_content.len() as u64)
    }

    fn extents(&self, range: Range<u64>) -> Result<Vec<Extent>, RepoError> {
        let pages = range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES);
        let pages = pages.start..pages.end.min(pages.start + TOLD_PAGES);
        let mut extents: Vec<Extent> = Vec::new();
        for page in pages {
            let flags = match self.map.is_zero(page)? {
                true => Extent::HOLE | Extent::ZERO,
                false => 0,
            };
            let end = self.bytes.min((page + 1) * PAGE_BYTES);
            match extents.last_mut() {
                Some(last) if last.flags == flags => last.bytes.end = end,
                last => {
                    let start = last.map_or(range.start, |last| last.bytes.end);
                    let bytes = start..end;
                    extents.push(Extent { bytes, flags });
                }
            }
        }
        Ok(extents)
    }
}

impl Export for Content<'_> {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let pages = self.reads.until_done(|| self.read_pages(offset, into))?;
        self.pages.fetch_add(pages, Ordering::Relaxed);
        Ok(())
    }

    fn allocation(&self, range: Range<u64>) -> io::Result<Vec<Extent>> {
        self.reads.until_done(|| self.extents(range.clone()))
    }
}

/// The reads that are under way.
#[derive(Debug, Default)]
struct Reads {
    now: Mutex<Now>,
    is_over: Condvar,
}

#[derive(Debug, Default)]
struct Now {
    /// When each began, by its number.
    begun: BTreeMap<u64, Instant>,
    next: u64,
    /// Why one of them cannot be answered.
    words: Option<String>,
    is_over: bool,
}

impl Reads {
    /// Reads, again and again if need be.
    ///
    /// # Errors
    /// The server has ended.
    fn until_done<T>(&self, mut read: impl FnMut() -> Result<T, RepoError>) -> io::Result<T> {
        let number = {
            let mut now = lock(&self.now);
            now.next += 1;
            let number = now.next;
            now.begun.insert(number, Instant::now());
            number
        };
        loop {
            let outcome = read();
            let mut now = lock(&self.now);
            match outcome {
                Ok(read) => {
                    now.begun.remove(&number);
                    now.words = None;
                    return Ok(read);
                }
                Err(error) => now.words = Some(in_words(&error)),
            }
            let waits = |now: &mut Now| !now.is_over;
            let waited = self.is_over.wait_timeout_while(now, TRY_AGAIN, waits);
            let (mut now, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if now.is_over {
                now.begun.remove(&number);
                return Err(io::Error::other("the server has ended"));
            }
        }
    }

    fn stall(&self) -> Option<(Duration, String)> {
        let now = lock(&self.now);
        let longest = now.begun.values().min()?.elapsed();
        let words = || now.words.clone();
        let silent = || "the repository does not answer".to_owned();
        (longest > SLOW).then(|| (longest, words().unwrap_or_else(silent)))
    }

    fn end(&self) {
        lock(&self.now).is_over = true;
        self.is_over.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
