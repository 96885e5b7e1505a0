//! Finds the pages that the guest wrote, with an asynchronous write-protecting userfaultfd inside QEMU. It is read
//! with `PAGEMAP_SCAN` (Linux Documentation/admin-guide/mm/{userfaultfd,pagemap}.rst).
//!
//! The kernel lifts the protection itself at the first write, so that no vCPU ever waits for the engine. A scan
//! returns the written pages and protects them again in the same step. These pages are remembered as *pending*
//! until a checkpoint that contains them is committed: a failed capture loses no dirty page.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use stillframe_page::PAGE_BYTES;
use stillframe_page::bitmap::DirtyBitmap;
use stillframe_qemu::monitor::{Monitor, RamBlock};
use stillframe_sys::infect::InjectedUffd;
use stillframe_sys::pagemap::Pagemap;
use stillframe_sys::process::{AddressRange, Process};
use stillframe_sys::system;
use stillframe_sys::uffd::{Track, Uffd, WriteProtectMode};

use crate::guardian::Heartbeat;
use crate::memory::BlockShape;
use crate::memory::block::{Block, BlockError, Guest};
use crate::memory::outcome::Found;
use crate::memory::ranges::{self, PageRanges, count, subtract, subtract_all};
use crate::memory::shared_data::SharedData;
use crate::tracking::error::TrackerError;
use crate::tracking::fault_handler::FaultHandler;
use crate::tracking::hot_set::HotSet;
use crate::tracking::protection::{scan_error, still_protected};

/// Protecting holds the kernel's lock on QEMU's address space: short steps keep page faults of
/// the guest from waiting. 64 MiB take about 1 ms.
const PROTECT_STEP_BYTES: u64 = 64 << 20;

/// Protecting a page that is protected already takes 60 ns, a call for a page of its own 0.9 us.
const NEAR_BYTES: u64 = 14 * PAGE_BYTES;

/// A tracked RAM block.
#[derive(Debug)]
pub struct Tracked {
    /// Its memory.
    pub block: Arc<Block>,
    /// The block as QEMU describes it; compared to see a hot-plug or a reset that resized it.
    pub ram: RamBlock,
    /// Written since the last capture, as far as scans have seen, or in captures that failed.
    pending: DirtyBitmap,
    /// In flight: captured, and not committed yet; each capture by itself, in their order.
    in_flight: VecDeque<DirtyBitmap>,
    /// Streamed by iterations of a checkpoint that is to be captured yet.
    streamed: DirtyBitmap,
    /// The guest called them free, and no scan saw them written since. What they hold means nothing.
    free: DirtyBitmap,
    /// For a shared block: pages that may have had content when last captured.
    with_content: DirtyBitmap,
    /// For a shared block: the pages that its file has.
    data: SharedData,
    /// The hot set: pages that are not worth a fault.
    hot_set: HotSet,
}

/// Pages that were protected while the guest ran. A disk request that was in progress then still writes to its
/// pages without a fault, because they are pinned (O_DIRECT, native AIO, io_uring). Therefore these pages must not
/// be read before such requests are done: see docs/memory-writers.md.
#[derive(Debug)]
#[must_use]
pub struct Undrained(Collected);

impl Undrained {
    /// How many pages.
    pub fn pages(&self) -> u64 {
        self.0.pages()
    }

    /// Waits for all requests that were in progress. Afterwards the pages keep their content
    /// until the next fault on them, which the next scan reports.
    pub fn drained(self, monitor: &mut Monitor) -> Result<Collected, TrackerError> {
        monitor.drain_disks().map_err(TrackerError::Drain)?;
        Ok(self.0)
    }
}

/// The result of one scan.
#[derive(Debug)]
pub struct Collected {
    /// Written since the scan before.
    pub written: PageRanges,
    /// Holes of a shared file where content was captured before: zero now. Separate from `written`,
    /// because reading them through a mapping would fill the hole that the guest's balloon made.
    pub discarded: PageRanges,
}

impl Collected {
    /// Pages that are to be read, whatever the reason.
    pub fn written(written: PageRanges) -> Collected {
        let discarded = vec![Vec::new(); written.len()];
        Collected { written, discarded }
    }

    /// Pages in all.
    pub fn pages(&self) -> u64 {
        count(&self.written) + count(&self.discarded)
    }
}

