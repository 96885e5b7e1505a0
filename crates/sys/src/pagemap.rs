//! Finds the pages of a process that were written: `ioctl(PAGEMAP_SCAN)` on its `/proc/PID/pagemap` (linux:
//! Documentation/admin-guide/mm/pagemap.rst; since 6.7).

use crate::process::{AddressRange, Process, ProcessError};
use linux_raw_sys::general::{
    PAGE_IS_PFNZERO, PAGE_IS_PRESENT, PAGE_IS_SWAPPED, PAGE_IS_WRITTEN, PM_SCAN_CHECK_WPASYNC,
    PM_SCAN_WP_MATCHING, page_region, pm_scan_arg,
};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: u64 = 0xc060_6610;

const _: () = {
    assert!(size_of::<pm_scan_arg>() == 96);
    assert!(size_of::<page_region>() == 24);
    assert!(
        PAGEMAP_SCAN
            == (3 << 30) | (size_of::<pm_scan_arg>() as u64) << 16 | (b'f' as u64) << 8 | 16
    );
    assert!(PAGE_IS_WRITTEN == 1 << 1);
    assert!(PAGE_IS_PRESENT == 1 << 3);
    assert!(PAGE_IS_SWAPPED == 1 << 4);
    assert!(PAGE_IS_PFNZERO == 1 << 5);
    assert!(PM_SCAN_WP_MATCHING == 1 && PM_SCAN_CHECK_WPASYNC == 2);
};

/// How many regions one call returns at most: 192 KiB of answers.
const REGIONS_MAX: usize = 8192;

/// Length of one entry of the page map.
const ENTRY_BYTES: usize = 8;
/// The host's page (x86-64), which one entry describes; huge pages have many entries.
pub(crate) const HOST_PAGE_BYTES: u64 = 4096;
const ENTRIES_AT_ONCE: usize = 8192;

/// The entry of a page that is not there, but for userfaultfd's marker (linux: fs/proc/task_mmu.c,
/// `pte_to_pagemap_entry`). Bit 62, swapped, is set, and bit 57, write-protected by userfaultfd; bit 63, present,
/// is not set. The swap offset (from bit 5 on) is the marker's own number, `PTE_MARKER_UFFD_WP`, 1. For a page that
/// is being moved the offset is its frame number, which is never 1. A process that may not see offsets (no
/// CAP_SYS_ADMIN) reads 0 there, takes the page for one with content, and is right.
const MARKER_MASK: u64 = 1 << 63 | 1 << 62 | 1 << 57 | ((1 << 50) - 1) << 5;
const MARKER: u64 = 1 << 62 | 1 << 57 | 1 << 5;

/// Why the pages could not be scanned.
#[derive(Debug, thiserror::Error)]
pub enum PagemapError {
    /// The process has ended; the result of the scan may not be used.
    #[error("process {pid} has ended")]
    Gone {
        /// Its pid while it lived.
        pid: i32,
    },
    /// The page map could not be opened.
    #[error("cannot read the page map")]
    Open(#[source] ProcessError),
    /// The kernel has no PAGEMAP_SCAN.
    #[error("this kernel cannot scan page maps (PAGEMAP_SCAN): Linux 6.7 or newer is needed")]
    Unsupported,
    /// The range is not under asynchronous write protection all along.
    #[error(
        "{range} of process {pid} is not registered for asynchronous write protection: attach again"
    )]
    NotTracked {
        /// The process.
        pid: i32,
        /// The requested range.
        range: AddressRange,
    },
    /// Anything else the kernel said.
    #[error("cannot scan the pages {range} of process {pid}")]
    Io {
        /// The process.
        pid: i32,
        /// The requested range.
        range: AddressRange,
        /// The kernel's error.
        source: io::Error,
    },
}

/// The page map of a process.
///
/// All scans append ranges of whole pages to `out`, sorted, neighbours joined. They pass over
/// addresses where nothing is mapped in silence.
#[derive(Debug)]
pub struct Pagemap {
    process: Process,
    file: File,
}

