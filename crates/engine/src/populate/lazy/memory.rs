//! Memory that is being populated: the pages that are there, and how a page gets there.
//!
//! A page is populated once. If it is missing again later, its owner has discarded it (a balloon, free page
//! reporting), and it is zero from then on. Populated pages are also noted in a file, the fill bitmap, for a
//! successor of a killed process. It has one byte a page, because threads that write bytes do not overwrite each
//! other's.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use stillframe_page::{GuestPage, PAGE_BYTES};
use stillframe_sys::process::AddressRange;
use stillframe_sys::uffd::{Uffd, UffdError, Waiters};
use thiserror::Error;

use crate::populate::lazy::access_trace::AccessTrace;
use crate::source::{PageSource, SourceError};

/// Faults are counted in steps of this.
const STEP: Duration = Duration::from_millis(10);
/// Number of steps of the test.
const STEPS: usize = 1000;

/// Why a page was not populated.
#[derive(Debug, Error)]
pub enum FillError {
    /// The source failed.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The kernel did not take it.
    #[error("cannot put pages into the VM's memory")]
    Uffd(#[from] UffdError),
    /// The fill was ended.
    #[error("filling was ended")]
    Ended,
    /// The fill bitmap cannot be written.
    #[error("cannot note which pages are filled")]
    FillBitmap(#[source] io::Error),
}

/// One RAM block that is being populated.
pub(super) struct LazyBlock<S> {
    pub(super) range: AddressRange,
    pub(super) source: S,
    populated: Vec<AtomicU64>,
    /// Where its bytes begin in the fill bitmap.
    bitmap_offset: u64,
}

/// How far the fill is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Filling {
    /// Pages that the background fill has gone through.
    pub done: u64,
    /// All pages.
    pub total: u64,
    /// How often the guest had to wait for a page.
    pub faults: u64,
    /// Pages with content that were populated, after a fault or in the background.
    pub filled: u64,
}

/// All RAM blocks that are being populated.
pub(super) struct LazyMemory<S> {
    pub(super) uffd: Uffd,
    pub(super) blocks: Vec<LazyBlock<S>>,
    fill_bitmap: File,
    since: Instant,
    pub(super) trace: AccessTrace,
    faults: AtomicU64,
    /// The first of them by when they were.
    faults_by_step: Vec<AtomicU64>,
    filled: AtomicU64,
    passed: AtomicU64,
}

impl<S: PageSource> LazyMemory<S> {
    /// `fill_bitmap` is the fill bitmap, with a byte a page, as a killed process left it.
    pub(super) fn new(
        uffd: Uffd,
        blocks: impl IntoIterator<Item = (AddressRange, S)>,
        fill_bitmap: File,
    ) -> Result<LazyMemory<S>, FillError> {
        let mut bitmap_offset = 0;
        let mut lazy = Vec::new();
        for (range, source) in blocks {
            let block = LazyBlock {
                populated: (0..source.pages().div_ceil(64))
                    .map(|_| AtomicU64::new(0))
                    .collect(),
                bitmap_offset,
                range,
                source,
            };
            bitmap_offset += block.source.pages();
            block
                .read_fill_bitmap(&fill_bitmap)
                .map_err(FillError::FillBitmap)?;
            lazy.push(block);
        }
        Ok(LazyMemory {
            uffd,
            blocks: lazy,
            fill_bitmap,
            since: Instant::now(),
            trace: AccessTrace::default(),
            faults: AtomicU64::new(0),
            faults_by_step: (0..STEPS).map(|_| AtomicU64::new(0)).collect(),
            filled: AtomicU64::new(0),
            passed: AtomicU64::new(0),
        })
    }

    /// The block and page at an address.
    pub(super) fn find(&self, address: u64) -> Option<GuestPage> {
        let mut blocks = self.blocks.iter();
        let number = blocks.position(|block| block.range.contains(address))?;
        let start = self.blocks[number].range.start;
        Some(GuestPage::new(number, (address - start) / PAGE_BYTES))
    }

    /// Where a page lies in QEMU.
    fn address(&self, page: GuestPage) -> u64 {
        self.blocks[page.block].address(page.page)
    }

    /// Whether a page was populated once.
    pub(super) fn is_populated(&self, page: GuestPage) -> bool {
        self.blocks[page.block].is_populated(page.page)
    }