/// Sees which pages are written, and changes nothing.
#[derive(Debug, Clone)]
pub struct Peek {
    pagemap: Arc<Pagemap>,
    blocks: Vec<Arc<Block>>,
}

impl Peek {
    /// The blocks.
    pub fn blocks(&self) -> &[Arc<Block>] {
        &self.blocks
    }

    /// The pages of this range of block number `block` that the next scan would find, but for discards of shared
    /// memory.
    pub fn written(
        &self,
        block: usize,
        pages: Range<u64>,
    ) -> Result<Vec<Range<u64>>, TrackerError> {
        let block = &self.blocks[block];
        let mut found = Vec::new();
        let scanned = self.pagemap.written(block.addresses(&pages), &mut found);
        scanned.map_err(|source| scan_error(block, source))?;
        Ok(to_pages(block, &found))
    }
}

/// Tracks all RAM blocks of one VM. Dropping it ends tracking; QEMU keeps nothing of it.
#[derive(Debug)]
pub struct Tracker {
    uffd: Arc<Uffd>,
    pagemap: Arc<Pagemap>,
    blocks: Vec<Tracked>,
    /// The part for synchronous tracking.
    faults: Option<FaultHandler>,
}

impl Tracker {
    /// Registers and protects every block. With a heartbeat, tracking is synchronous: first writes wait
    /// for a thread of ours.
    pub fn attach(
        process: &Process,
        injected: InjectedUffd,
        ram: &[RamBlock],
        heartbeat: Option<Heartbeat>,
    ) -> Result<Tracker, TrackerError> {
        let uffd_error = |block: &str, source| TrackerError::Uffd {
            block: block.to_owned(),
            source,
        };
        let mode = match heartbeat {
            Some(_) if injected.user_mode_only => return Err(TrackerError::UserModeOnly),
            Some(_) => WriteProtectMode::Sync,
            None => WriteProtectMode::Async,
        };
        let uffd =
            Uffd::handshake(injected.fd, mode).map_err(|source| uffd_error("all", source))?;
        let uffd = Arc::new(uffd);
        let pagemap = Arc::new(Pagemap::open(process).map_err(TrackerError::Pagemap)?);
        let blocks = open_blocks(process, ram, mode)?;
        // Before anything is protected: from then on writers wait for the fault handler.
        let faults = heartbeat.map(|heartbeat| {
            let blocks = blocks.iter().map(|tracked| tracked.block.clone());
            FaultHandler::start(uffd.clone(), pagemap.clone(), blocks, heartbeat)
                .map_err(TrackerError::FaultHandler)
        });
        let faults = faults.transpose()?;
        for tracked in &blocks {
            let error = |source| uffd_error(tracked.block.name(), source);
            uffd.register(tracked.block.range(), Track::WriteProtect)
                .map_err(error)?;
            for step in steps(tracked.block.range()) {
                uffd.protect(step).map_err(error)?;
            }
        }
        Ok(Tracker {
            uffd,
            pagemap,
            blocks,
            faults,
        })
    }

    /// The tracked blocks.
    pub fn blocks(&self) -> &[Tracked] {
        &self.blocks
    }

    /// Whether the tracked blocks are these.
    pub fn tracks(&self, ram: &[RamBlock]) -> bool {
        self.blocks.iter().map(|tracked| &tracked.ram).eq(ram)
    }

    /// All pages of all blocks.
    pub fn pages(&self) -> u64 {
        self.blocks
            .iter()
            .map(|tracked| tracked.block.pages())
            .sum()
    }

    /// The pages that may be other than zero, without those that the guest calls free. Everything is protected before
    /// this call, so the next scan reports a page that is written later.
    pub fn populated(&mut self) -> Result<Undrained, TrackerError> {
        let swap = system::has_swap();
        let blocks = self.blocks.iter_mut();
        let populated = blocks.map(|tracked| {
            let block = &tracked.block;
            if let Some(data) = tracked.data.look(block)? {
                return Ok(data.to_vec());
            }
            if !block.absent_is_zero() {
                return Ok(block.whole());
            }
            let mut found = Vec::new();
            // The marker of an untouched page is similar to a page in swap. With swap on, all pages are read, at
            // the price of reading the untouched ones too.
            let scanned = match swap {
                true => self.pagemap.populated(block.range(), &mut found),
                false => self.pagemap.may_have_content(block.range(), &mut found),
            };
            scanned.map_err(|source| scan_error(block, source))?;
            Ok(to_pages(block, &found))
        });
        let populated = populated.collect::<Result<PageRanges, TrackerError>>()?;
        let populated = subtract_all(&populated, &self.free());
        Ok(Undrained(Collected::written(populated)))
    }