/// The pages to find, and the action on them.
struct Scan {
    flags: u32,
    /// All of these bits.
    all_of: u32,
    /// At least one of these.
    any_of: u32,
    /// None of these.
    none_of: u32,
}

/// What is in memory or in swap.
const POPULATED: Scan = Scan {
    flags: 0,
    all_of: 0,
    any_of: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
    none_of: 0,
};

impl Pagemap {
    /// Opens the page map of this process (needs the right to ptrace it).
    pub fn open(process: &Process) -> Result<Self, PagemapError> {
        let file = process
            .open_file("pagemap", "open the page map")
            .map_err(PagemapError::Open)?;
        Ok(Pagemap {
            process: process.clone(),
            file,
        })
    }

    /// Finds the pages written since they were last protected, and protects them again in the same step. So no
    /// write is missed or lost between the two. The range must be registered for asynchronous write protection. A
    /// page never protected counts as written.
    ///
    /// # Errors
    /// After an error, the pages appended to `out` *are* protected again and must be treated as written; the rest
    /// of the range was left alone.
    pub fn take_written(
        &self,
        range: AddressRange,
        out: &mut Vec<AddressRange>,
    ) -> Result<(), PagemapError> {
        self.look_for_written(PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC, range, out)
    }

    /// The pages written since they were last protected, without disturbing anything.
    pub fn peek_written(
        &self,
        range: AddressRange,
        out: &mut Vec<AddressRange>,
    ) -> Result<(), PagemapError> {
        self.look_for_written(PM_SCAN_CHECK_WPASYNC, range, out)
    }

    /// Does the same as [`Pagemap::peek_written`], of a range that is registered for write protection of either kind:
    /// the pages that are not protected.
    pub fn written(
        &self,
        range: AddressRange,
        out: &mut Vec<AddressRange>,
    ) -> Result<(), PagemapError> {
        self.look_for_written(0, range, out)
    }

    fn look_for_written(
        &self,
        flags: u32,
        range: AddressRange,
        out: &mut Vec<AddressRange>,
    ) -> Result<(), PagemapError> {
        let written = Scan {
            flags,
            all_of: PAGE_IS_WRITTEN,
            any_of: 0,
            none_of: 0,
        };
        self.scan(range, &written, out)
    }

    /// The pages that are present or swapped out. The protection marker of a page that was never
    /// touched counts as swapped out (kernel: such a page table entry is a swap entry).
    pub fn populated(
        &self,
        range: AddressRange,
        out: &mut Vec<AddressRange>,
    ) -> Result<(), PagemapError> {
        self.scan(range, &POPULATED, out)
    }

    /// The pages that are in memory and in the page table of this process.
    pub fn present(
        &self,
        range: AddressRange,
        out: &mut Vec<AddressRange>,
    ) -> Result<(), PagemapError> {
        self.scan(
            range,
            &Scan {
                flags: 0,
                all_of: PAGE_IS_PRESENT,
                any_of: 0,
                none_of: 0,
            },
            out,
        )
    }

    /// The pages that may hold anything: all but those that were never touched since
    /// [`crate::uffd::Uffd::protect`] left its marker on them, and those that were only read (by QEMU's own saving, say),
    /// which have the kernel's page of zeros. For private memory these others are zero. A page that the kernel is moving,
    /// or has swapped out, may hold something.
    pub fn may_have_content(
        &self,
        range: AddressRange,
        out: &mut Vec<AddressRange>,
    ) -> Result<(), PagemapError> {
        let mut populated = Vec::new();
        let without_zeros = Scan {
            none_of: PAGE_IS_PFNZERO,
            ..POPULATED
        };
        self.scan(range, &without_zeros, &mut populated)?;
        let first = out.len();
        let mut entries = vec![0; ENTRY_BYTES * ENTRIES_AT_ONCE];
        for range in populated {
            for start in
                (range.start..range.end).step_by(HOST_PAGE_BYTES as usize * ENTRIES_AT_ONCE)
            {
                let pages = ((range.end - start) / HOST_PAGE_BYTES).min(ENTRIES_AT_ONCE as u64);
                let entries = &mut entries[..ENTRY_BYTES * pages as usize];
                self.file
                    .read_exact_at(entries, start / HOST_PAGE_BYTES * ENTRY_BYTES as u64)
                    .map_err(|source| self.failed(range, source))?;
                for (number, entry) in (0..).zip(entries.as_chunks::<ENTRY_BYTES>().0) {
                    if u64::from_ne_bytes(*entry) & MARKER_MASK != MARKER {
                        let start = start + number * HOST_PAGE_BYTES;
                        let end = start + HOST_PAGE_BYTES;
                        append(out, first, AddressRange { start, end });
                    }
                }
            }
        }
        Ok(())
    }

