//! Replies: simple or structured, whole under one lock, in any order.

use std::io::{self, ErrorKind, IoSlice, Write};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::negotiation::ALLOCATION_ID;
use crate::ranges::{Extent, pieces};
use crate::wire::{CHUNK_BYTES, Chunk, ChunkKind, SimpleReply, encode_error, encode_status};

/// Ranges of zeros are found in units of this many bytes, at multiples of it. A smaller hole costs a client more than it
/// saves.
const ZERO_BYTES: u32 = 32 << 10;

/// The way to a client.
#[derive(Debug)]
pub(crate) struct Replies<W> {
    to: Mutex<W>,
    structured: bool,
}

impl<W: Write> Replies<W> {
    pub(crate) fn new(to: W, structured: bool) -> Replies<W> {
        Replies {
            to: Mutex::new(to),
            structured,
        }
    }

    /// Confirms a request that has no data.
    pub(crate) fn confirm(&self, cookie: u64) -> io::Result<()> {
        match self.structured {
            true => self.chunk(ChunkKind::None, cookie, &[]),
            false => self.simple(cookie, 0, &[]),
        }
    }

    /// Ends a reply with an error. Only a structured one has the text.
    pub(crate) fn refuse(&self, cookie: u64, error: u32, why: &str) -> io::Result<()> {
        match self.structured {
            true => self.chunk(ChunkKind::Error, cookie, &encode_error(error, why)),
            false => self.simple(cookie, error, &[]),
        }
    }

    /// Sends the content of a range; a simple reply has the whole content of its request. `last` ends the reply.
    pub(crate) fn content(
        &self,
        cookie: u64,
        offset: u64,
        bytes: &[u8],
        last: bool,
    ) -> io::Result<()> {
        if !self.structured {
            return self.simple(cookie, 0, bytes);
        }
        let runs = runs(offset, bytes);
        let end = bytes.len();
        let heads = runs
            .iter()
            .map(|run| run.encode(cookie, offset, last && run.range.end == end));
        let heads = heads.collect::<Vec<_>>();
        let slices = runs.iter().zip(&heads).flat_map(|(run, head)| {
            let data = if run.zero {
                &[]
            } else {
                &bytes[run.range.clone()]
            };
            [IoSlice::new(head), IoSlice::new(data)]
        });
        self.write(&mut slices.collect::<Vec<_>>())
    }

    /// Sends the lengths and flags of extents.
    pub(crate) fn allocation(&self, cookie: u64, ranges: &[(u32, u32)]) -> io::Result<()> {
        self.chunk(
            ChunkKind::BlockStatus,
            cookie,
            &encode_status(ALLOCATION_ID, ranges),
        )
    }

    fn simple(&self, cookie: u64, error: u32, bytes: &[u8]) -> io::Result<()> {
        let head = SimpleReply { error, cookie }.encode();
        self.write(&mut [IoSlice::new(&head), IoSlice::new(bytes)])
    }

    /// A reply of one chunk.
    fn chunk(&self, kind: ChunkKind, cookie: u64, payload: &[u8]) -> io::Result<()> {
        let head = Chunk {
            kind,
            done: true,
            cookie,
            length: payload.len() as u32,
        };
        self.write(&mut [IoSlice::new(&head.encode()), IoSlice::new(payload)])
    }

