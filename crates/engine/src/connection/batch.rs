//! Pages of one block as the payload of a frame.
//!
//! ```text
//!   block u32 | pages u32 | deltas u32                           little-endian
//!   numbers:  number u32 of each page                            ascending
//!   contents: pages u8 | kind u8 | length u32 | payload          of as many pages; kinds of `stillframe_page::encoding`
//!   deltas:   length u32 | payload                               `stillframe_page::delta`
//! ```
//!
//! A page that is neither among the pages nor in a delta is unchanged. Pages that follow each other are compressed together
//! if they look alike: each for itself they take half as much again, and noise among them would spoil it.

use stillframe_page::delta::Delta;
use stillframe_page::encoding::{Decoder, EncodingError, Kind};
use stillframe_page::{PAGE, is_zero};

use super::compression::{CompressionChoice, GroupCompressor};
use super::{ConnectionError, malformed};
use crate::memory::BlockShape;

/// Upper bound on pages of a batch, deltas not counted.
pub const PAGES_MAX: usize = 2048;

/// Pages that are compressed together, at most: 64 KiB.
const TOGETHER_MAX: usize = 16;
/// Contents of noise of which one is compressed in a trial: it may look like noise only.
const TRY_ONE_OF: u32 = 8;
/// Before the payload of pages that are compressed together: their number, its kind, its length.
const GROUP_HEAD_BYTES: usize = 6;
/// Bytes of a page by which noise is known, and how many different ones it has among them, of 162 that are expected.
const LOOKS: usize = 256;
const DIFFERENT_MIN: u32 = 140;

/// What pages are compressed as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Likeness {
    Zero,
    /// It will compress.
    Plain,
    /// It hardly will.
    Noise,
}

impl Likeness {
    fn of(page: &[u8; PAGE]) -> Likeness {
        if is_zero(page) {
            return Likeness::Zero;
        }
        let mut seen = [0u64; 4];
        for &byte in page.iter().step_by(PAGE / LOOKS) {
            seen[usize::from(byte >> 6)] |= 1 << (byte & 63);
        }
        match seen.iter().map(|bits| bits.count_ones()).sum::<u32>() >= DIFFERENT_MIN {
            true => Likeness::Noise,
            false => Likeness::Plain,
        }
    }
}

/// Puts batches together; keeps its memory.
pub struct BatchWriter {
    compressor: GroupCompressor,
    /// The head of the batch, and the numbers of its pages.
    payload: Vec<u8>,
    /// Their contents, and deltas after them.
    contents: Vec<u8>,
    pages: u32,
    deltas: u32,
    /// Pages that wait to be compressed together, what they look like, and how many they are.
    plain: Vec<u8>,
    likeness: Likeness,
    together: usize,
    /// Where their head is in `contents`, and whether they follow it there as they are.
    place: usize,
    as_is: bool,
    /// Contents of noise since the last one that was tried.
    untried: u32,
}

impl BatchWriter {
    /// Writes batches one after the other, whose pages are compressed in this way.
    ///
    /// # Errors
    /// There is no memory for the compressor, or it has no such level.
    pub fn new(choice: CompressionChoice) -> Result<BatchWriter, ConnectionError> {
        Ok(BatchWriter {
            compressor: GroupCompressor::new(choice)?,
            payload: Vec::new(),
            contents: Vec::new(),
            pages: 0,
            deltas: 0,
            plain: Vec::new(),
            likeness: Likeness::Zero,
            together: 0,
            place: 0,
            as_is: false,
            untried: 0,
        })
    }

    /// How pages are compressed, and what became of the batches.
    pub fn compressor(&mut self) -> &mut GroupCompressor {
        &mut self.compressor
    }

    /// Begins a batch of block number `block`.
    pub fn begin(&mut self, block: usize) {
        self.payload.clear();
        self.contents.clear();
        self.plain.clear();
        self.together = 0;
        // A VM has less than 2^32 blocks. Counts are written at the end.
        self.payload.extend((block as u32).to_le_bytes());
        self.payload.extend([0; 8]);
        (self.pages, self.deltas) = (0, 0);
        // Other places may compress.
        self.untried = 0;
    }

