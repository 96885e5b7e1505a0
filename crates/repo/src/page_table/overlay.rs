//! Several layers merged, and the deltas that remain.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use stillframe_page::PAGE;
use stillframe_page::bitmap::DirtyBitmap;
use stillframe_page::delta::Delta;
use stillframe_page::hash::ContentId;

use crate::blobs::Blobs;
use crate::error::RepoError;
use crate::format::manifest::LayerRef;
use crate::page_table::layer::Layer;
use crate::page_table::table::{PageRef, bad_blob};
use crate::sync::lock;

/// Number of pages that deltas are applied to at once: 4 MiB.
pub(crate) const GROUP_PAGES: usize = 1024;

/// Bytes of parts that are cached for reads of their other pages.
const RECENT_BYTES_MAX: usize = 16 << 20;

/// Several layers merged.
pub(crate) struct Overlay {
    /// The newest whole content of each page that has one, ascending.
    pub(crate) whole: Vec<(u32, PageRef)>,
    /// Deltas newer than that.
    pub(crate) deltas: Deltas,
    /// The pages that the newest layer lists, ascending.
    pub(crate) newest: Vec<u32>,
}

/// The deltas of each page.
#[derive(Default)]
pub(crate) struct Deltas {
    /// By page, then oldest first.
    links: Vec<Link>,
    /// Oldest first.
    parts: Vec<ContentId>,
    recent: Mutex<Recent>,
}

/// Recently used parts, for pages with changes in the same part. The one used last is the last.
#[derive(Default)]
struct Recent {
    parts: Vec<(u32, Arc<Delta>)>,
    bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Link {
    page: u32,
    part: u32,
}

impl Overlay {
    /// Reads layers, given oldest first, of a block of `pages` pages.
    pub(crate) fn read(
        blobs: Blobs<'_>,
        layers: &[LayerRef],
        pages: u64,
    ) -> Result<Overlay, RepoError> {
        let mut whole = Vec::new();
        let mut deltas = Deltas::default();
        let mut newest = None;
        // Newest first: anything older than a whole content is ignored.
        let mut covered = DirtyBitmap::new(match layers {
            [] => 0,
            _ => pages,
        });
        for layer in layers.iter().rev() {
            let layer = Layer::decode(&blobs.read(&layer.id)?, pages)
                .map_err(|error| bad_blob(&layer.id, &error))?;
            newest.get_or_insert_with(|| layer.pages());
            for part in layer.parts {
                // Each part has at least one page, and pages fit 32 bits.
                let number = deltas.parts.len() as u32;
                deltas.parts.push(part.id);
                let uncovered = |page: &u32| !covered.get((*page).into());
                let pages = part.pages.into_iter().filter(uncovered);
                deltas
                    .links
                    .extend(pages.map(|page| Link { page, part: number }));
            }
            let is_newest = |&(page, _): &(u32, PageRef)| covered.set(page.into());
            whole.extend(layer.whole.into_iter().filter(is_newest));
        }
        whole.sort_unstable_by_key(|&(page, _)| page);
        deltas.reverse();
        Ok(Overlay {
            whole,
            deltas,
            newest: newest.unwrap_or_default(),
        })
    }
}

impl Deltas {
    /// Reverses the order from newest first to oldest first.
    fn reverse(&mut self) {
        self.parts.reverse();
        let last = self.parts.len().saturating_sub(1) as u32;
        for link in &mut self.links {
            link.part = last - link.part;
        }
        self.links.sort_unstable();
    }

    /// The pages that have deltas, ascending.
    pub(crate) fn pages(&self) -> Vec<u32> {
        let mut pages: Vec<u32> = self.links.iter().map(|link| link.page).collect();
        pages.dedup();
        pages
    }

    /// The blobs that any page needs.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &ContentId> {
        let mut needed: Vec<u32> = self.links.iter().map(|link| link.part).collect();
        needed.sort_unstable();
        needed.dedup();
        needed.into_iter().map(|part| &self.parts[part as usize])
    }

    /// Whether a page has deltas.
    pub(crate) fn has(&self, page: u32) -> bool {
        self.links
            .binary_search_by_key(&page, |link| link.page)
            .is_ok()
    }

    fn links_of(&self, page: u32) -> &[Link] {
        let start = self.links.partition_point(|link| link.page < page);
        let rest = &self.links[start..];
        let count = rest.iter().take_while(|link| link.page == page).count();
        &rest[..count]
    }

    /// The blobs of a page's deltas, oldest first.
    pub(crate) fn of(&self, page: u32) -> Vec<ContentId> {
        let links = self.links_of(page).iter();
        links.map(|link| self.parts[link.part as usize]).collect()
    }

    /// Turns the content without deltas of each of `pages`, one after the other in `memory`, into the current
    /// one.
    pub(crate) fn apply(
        &self,
        blobs: Blobs<'_>,
        pages: &[u32],
        memory: &mut [u8],
    ) -> Result<(), RepoError> {
        let mut by_part: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (slot, &page) in pages.iter().enumerate() {
            for link in self.links_of(page) {
                by_part.entry(link.part).or_default().push(slot);
            }
        }
        let (memory, _) = memory.as_chunks_mut::<PAGE>();
        for (part, slots) in by_part {
            let delta = self.part(blobs, part)?;
            for slot in slots {
                let page = pages[slot];
                let index = delta.index_of(page).ok_or_else(|| {
                    self.damaged(
                        part,
                        format!("it does not contain the change of page {page}"),
                    )
                })?;
                delta.apply(index, &mut memory[slot]);
            }
        }
        Ok(())
    }

    /// One of the parts, from the cache if it was read recently.
    fn part(&self, blobs: Blobs<'_>, part: u32) -> Result<Arc<Delta>, RepoError> {
        if let Some(found) = lock(&self.recent).take(part) {
            return Ok(found);
        }
        let read = Delta::decode(&blobs.read(&self.parts[part as usize])?);
        let delta = Arc::new(read.map_err(|error| self.damaged(part, error.to_string()))?);
        lock(&self.recent).add(part, delta.clone());
        Ok(delta)
    }

    fn damaged(&self, part: u32, what: String) -> RepoError {
        let id = &self.parts[part as usize];
        RepoError::Damaged {
            file: format!("blob {id}"),
            what,
        }
    }
}

impl Recent {
    fn take(&mut self, part: u32) -> Option<Arc<Delta>> {
        let at = self.parts.iter().position(|&(number, _)| number == part)?;
        let found = self.parts.remove(at);
        let delta = found.1.clone();
        self.parts.push(found);
        Some(delta)
    }

    fn add(&mut self, part: u32, delta: Arc<Delta>) {
        self.bytes += delta.memory_bytes();
        self.parts.push((part, delta));
        // Two threads may have read the same part, which is then cached twice for a while.
        while self.bytes > RECENT_BYTES_MAX && self.parts.len() > 1 {
            let (_, oldest) = self.parts.remove(0);
            self.bytes -= oldest.memory_bytes();
        }
    }
}
