//! The page map: every page of a RAM block at one checkpoint, by its page table and the layers over it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

use stillframe_page::PAGE;
use stillframe_page::hash::ContentId;

use crate::blobs::Blobs;
use crate::error::RepoError;
use crate::format::manifest::BlockTable;
use crate::index::reader::FrameLookup;
use crate::pack::place::Place;
use crate::page_table::overlay::{Deltas, GROUP_PAGES, Overlay};
use crate::page_table::table::{
    BATCH, PageRef, SEGMENT_PAGES, read_root, read_segments, segment_pages,
};
use crate::sync::lock;

/// What a page is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageVersion {
    /// Its newest whole content.
    pub base: PageRef,
    /// The blobs of the deltas from the base to the current content, oldest first. Versions with the same base
    /// and deltas have the same content; others may have it, too.
    pub deltas: Vec<ContentId>,
}

/// Receives pages: the number of the first, its bytes, and behind them those of the pages after it.
pub type PageSink<'s, E> = &'s (dyn Fn(u64, &[u8]) -> Result<(), E> + Sync);

/// All pages of a RAM block at one checkpoint. The table is read on demand, a segment (2 MiB of memory) at a
/// time, and kept: 33 bytes a page, and none for a segment that is all zero, as most of a large disk is.
pub struct PageMap<'a> {
    blobs: Blobs<'a>,
    pages: u64,
    root: Vec<PageRef>,
    segments: Vec<OnceLock<Segment>>,
    /// Pages with whole content in the layers, ascending. It replaces that of the table.
    whole: Vec<(u32, PageRef)>,
    deltas: Deltas,
    /// Pages of the newest layer.
    newest: Vec<u32>,
}

/// A segment of the table, with the whole pages of the layers.
enum Segment {
    /// This number of pages, all zero.
    Zeros(usize),
    Entries(Box<[PageRef]>),
}

impl Segment {
    fn new(entries: Vec<PageRef>) -> Segment {
        match entries.iter().all(|entry| *entry == PageRef::Zero) {
            true => Segment::Zeros(entries.len()),
            false => Segment::Entries(entries.into()),
        }
    }

    /// The entry of a page of it; none behind the end of the table.
    fn of(&self, page: u64) -> Option<PageRef> {
        let at = (page % SEGMENT_PAGES) as usize;
        match self {
            Segment::Zeros(count) => (at < *count).then_some(PageRef::Zero),
            Segment::Entries(entries) => entries.get(at).copied(),
        }
    }
}