    /// Adds a page, whose number is above those before. Pages come before deltas.
    ///
    /// # Errors
    /// The compressor failed.
    pub fn page(&mut self, page: u64, bytes: &[u8; PAGE]) -> Result<(), ConnectionError> {
        // A block has less than 2^30 pages.
        self.payload.extend((page as u32).to_le_bytes());
        let likeness = Likeness::of(bytes);
        if likeness != self.likeness || self.together == TOGETHER_MAX {
            self.close()?;
        }
        if self.together == 0 {
            self.open(likeness);
        }
        match likeness {
            Likeness::Zero => {}
            _ if self.as_is => self.contents.extend_from_slice(bytes),
            _ => self.plain.extend_from_slice(bytes),
        }
        self.together += 1;
        self.pages += 1;
        Ok(())
    }

    /// Begins the next pages that look alike.
    fn open(&mut self, likeness: Likeness) {
        self.likeness = likeness;
        self.place = self.contents.len();
        self.contents.extend([0; GROUP_HEAD_BYTES]);
        self.as_is = match likeness {
            Likeness::Zero => false,
            Likeness::Plain => self.compressor.leaves_as_is(),
            Likeness::Noise => {
                let tried = self.untried.is_multiple_of(TRY_ONE_OF);
                self.untried = self.untried.wrapping_add(1);
                !tried || self.compressor.leaves_as_is()
            }
        };
    }

    /// Writes the pages that wait.
    fn close(&mut self) -> Result<(), EncodingError> {
        // At most TOGETHER_MAX.
        let count = std::mem::take(&mut self.together) as u8;
        if count == 0 {
            return Ok(());
        }
        let kind = match self.likeness {
            Likeness::Zero => Kind::Zero,
            _ if self.as_is => Kind::Raw,
            _ => self.compressor.encode(&self.plain, &mut self.contents)?,
        };
        if kind != Kind::Raw {
            self.untried = 0;
        }
        self.plain.clear();
        let begin = self.place + GROUP_HEAD_BYTES;
        let length = (self.contents.len() - begin) as u32;
        let [a, b, c, d] = length.to_le_bytes();
        self.contents[self.place..begin].copy_from_slice(&[count, kind.number(), a, b, c, d]);
        Ok(())
    }

    /// Adds a delta. No pages come after it.
    ///
    /// # Errors
    /// The compressor failed.
    pub fn delta(&mut self, delta: &[u8]) -> Result<(), ConnectionError> {
        self.close()?;
        // A delta is shorter than the pages that it changes.
        self.contents.extend((delta.len() as u32).to_le_bytes());
        self.contents.extend(delta);
        self.deltas += 1;
        Ok(())
    }

    /// The payload, in two parts.
    ///
    /// # Errors
    /// The compressor failed.
    pub fn finish(&mut self) -> Result<[&[u8]; 2], ConnectionError> {
        self.close()?;
        self.payload[4..8].copy_from_slice(&self.pages.to_le_bytes());
        self.payload[8..12].copy_from_slice(&self.deltas.to_le_bytes());
        Ok([&self.payload, &self.contents])
    }
}

/// A batch that came over a connection.
#[derive(Debug)]
pub struct Batch<'p> {
    /// The number of the block.
    pub block: usize,
    pages: Vec<u32>,
    /// How many of the pages each of these holds, its kind, and its payload.
    contents: Vec<(usize, u8, &'p [u8])>,
    /// Deltas against the pages' contents at the receiver.
    pub deltas: Vec<Delta>,
}

