//! The index reader: looks blobs up in the in-memory index, the on-demand index, or the writer's index.
//!
//! Prunes and checks look up all blobs: they have the whole index in memory ([`Index`]). A restore looks up existing
//! blobs, and begins at once ([`ReopeningIndex`]). A writer reads few blobs, by the index with which it finds
//! duplicates ([`WriterIndex`]).

use std::sync::Arc;

use stillframe_page::hash::ContentId;

use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::index::in_memory::Index;
use crate::index::reopening::ReopeningIndex;
use crate::index::segment::IndexSegment;
use crate::index::writer_index::WriterIndex;
use crate::pack::place::Place;
use crate::pack::place::Wanted;

/// One of the three indexes.
#[derive(Clone, Copy)]
pub(crate) enum IndexReader<'a> {
    InMemory(&'a Index),
    OnDemand(&'a ReopeningIndex),
    Writer(&'a WriterIndex),
}

impl IndexReader<'_> {
    /// The location of a blob, in a whole pack if there is one.
    pub(crate) fn find(self, id: &ContentId) -> Result<Place, RepoError> {
        let found = match self {
            IndexReader::InMemory(index) => index.place(id),
            IndexReader::OnDemand(on_demand) => on_demand.get(id)?.map(|found| found.place),
            IndexReader::Writer(index) => index.get(id)?.map(|found| found.place),
        };
        found.ok_or(RepoError::MissingBlob { id: *id })
    }

    /// Locates all wanted blobs.
    pub(crate) fn find_all<T: Copy>(self, wanted: &mut [Wanted<T>]) -> Result<(), RepoError> {
        match self {
            IndexReader::InMemory(_) => {
                for blob in wanted {
                    blob.at = self.find(&blob.id)?;
                }
                Ok(())
            }
            IndexReader::OnDemand(on_demand) => on_demand.find_all(wanted),
            IndexReader::Writer(index) => index.find_all(wanted),
        }
    }

    /// Opens the index anew because this pack is gone. Returns whether its blobs may be located elsewhere now.
    pub(crate) fn renew(self, pack: u32) -> Result<bool, RepoError> {
        match self {
            IndexReader::InMemory(_) | IndexReader::Writer(_) => Ok(false),
            IndexReader::OnDemand(on_demand) => on_demand.renew(pack),
        }
    }

    /// The name of a pack by its number.
    pub(crate) fn pack_name(self, pack: u32) -> FileHash {
        match self {
            IndexReader::InMemory(index) => index.packs()[pack as usize].name,
            IndexReader::OnDemand(on_demand) => on_demand.pack_name(pack),
            IndexReader::Writer(index) => index.pack_name(pack),
        }
    }
}

/// Looks up the other blobs of a frame.
pub(crate) struct FrameLookup<'a> {
    frame: Place,
    from: FrameSource<'a>,
}

enum FrameSource<'a> {
    Index(&'a Index),
    /// `None` if it is no longer in memory: a lookup by section would have to read it.
    Part(Option<Arc<IndexSegment>>),
}

impl<'a> FrameLookup<'a> {
    /// A lookup in the frame of a location that was found before.
    pub(crate) fn new(index: IndexReader<'a>, frame: Place) -> FrameLookup<'a> {
        let from = match index {
            IndexReader::InMemory(index) => FrameSource::Index(index),
            IndexReader::OnDemand(on_demand) => FrameSource::Part(on_demand.known_part(frame.part)),
            IndexReader::Writer(index) => FrameSource::Part(index.known_part(frame.part)),
        };
        FrameLookup { frame, from }
    }

    /// The location of a blob, if it is in this frame.
    pub(crate) fn find(&self, id: &ContentId) -> Option<Place> {
        let found = match &self.from {
            FrameSource::Index(index) => index.place(id),
            FrameSource::Part(part) => part.as_ref()?.find(id),
        };
        found.filter(|found| found.same_frame(&self.frame))
    }
}
