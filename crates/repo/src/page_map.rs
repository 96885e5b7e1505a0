//! What every page of a RAM block is at one checkpoint: its page table, and the layers over it.

use std::collections::HashMap;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use stillframe_page::delta::PAGE_BYTES;
use stillframe_page::hash::ContentId;

use crate::blobs::{Blobs, lock};
use crate::error::RepoError;
use crate::manifest::RamTable;
use crate::overlay::{Deltas, GROUP_PAGES, Overlay};
use crate::table::{PageRef, read_table};

/// What a page is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageVersion {
    /// Its last whole content.
    pub base: PageRef,
    /// The blobs of the deltas that make its current content of that, oldest first. Two versions that
    /// have the same base and deltas are the same; others may be.
    pub deltas: Vec<ContentId>,
}

/// Where a page's content goes: its number and its bytes.
pub type PageSink<'s> = &'s (dyn Fn(u64, &[u8]) -> io::Result<()> + Sync);

/// All pages of a RAM block at one checkpoint. Takes 33 bytes a page.
pub struct PageMap<'a> {
    blobs: Blobs<'a>,
    base: Vec<PageRef>,
    deltas: Deltas,
}

impl<'a> PageMap<'a> {
    /// Reads the table and its layers.
    pub fn read(from: impl Into<Blobs<'a>>, table: &RamTable) -> Result<PageMap<'a>, RepoError> {
        let blobs = from.into();
        let mut base = Vec::with_capacity(table.pages as usize);
        read_table(blobs, &table.root, table.pages, |_, content| {
            base.push(content)
        })?;
        let Overlay { whole, deltas } = Overlay::read(blobs, &table.layers, table.pages)?;
        for (page, content) in whole {
            base[page as usize] = content;
        }
        Ok(PageMap {
            blobs,
            base,
            deltas,
        })
    }

    /// The number of pages.
    pub fn pages(&self) -> u64 {
        self.base.len() as u64
    }

    /// What a page is.
    pub fn version(&self, page: u64) -> PageVersion {
        PageVersion {
            base: self.base[page as usize],
            deltas: self.deltas.of(page as u32),
        }
    }

    /// Whether nothing is stored for a page: it is all zero.
    pub fn is_zero(&self, page: u64) -> bool {
        self.base[page as usize] == PageRef::Zero && !self.deltas.has(page as u32)
    }

    /// The content id of a page that is stored as a whole.
    pub fn whole_id(&self, page: u64) -> Option<ContentId> {
        match self.base[page as usize] {
            PageRef::Stored(id) if !self.deltas.has(page as u32) => Some(id),
            _ => None,
        }
    }

    /// Hands each of the wanted pages to `sink`, in no order, from up to `threads` threads at once.
    /// Every blob they are made of is verified against its id. The first error ends it; some pages
    /// have been handed over by then. Takes about 70 bytes a page, and 5 MiB a thread.
    pub fn read_pages(
        &self,
        wanted: impl IntoIterator<Item = u64>,
        threads: usize,
        sink: PageSink<'_>,
    ) -> Result<(), RepoError> {
        let mut whole = Vec::new();
        let mut changed = Vec::new();
        for page in wanted {
            match self.base[page as usize] {
                // A table has less than 2^30 pages.
                _ if self.deltas.has(page as u32) => changed.push(page as u32),
                PageRef::Stored(id) => whole.push((id, page)),
                PageRef::Zero => {
                    let sunk = sink(page, &[0; PAGE_BYTES]);
                    sunk.map_err(|source| RepoError::PageSink { page, source })?;
                }
            }
        }
        self.blobs.read_sorted(whole, threads, sink)?;
        // Neighbours have their changes in the same deltas.
        changed.sort_unstable();
        self.read_changed(&changed, threads, sink)
    }

    /// The contents of these pages, one behind the other.
    pub fn read_together(&self, wanted: &[u64]) -> Result<Vec<u8>, RepoError> {
        let place: HashMap<u64, usize> = wanted.iter().copied().zip(0..).collect();
        let all = Mutex::new(vec![0; wanted.len() * PAGE_BYTES]);
        self.read_pages(wanted.iter().copied(), 1, &|page, bytes| {
            let slot = place.get(&page).copied().unwrap_or_default();
            copy_page(&mut lock(&all), slot, bytes)
        })?;
        Ok(all
            .into_inner()
            .unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    fn read_changed(
        &self,
        pages: &[u32],
        threads: usize,
        sink: PageSink<'_>,
    ) -> Result<(), RepoError> {
        let groups = Mutex::new(pages.chunks(GROUP_PAGES));
        let failed = AtomicBool::new(false);
        let failure: Mutex<Option<RepoError>> = Mutex::new(None);
        let work = || {
            let mut memory = Vec::new();
            while !failed.load(Ordering::Relaxed) {
                let Some(group) = lock(&groups).next() else {
                    break;
                };
                if let Err(error) = self.read_group(group, &mut memory, sink) {
                    failed.store(true, Ordering::Relaxed);
                    lock(&failure).get_or_insert(error);
                }
            }
        };
        let helpers = threads.min(pages.len().div_ceil(GROUP_PAGES));
        std::thread::scope(|scope| {
            for _ in 1..helpers {
                scope.spawn(work);
            }
            work();
        });
        let failure = failure
            .into_inner()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        failure.map_or(Ok(()), Err)
    }

    fn read_group(
        &self,
        group: &[u32],
        memory: &mut Vec<u8>,
        sink: PageSink<'_>,
    ) -> Result<(), RepoError> {
        memory.clear();
        memory.resize(group.len() * PAGE_BYTES, 0);
        let stored =
            group
                .iter()
                .enumerate()
                .filter_map(|(slot, &page)| match self.base[page as usize] {
                    PageRef::Zero => None,
                    PageRef::Stored(id) => Some((id, slot)),
                });
        let into = Mutex::new(&mut *memory);
        self.blobs
            .read_sorted(stored.collect(), 1, &|slot: usize, bytes| {
                copy_page(&mut lock(&into), slot, bytes)
            })?;
        self.deltas.apply(self.blobs, group, memory)?;
        for (&page, bytes) in group.iter().zip(memory.chunks_exact(PAGE_BYTES)) {
            let page = page.into();
            sink(page, bytes).map_err(|source| RepoError::PageSink { page, source })?;
        }
        Ok(())
    }
}

fn copy_page(into: &mut [u8], slot: usize, bytes: &[u8]) -> io::Result<()> {
    match into.get_mut(slot * PAGE_BYTES..(slot + 1) * PAGE_BYTES) {
        Some(page) if bytes.len() == PAGE_BYTES => page.copy_from_slice(bytes),
        _ => return Err(io::Error::other("it has not the length of a page")),
    }
    Ok(())
}
