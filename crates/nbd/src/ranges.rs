//! Ranges of a disk: extents with their flags, and the pieces of a range.

use std::ops::Range;

/// A range of the disk with a status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// Its bytes.
    pub bytes: Range<u64>,
    /// The flags of the metadata context. `base:allocation`: [`HOLE`](Extent::HOLE) and [`ZERO`](Extent::ZERO).
    /// `qemu:dirty-bitmap:NAME`: 1 for dirty.
    pub flags: u32,
}

impl Extent {
    /// Of the flags of `base:allocation`: nothing is stored there.
    pub const HOLE: u32 = 1;
    /// Of the flags of `base:allocation`: it reads as zeros.
    pub const ZERO: u32 = 2;
}

/// Splits a range into pieces, whose ends are at multiples of `bytes_max` where possible. Returns offsets and lengths.
pub(crate) fn pieces(range: Range<u64>, bytes_max: u32) -> impl Iterator<Item = (u64, u32)> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        if at >= range.end {
            return None;
        }
        let step = u64::from(bytes_max);
        let end = range.end.min((at / step + 1).saturating_mul(step));
        let piece = (at, (end - at) as u32);
        at = end;
        Some(piece)
    })
}
