//! The changes of several pages, encoded together (FITDOC, section III.C).
//!
//! Each new version is XORed with the old one in words of eight bytes. The non-zero words go into three streams, so
//! that each stream can be compressed by its nature:
//!
//! ```text
//! places   per page: its number (distance to the one before), runs; per run: words skipped, words
//! masks    for the changed words: bit i is set when byte i differs; per run of equal masks: mask, words
//! bytes    the bytes that differ, each old XOR new
//! ```
//!
//! Bytes that did not change are not stored, and neither is a page that did not.
//!
//! ```text
//! encoded  varint pages, then per stream: u8 kind, varint plain bytes, varint stored bytes, payload
//! ```
//!
//! Kinds are defined in [`crate::encoding`]; varints in [`crate::varint`].

use thiserror::Error;

use crate::PAGE;
use crate::encoding::{Compression, Decoder, Encoder, EncodingError, Kind};
use crate::varint::{self, VarintError};

const WORD_BYTES: usize = 8;
const WORDS: usize = PAGE / WORD_BYTES;

/// The most pages in one delta: bounds a decoder's allocations.
pub const PAGES_MAX: usize = 4096;

/// Changed bytes are mostly as they are in memory. This much of them is tried first: compressing incompressible
/// bytes would take longer than all the rest.
const SAMPLE_BYTES: usize = 8 << 10;

/// Why a delta cannot be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeltaError {
    /// It is not what an encoder makes.
    #[error("the delta is malformed: {0}")]
    Malformed(&'static str),
    /// A number of it cannot be read.
    #[error("the delta is malformed")]
    Number(#[from] VarintError),
    /// One of its streams cannot be decoded.
    #[error("a stream of the delta cannot be decoded")]
    Stream(#[from] EncodingError),
}

/// Kind and lengths of three streams, at the most.
const STREAM_HEADS_BYTES: usize = 3 * (1 + 5 + 5);

/// Plain bytes at which a delta is best finished: bounds a reader's memory for it.
const BYTES_FULL: usize = 1 << 20;

/// Collects changed pages. Holds a compression context: make one per thread and keep it.
pub struct DeltaEncoder {
    compressor: Encoder,
    pages: Vec<u32>,
    places: Vec<u8>,
    masks: Vec<u8>,
    bytes: Gathered,
    /// The runs of equal masks of one page; what was there before does not matter.
    mask_runs: Box<[MaskRun; WORDS + 1]>,
}

/// The outcome for a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Added {
    /// Nothing changed: nothing was added.
    Same,
    /// Its change was added.
    Changed,
    /// More bytes changed than allowed: nothing was added.
    TooMuch,
}

/// A finished delta.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EncodedDelta {
    /// The pages it changes, ascending.
    pub pages: Vec<u32>,
    /// The encoded delta, as [`Delta::decode`] reads it.
    pub bytes: Vec<u8>,
}

impl DeltaEncoder {
    /// An encoder with a Zstandard level for its streams.
    pub fn new(level: i32) -> Result<DeltaEncoder, EncodingError> {
        Ok(DeltaEncoder {
            compressor: Encoder::new(Compression::Zstd(level))?,
            pages: Vec::new(),
            places: Vec::new(),
            masks: Vec::new(),
            bytes: Gathered::default(),
            mask_runs: Box::new([0; WORDS + 1]),
        })
    }

    /// Whether no page was added since the last [`DeltaEncoder::finish`].
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Whether it is time to finish: after [`PAGES_MAX`] pages no more may be added.
    pub fn is_full(&self) -> bool {
        self.pages.len() >= PAGES_MAX || self.bytes.filled >= BYTES_FULL
    }