impl<'p> Batch<'p> {
    /// Reads a batch; trusts nothing of it.
    ///
    /// # Errors
    /// [`ConnectionError::Malformed`]: it is none, or does not fit these blocks.
    pub fn decode(payload: &'p [u8], blocks: &[BlockShape]) -> Result<Batch<'p>, ConnectionError> {
        let mut input = Input(payload);
        let block = input.u32()? as usize;
        let shape = blocks.get(block);
        let limit = shape.ok_or_else(|| malformed("pages of a block that the VM does not have"))?;
        let (count, deltas) = (input.u32()? as usize, input.u32()? as usize);
        if count > PAGES_MAX || deltas > PAGES_MAX {
            return Err(malformed("a batch of too many pages"));
        }
        let mut batch = Batch {
            block,
            pages: Vec::with_capacity(count),
            contents: Vec::new(),
            deltas: Vec::new(),
        };
        for _ in 0..count {
            let page = input.u32()?;
            let before = batch.pages.last();
            if u64::from(page) >= limit.pages || before.is_some_and(|&last| last >= page) {
                return Err(malformed(
                    "pages that do not ascend, or lie outside their block",
                ));
            }
            batch.pages.push(page);
        }
        let mut left = count;
        while left > 0 {
            let together = usize::from(input.take(1)?[0]);
            if together == 0 || together > TOGETHER_MAX.min(left) {
                return Err(malformed("contents of no page, or of too many"));
            }
            left -= together;
            let kind = input.take(1)?[0];
            Kind::from_number(kind)?;
            let length = input.u32()? as usize;
            batch.contents.push((together, kind, input.take(length)?));
        }
        for _ in 0..deltas {
            let length = input.u32()? as usize;
            let delta = Delta::decode(input.take(length)?);
            let delta = delta.map_err(|error| malformed(format!("a delta: {error}")))?;
            if delta.pages().any(|page| u64::from(page) >= limit.pages) {
                return Err(malformed("a delta of pages outside their block"));
            }
            batch.deltas.push(delta);
        }
        match input.0.is_empty() {
            true => Ok(batch),
            false => Err(malformed("a batch with data after its end")),
        }
    }

    /// The numbers of its pages, ascending; deltas have their own.
    pub fn numbers(&self) -> impl Iterator<Item = u64> + '_ {
        self.pages.iter().map(|&page| page.into())
    }

    /// Decodes the pages, adjacent ones together where that takes no copy: the number of the first, and the bytes of all.
    /// What is not compressed stays in the payload, and the rest goes to `buffer`.
    ///
    /// # Errors
    /// A page cannot be decoded.
    pub fn runs<'b>(
        &self,
        decoder: &mut Decoder,
        buffer: &'b mut Vec<u8>,
    ) -> Result<Vec<(u64, &'b [u8])>, ConnectionError>
    where
        'p: 'b,
    {
        let is_raw = |kind: u8| kind == Kind::Raw.number();
        let packed = self.contents.iter().filter(|(_, kind, _)| !is_raw(*kind));
        // No longer than PAGES_MAX pages. What is in it is overwritten.
        buffer.resize(packed.map(|(together, ..)| together * PAGE).sum(), 0);
        let mut rest = &mut buffer[..];
        for &(together, kind, encoded) in &self.contents {
            let bytes = together * PAGE;
            match is_raw(kind) {
                true if encoded.len() == bytes => {}
                true => return Err(malformed("contents of another length than their pages")),
                false => {
                    let (own, others) = rest.split_at_mut(bytes);
                    decoder.decode_into(kind, encoded, own)?;
                    rest = others;
                }
            }
        }
        Ok(self.joined(buffer))
    }

    /// The contents, of which those that are compressed are in `decoded`.
    fn joined<'b>(&self, decoded: &'b [u8]) -> Vec<(u64, &'b [u8])>
    where
        'p: 'b,
    {
        let mut runs = Vec::new();
        let (mut rest, mut pages) = (decoded, &self.pages[..]);
        let mut contents = self.contents.iter().peekable();
        while let Some(&(mut together, kind, encoded)) = contents.next() {
            let mut bytes = encoded;
            if kind != Kind::Raw.number() {
                // Those that follow each other in `decoded` are one.
                while let Some((more, ..)) = contents.next_if(|next| next.1 != Kind::Raw.number()) {
                    together += more;
                }
                (bytes, rest) = rest.split_at(together * PAGE);
            }
            let own;
            (own, pages) = pages.split_at(together);
            for run in own.chunk_by(|a, b| a + 1 == *b) {
                let (now, later) = bytes.split_at(run.len() * PAGE);
                runs.push((u64::from(run[0]), now));
                bytes = later;
            }
        }
        runs
    }
}

