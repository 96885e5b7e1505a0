//! The cache of an on-demand index: sections and parts that were read, each up to a number of bytes.

use std::sync::Arc;

use lru::LruCache;
use stillframe_page::hash::ContentId;

use crate::index::layout::Entry;
use crate::index::mark_bitmaps::Bits;
use crate::index::segment::IndexSegment;
use crate::pack::place::Place;

/// Number of recent parts, which are searched before any section.
const RECENT_PARTS: usize = 8;

/// Upper bounds of a cache, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CacheLimits {
    pub(crate) parts: usize,
    pub(crate) sections: usize,
}

/// The cached segments of an on-demand index.
pub(crate) struct SegmentCache {
    limits: CacheLimits,
    pub(crate) parts: LruCache<u32, Arc<IndexSegment>>,
    parts_bytes: usize,
    pub(crate) sections: LruCache<u32, Arc<[Entry]>>,
    sections_bytes: usize,
    /// The parts of recent lookups, the last one last; only of packs that are whole.
    recent: Vec<Arc<IndexSegment>>,
    /// The packs known to be whole.
    pub(crate) whole: Bits,
}

impl SegmentCache {
    pub(crate) fn new(limits: CacheLimits) -> SegmentCache {
        SegmentCache {
            limits,
            parts: LruCache::unbounded(),
            parts_bytes: 0,
            sections: LruCache::unbounded(),
            sections_bytes: 0,
            recent: Vec::with_capacity(RECENT_PARTS),
            whole: Bits::default(),
        }
    }

    /// Keeps a part that was read.
    pub(crate) fn add_part(&mut self, part: &Arc<IndexSegment>) {
        self.parts_bytes += part.memory_bytes();
        // Two threads may have read the same part.
        if let Some(old) = self.parts.put(part.number, part.clone()) {
            self.parts_bytes -= old.memory_bytes();
        }
        while self.parts_bytes > self.limits.parts
            && let Some((_, old)) = self.parts.pop_lru()
        {
            self.parts_bytes -= old.memory_bytes();
        }
    }

    /// Keeps a section that was read.
    pub(crate) fn add_section(&mut self, number: u32, section: &Arc<[Entry]>) {
        self.sections_bytes += size_of_val(&section[..]);
        if let Some(old) = self.sections.put(number, section.clone()) {
            self.sections_bytes -= size_of_val(&old[..]);
        }
        while self.sections_bytes > self.limits.sections
            && let Some((_, old)) = self.sections.pop_lru()
        {
            self.sections_bytes -= size_of_val(&old[..]);
        }
    }

    /// Sets other limits, which hold from the next segment on.
    pub(crate) fn limit(&mut self, limits: CacheLimits) {
        self.limits = limits;
    }

    /// Empties it.
    pub(crate) fn clear(&mut self) {
        *self = SegmentCache::new(self.limits);
    }

    /// The location of a blob, if a recent part describes it.
    pub(crate) fn find_recent(&mut self, id: &ContentId) -> Option<Place> {
        let newest_first = self.recent.iter().enumerate().rev();
        let (at, place) = newest_first
            .filter_map(|(at, part)| Some((at, part.find(id)?)))
            .next()?;
        if at + 1 < self.recent.len() {
            let part = self.recent.remove(at);
            self.recent.push(part);
        }
        Some(place)
    }

    /// The location of a blob, if the most recent part describes it.
    pub(crate) fn find_newest(&self, id: &ContentId) -> Option<Place> {
        self.recent.last()?.find(id)
    }

    /// Makes a part, of a pack that is whole, the most recent one.
    pub(crate) fn add_recent(&mut self, part: Arc<IndexSegment>) {
        if self.recent.iter().any(|known| known.number == part.number) {
            return;
        }
        if self.recent.len() == RECENT_PARTS {
            self.recent.remove(0);
        }
        self.recent.push(part);
    }
}