    /// Adds what changed in a page, unless more than `bytes_max` bytes did. Page numbers must
    /// ascend.
    pub fn add(&mut self, page: u32, [old, new]: [&[u8; PAGE]; 2], bytes_max: usize) -> Added {
        let last_page = self.pages.last().copied();
        debug_assert!(last_page.is_none_or(|last| page > last));
        debug_assert!(self.pages.len() < PAGES_MAX);
        let mut runs = Runs::default();
        let mut masks = MaskRuns::default();
        let bytes = self.bytes.room_for_a_page();
        let mut filled = 0;
        let (old, _) = old.as_chunks::<WORD_BYTES>();
        let (new, _) = new.as_chunks::<WORD_BYTES>();
        let word_at = |at: usize| u64::from_le_bytes(old[at]) ^ u64::from_le_bytes(new[at]);
        let mut at = 0;
        while at < WORDS {
            let start = at;
            let mut word = word_at(at);
            while word != 0 {
                let mask = mask_of(word);
                masks.add(mask, &mut self.mask_runs);
                filled += store(word, mask, &mut bytes[filled..]);
                at += 1;
                word = match at < WORDS {
                    true => word_at(at),
                    false => 0,
                };
            }
            if at > start {
                runs.add(start, at);
            }
            // Over the word that is the same in both.
            at += 1;
        }
        if filled == 0 {
            return Added::Same;
        }
        if filled > bytes_max {
            return Added::TooMuch;
        }
        self.bytes.filled += filled;
        put_masks(&mut self.masks, &self.mask_runs[1..=masks.count]);
        varint::put(&mut self.places, page - last_page.unwrap_or(0));
        runs.write(&mut self.places);
        self.pages.push(page);
        Added::Changed
    }

    /// The delta of all pages added; begins anew.
    pub fn finish(&mut self) -> Result<EncodedDelta, EncodingError> {
        let pages = std::mem::take(&mut self.pages);
        let mut bytes = Vec::new();
        varint::put(&mut bytes, pages.len() as u32);
        let streams = [&self.places, &self.masks, self.bytes.all()];
        bytes.reserve(streams.map(<[u8]>::len).iter().sum::<usize>() + STREAM_HEADS_BYTES);
        for stream in streams {
            put_stream(&mut self.compressor, stream, &mut bytes)?;
        }
        self.places.clear();
        self.masks.clear();
        self.bytes.filled = 0;
        Ok(EncodedDelta { pages, bytes })
    }
}

fn put_stream(
    compressor: &mut Encoder,
    plain: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), EncodingError> {
    let mut payload = Vec::new();
    let sample = &plain[..plain.len().min(SAMPLE_BYTES)];
    let mut kind = compressor.encode(sample, &mut payload)?;
    if sample.len() < plain.len() && kind != Kind::Raw {
        payload.clear();
        kind = compressor.encode(plain, &mut payload)?;
    }
    let payload = match kind {
        Kind::Raw => plain,
        _ => &payload,
    };
    out.push(kind.number());
    // A stream is shorter than PAGES_MAX pages: 16 MiB.
    varint::put(out, plain.len() as u32);
    varint::put(out, payload.len() as u32);
    out.extend_from_slice(payload);
    Ok(())
}

/// Runs of changed words of one page.
#[derive(Default)]
struct Runs {
    encoded: Vec<u8>,
    count: u32,
    /// Where the run before ended.
    before: usize,
}

impl Runs {
    /// One more run, of words `start` to `end`.
    fn add(&mut self, start: usize, end: usize) {
        self.count += 1;
        varint::put(&mut self.encoded, (start - self.before) as u32);
        varint::put(&mut self.encoded, (end - start) as u32);
        self.before = end;
    }

    fn write(self, out: &mut Vec<u8>) {
        varint::put(out, self.count);
        out.extend_from_slice(&self.encoded);
    }
}

/// The changed bytes of several pages. Words are written whole, one over the useless end of the other.
#[derive(Default)]
struct Gathered {
    /// Longer than its used part, so that nothing is filled with zeros twice.
    buffer: Vec<u8>,
    filled: usize,
}

impl Gathered {
    /// Where the bytes of another page go, with room for the last word's useless end.
    fn room_for_a_page(&mut self) -> &mut [u8] {
        let end = self.filled + PAGE + WORD_BYTES;
        if self.buffer.len() < end {
            self.buffer.resize(2 * end, 0);
        }
        &mut self.buffer[self.filled..end]
    }

    fn all(&self) -> &[u8] {
        &self.buffer[..self.filled]
    }
}

/// Words of the same mask, in one number: the mask below, their count above.
type MaskRun = u32;

const ONE_WORD: MaskRun = 1 << 8;

/// Counts runs of equal masks of one page. Adding a word does not branch: where masks change is
/// anyone's guess.
#[derive(Default)]
struct MaskRuns {
    /// How many there are.
    count: usize,
    last: MaskRun,
}

impl MaskRuns {
    /// One more word, of this mask, which is not 0. The first run is `runs[1]`.
    fn add(&mut self, mask: u8, runs: &mut [MaskRun; WORDS + 1]) {
        let other = mask != self.last as u8;
        self.count += usize::from(other);
        self.last = if other { mask.into() } else { self.last } + ONE_WORD;
        runs[self.count] = self.last;
    }
}