    /// Writes all of it, with nothing of other replies between.
    fn write(&self, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
        // A thread that panics holds no lock of this.
        let mut to = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        while !slices.is_empty() {
            match to.write_vectored(slices) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => IoSlice::advance_slices(&mut slices, written),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// A part of a content that is all zeros, or is sent as it is.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    /// Its place in the content.
    range: Range<usize>,
    zero: bool,
}

impl Run {
    /// What comes before its data: the head of a chunk and the beginning of its payload.
    fn encode(&self, cookie: u64, offset: u64, done: bool) -> Vec<u8> {
        let length = self.range.len() as u32;
        let (kind, payload_bytes) = match self.zero {
            true => (ChunkKind::Hole, 8 + 4),
            false => (ChunkKind::Data, 8 + length),
        };
        let chunk = Chunk {
            kind,
            done,
            cookie,
            length: payload_bytes,
        };
        let mut head = Vec::with_capacity(CHUNK_BYTES + 8 + 4);
        head.extend(chunk.encode());
        head.extend((offset + self.range.start as u64).to_be_bytes());
        if self.zero {
            head.extend(length.to_be_bytes());
        }
        head
    }
}

/// Splits the content at an offset of the disk into runs of zeros and of data.
fn runs(offset: u64, bytes: &[u8]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (at, length) in pieces(offset..offset + bytes.len() as u64, ZERO_BYTES) {
        let start = (at - offset) as usize;
        let range = start..start + length as usize;
        let zero = is_zero(&bytes[range.clone()]);
        match runs.last_mut() {
            Some(last) if last.zero == zero => last.range.end = range.end,
            _ => runs.push(Run { range, zero }),
        }
    }
    runs
}

/// Whether all bytes are zero. The bytes of a block are combined without a branch, which the compiler turns into wide
/// instructions.
fn is_zero(bytes: &[u8]) -> bool {
    let mut blocks = bytes.chunks(512);
    blocks.all(|block| block.iter().fold(0, |all, byte| all | byte) == 0)
}

/// The lengths and flags of extents that begin a range, at most `extents_max`. Neighbours with the same flags are one.
///
/// # Errors
/// They do not cover a beginning of the range.
pub(crate) fn ranges(
    range: &Range<u64>,
    extents: &[Extent],
    extents_max: usize,
) -> io::Result<Vec<(u32, u32)>> {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    let mut at = range.start;
    for Extent { bytes, flags } in extents {
        if at == range.end {
            break;
        }
        if bytes.start != at || bytes.end <= at {
            return Err(io::Error::other("extents with a gap"));
        }
        let end = bytes.end.min(range.end);
        // The length of a request has 32 bits, so that of a part has, too.
        let length = (end - at) as u32;
        let full = ranges.len() == extents_max;
        match ranges.last_mut() {
            Some(last) if last.1 == *flags => last.0 += length,
            _ if full => break,
            _ => ranges.push((length, *flags)),
        }
        at = end;
    }
    match ranges.is_empty() {
        true => Err(io::Error::other("no extents")),
        false => Ok(ranges),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
    /// A content is split into runs that cover it, and those of zeros have zeros only.
    #[test]
    fn runs_are_the_content(
        offset in 0u64..100_000,
        parts in prop::collection::vec((1usize..100_000, 0u8..2), 1..8),
    ) {
        let parts = parts.iter();
        let content = parts.flat_map(|&(length, byte)| std::iter::repeat_n(byte, length));
        let content = content.collect::<Vec<_>>();
        let mut at = 0;
        let mut zero = None;
        for run in runs(offset, &content) {
            prop_assert_eq!(run.range.start, at);
            prop_assert!(run.range.end > at && zero != Some(run.zero));
            prop_assert!(!run.zero || content[run.range.clone()].iter().all(|&byte| byte == 0));
            (at, zero) = (run.range.end, Some(run.zero));
        }
        prop_assert_eq!(at, content.len());
    }
    }

    #[test]
    fn extents_must_cover_a_beginning() {
        let extent = |bytes: Range<u64>, flags| Extent { bytes, flags };
        let (a, b) = (extent(10..20, 0), extent(20..40, 0));
        let hole = extent(40..90, 3);
        let all = [a.clone(), b.clone(), hole.clone()];
        let of = |extents: &[Extent], max| ranges(&(10..60), extents, max).ok();
        assert_eq!(of(&all, 9), Some(vec![(30, 0), (20, 3)]));
        assert_eq!(of(&all, 1), Some(vec![(30, 0)]));
        assert_eq!(of(&all[..1], 9), Some(vec![(10, 0)]));
        assert_eq!(of(&[], 9), None);
        assert_eq!(of(std::slice::from_ref(&b), 9), None);
        assert_eq!(of(&[a.clone(), hole], 9), None);
        assert_eq!(of(&[a, extent(20..20, 0), b], 9), None);
    }
}