impl<'a> PageMap<'a> {
    /// Reads the root of the table, and the layers.
    pub fn open(from: impl Into<Blobs<'a>>, table: &BlockTable) -> Result<PageMap<'a>, RepoError> {
        let blobs = from.into();
        let root = read_root(blobs, &table.root, table.pages)?;
        let Overlay {
            whole,
            deltas,
            newest,
        } = Overlay::read(blobs, &table.layers, table.pages)?;
        Ok(PageMap {
            blobs,
            pages: table.pages,
            segments: root.iter().map(|_| OnceLock::new()).collect(),
            root,
            whole,
            deltas,
            newest,
        })
    }

    /// As [`PageMap::open`], and reads all of the table.
    pub fn read(from: impl Into<Blobs<'a>>, table: &BlockTable) -> Result<PageMap<'a>, RepoError> {
        let map = PageMap::open(from, table)?;
        map.read_rest()?;
        Ok(map)
    }

    /// Reads the rest of the table, neighbouring segments together.
    pub fn read_rest(&self) -> Result<(), RepoError> {
        let numbers = 0..self.root.len() as u64;
        let missing: Vec<u64> = numbers
            .filter(|&number| self.known(number).is_none())
            .collect();
        for batch in missing.chunks(BATCH) {
            let read = read_segments(self.blobs, self.pages, &self.root, batch)?;
            for (&number, entries) in batch.iter().zip(read) {
                self.keep(number, entries);
            }
        }
        Ok(())
    }

    /// The number of pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The pages that changed in the last interval before the checkpoint, ascending; none if it was a first one.
    pub fn newest_changes(&self) -> &[u32] {
        &self.newest
    }

    /// What a page is.
    pub fn version(&self, page: u64) -> Result<PageVersion, RepoError> {
        Ok(PageVersion {
            base: self.base(page)?,
            deltas: self.deltas.of(page as u32),
        })
    }

    /// Whether a page is all zero: nothing is stored for it.
    pub fn is_zero(&self, page: u64) -> Result<bool, RepoError> {
        Ok(self.base(page)? == PageRef::Zero && !self.deltas.has(page as u32))
    }

    /// As [`PageMap::is_zero`], if this is known without a read; else `false`.
    pub fn is_known_zero(&self, page: u64) -> bool {
        self.known_base(page) == Some(PageRef::Zero) && !self.deltas.has(page as u32)
    }

    /// The content id of a page that is stored as a whole.
    pub fn whole_id(&self, page: u64) -> Result<Option<ContentId>, RepoError> {
        Ok(match self.base(page)? {
            PageRef::Stored(id) if !self.deltas.has(page as u32) => Some(id),
            _ => None,
        })
    }

    /// The content of a page without its deltas.
    pub(crate) fn base(&self, page: u64) -> Result<PageRef, RepoError> {
        let number = page / SEGMENT_PAGES;
        let outside = || RepoError::Table {
            what: format!("page {page} is outside a table of {} pages", self.pages),
        };
        if number >= self.segments.len() as u64 {
            return Err(outside());
        }
        let segment = match self.known(number) {
            Some(segment) => segment,
            None => {
                let mut read = read_segments(self.blobs, self.pages, &self.root, &[number])?;
                self.keep(number, read.pop().unwrap_or_default())
            }
        };
        segment.of(page).ok_or_else(outside)
    }

    /// As [`PageMap::base`], if this is known without a read.
    pub(crate) fn known_base(&self, page: u64) -> Option<PageRef> {
        self.known(page / SEGMENT_PAGES)?.of(page)
    }

    /// Whether there are deltas for a page.
    pub(crate) fn is_changed(&self, page: u64) -> bool {
        self.deltas.has(page as u32)
    }

    /// Whether a page has the same deltas as `other`, which has some, and its entry of the table is in memory.
    pub(crate) fn has_deltas_of(&self, page: u64, other: u64) -> bool {
        self.known_base(page).is_some()
            && self.deltas.of(page as u32) == self.deltas.of(other as u32)
    }

    /// The blobs of its repository.
    pub(crate) fn blobs(&self) -> Blobs<'a> {
        self.blobs
    }

    /// Whether a pack is gone, and a newer index may locate its blobs elsewhere.
    pub(crate) fn is_elsewhere(&self, pack: u32) -> Result<bool, RepoError> {
        self.blobs.is_elsewhere(pack)
    }

    pub(crate) fn locate(&self, id: &ContentId) -> Result<Place, RepoError> {
        self.blobs.index.find(id)
    }

    /// A lookup of the other blobs of a frame.
    pub(crate) fn frame_of(&self, at: Place) -> FrameLookup<'a> {
        FrameLookup::new(self.blobs.index, at)
    }

    /// Turns the contents of pages without deltas, in `memory`, into the current ones.
    pub(crate) fn apply_deltas(&self, pages: &[u64], memory: &mut [u8]) -> Result<(), RepoError> {
        let pages: Vec<u32> = pages.iter().map(|&page| page as u32).collect();
        self.deltas.apply(self.blobs, &pages, memory)
    }

    /// A segment that was read, or of which nothing is stored, in the table and in the layers.
    fn known(&self, number: u64) -> Option<&Segment> {
        let segment = self.segments.get(number as usize)?;
        let first = number * SEGMENT_PAGES;
        if let Some(segment) = segment.get() {
            return Some(segment);
        }
        let count = segment_pages(self.pages, number);
        let nothing_stored = self.root.get(number as usize) == Some(&PageRef::Zero)
            && self.whole_between(first, first + count).is_empty();
        nothing_stored.then(|| segment.get_or_init(|| Segment::Zeros(count as usize)))
    }

    /// Keeps a segment, with the whole pages of the layers.
    fn keep(&self, number: u64, mut entries: Vec<PageRef>) -> &Segment {
        let first = number * SEGMENT_PAGES;
        for &(page, content) in self.whole_between(first, first + entries.len() as u64) {
            entries[(u64::from(page) - first) as usize] = content;
        }
        self.segments[number as usize].get_or_init(|| Segment::new(entries))
    }

    /// The whole pages of the layers from `first` to before `end`.
    fn whole_between(&self, first: u64, end: u64) -> &[(u32, PageRef)] {
        let before = |limit: u64| {
            self.whole
                .partition_point(|&(page, _)| u64::from(page) < limit)
        };
        &self.whole[before(first)..before(end)]
    }