/// Bytes from the front of a payload.
struct Input<'p>(&'p [u8]);

impl<'p> Input<'p> {
    fn take(&mut self, bytes: usize) -> Result<&'p [u8], ConnectionError> {
        let split = self.0.split_at_checked(bytes);
        let (taken, rest) = split.ok_or_else(|| malformed("a batch that is cut off"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32, ConnectionError> {
        let bytes = self.take(4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use stillframe_page::encoding::Compression;

    use super::*;

    fn shapes() -> Vec<BlockShape> {
        let shape = |name: &str, pages| BlockShape {
            name: name.to_owned(),
            pages,
        };
        vec![shape("small", 8), shape("large", 600)]
    }

    /// Zero, text and noise.
    fn content(seed: u8) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        for (at, byte) in page.iter_mut().enumerate() {
            *byte = match seed % 3 {
                0 => 0,
                1 => seed,
                _ => (at.wrapping_mul(usize::from(seed) + 7919) >> 5) as u8,
            };
        }
        page
    }

    fn encode(block: usize, pages: &BTreeMap<u64, u8>) -> Vec<u8> {
        encode_by(CompressionChoice::Auto, block, pages)
    }

    fn encode_by(choice: CompressionChoice, block: usize, pages: &BTreeMap<u64, u8>) -> Vec<u8> {
        let mut writer = BatchWriter::new(choice).unwrap();
        writer.begin(block);
        for (&page, &seed) in pages {
            writer.page(page, &content(seed)).unwrap();
        }
        writer.finish().unwrap().concat()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn pages_come_as_they_were(
            pages in prop::collection::btree_map(0..600u64, any::<u8>(), 0..60),
            as_is: bool,
        ) {
            let choice = match as_is {
                true => CompressionChoice::Always(Compression::None),
                false => CompressionChoice::Auto,
            };
            let payload = encode_by(choice, 1, &pages);
            let batch = Batch::decode(&payload, &shapes()).unwrap();
            prop_assert_eq!(batch.block, 1);
            prop_assert!(batch.numbers().eq(pages.keys().copied()));
            let mut found = BTreeMap::new();
            let mut buffer = vec![7; PAGE];
            for (first, bytes) in batch.runs(&mut Decoder::new().unwrap(), &mut buffer).unwrap() {
                for (page, bytes) in (first..).zip(bytes.chunks(PAGE)) {
                    found.insert(page, bytes.to_vec());
                }
            }
            let expected: BTreeMap<u64, Vec<u8>> =
                pages.iter().map(|(&page, &seed)| (page, content(seed).to_vec())).collect();
            prop_assert!(found == expected);
        }

        #[test]
        fn what_is_cut_off_is_refused(pages in prop::collection::btree_map(0..600u64, any::<u8>(), 1..9), cut in any::<prop::sample::Index>()) {
            let payload = encode(1, &pages);
            prop_assert!(Batch::decode(&payload[..cut.index(payload.len())], &shapes()).is_err());
        }
    }

    #[test]
    fn pages_of_no_block_are_refused() {
        let pages = BTreeMap::from([(8, 1)]);
        assert!(Batch::decode(&encode(1, &pages), &shapes()).is_ok());
        assert!(Batch::decode(&encode(0, &pages), &shapes()).is_err());
        assert!(Batch::decode(&encode(2, &pages), &shapes()).is_err());
    }
}
