//! Lazy population: the guest runs before its memory is there.
//!
//! ```text
//!   guest touches a page ----------------> fault handlers --+
//!                                                           +--> page source --> UFFDIO_COPY --> the page
//!   working set, last changes, then all -> background fill -+
//! ```
//!
//! A userfaultfd in QEMU reports missing pages. QEMU keeps a copy of it for as long as its memory is not complete.
//! If this process is killed, a thread that touches a missing page blocks (without a copy it would read zeros). The
//! guardian pauses the VM, and another process can continue ([`crate::restore::filling_record`]). Nothing of it
//! remains in QEMU when the last page is populated.

mod access_trace;
mod background_fill;
mod fault_around;
mod fault_batching;
mod fault_handler;
mod fill_order;
mod memory;
pub mod prefetch;
mod prefetch_queue;
mod stall;
pub mod supervision;

use std::fs::File;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::Scope;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use rustix::event::{EventfdFlags, eventfd};
use stillframe_page::bitmap::DirtyBitmap;
use stillframe_page::{GuestPage, PAGE_BYTES};
use stillframe_sys::affinity;
use stillframe_sys::pagemap::Pagemap;
use stillframe_sys::process::Process;
use stillframe_sys::uffd::{Track, Uffd, UffdError};

use super::eager::{self, PopulateError};
use crate::memory::block::Block;
use background_fill::BackgroundFill;
use fault_around::FaultAround;
use fault_batching::FaultBatching;
use fault_handler::FaultHandler;
pub use fill_order::FillOrder;
use memory::LazyMemory;
pub use memory::{FillError, Filling};
use prefetch::PreloadBuffer;
use prefetch_queue::PrefetchQueue;
use stall::Stall;

use crate::source::PageSource;

/// Fault handler threads: each waits for the page source by itself.
const SERVERS_MAX: usize = 4;
/// Upper bound on pages of the last interval before the checkpoint that are populated early: 256 MiB.
const NEWEST_MAX: usize = 1 << 16;

/// The result that a thread ended with.
enum Ended {
    FaultHandler(Result<(), FillError>),
    /// Whether all pages were populated.
    BackgroundFill(Result<bool, FillError>),
}

/// The status of the background fill.
pub enum FillStatus {
    /// Nothing in particular.
    None,
    /// All pages are there.
    Complete,
}

/// The memory of a QEMU, being filled.
pub struct Lazy<S> {
    memory: LazyMemory<S>,
    /// The rest of the working set: the prefetch queue.
    working_set: PrefetchQueue,
    batching: FaultBatching,
    /// Preload buffers: pages that were read already and are not in memory yet.
    prefetched: Mutex<Vec<PreloadBuffer>>,
    prefetched_pages: u64,
    /// Pages written in the last interval before the checkpoint, which are likely to be used again.
    newest: Vec<GuestPage>,
    /// Rate limit of the background fill, in bytes per second.
    bytes_per_s: Option<NonZeroU64>,
    stall: Stall,
    /// Why some pages cannot be populated that no thread waits for.
    problem: Mutex<Option<String>>,
    end: AtomicBool,
    end_event: OwnedFd,
    to_supervisor: Sender<Ended>,
    ended: Receiver<Ended>,
}

/// Ends the threads when dropped; pages that are missing then stay missing.
pub struct EndOnDrop<'l, S>(&'l Lazy<S>);

impl<S> Drop for EndOnDrop<'_, S> {
    fn drop(&mut self) {
        self.0.end.store(true, Ordering::Relaxed);
        // Cannot fail: the counter is far from full.
        let _ = rustix::io::write(&self.0.end_event, &1u64.to_ne_bytes());
    }
}