    /// Notes that these pages may have content. The next scan shows it if one becomes a hole of a shared file.
    pub fn expect_content(&mut self, pages: &PageRanges) {
        for (tracked, pages) in self.blocks.iter_mut().zip(pages) {
            for range in pages {
                tracked.with_content.set_range(range.clone());
            }
        }
    }

    /// How many pages a scan would find now, without discards of shared memory. Changes nothing.
    pub fn written_pages(&self) -> Result<u64, TrackerError> {
        let mut found = Vec::new();
        for tracked in &self.blocks {
            let range = tracked.block.range();
            let scanned = self.pagemap.written(range, &mut found);
            scanned.map_err(|source| scan_error(&tracked.block, source))?;
        }
        Ok(found.iter().map(AddressRange::len).sum::<u64>() / PAGE_BYTES)
    }

    /// Takes the pages written since the last scan (or since the attach) and protects it again, while the
    /// guest runs. The pages are pending from here on.
    pub fn collect_running(&mut self) -> Result<Undrained, TrackerError> {
        Ok(Undrained(self.collect(Guest::Running)?))
    }

    /// The same while the guest is stopped and its disks are drained. With synchronous tracking, the pause lock of
    /// the fault handler is held, so that no page is unprotected meanwhile.
    pub fn collect_stopped(&mut self) -> Result<Collected, TrackerError> {
        self.collect(Guest::Stopped)
    }

    fn collect(&mut self, guest: Guest) -> Result<Collected, TrackerError> {
        if let Some(faults) = &self.faults {
            faults.serves()?;
        }
        let mut all = Collected {
            written: Vec::new(),
            discarded: Vec::new(),
        };
        for tracked in &mut self.blocks {
            let mut found = Vec::new();
            let range = tracked.block.range();
            let scanned = match self.faults {
                None => self.pagemap.take_written(range, &mut found),
                Some(_) => self.pagemap.written(range, &mut found),
            };
            // Pages that a failing scan has already taken are protected again and would be lost.
            let written = to_pages(&tracked.block, &found);
            tracked.add_pending(&written);
            scanned.map_err(|source| scan_error(&tracked.block, source))?;
            if self.faults.is_some() {
                // A page that is written between scan and protection is in the scan already, or is unprotected
                // after it and stays unprotected for the next. Therefore no other page may be protected, not even
                // to save calls. The exception is that no page can be unprotected: then all others are protected
                // already.
                let found = match guest {
                    Guest::Running => found,
                    Guest::Stopped => ranges::join_near(found, NEAR_BYTES),
                };
                for step in found.into_iter().flat_map(steps) {
                    let protected = self.uffd.protect(step);
                    protected.map_err(|source| TrackerError::Uffd {
                        block: tracked.block.name().to_owned(),
                        source,
                    })?;
                }
            }
            let discarded = match tracked.data.look(&tracked.block)? {
                Some(data) => {
                    let content: Vec<Range<u64>> = tracked.with_content.ranges().collect();
                    subtract(&content, data)
                }
                None => Vec::new(),
            };
            for range in &written {
                tracked.with_content.set_range(range.clone());
            }
            for range in written.iter().chain(&discarded) {
                tracked.free.clear_range(range.clone());
            }
            tracked.add_pending(&discarded);
            all.written.push(written);
            all.discarded.push(discarded);
        }
        Ok(all)
    }

    /// Everything pending, also from captures that failed, without the pages that the guest calls free.
    pub fn pending(&self) -> PageRanges {
        let kept = |tracked: &Tracked| {
            let mut pages = tracked.pending.clone();
            pages.subtract(&tracked.free);
            pages.ranges().collect()
        };
        self.blocks.iter().map(kept).collect()
    }

    /// The guest calls these pages free. It did so after the last scan, or after the attach, and the next one reports
    /// those that it has written since.
    pub fn call_free(&mut self, pages: &PageRanges) {
        for (tracked, pages) in self.blocks.iter_mut().zip(pages) {
            for range in pages {
                tracked.free.set_range(range.clone());
            }
        }
    }

