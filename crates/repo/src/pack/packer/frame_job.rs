//! A frame between packer, sealer and appender, and the state that these share.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rustix::thread::CpuSet;
use stillframe_page::hash::ContentId;

use crate::error::RepoError;
use crate::pack::external_frame::ExternalPlace;
use crate::pack::packer::Meter;
use crate::pack::{IndexedPack, PackCipher};
use crate::sync::lock;

/// A buffer that grew beyond this for one large blob is not kept.
const BUFFER_BYTES_KEPT: usize = 1 << 20;

/// A pack being written. The packer makes it, so that sealers have its key; `stored` reports its length in bytes
/// so far to the packer.
pub(super) struct PackInProgress {
    pub(super) cipher: PackCipher,
    pub(super) stored: AtomicU64,
}

/// A frame to be sealed and written, and its two buffers.
#[derive(Default)]
pub(super) struct FrameJob {
    /// Counts frames over all packs of this writer.
    pub(super) sequence: u64,
    pub(super) number: u32,
    pub(super) pack: Option<Arc<PackInProgress>>,
    pub(super) blobs: Vec<(ContentId, u32)>,
    pub(super) plain: Vec<u8>,
    /// Where the content is, if it is in an image. The sealer then makes the ids, and the plain bytes are not stored.
    pub(super) external: Option<ExternalPlace>,
    pub(super) kind: Option<u8>,
    pub(super) sealed: Vec<u8>,
    /// What counts its bytes besides.
    pub(super) meter: Meter,
    /// Where the thread that cut it may run. The sealer goes there.
    pub(super) processors: Option<CpuSet>,
}

impl FrameJob {
    /// Empties its buffers, for another frame.
    pub(super) fn emptied(mut self) -> FrameJob {
        if self.plain.capacity() + self.sealed.capacity() > 2 * BUFFER_BYTES_KEPT {
            return FrameJob::default();
        }
        self.plain.clear();
        self.sealed.clear();
        self.blobs.clear();
        self.external = None;
        self
    }
}

/// What the threads report to the packer.
#[derive(Default)]
pub(super) struct Shared {
    pub(super) stored_bytes: AtomicU64,
    pub(super) failure: Mutex<Option<RepoError>>,
    /// The packs that are complete and durable, in the order in which they were begun, until the packer's owner
    /// takes them.
    finished: Mutex<Vec<IndexedPack>>,
    /// Length in bytes of the plain directories of these packs.
    finished_bytes: AtomicUsize,
}

impl Shared {
    /// Adds a pack that is complete and durable.
    pub(super) fn add_finished(&self, pack: IndexedPack) {
        let bytes = pack.directory.encoded_bytes();
        lock(&self.finished).push(pack);
        self.finished_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn finished_bytes(&self) -> usize {
        self.finished_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn take_finished(&self) -> Vec<IndexedPack> {
        let packs = std::mem::take(&mut *lock(&self.finished));
        let bytes = packs
            .iter()
            .map(|pack| pack.directory.encoded_bytes())
            .sum();
        self.finished_bytes.fetch_sub(bytes, Ordering::Relaxed);
        packs
    }

    pub(super) fn fail(&self, error: RepoError) {
        lock(&self.failure).get_or_insert(error);
    }
}
