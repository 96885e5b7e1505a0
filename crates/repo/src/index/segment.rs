//! A part of an index file, decoded for lookups.
//!
//! ```text
//! starts   0x07..  0x07..  0x31..   the first eight bytes of the ids, ascending: what is searched
//! blobs    id, frame, offset, bytes of each, in the same order
//! frames   where they lie in the pack
//! ```
//!
//! Eight bytes of a keyed hash distinguish the few hundred blobs of a part, and are adjacent in memory.
//! Comparing whole ids took an eighth of the time of a lazy restore.

use stillframe_page::hash::ContentId;

use crate::index::layout::Part;
use crate::pack::place::FrameInfo;
use crate::pack::place::Place;

/// A part, in memory.
pub(crate) struct IndexSegment {
    /// Its number in the on-demand index.
    pub(crate) number: u32,
    /// The number of its pack in the on-demand index.
    pub(crate) pack: u32,
    first_frame: u32,
    frames: Vec<FrameInfo>,
    starts: Vec<u64>,
    blobs: Vec<PartBlob>,
}

struct PartBlob {
    id: ContentId,
    /// The number of its frame in the part.
    frame: u32,
    offset: u32,
    bytes: u32,
}

impl IndexSegment {
    /// Decodes the part of this number, which belongs to this pack.
    pub(crate) fn new(number: u32, pack: u32, part: &Part) -> IndexSegment {
        let mut frames = Vec::with_capacity(part.frames.len());
        let count = part.frames.iter().map(|frame| frame.blobs.len()).sum();
        let mut blobs = Vec::with_capacity(count);
        // That they end below 1 GiB was checked when the part was decoded.
        let mut at = part.offset;
        for frame in &part.frames {
            let mut offset = 0;
            for &(id, bytes) in &frame.blobs {
                blobs.push(PartBlob {
                    id,
                    frame: frames.len() as u32,
                    offset,
                    bytes,
                });
                offset += bytes;
            }
            frames.push(FrameInfo {
                offset: at,
                stored_bytes: frame.stored_bytes,
                plain_bytes: frame.plain_bytes,
                kind: frame.kind,
            });
            at += frame.stored_bytes;
        }
        // A stable sort: of two copies the first is found.
        blobs.sort_by_key(|blob| blob.id);
        IndexSegment {
            number,
            pack,
            first_frame: part.first_frame,
            frames,
            starts: blobs.iter().map(|blob| start(&blob.id)).collect(),
            blobs,
        }
    }

    /// The location of a blob, if this part describes it.
    pub(crate) fn find(&self, id: &ContentId) -> Option<Place> {
        let start = start(id);
        let first = self.starts.partition_point(|&other| other < start);
        let alike = self.starts[first..].iter();
        let alike = alike.take_while(|&&other| other == start).count();
        let mut candidates = self.blobs[first..first + alike].iter();
        let blob = candidates.find(|blob| blob.id == *id)?;
        Some(Place {
            pack: self.pack,
            frame: self.first_frame + blob.frame,
            info: self.frames[blob.frame as usize],
            offset: blob.offset,
            bytes: blob.bytes,
            part: self.number,
        })
    }

    /// Memory that it takes, in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        size_of_val(&self.frames[..]) + size_of_val(&self.starts[..]) + size_of_val(&self.blobs[..])
    }
}

/// The first eight bytes of an id, as a number that is in the order of ids.
fn start(id: &ContentId) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = id.0;
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pack::Frame;

    /// Ids that often share their first eight bytes: only the first and the eighth vary, in two and three values.
    fn id() -> impl Strategy<Value = ContentId> {
        (0..2_u8, 0..3_u8, 0..20_u8).prop_map(|(first, eighth, last)| {
            let mut id = [0; 32];
            (id[0], id[7], id[31]) = (first * 255, eighth, last);
            ContentId(id)
        })
    }

    fn frame() -> impl Strategy<Value = Frame> {
        (
            prop::collection::vec((id(), 1..9000_u32), 1..8),
            1..70_000_u32,
        )
            .prop_map(|(blobs, stored_bytes)| Frame {
                stored_bytes,
                plain_bytes: blobs.iter().map(|(_, bytes)| bytes).sum(),
                kind: 0,
                blobs,
            })
    }

    proptest! {
        /// Compared with a linear search.
        #[test]
        fn it_finds_the_first_copy_of_each_blob(
            frames in prop::collection::vec(frame(), 1..12),
            strangers in prop::collection::vec(id(), 0..20),
        ) {
            let part = Part { first_frame: 7, offset: 100, frames };
            let found = IndexSegment::new(3, 5, &part);
            let ids = part.frames.iter().flat_map(|frame| &frame.blobs).map(|(id, _)| *id);
            for id in ids.chain(strangers) {
                let mut slow = None;
                let mut at = part.offset;
                for (number, frame) in (7..).zip(&part.frames) {
                    let mut offset = 0;
                    for &(other, bytes) in &frame.blobs {
                        if other == id {
                            slow.get_or_insert((number, at, offset, bytes));
                        }
                        offset += bytes;
                    }
                    at += frame.stored_bytes;
                }
                let fast = found.find(&id);
                prop_assert_eq!(
                    fast.map(|at| (at.frame, at.info.offset, at.offset, at.bytes)),
                    slow
                );
                prop_assert!(fast.is_none_or(|at| (at.pack, at.part) == (5, 3)));
            }
        }
    }
}