    fn scan(
        &self,
        range: AddressRange,
        scan: &Scan,
        out: &mut Vec<AddressRange>,
    ) -> Result<(), PagemapError> {
        let first = out.len();
        let mut regions = vec![
            page_region {
                start: 0,
                end: 0,
                categories: 0
            };
            REGIONS_MAX
        ];
        let mut at = range.start;
        while at < range.end {
            let (found, walk_end) = self
                .call(at, range.end, scan, &mut regions)
                .map_err(|source| self.failed(range, source))?;
            let found = &regions[..found.min(REGIONS_MAX)];
            for region in found {
                append(
                    out,
                    first,
                    AddressRange {
                        start: region.start,
                        end: region.end,
                    },
                );
            }
            // With space left for answers, the walk has come to its end. `walk_end` does not show it: it may be
            // where the kernel last emptied a buffer of its own (seen on Linux 6.18). Going on there would report
            // pages twice. Therefore never go back behind an answer either.
            match found.last() {
                Some(last) if found.len() == REGIONS_MAX => at = walk_end.max(last.end),
                _ => break,
            }
        }
        // The page table of a process that has ended reads as empty, without an error.
        if self.process.is_alive() {
            return Ok(());
        }
        Err(PagemapError::Gone {
            pid: self.process.pid(),
        })
    }

    /// One call: how many regions it found, and where it stopped.
    fn call(
        &self,
        start: u64,
        end: u64,
        scan: &Scan,
        regions: &mut [page_region],
    ) -> io::Result<(usize, u64)> {
        let mut argument = pm_scan_arg {
            size: size_of::<pm_scan_arg>() as u64,
            flags: u64::from(scan.flags),
            start,
            end,
            walk_end: 0,
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            max_pages: 0,
            category_inverted: u64::from(scan.none_of),
            category_mask: u64::from(scan.all_of | scan.none_of),
            category_anyof_mask: u64::from(scan.any_of),
            return_mask: u64::from(scan.all_of | scan.any_of),
        };
        // SAFETY: the number and the structure are those of the kernel (asserted above). `vec` is valid for
        // `vec_len` regions, plain integers, and exclusively borrowed during the call.
        let found = unsafe {
            libc::ioctl(
                self.file.as_raw_fd(),
                PAGEMAP_SCAN,
                std::ptr::from_mut(&mut argument),
            )
        };
        let found = usize::try_from(found).map_err(|_| io::Error::last_os_error())?;
        Ok((found, argument.walk_end))
    }

    fn failed(&self, range: AddressRange, source: io::Error) -> PagemapError {
        let pid = self.process.pid();
        match source.raw_os_error() {
            _ if !self.process.is_alive() => PagemapError::Gone { pid },
            Some(libc::ESRCH) => PagemapError::Gone { pid },
            Some(libc::ENOTTY) => PagemapError::Unsupported,
            Some(libc::EPERM) => PagemapError::NotTracked { pid, range },
            _ => PagemapError::Io { pid, range, source },
        }
    }
}

/// Joins with the last range of *this* scan when they touch.
fn append(out: &mut Vec<AddressRange>, first: usize, next: AddressRange) {
    if out.len() > first
        && let Some(last) = out.last_mut()
        && last.end == next.start
    {
        last.end = next.end;
        return;
    }
    out.push(next);
}