    /// Notes that the guest waits for a page.
    pub(super) fn note_fault(&self) {
        self.faults.fetch_add(1, Ordering::Relaxed);
        let step = self.since.elapsed().as_millis() / STEP.as_millis();
        let step = usize::try_from(step).ok();
        if let Some(count) = step.and_then(|step| self.faults_by_step.get(step)) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How many faults there were in each of the first steps of 10 ms, up to the last.
    pub(super) fn faults_by_step(&self) -> Vec<u64> {
        let counts = self.faults_by_step.iter();
        let mut counts: Vec<u64> = counts.map(|count| count.load(Ordering::Relaxed)).collect();
        let end = counts
            .iter()
            .rposition(|&count| count > 0)
            .map_or(0, |last| last + 1);
        counts.truncate(end);
        counts
    }

    /// Notes that all pages of a range are populated, or zero, or cannot be read.
    pub(super) fn passed(&self, pages: Range<u64>) {
        let pages = pages.end - pages.start;
        self.passed.fetch_add(pages, Ordering::Relaxed);
    }

    /// How far the fill is.
    pub(super) fn filling(&self) -> Filling {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Filling {
            done: count(&self.passed),
            total: self.blocks.iter().map(|block| block.source.pages()).sum(),
            faults: count(&self.faults),
            filled: count(&self.filled),
        }
    }

    /// Populates consecutive pages; those that were populated before, or that are no longer registered, are left
    /// as they are.
    pub(super) fn put(
        &self,
        first: GuestPage,
        bytes: &[u8],
        waiters: Waiters,
    ) -> Result<(), FillError> {
        let to = self.address(first);
        let filled = self.populate_each(first, bytes.len() as u64, |done, rest| {
            let range = done as usize..(done + rest) as usize;
            self.uffd.copy(to + done, &bytes[range], waiters)
        })?;
        self.filled.fetch_add(filled, Ordering::Relaxed);
        Ok(())
    }

    /// Does the same as [`LazyMemory::put`], with zeros.
    pub(super) fn put_zeros(&self, block: usize, pages: Range<u64>) -> Result<(), FillError> {
        let first = GuestPage::new(block, pages.start);
        let to = self.address(first);
        let bytes = (pages.end - pages.start) * PAGE_BYTES;
        self.populate_each(first, bytes, |done, rest| {
            self.uffd.zero(AddressRange {
                start: to + done,
                end: to + done + rest,
            })
        })?;
        Ok(())
    }

    /// A populated page that causes a fault: it is there by now, or it was discarded, and
    /// is zero from now on.
    pub(super) fn put_discarded(&self, page: GuestPage) -> Result<(), FillError> {
        let start = self.address(page);
        let end = start + PAGE_BYTES;
        match self.uffd.zero(AddressRange { start, end }) {
            Ok(()) | Err(UffdError::Exists { .. } | UffdError::NotRegistered { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Populates from `first` on with `fill`, which gets the bytes done and the bytes to do. Returns
    /// how many pages were populated.
    fn populate_each(
        &self,
        GuestPage { block, page: first }: GuestPage,
        bytes: u64,
        fill: impl Fn(u64, u64) -> Result<(), UffdError>,
    ) -> Result<u64, FillError> {
        let block = &self.blocks[block];
        let start = block.address(first);
        let end = first + bytes / PAGE_BYTES;
        let (mut page, mut filled) = (first, 0);
        // Pages of one call: where part of the range is not registered (any more), one.
        let mut at_once = u64::MAX;
        while page < end {
            // Checked right before: since this page was requested it may have been populated, written and
            // discarded. Then the bytes at hand are not its content.
            if block.is_populated(page) {
                page += 1;
                continue;
            }
            let rest = (page + 1..end).take_while(|&next| !block.is_populated(next));
            let pages = at_once.min(1 + rest.count() as u64);
            let done = (page - first) * PAGE_BYTES;
            let (there, populated) = match fill(done, pages * PAGE_BYTES) {
                Ok(()) => (pages, pages),
                Err(UffdError::Exists { range }) => {
                    let there = (range.start - start - done) / PAGE_BYTES;
                    (there, there + 1)
                }
                Err(UffdError::NotRegistered { .. }) if pages > 1 => {
                    at_once = 1;
                    continue;
                }
                Err(UffdError::NotRegistered { .. }) => (0, 1),
                Err(error) => return Err(error.into()),
            };
            self.mark_populated(block, page..page + populated)?;
            filled += there;
            page += populated;
        }
        Ok(filled)
    }

    /// Notes pages as populated. In the file last: if this process is killed between the two, its successor
    /// sees in the page map that the pages are there.
    fn mark_populated(&self, block: &LazyBlock<S>, pages: Range<u64>) -> Result<(), FillError> {
        block.mark_populated(pages.clone());
        let fill_bitmap = vec![1; (pages.end - pages.start) as usize];
        self.fill_bitmap
            .write_all_at(&fill_bitmap, block.bitmap_offset + pages.start)
            .map_err(FillError::FillBitmap)
    }

    /// Wakes the threads that wait for a page.
    pub(super) fn wake(&self, page: GuestPage) -> Result<(), FillError> {
        let start = self.address(page);
        Ok(self.uffd.wake(AddressRange {
            start,
            end: start + PAGE_BYTES,
        })?)
    }
}

impl<S: PageSource> LazyBlock<S> {
    /// Where a page lies in QEMU.
    fn address(&self, page: u64) -> u64 {
        self.range.start + page * PAGE_BYTES
    }

    /// Whether a page was populated once.
    pub(super) fn is_populated(&self, page: u64) -> bool {
        let word = self.populated.get((page / 64) as usize);
        word.is_none_or(|word| word.load(Ordering::Acquire) >> (page % 64) & 1 == 1)
    }

    /// Notes pages as populated, in memory only.
    pub(super) fn mark_populated(&self, pages: Range<u64>) {
        for page in pages {
            if let Some(word) = self.populated.get((page / 64) as usize) {
                word.fetch_or(1 << (page % 64), Ordering::AcqRel);
            }
        }
    }

    fn read_fill_bitmap(&self, file: &File) -> io::Result<()> {
        // Pages behind the end were never noted: for a new VM, all of them.
        let there = file.metadata()?.len().saturating_sub(self.bitmap_offset);
        let mut fill_bitmap = vec![0; self.source.pages().min(there) as usize];
        let mut filled = 0;
        while filled < fill_bitmap.len() {
            match file.read_at(
                &mut fill_bitmap[filled..],
                self.bitmap_offset + filled as u64,
            ) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        for (page, _) in (0..).zip(&fill_bitmap).filter(|(_, mark)| **mark != 0) {
            self.mark_populated(page..page + 1);
        }
        Ok(())
    }
}