    /// Passes each of the wanted pages to `sink`, in no particular order, from up to `threads` threads at once.
    /// Every blob of them is verified against its id. The first error, of a read or of `sink`, ends it; some
    /// pages have been passed on by then. Takes about 130 bytes a page, and 5 MiB a thread.
    pub fn read_pages<E: From<RepoError> + Send>(
        &self,
        wanted: impl IntoIterator<Item = u64>,
        threads: usize,
        sink: PageSink<'_, E>,
    ) -> Result<(), E> {
        let mut whole = Vec::new();
        let mut changed = Vec::new();
        for page in wanted {
            match self.base(page)? {
                // A table has less than 2^30 pages.
                _ if self.deltas.has(page as u32) => changed.push(page as u32),
                PageRef::Stored(id) => whole.push((id, page)),
                PageRef::Zero => sink(page, &[0; PAGE])?,
            }
        }
        let next = |page: u64, other: u64| page + 1 == other;
        self.blobs.read_joined(whole, threads, next, sink)?;
        // Neighbours have their changes in the same deltas.
        changed.sort_unstable();
        self.read_changed(&changed, threads, sink)
    }

    /// The contents of these pages, which are given in ascending order, one after the other.
    pub fn read_together(&self, wanted: &[u64]) -> Result<Vec<u8>, RepoError> {
        self.read_together_by(1, wanted)
    }

    /// The same by up to `threads` threads.
    pub fn read_together_by(&self, threads: usize, wanted: &[u64]) -> Result<Vec<u8>, RepoError> {
        let all = Mutex::new(vec![0; wanted.len() * PAGE]);
        self.read_pages(wanted.iter().copied(), threads, &|page, bytes| {
            // The pages after it in `bytes` also follow it in the list.
            let slot = wanted.partition_point(|&other| other < page);
            copy_pages(&mut lock(&all), slot, bytes)
        })?;
        Ok(all
            .into_inner()
            .unwrap_or_else(|poisoned| poisoned.into_inner()))
    }

    fn read_changed<E: From<RepoError> + Send>(
        &self,
        pages: &[u32],
        threads: usize,
        sink: PageSink<'_, E>,
    ) -> Result<(), E> {
        let groups = Mutex::new(pages.chunks(GROUP_PAGES));
        let failed = AtomicBool::new(false);
        let failure: Mutex<Option<E>> = Mutex::new(None);
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

    fn read_group<E: From<RepoError>>(
        &self,
        group: &[u32],
        memory: &mut Vec<u8>,
        sink: PageSink<'_, E>,
    ) -> Result<(), E> {
        memory.clear();
        memory.resize(group.len() * PAGE, 0);
        let mut stored = Vec::new();
        for (slot, &page) in group.iter().enumerate() {
            if let PageRef::Stored(id) = self.base(page.into())? {
                stored.push((id, slot));
            }
        }
        let into = Mutex::new(&mut *memory);
        self.blobs.read_sorted(stored, 1, &|slot: usize, bytes| {
            copy_pages(&mut lock(&into), slot, bytes)
        })?;
        self.deltas.apply(self.blobs, group, memory)?;
        let mut rest = &memory[..];
        for together in group.chunk_by(|page, next| page + 1 == *next) {
            let (bytes, behind) = rest.split_at(together.len() * PAGE);
            rest = behind;
            sink(together[0].into(), bytes)?;
        }
        Ok(())
    }
}

fn copy_pages(into: &mut [u8], slot: usize, bytes: &[u8]) -> Result<(), RepoError> {
    let start = slot * PAGE;
    match into.get_mut(start..start + bytes.len()) {
        Some(pages) if bytes.len().is_multiple_of(PAGE) => pages.copy_from_slice(bytes),
        _ => {
            return Err(RepoError::Table {
                what: "the blob of a page does not have the length of a page".into(),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Zeros take no memory, however many: most of a large disk.
    #[test]
    fn a_segment_of_zeros_is_a_number() {
        let zeros = Segment::new(vec![PageRef::Zero; 5]);
        assert!(matches!(zeros, Segment::Zeros(5)));
        let mut entries = vec![PageRef::Zero; 5];
        entries[3] = PageRef::Stored(ContentId([1; 32]));
        let mixed = Segment::new(entries.clone());
        assert!(matches!(mixed, Segment::Entries(_)));
        for (page, entry) in (SEGMENT_PAGES..).zip(&entries) {
            assert_eq!(zeros.of(page), Some(PageRef::Zero));
            assert_eq!(mixed.of(page), Some(*entry));
        }
        assert_eq!(zeros.of(5), None);
        assert_eq!(mixed.of(5), None);
    }
}