    /// Pages that the guest called free and has not written since, by block.
    pub fn free(&self) -> PageRanges {
        let ranges = |tracked: &Tracked| tracked.free.ranges().collect();
        self.blocks.iter().map(ranges).collect()
    }

    /// From now on these pages are pending like any others: a migration sends all of a VM, as it is.
    pub fn forget_free(&mut self) {
        for tracked in &mut self.blocks {
            tracked.pending.union_with(&tracked.free);
            tracked.free.clear_all();
        }
    }

    /// Those of them that are zeros in the checkpoint that is being captured, and not in the one before.
    pub fn left_out(&self) -> PageRanges {
        let left_out = |tracked: &Tracked| {
            let mut pages = tracked.pending.clone();
            pages.union_with(&tracked.streamed);
            pages.intersect_with(&tracked.free);
            pages.ranges().collect()
        };
        self.blocks.iter().map(left_out).collect()
    }

    /// Everything pending is captured and in flight from here on, behind earlier captures in flight.
    pub fn mark_in_flight(&mut self) {
        for tracked in &mut self.blocks {
            let mut pages = tracked.take_streamed();
            pages.union_with(&tracked.pending);
            tracked.pending.clear_all();
            tracked.in_flight.push_back(pages);
        }
    }

    /// Everything pending was `found`, and is streamed into the repository in an iteration, while the guest runs on:
    /// part of the next capture in flight.
    pub fn streamed(&mut self, found: &Collected) {
        for (tracked, discarded) in self.blocks.iter_mut().zip(&found.discarded) {
            tracked.streamed.union_with(&tracked.pending);
            tracked.pending.clear_all();
            let mut gone = DirtyBitmap::new(tracked.block.pages());
            for range in discarded {
                gone.set_range(range.clone());
            }
            tracked.with_content.subtract(&gone);
        }
    }

    /// The oldest capture in flight is committed: its checkpoint is durable, and `found` is its outcome.
    pub fn committed(&mut self, found: &[Found]) {
        for (tracked, found) in self.blocks.iter_mut().zip(found) {
            tracked.in_flight.pop_front();
            // A zero page that was written again since may have content now.
            let mut zero = found.zero.clone();
            zero.subtract(&tracked.pending);
            for later in &tracked.in_flight {
                zero.subtract(later);
            }
            tracked.with_content.subtract(&zero);
            tracked.with_content.union_with(&found.content);
            tracked.hot_set.committed(&found.new);
        }
    }

    /// All captures in flight are rolled back: their pages become pending again.
    pub fn rolled_back(&mut self) {
        for tracked in &mut self.blocks {
            let streamed = tracked.take_streamed();
            for pages in tracked.in_flight.drain(..).chain([streamed]) {
                tracked.pending.union_with(&pages);
                // The next scan then finds holes among them again.
                tracked.with_content.union_with(&pages);
            }
        }
    }

    /// Pages that are pending will be read in any case, by the bulk phase of streaming pre-copy.
    pub fn drop_pending(&mut self) {
        for tracked in &mut self.blocks {
            tracked.pending.clear_all();
        }
    }

    /// Names and lengths of the blocks.
    pub fn shape(&self) -> Vec<BlockShape> {
        let blocks = self.blocks.iter();
        blocks
            .map(|tracked| BlockShape {
                name: tracked.block.name().to_owned(),
                pages: tracked.block.pages(),
            })
            .collect()
    }

    /// Unprotects write-hot pages, where that is cheaper than faults (see [`crate::tracking::hot_set`]), until
    /// the next collect, which takes them for written. To be called when they are copied. Returns how many
    /// pages that were.
    pub fn leave_hot_unprotected(&self) -> u64 {
        let blocks = self.blocks.iter().enumerate();
        blocks
            .map(|(number, tracked)| match self.faults {
                Some(_) => self.unprotect(number, tracked.hot().ranges()),
                None => self.unprotect(number, tracked.hot_set.hot_runs(&tracked.pending)),
            })
            .sum()
    }