fn put_masks(out: &mut Vec<u8>, runs: &[MaskRun]) {
    for run in runs {
        let (mask, words) = (*run as u8, run / ONE_WORD);
        match words {
            0..0x80 => out.extend_from_slice(&[mask, words as u8]),
            _ => {
                out.push(mask);
                varint::put(out, words);
            }
        }
    }
}

/// How the bytes of a mask lie in their word.
#[derive(Clone, Copy)]
struct Shape {
    count: u8,
    /// Bits below the first of them; [`SCATTERED`] when others lie between them.
    shift: u8,
}

const SCATTERED: u8 = u8::MAX;

/// Counts by mask. It is a table, because without the POPCNT instruction counting takes longer.
const SHAPES: [Shape; 256] = {
    let mut shapes = [Shape { count: 0, shift: 0 }; 256];
    let mut mask = 1;
    while mask < 256 {
        let byte = mask as u8;
        let first = byte.trailing_zeros();
        let count = byte.count_ones();
        let together = (byte >> first).trailing_ones() == count;
        shapes[mask] = Shape {
            count: count as u8,
            shift: if together { 8 * first as u8 } else { SCATTERED },
        };
        mask += 1;
    }
    shapes
};

/// Bit i is set when byte i of the word is not zero.
fn mask_of(word: u64) -> u8 {
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    // One bit a byte: the sum carries into the top bit when any low bit is set.
    let tops = (((word & LOW) + LOW) | word) & !LOW;
    // Moves top bit i to bit 56 + i; no two products meet, so nothing carries.
    ((tops >> 7).wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8
}

/// Writes the bytes of the mask one behind the other; how many. Writes eight, of which only those
/// count.
fn store(word: u64, mask: u8, into: &mut [u8]) -> usize {
    let Shape { count, shift } = SHAPES[usize::from(mask)];
    if shift != SCATTERED {
        into[..WORD_BYTES].copy_from_slice(&(word >> shift).to_le_bytes());
        return count.into();
    }
    let bytes = word.to_le_bytes();
    let set = (0..WORD_BYTES).filter(|at| mask >> at & 1 == 1);
    for (to, at) in into.iter_mut().zip(set) {
        *to = bytes[at];
    }
    count.into()
}

/// The changes of several pages, read back.
#[derive(Debug)]
pub struct Delta {
    pages: Vec<Changed>,
    runs: Vec<(u16, u16)>,
    masks: Vec<u8>,
    bytes: Vec<u8>,
}

/// Where one page's changes lie in the streams.
#[derive(Debug, Clone, Copy)]
struct Changed {
    page: u32,
    runs: usize,
    masks: usize,
    bytes: usize,
}

impl Delta {
    /// Reads a delta; trusts nothing of it.
    pub fn decode(encoded: &[u8]) -> Result<Delta, DeltaError> {
        let mut input = Input(encoded);
        let count = input.varint()? as usize;
        if count > PAGES_MAX {
            return Err(DeltaError::Malformed("it has more pages than allowed"));
        }
        let mut decoder = Decoder::new()?;
        // A page has at most 256 runs of changed words, of at most 2 + 2 bytes each, and 512 of masks.
        let places = input.stream(&mut decoder, count * (WORDS * 2 + 8))?;
        let masks = input.stream(&mut decoder, count * WORDS * 2)?;
        let bytes = input.stream(&mut decoder, count * PAGE)?;
        if !input.0.is_empty() {
            return Err(DeltaError::Malformed("it has data after its end"));
        }
        let mut delta = Delta {
            pages: Vec::with_capacity(count),
            runs: Vec::new(),
            masks: Vec::new(),
            bytes,
        };
        delta.read_pages(Input(&places), Input(&masks), count)?;
        Ok(delta)
    }

    /// Finds each page's part of the streams, and that they fit together.
    fn read_pages(
        &mut self,
        mut places: Input<'_>,
        mut masks: Input<'_>,
        count: usize,
    ) -> Result<(), DeltaError> {
        let (mut page, mut bytes) = (0u32, 0);
        for number in 0..count {
            let distance = places.varint()?;
            if distance == 0 && number > 0 {
                return Err(DeltaError::Malformed("a page comes twice"));
            }
            page = page
                .checked_add(distance)
                .ok_or(DeltaError::Malformed("a page number is too large"))?;
            self.pages.push(Changed {
                page,
                runs: self.runs.len(),
                masks: self.masks.len(),
                bytes,
            });
            let words = self.read_runs(&mut places)?;
            bytes += self.read_masks(&mut masks, words)?;
        }
        if !places.0.is_empty() || !masks.0.is_empty() || bytes != self.bytes.len() {
            return Err(DeltaError::Malformed("its streams do not fit together"));
        }
        Ok(())
    }

    /// The masks of one page's changed words; how many bytes they stand for.
    fn read_masks(&mut self, masks: &mut Input<'_>, words: usize) -> Result<usize, DeltaError> {
        let (mut left, mut bytes) = (words, 0);
        while left > 0 {
            let [mask] = *masks.take(1)? else { break };
            let run = masks.varint()? as usize;
            if mask == 0 || run == 0 || run > left {
                return Err(DeltaError::Malformed("its masks do not fit its runs"));
            }
            self.masks.resize(self.masks.len() + run, mask);
            bytes += run * mask.count_ones() as usize;
            left -= run;
        }
        Ok(bytes)
    }

    /// The runs of one page; how many words they have.
    fn read_runs(&mut self, places: &mut Input<'_>) -> Result<usize, DeltaError> {
        let count = places.varint()?;
        let (mut at, mut words) = (0usize, 0);
        for _ in 0..count {
            let (skipped, length) = (places.varint()? as usize, places.varint()? as usize);
            let start = at.saturating_add(skipped);
            at = start.saturating_add(length);
            if length == 0 || at > WORDS {
                return Err(DeltaError::Malformed("a run leaves its page"));
            }
            words += length;
            // Both at most WORDS.
            self.runs.push((start as u16, length as u16));
        }
        Ok(words)
    }

    /// About how much memory it takes, in bytes.
    pub fn memory_bytes(&self) -> usize {
        size_of_val(&self.pages[..])
            + size_of_val(&self.runs[..])
            + self.masks.len()
            + self.bytes.len()
    }

    /// The numbers of the pages it changes, ascending.
    pub fn pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.pages.iter().map(|changed| changed.page)
    }

    /// The place of a page among [`Delta::pages`].
    pub fn index_of(&self, page: u32) -> Option<usize> {
        self.pages
            .binary_search_by_key(&page, |changed| changed.page)
            .ok()
    }

    /// Makes the new version of page number `index` of [`Delta::pages`] out of the old one. Done
    /// twice it is undone.
    pub fn apply(&self, index: usize, page: &mut [u8; PAGE]) {
        let Some(changed) = self.pages.get(index) else {
            return;
        };
        let end = self
            .pages
            .get(index + 1)
            .map_or(self.runs.len(), |next| next.runs);
        let mut masks = self.masks[changed.masks..].iter();
        let mut bytes = self.bytes[changed.bytes..].iter();
        for &(start, length) in &self.runs[changed.runs..end] {
            let from = usize::from(start) * WORD_BYTES;
            let words = page[from..].chunks_exact_mut(WORD_BYTES);
            for (word, mask) in words.take(length.into()).zip(&mut masks) {
                let set = (0..WORD_BYTES).filter(|at| mask >> at & 1 == 1);
                for (at, byte) in set.zip(&mut bytes) {
                    word[at] ^= byte;
                }
            }
        }
    }
}

/// The unread rest.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], DeltaError> {
        let (taken, rest) = self
            .0
            .split_at_checked(bytes)
            .ok_or(DeltaError::Malformed("it ends too early"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn varint(&mut self) -> Result<u32, DeltaError> {
        Ok(varint::take(&mut self.0)?)
    }

    fn stream(
        &mut self,
        decoder: &mut Decoder,
        plain_bytes_max: usize,
    ) -> Result<Vec<u8>, DeltaError> {
        let [kind] = *self.take(1)? else {
            return Err(DeltaError::Malformed("it ends too early"));
        };
        let (plain, stored) = (self.varint()? as usize, self.varint()? as usize);
        if plain > plain_bytes_max {
            return Err(DeltaError::Malformed("a stream is too long"));
        }
        let mut out = Vec::new();
        decoder.decode(kind, self.take(stored)?, plain, &mut out)?;
        Ok(out)
    }
}

#[cfg(test)]
mod tests;
