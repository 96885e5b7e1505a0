//! Single pages out of page maps, for a guest that touches a page which is not there yet: it cannot wait for
//! many.

use stillframe_page::delta::PAGE_BYTES;
use stillframe_page::hash::ContentId;

use crate::blobs::Blobs;
use crate::blobs::frame_reader::FrameReader;
use crate::error::RepoError;
use crate::pack::place::Place;
use crate::page_table::map::PageMap;
use crate::page_table::table::PageRef;

/// Where pages go: the number of the first, and the bytes of all.
pub type NearSink<'s, E> = &'s mut dyn FnMut(u64, &[u8]) -> Result<(), E>;

/// When a page is handed over.
#[derive(Clone, Copy)]
enum Haste {
    /// Before any other is made: a thread waits for it.
    First,
    /// With the others.
    InItsPlace,
}

/// Reads pages one at a time, with what comes with them at little cost. The state of one thread; takes
/// up to 5 MiB, and keeps a few packs open.
pub struct PageReader<'a> {
    frames: FrameReader<'a>,
}

impl<'a> PageMap<'a> {
    /// A reader of single pages, for all page maps of this repository.
    ///
    /// # Errors
    /// No decoder can be had.
    pub fn page_reader(&self) -> Result<PageReader<'a>, RepoError> {
        PageReader::new(self.blobs())
    }
}

impl<'a> PageReader<'a> {
    /// For page maps of the same repository.
    pub fn new(from: impl Into<Blobs<'a>>) -> Result<PageReader<'a>, RepoError> {
        Ok(PageReader {
            frames: from.into().frame_reader()?,
        })
    }

    /// Hands over a page, and then those of `neighbours` (which ascend) that are now quickly made: they
    /// lie in the same frame, or have their changes in the same deltas. Every blob is verified against
    /// its id.
    pub fn read_near<E: From<RepoError>>(
        &mut self,
        map: &PageMap<'_>,
        page: u64,
        neighbours: &[u64],
        sink: NearSink<'_, E>,
    ) -> Result<(), E> {
        self.read(map, (page, Haste::First), neighbours, sink)
    }

    /// As [`PageReader::read_near`], for a page that no thread waits for: it is handed over in the order of
    /// the pages, adjacent ones with one call.
    pub fn read_together<E: From<RepoError>>(
        &mut self,
        map: &PageMap<'_>,
        page: u64,
        neighbours: &[u64],
        sink: NearSink<'_, E>,
    ) -> Result<(), E> {
        self.read(map, (page, Haste::InItsPlace), neighbours, sink)
    }

    fn read<E: From<RepoError>>(
        &mut self,
        map: &PageMap<'_>,
        page: (u64, Haste),
        neighbours: &[u64],
        sink: NearSink<'_, E>,
    ) -> Result<(), E> {
        let read = match map.is_changed(page.0) {
            true => self.read_changed(map, page, neighbours, sink),
            false => self.read_whole(map, page, neighbours, sink),
        };
        if read.is_err() {
            self.frames.close_packs();
        }
        read
    }

    /// A page that has deltas, and those of the others that have the same.
    fn read_changed<E: From<RepoError>>(
        &mut self,
        map: &PageMap<'_>,
        (page, haste): (u64, Haste),
        neighbours: &[u64],
        hand_over: NearSink<'_, E>,
    ) -> Result<(), E> {
        // From here on the table's entries of its neighbours are in memory, too.
        map.base(page)?;
        let others = neighbours.iter().copied();
        let mut pages: Vec<u64> = others
            .filter(|&other| map.has_deltas_of(other, page))
            .collect();
        match haste {
            Haste::First => hand_over(page, &self.changed(map, &[page])?)?,
            Haste::InItsPlace => {
                pages.push(page);
                pages.sort_unstable();
            }
        }
        let memory = self.changed(map, &pages)?;
        let mut rest = &memory[..];
        for together in pages.chunk_by(|page, next| page + 1 == *next) {
            let (bytes, behind) = rest.split_at(together.len() * PAGE_BYTES);
            rest = behind;
            hand_over(together[0], bytes)?;
        }
        Ok(())
    }

    /// A page that is stored as a whole, and those of the others that lie in its frame.
    fn read_whole<E: From<RepoError>>(
        &mut self,
        map: &PageMap<'_>,
        (page, haste): (u64, Haste),
        neighbours: &[u64],
        hand_over: NearSink<'_, E>,
    ) -> Result<(), E> {
        let PageRef::Stored(id) = map.base(page)? else {
            return hand_over(page, &[0; PAGE_BYTES]);
        };
        let at = self.read_frame_of(map, &id)?;
        let blob = self.frames.blob(&at, &id)?;
        let mut found: Vec<(u64, Place)> = Vec::new();
        match haste {
            Haste::First => hand_over(page, blob)?,
            Haste::InItsPlace => found.push((page, at)),
        }
        let frame = map.frame_of(at);
        for &page in neighbours {
            // Only what is known to lie there: else more of the table would have to be read.
            if !map.is_changed(page)
                && let Some(PageRef::Stored(id)) = map.known_base(page)
                && let Some(other) = frame.find(&id)
            {
                self.frames.blob(&other, &id)?;
                found.push((page, other));
            }
        }
        found.sort_unstable_by_key(|&(page, _)| page);
        let follows = |&(page, at): &(u64, Place), &(next, behind): &(u64, Place)| {
            page + 1 == next && at.offset + at.bytes == behind.offset
        };
        for together in found.chunk_by(follows) {
            let (page, first) = &together[0];
            let bytes = together.iter().map(|(_, at)| at.bytes).sum();
            hand_over(*page, self.frames.together(first, bytes)?)?;
        }
        Ok(())
    }

    /// Reads the frame that a blob lies in; where its pack is gone, from where it is now.
    fn read_frame_of(&mut self, map: &PageMap<'_>, id: &ContentId) -> Result<Place, RepoError> {
        let mut at = map.locate(id)?;
        if let Err(error) = self.frames.open_pack(at.pack) {
            if !map.is_elsewhere(at.pack)? {
                return Err(error);
            }
            at = map.locate(id)?;
        }
        self.frames.read_frame(&at).map(|()| at)
    }

    /// The contents of pages that have deltas, one behind the other.
    fn changed(&mut self, map: &PageMap<'_>, pages: &[u64]) -> Result<Vec<u8>, RepoError> {
        let mut memory = vec![0; pages.len() * PAGE_BYTES];
        let (slots, _) = memory.as_chunks_mut::<PAGE_BYTES>();
        for (&page, slot) in pages.iter().zip(slots) {
            let PageRef::Stored(id) = map.base(page)? else {
                continue;
            };
            let at = self.read_frame_of(map, &id)?;
            let whole = self.frames.blob(&at, &id)?;
            slot.copy_from_slice(whole.first_chunk::<PAGE_BYTES>().ok_or_else(|| {
                RepoError::Damaged {
                    file: format!("blob {id}"),
                    what: "it has not the length of a page".into(),
                }
            })?);
        }
        map.apply_deltas(pages, &mut memory)?;
        Ok(memory)
    }
}
