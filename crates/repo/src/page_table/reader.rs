//! Reads single pages of page maps, for the faults of a lazily restored guest.

use stillframe_page::hash::ContentId;
use stillframe_page::{PAGE, PageRequest, ReadOrder};

use crate::blobs::Blobs;
use crate::blobs::frame_reader::FrameReader;
use crate::error::RepoError;
use crate::pack::place::Place;
use crate::page_table::map::PageMap;
use crate::page_table::table::PageRef;

/// Receives pages: the number of the first, and the bytes of all.
pub type NeighbourSink<'s, E> = &'s mut dyn FnMut(u64, &[u8]) -> Result<(), E>;

/// Reads single pages with fault-around. The state of one thread; takes up to 5 MiB, and keeps a few packs open.
pub struct PageReader<'a> {
    frames: FrameReader<'a>,
}

impl<'a> PageMap<'a> {
    /// A reader of single pages, for all page maps of this repository.
    ///
    /// # Errors
    /// No decoder can be created.
    pub fn page_reader(&self) -> Result<PageReader<'a>, RepoError> {
        PageReader::new(self.blobs())
    }
}

impl<'a> PageReader<'a> {
    /// A reader for page maps of this repository.
    pub fn new(from: impl Into<Blobs<'a>>) -> Result<PageReader<'a>, RepoError> {
        Ok(PageReader {
            frames: from.into().frame_reader()?,
        })
    }

    /// Passes a page to `sink`, and those of its neighbours that cost little more: they lie in the same frame, or
    /// have their changes in the same deltas. Every blob is verified against its id.
    pub fn read<E: From<RepoError>>(
        &mut self,
        map: &PageMap<'_>,
        request: PageRequest<'_>,
        sink: NeighbourSink<'_, E>,
    ) -> Result<(), E> {
        let read = match map.is_changed(request.page) {
            true => self.read_changed(map, request, sink),
            false => self.read_whole(map, request, sink),
        };
        if read.is_err() {
            self.frames.close_packs();
        }
        read
    }

    /// Reads a page with deltas, and the neighbours that have the same deltas.
    fn read_changed<E: From<RepoError>>(
        &mut self,
        map: &PageMap<'_>,
        request: PageRequest<'_>,
        sink: NeighbourSink<'_, E>,
    ) -> Result<(), E> {
        let PageRequest {
            page,
            neighbours,
            order,
        } = request;
        // From here on the neighbours' entries of the table are in memory, too.
        map.base(page)?;
        let others = neighbours.iter().copied();
        let mut pages: Vec<u64> = others
            .filter(|&other| map.has_deltas_of(other, page))
            .collect();
        match order {
            ReadOrder::RequestedFirst => sink(page, &self.changed(map, &[page])?)?,
            ReadOrder::Ascending => {
                pages.push(page);
                pages.sort_unstable();
            }
        }
        let memory = self.changed(map, &pages)?;
        let mut rest = &memory[..];
        for together in pages.chunk_by(|page, next| page + 1 == *next) {
            let (bytes, behind) = rest.split_at(together.len() * PAGE);
            rest = behind;
            sink(together[0], bytes)?;
        }
        Ok(())
    }

    /// Reads a page that is stored as a whole, and the neighbours in its frame.
    fn read_whole<E: From<RepoError>>(
        &mut self,
        map: &PageMap<'_>,
        request: PageRequest<'_>,
        sink: NeighbourSink<'_, E>,
    ) -> Result<(), E> {
        let page = request.page;
        let PageRef::Stored(id) = map.base(page)? else {
            return sink(page, &[0; PAGE]);
        };
        let at = self.read_frame_of(map, &id)?;
        let blob = self.frames.blob(&at, &id)?;
        let mut found: Vec<(u64, Place)> = Vec::new();
        match request.order {
            ReadOrder::RequestedFirst => sink(page, blob)?,
            ReadOrder::Ascending => found.push((page, at)),
        }
        let frame = map.frame_of(at);
        for &page in request.neighbours {
            // Only entries in memory: others would need a read of the table.
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
            sink(*page, self.frames.together(first, bytes)?)?;
        }
        Ok(())
    }

    /// Reads the frame of a blob; if its pack is gone, looks the blob up again.
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

    /// The contents of pages that have deltas, one after the other.
    fn changed(&mut self, map: &PageMap<'_>, pages: &[u64]) -> Result<Vec<u8>, RepoError> {
        let mut memory = vec![0; pages.len() * PAGE];
        let (slots, _) = memory.as_chunks_mut::<PAGE>();
        for (&page, slot) in pages.iter().zip(slots) {
            let PageRef::Stored(id) = map.base(page)? else {
                continue;
            };
            let at = self.read_frame_of(map, &id)?;
            let whole = self.frames.blob(&at, &id)?;
            slot.copy_from_slice(whole.first_chunk::<PAGE>().ok_or_else(|| {
                RepoError::Damaged {
                    file: format!("blob {id}"),
                    what: "it does not have the length of a page".into(),
                }
            })?);
        }
        map.apply_deltas(pages, &mut memory)?;
        Ok(memory)
    }
}