    /// Unprotects pages of block number `block`; returns how many. Where the kernel refuses
    /// (parts of huge pages, say) they stay protected, and nothing is lost but time.
    pub fn unprotect(&self, block: usize, pages: impl IntoIterator<Item = Range<u64>>) -> u64 {
        let base = self.blocks[block].block.range().start;
        let ranges = pages.into_iter().map(|pages| AddressRange {
            start: base + pages.start * PAGE_BYTES,
            end: base + pages.end * PAGE_BYTES,
        });
        ranges
            .flat_map(steps)
            .map_while(|step| self.uffd.unprotect(step).is_ok().then(|| step.len()))
            .sum::<u64>()
            / PAGE_BYTES
    }

    /// These pages stay pending, although they were [`Tracker::streamed`]: they were left out.
    pub fn postpone(&mut self, pages: &PageRanges) {
        for (tracked, pages) in self.blocks.iter_mut().zip(pages) {
            tracked.add_pending(pages);
        }
    }

    /// Looks for written pages from other threads, without disturbing anything.
    pub fn peek(&self) -> Peek {
        Peek {
            pagemap: self.pagemap.clone(),
            blocks: self
                .blocks
                .iter()
                .map(|tracked| tracked.block.clone())
                .collect(),
        }
    }

    /// Whether these pages of block number `block` still have their content of the pause, in which they were
    /// protected.
    pub fn still_protected(
        &self,
        block: usize,
        pages: &[Range<u64>],
    ) -> Result<bool, TrackerError> {
        still_protected(&self.pagemap, &self.blocks[block].block, pages)
    }

    /// The fault handler of the VM's write faults.
    pub fn fault_handler(&self) -> Result<&FaultHandler, TrackerError> {
        self.faults.as_ref().ok_or(TrackerError::NoFaultServer)
    }

    /// Ends tracking and leaves QEMU as it was found.
    pub fn detach(self) -> Result<(), TrackerError> {
        for tracked in &self.blocks {
            self.uffd
                .unregister(tracked.block.range())
                .map_err(|source| TrackerError::Uffd {
                    block: tracked.block.name().to_owned(),
                    source,
                })?;
        }
        Ok(())
    }
}

impl Tracked {
    /// The write-hot pages of those written: not worth a fault that the engine handles (see
    /// [`crate::tracking::hot_set`]).
    pub fn hot(&self) -> DirtyBitmap {
        self.hot_set.hot(&self.pending)
    }

    fn take_streamed(&mut self) -> DirtyBitmap {
        let none = DirtyBitmap::new(self.block.pages());
        std::mem::replace(&mut self.streamed, none)
    }

    fn add_pending(&mut self, ranges: &[Range<u64>]) {
        for range in ranges {
            self.pending.set_range(range.clone());
        }
    }
}

fn open_blocks(
    process: &Process,
    ram: &[RamBlock],
    mode: WriteProtectMode,
) -> Result<Vec<Tracked>, TrackerError> {
    let mappings = process.mappings().map_err(BlockError::from)?;
    let open = |ram: &RamBlock| {
        if mode == WriteProtectMode::Sync && ram.page_bytes != PAGE_BYTES {
            return Err(TrackerError::HugePages {
                block: ram.name.clone(),
                page_bytes: ram.page_bytes,
            });
        }
        let block = Block::open(process, &mappings, ram, false)?;
        let pages = block.pages();
        Ok(Tracked {
            block: Arc::new(block),
            ram: ram.clone(),
            pending: DirtyBitmap::new(pages),
            in_flight: VecDeque::new(),
            streamed: DirtyBitmap::new(pages),
            free: DirtyBitmap::new(pages),
            with_content: DirtyBitmap::new(pages),
            data: SharedData::default(),
            hot_set: HotSet::new(pages),
        })
    };
    ram.iter().map(open).collect()
}

fn steps(range: AddressRange) -> impl Iterator<Item = AddressRange> {
    (range.start..range.end)
        .step_by(PROTECT_STEP_BYTES as usize)
        .map(move |start| AddressRange {
            start,
            end: range.end.min(start + PROTECT_STEP_BYTES),
        })
}

fn to_pages(block: &Block, found: &[AddressRange]) -> Vec<Range<u64>> {
    let base = block.range().start;
    found
        .iter()
        .map(|range| (range.start - base) / PAGE_BYTES..(range.end - base) / PAGE_BYTES)
        .collect()
}
