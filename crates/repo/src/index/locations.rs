//! Blob locations: where the blobs of an index lie, by their numbers.
//!
//! Blobs are numbered pack by pack, frame by frame. So a frame stores only the number of its first blob, and a
//! blob stores only its end, if its length is not that of a page.
//!
//! ```text
//! blobs    0    1    2    3    4    5    6
//! frames   |0             |1        |2          first blob, pack, offset and length in the file
//! ends               (2, 8700)                  of blobs of another length: where in the frame they end
//! ```

use crate::format::file_hash::FileHash;
use crate::format::image_record::ImageId;
use crate::index::chunked::ChunkedVec;
use crate::index::missing_packs::InspectedPack;
use crate::pack::Frame;
use crate::pack::place::FrameInfo;

/// Length in bytes of nearly all blobs.
const USUAL_BYTES: u32 = 4096;

/// The frame of one blob in this many is stored, so that a search for a frame takes few steps.
const HINT_BLOBS: usize = 64;

/// The location of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Location {
    /// The blob's number in this index, ascending with the location.
    pub(crate) blob: u32,
    /// The number of its frame in this index.
    pub(crate) frame: u32,
    /// Where it starts in the frame's plain bytes.
    pub(crate) offset: u32,
    /// Its length in bytes.
    pub(crate) bytes: u32,
}

/// A pack of the index.
#[derive(Debug)]
pub(crate) struct PackInfo {
    pub(crate) name: FileHash,
    pub(crate) file_bytes: u64,
    /// The number of its first frame; the others follow.
    pub(crate) first_frame: u32,
    /// The image that has its content, if it is an external pack.
    pub(crate) image: Option<ImageId>,
    /// Whether it is missing on disk, or cut short.
    pub(crate) missing: bool,
}

impl PackInfo {
    /// A pack of which only name and length are known.
    #[cfg(test)]
    pub(crate) fn of_bytes(name: FileHash, file_bytes: u64) -> PackInfo {
        PackInfo {
            name,
            file_bytes,
            first_frame: 0,
            image: None,
            missing: false,
        }
    }

    /// The number in this pack of the frame of a location.
    pub(crate) fn frame_number(&self, at: Location) -> u32 {
        at.frame - self.first_frame
    }
}

impl InspectedPack for PackInfo {
    fn name(&self) -> &FileHash {
        &self.name
    }

    fn file_bytes(&self) -> u64 {
        self.file_bytes
    }
}

#[derive(Debug, Clone, Copy)]
struct FrameEntry {
    pack: u32,
    first_blob: u32,
    /// The number of its first entry in `ends`.
    first_end: u32,
    offset: u32,
    stored_bytes: u32,
    kind: u8,
}

/// Frames, numbered over all packs, and the lengths of their blobs.
#[derive(Default)]
pub(crate) struct BlobLocations {
    blobs: u32,
    frames: ChunkedVec<FrameEntry>,
    /// Blobs not of the usual length: the number, and the end in the frame.
    ends: ChunkedVec<(u32, u32)>,
    /// The frames of the blobs 0, 64, 128, ...
    hints: ChunkedVec<u32>,
}

impl BlobLocations {
    /// Adds a frame of a pack. Its directory has been checked, and the numbers fit.
    pub(crate) fn add(&mut self, pack: u32, offset: u32, frame: &Frame) {
        let number = self.frames.len() as u32;
        self.frames.push(FrameEntry {
            pack,
            first_blob: self.blobs,
            first_end: self.ends.len() as u32,
            offset,
            stored_bytes: frame.stored_bytes,
            kind: frame.kind,
        });
        let mut end = 0;
        for &(_, bytes) in &frame.blobs {
            end += bytes;
            if bytes != USUAL_BYTES {
                self.ends.push((self.blobs, end));
            }
            if (self.blobs as usize).is_multiple_of(HINT_BLOBS) {
                self.hints.push(number);
            }
            self.blobs += 1;
        }
    }

    /// Number of frames.
    pub(crate) fn frames(&self) -> u32 {
        self.frames.len() as u32
    }

    /// The pack of a frame.
    pub(crate) fn pack(&self, frame: u32) -> u32 {
        self.frames.at(frame as usize).pack
    }

    /// The frame of this number.
    pub(crate) fn frame(&self, number: u32) -> FrameInfo {
        let entry = self.frames.at(number as usize);
        let next = self.frames.get(number as usize + 1);
        let end = next.map_or(self.blobs, |next| next.first_blob);
        // Every frame has blobs.
        let (_, plain_bytes) = self.bounds(number, end - 1);
        FrameInfo {
            offset: entry.offset,
            stored_bytes: entry.stored_bytes,
            plain_bytes,
            kind: entry.kind,
        }
    }

    /// The frame that a blob is in.
    pub(crate) fn frame_of(&self, blob: u32) -> u32 {
        let hint = blob as usize / HINT_BLOBS;
        let from = self.hints.at(hint) as usize;
        let to = self.hints.get(hint + 1);
        let to = to.map_or(self.frames.len(), |frame| frame as usize + 1);
        let after = self
            .frames
            .partition_point(from..to, |frame| frame.first_blob <= blob);
        after as u32 - 1
    }

    pub(crate) fn locate(&self, blob: u32) -> Location {
        let frame = self.frame_of(blob);
        let (offset, end) = self.bounds(frame, blob);
        Location {
            blob,
            frame,
            offset,
            bytes: end - offset,
        }
    }

    /// The start and the end of a blob in its frame.
    fn bounds(&self, frame: u32, blob: u32) -> (u32, u32) {
        let first_end = |entry: FrameEntry| entry.first_end as usize;
        let entry = self.frames.at(frame as usize);
        let next = self.frames.get(frame as usize + 1);
        let ends = first_end(entry)..next.map_or(self.ends.len(), first_end);
        let at = self
            .ends
            .partition_point(ends.clone(), |(other, _)| other < blob);
        // After the last blob before it whose end is stored, all have the usual length.
        let (from, start) = match at > ends.start {
            true => {
                let (before, end) = self.ends.at(at - 1);
                (before + 1, end)
            }
            false => (entry.first_blob, 0),
        };
        let start = start + (blob - from) * USUAL_BYTES;
        let own = self.ends.get(at).filter(|&(other, _)| other == blob);
        (start, own.map_or(start + USUAL_BYTES, |(_, end)| end))
    }
}