/// Whether a block can be populated lazily with this userfaultfd; registers it if so. Missing pages can be
/// handled in anonymous and shared memory, but not in files on disk; huge pages are populated at once.
pub fn register(uffd: &Uffd, block: &Block, page_bytes: u64) -> Result<bool, UffdError> {
    if page_bytes != PAGE_BYTES || !block.absent_is_zero() {
        return Ok(false);
    }
    match uffd.register(block.range(), Track::Missing) {
        Ok(()) => Ok(true),
        Err(UffdError::Unsupported { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

impl<S: PageSource> Lazy<S> {
    /// Lazy population of blocks that are registered with `uffd`. Pages that are there already are left alone.
    /// `bytes_per_s` limits the background fill.
    pub fn new(
        uffd: Uffd,
        blocks: &[&Block],
        sources: Vec<S>,
        mut first: FillOrder,
        bytes_per_s: Option<NonZeroU64>,
        fill_bitmap: File,
    ) -> Result<Lazy<S>, PopulateError> {
        let mut lazy = Vec::new();
        let mut newest = Vec::new();
        for (number, (block, source)) in blocks.iter().zip(sources).enumerate() {
            let changes = source.likely_first().iter();
            newest.extend(changes.map(|&page| GuestPage::new(number, page.into())));
            lazy.push((block.range(), source));
        }
        newest.truncate(NEWEST_MAX);
        let (to_supervisor, ended) = unbounded();
        Ok(Lazy {
            memory: LazyMemory::new(uffd, lazy, fill_bitmap)?,
            prefetched: Mutex::new(std::mem::take(&mut first.buffers)),
            prefetched_pages: first.prefetched_pages,
            working_set: first.prefetch_queue(),
            batching: FaultBatching::default(),
            newest,
            bytes_per_s,
            stall: Stall::new(SERVERS_MAX),
            problem: Mutex::default(),
            end: AtomicBool::new(false),
            end_event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|errno| PopulateError::Threads(errno.into()))?,
            to_supervisor,
            ended,
        })
    }

    /// Populates the pages that a fresh QEMU has written, which therefore never cause a fault.
    pub fn populate_used(&self, process: &Process, blocks: &[&Block]) -> Result<(), PopulateError> {
        let pagemap = Pagemap::open(process)?;
        for (lazy, block) in self.memory.blocks.iter().zip(blocks) {
            let in_use = eager::in_use(&pagemap, block)?;
            let used = in_use.iter().cloned().flatten();
            eager::write_pages(block, &lazy.source, used, |_| true)?;
            for pages in in_use {
                lazy.mark_populated(pages);
            }
        }
        Ok(())
    }

    /// Marks the pages that are there as populated: after another process was killed during a background fill.
    pub fn mark_present(&self, process: &Process, blocks: &[&Block]) -> Result<(), PopulateError> {
        let pagemap = Pagemap::open(process)?;
        for (lazy, block) in self.memory.blocks.iter().zip(blocks) {
            for pages in eager::in_use(&pagemap, block)? {
                lazy.mark_populated(pages);
            }
        }
        Ok(())
    }

    /// Marks these pages of each block as populated.
    pub fn mark_populated(&self, pages: &[DirtyBitmap]) {
        for (block, pages) in self.memory.blocks.iter().zip(pages) {
            pages.ranges().for_each(|range| block.mark_populated(range));
        }
    }

    /// Wakes all threads that wait for a page; each faults again if the page is still missing.
    pub fn wake_all(&self) -> Result<(), FillError> {
        for block in &self.memory.blocks {
            self.memory.uffd.wake(block.range)?;
        }
        Ok(())
    }

    /// Makes sure that the threads end with the scope they are started in.
    pub fn end_on_drop(&self) -> EndOnDrop<'_, S> {
        EndOnDrop(self)
    }

    /// Starts the fault handlers.
    pub fn serve<'s>(&'s self, scope: &'s Scope<'s, '_>) -> Result<(), PopulateError> {
        let processors = affinity::of_this_thread().len();
        for number in 0..processors.clamp(2, SERVERS_MAX) {
            let server = FaultHandler {
                number,
                memory: &self.memory,
                fault_around: FaultAround::new(&self.memory),
                prefetch_queue: &self.working_set,
                batching: self.bytes_per_s.is_none().then_some(&self.batching),
                stall: &self.stall,
                end: &self.end_event,
            };
            let ended = self.to_supervisor.clone();
            std::thread::Builder::new()
                .name("fault handler".into())
                .spawn_scoped(scope, move || {
                    // No thread listens any more when the scope is being left.
                    let _ = ended.send(Ended::FaultHandler(server.run()));
                })
                .map_err(PopulateError::Threads)?;
        }
        Ok(())
    }

    /// Starts the background fill.
    pub fn fill<'s>(&'s self, scope: &'s Scope<'s, '_>) -> Result<(), PopulateError> {
        let fill = BackgroundFill {
            memory: &self.memory,
            // The other half is the guest's. Measured: more threads take from the guest as much as they gain.
            threads: affinity::of_this_thread().len().div_ceil(2),
            bytes_per_s: self.bytes_per_s,
            prefetch_queue: &self.working_set,
            end: &self.end,
            problem: &self.problem,
        };
        let mut prefetched = self
            .prefetched
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let prefetched = std::mem::take(&mut *prefetched);
        let ended = self.to_supervisor.clone();
        std::thread::Builder::new()
            .name("background fill".into())
            .spawn_scoped(scope, move || {
                affinity::lower_priority();
                let _ = ended.send(Ended::BackgroundFill(fill.run(prefetched, &self.newest)));
            })
            .map_err(PopulateError::Threads)?;
        Ok(())
    }

    /// The working set for the next restore, if this one had any fault.
    pub fn learned_working_set(&self) -> Option<Vec<GuestPage>> {
        self.memory.trace.learned(self.working_set.pages())
    }

    /// How many pages were prefetched before there was memory to populate.
    pub fn prefetched(&self) -> u64 {
        self.prefetched_pages
    }

    /// How many faults there were in each of the first steps of 10 ms, up to the last.
    pub fn faults_by_step(&self) -> Vec<u64> {
        self.memory.faults_by_step()
    }

    /// Waits for a change of status, for no longer than `limit`.
    pub fn status(&self, limit: Duration) -> Result<FillStatus, PopulateError> {
        match self.ended.recv_timeout(limit) {
            Ok(Ended::BackgroundFill(all)) => match all? {
                true => Ok(FillStatus::Complete),
                false => Ok(FillStatus::None),
            },
            Ok(Ended::FaultHandler(ended)) => {
                ended?;
                Ok(FillStatus::None)
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(FillStatus::None),
        }
    }

    /// A stall: for how long the guest has been waiting for a page that cannot be read, and why.
    pub fn stall(&self) -> Option<(Duration, String)> {
        self.stall.for_how_long()
    }

    /// Why a page could not be populated that no thread waits for; reported once.
    pub fn take_problem(&self) -> Option<String> {
        let mut problem = self.problem.lock().unwrap_or_else(PoisonError::into_inner);
        problem.take()
    }

    /// How far the fill is.
    pub fn filling(&self) -> Filling {
        self.memory.filling()
    }

    /// The first of these pages, by block, from this one on, that is not populated.
    pub fn first_missing(&self, pages: &[DirtyBitmap], from: GuestPage) -> Option<GuestPage> {
        let blocks = self.memory.blocks.iter().zip(pages).enumerate();
        let missing = blocks.skip(from.block).map(|(number, (block, pages))| {
            let behind = GuestPage::new(number, 0).max(from).page;
            let pages = pages
                .ranges()
                .flat_map(|range| range.start.max(behind)..range.end);
            let mut missing = pages.filter(|&page| !block.is_populated(page));
            missing.next().map(|page| GuestPage::new(number, page))
        });
        missing.flatten().next()
    }

    /// Unregisters all blocks when all pages are populated. Pages that are still missing are zero from now on.
    pub fn finish(&self) -> Result<(), FillError> {
        for block in &self.memory.blocks {
            self.memory.uffd.unregister(block.range)?;
        }
        Ok(())
    }
}
