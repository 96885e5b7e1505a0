//! A part of an index file, decoded for lookups.
//!
//! ```text
//! keys     0x31..  0x07..  0x55..   four bytes of each id, in the order of the pack: what is searched
//! frames   |0      |0      |1       the blobs of each, and where it lies in the pack
//! ```
//!
//! The keys of the few hundred blobs of a part are adjacent in memory, and the processor compares several at once.
//! A search takes as long as one in a sorted list, but sorting took half of the time of reading a part. Comparing
//! whole ids took an eighth of the time of a lazy restore.

use stillframe_page::hash::ContentId;

use crate::index::layout::{Part, key};
use crate::pack::Frame;
use crate::pack::place::FrameInfo;
use crate::pack::place::Place;

/// Number of keys that are compared at once.
const LANES: usize = 16;

/// A part, in memory.
pub(crate) struct IndexSegment {
    /// Its number in the on-demand index.
    pub(crate) number: u32,
    /// The number of its pack in the on-demand index.
    pub(crate) pack: u32,
    part: Part,
    keys: Vec<u32>,
}

impl IndexSegment {
    /// The part of this number, which belongs to this pack.
    pub(crate) fn new(number: u32, pack: u32, part: Part) -> IndexSegment {
        let blobs = part.frames.iter().map(|frame| frame.blobs.len()).sum();
        let mut keys = Vec::with_capacity(blobs);
        for frame in &part.frames {
            keys.extend(frame.blobs.iter().map(|(id, _)| key(id)));
        }
        IndexSegment {
            number,
            pack,
            part,
            keys,
        }
    }

    /// The location of a blob, if this part describes it; of two copies the first.
    pub(crate) fn find(&self, id: &ContentId) -> Option<Place> {
        let key = key(id);
        let groups = self.keys.chunks(LANES).enumerate();
        let groups = groups.filter(|(_, keys)| contains(keys, key));
        let positions = groups.flat_map(|(group, keys)| {
            let alike = keys.iter().enumerate().filter(|&(_, &other)| other == key);
            alike.map(move |(at, _)| group * LANES + at)
        });
        { positions }.find_map(|position| self.place_of(position, id))
    }

    /// The location of the blob at a position, if it has this id.
    fn place_of(&self, mut position: usize, id: &ContentId) -> Option<Place> {
        // That the frames end below 1 GiB was checked when the part was decoded.
        let mut offset = self.part.offset;
        for (number, frame) in (self.part.first_frame..).zip(&self.part.frames) {
            match frame.blobs.get(position) {
                Some(&(other, bytes)) => {
                    let before = frame.blobs[..position].iter();
                    return (other == *id).then(|| Place {
                        pack: self.pack,
                        frame: number,
                        info: FrameInfo {
                            offset,
                            stored_bytes: frame.stored_bytes,
                            plain_bytes: frame.plain_bytes,
                            kind: frame.kind,
                        },
                        offset: before.map(|(_, bytes)| bytes).sum(),
                        bytes,
                        part: self.number,
                    });
                }
                None => {
                    position -= frame.blobs.len();
                    offset += frame.stored_bytes;
                }
            }
        }
        None
    }

    /// Memory that it takes, in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        let frames = self.part.frames.iter();
        let blobs: usize = frames.map(|frame| size_of_val(&frame.blobs[..])).sum();
        self.part.frames.len() * size_of::<Frame>() + blobs + size_of_val(&self.keys[..])
    }
}

/// Compares without a branch for each key, so that the compiler uses vector instructions.
fn contains(keys: &[u32], key: u32) -> bool {
    keys.iter()
        .fold(false, |found, &other| found | (other == key))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pack::Frame;

    /// Ids that often share their keys: only the first, the eighth and the last byte vary.
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
            let found = IndexSegment::new(3, 5, part.clone());
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
