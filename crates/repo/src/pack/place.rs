//! Locations of blobs and frames in packs.

use stillframe_page::hash::ContentId;

/// The location of a frame, and how it is encoded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct FrameInfo {
    pub(crate) offset: u32,
    pub(crate) stored_bytes: u32,
    pub(crate) plain_bytes: u32,
    pub(crate) kind: u8,
}

/// The location of a blob, and its frame.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// The number of the pack, in the index that was queried.
    pub(crate) pack: u32,
    /// The number of the frame in the pack.
    pub(crate) frame: u32,
    pub(crate) info: FrameInfo,
    /// Where the blob starts in the frame's plain bytes.
    pub(crate) offset: u32,
    /// Its length in bytes, never 0.
    pub(crate) bytes: u32,
    /// The part of the index that describes it, if the index has parts.
    pub(crate) part: u32,
}

impl Place {
    /// Sort key of blobs, so that neighbours are read with one call.
    pub(crate) fn order(&self) -> (u32, u32, u32) {
        (self.pack, self.frame, self.offset)
    }

    pub(crate) fn same_frame(&self, other: &Place) -> bool {
        (self.pack, self.frame) == (other.pack, other.frame)
    }

    /// Where the frame ends in its pack.
    pub(crate) fn frame_end(&self) -> u32 {
        // Offsets and lengths of one pack stay below 1 GiB.
        self.info.offset + self.info.stored_bytes
    }
}

/// A blob to read, and the caller's tag for it.
pub(crate) struct Wanted<T> {
    pub(crate) at: Place,
    pub(crate) id: ContentId,
    pub(crate) tag: T,
}
