//! The segments of an index file (head, parts, sections) as bytes. [`crate::index::file`] seals them and places
//! them in the file.
//!
//! ```text
//! head       the index files that it supersedes, its packs, the lengths of what follows
//! parts      the directories of the packs, each cut into parts of about 16 KiB
//! sections   for each blob the part that describes it, by the blob's id, 1024 or so to a section
//! ```
//!
//! The in-memory index reads all parts. A lookup of one blob reads its section and the part that the section
//! names. Ids are keyed hashes, so sections fill evenly, and four bytes of an id distinguish the blobs of a
//! section; if two blobs share them, one part is read in vain.

use stillframe_page::hash::ContentId;

use crate::crypto::TAG_BYTES;
use crate::format::file_hash::FileHash;
use crate::format::image_record::{IMAGE_ID_BYTES, ImageId};
use crate::format::layout::{Cursor, FormatError};
use crate::pack::{
    FRAME_ENTRY_BYTES, Frame, PACK_BYTES_MAX, PREAMBLE_BYTES, decode_frame, encode_frame,
};

/// Bytes of frame entries at which a part is closed: about 440 pages. So a lookup of one blob also finds its
/// neighbours, in some ten microseconds.
pub(crate) const PART_BYTES_TARGET: usize = 16 << 10;

/// Average number of blobs of a section.
const SECTION_ENTRIES: usize = 1024;

/// A pack in the head of an index file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadPack {
    /// The pack's name.
    pub pack: FileHash,
    /// Length of the pack in bytes.
    pub file_bytes: u32,
    /// Number of parts of its directory.
    pub parts: u32,
    /// The image that has its content, if it is an external pack.
    pub image: Option<ImageId>,
}

/// The head of an index file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Head {
    /// The index files that this one supersedes.
    pub supersedes: Vec<FileHash>,
    /// The packs that it describes, in the order of their parts.
    pub packs: Vec<HeadPack>,
    /// The lengths in bytes of the parts in the file, tags included.
    pub parts: Vec<u32>,
    /// The lengths in bytes of the sections, tags included.
    pub sections: Vec<u32>,
}

const HEAD_PACK_BYTES: usize = 32 + 4 + 4 + IMAGE_ID_BYTES;

impl Head {
    /// Encodes the plain form.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let count = |bytes: &mut Vec<u8>, count: usize| {
            bytes.extend_from_slice(&(count as u32).to_le_bytes());
        };
        count(&mut bytes, self.supersedes.len());
        for name in &self.supersedes {
            bytes.extend_from_slice(&name.0);
        }
        count(&mut bytes, self.packs.len());
        for entry in &self.packs {
            bytes.extend_from_slice(&entry.pack.0);
            bytes.extend_from_slice(&entry.file_bytes.to_le_bytes());
            bytes.extend_from_slice(&entry.parts.to_le_bytes());
            bytes.extend_from_slice(&ImageId::encode(entry.image));
        }
        for lengths in [&self.parts, &self.sections] {
            count(&mut bytes, lengths.len());
            bytes.extend(lengths.iter().flat_map(|length| length.to_le_bytes()));
        }
        bytes
    }

    /// Decodes the plain form. The result is consistent: every part belongs to a pack.
    pub fn decode(bytes: &[u8]) -> Result<Head, FormatError> {
        let mut cursor = Cursor::new(bytes);
        let supersedes = (0..cursor.count(32)?)
            .map(|_| cursor.array().map(FileHash))
            .collect::<Result<_, _>>()?;
        let packs = (0..cursor.count(HEAD_PACK_BYTES)?)
            .map(|_| decode_pack(&mut cursor))
            .collect::<Result<Vec<_>, _>>()?;
        let parts = decode_lengths(&mut cursor)?;
        let sections = decode_lengths(&mut cursor)?;
        cursor.finish()?;
        let expected: u64 = packs.iter().map(|entry| u64::from(entry.parts)).sum();
        if expected != parts.len() as u64 {
            return Err(FormatError::invalid(
                "its head has too many or too few parts for its packs",
            ));
        }
        Ok(Head {
            supersedes,
            packs,
            parts,
            sections,
        })
    }
}

fn decode_pack(cursor: &mut Cursor<'_>) -> Result<HeadPack, FormatError> {
    let entry = HeadPack {
        pack: FileHash(cursor.array()?),
        file_bytes: cursor.u32()?,
        parts: cursor.u32()?,
        image: ImageId::decode(cursor.array()?),
    };
    match u64::from(entry.file_bytes) <= PACK_BYTES_MAX {
        true => Ok(entry),
        false => Err(FormatError::invalid(
            "its head names a pack longer than the limit",
        )),
    }
}

fn decode_lengths(cursor: &mut Cursor<'_>) -> Result<Vec<u32>, FormatError> {
    let lengths: Vec<u32> = (0..cursor.count(4)?)
        .map(|_| cursor.u32())
        .collect::<Result<_, _>>()?;
    match lengths.iter().all(|&length| length as usize >= TAG_BYTES) {
        true => Ok(lengths),
        false => Err(FormatError::invalid("a part or section has no tag")),
    }
}

/// Some neighbouring frames of a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The number in the pack of the first frame.
    pub first_frame: u32,
    /// The offset of that frame in the pack.
    pub offset: u32,
    /// The frames, at least one.
    pub frames: Vec<Frame>,
}

impl Part {
    /// Encodes the plain form.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(2 * PART_BYTES_TARGET);
        for number in [self.first_frame, self.offset, self.frames.len() as u32] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        for frame in &self.frames {
            encode_frame(frame, &mut bytes);
        }
        bytes
    }

    /// Decodes the plain form. The result is consistent, like a decoded directory.
    pub fn decode(bytes: &[u8]) -> Result<Part, FormatError> {
        let mut cursor = Cursor::new(bytes);
        let (first_frame, offset) = (cursor.u32()?, cursor.u32()?);
        let frames = (0..cursor.count(FRAME_ENTRY_BYTES)?)
            .map(|_| decode_frame(&mut cursor))
            .collect::<Result<Vec<_>, _>>()?;
        cursor.finish()?;
        let part = Part {
            first_frame,
            offset,
            frames,
        };
        let numbers = u64::from(first_frame) + part.frames.len() as u64;
        if part.frames.is_empty()
            || (offset as usize) < PREAMBLE_BYTES
            || part.end() > PACK_BYTES_MAX
            || numbers > u64::from(u32::MAX)
        {
            return Err(FormatError::invalid("a part of it does not fit a pack"));
        }
        Ok(part)
    }

    /// The end of its last frame in the pack.
    pub(crate) fn end(&self) -> u64 {
        let frames = self.frames.iter();
        let frames: u64 = frames.map(|frame| u64::from(frame.stored_bytes)).sum();
        u64::from(self.offset) + frames
    }
}

/// The part that describes a blob, and the bytes of the blob's id that the section does not imply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// The second four bytes of the id.
    pub key: u32,
    /// The number of the part in the index file.
    pub part: u32,
}

const ENTRY_BYTES: usize = 4 + 4;

/// The second four bytes of an id.
pub(crate) fn key(id: &ContentId) -> u32 {
    let [_, _, _, _, a, b, c, d, ..] = id.0;
    u32::from_le_bytes([a, b, c, d])
}

/// The first four bytes of an id, by which blobs are assigned to sections.
pub(crate) fn order(id: &ContentId) -> u32 {
    let [a, b, c, d, ..] = id.0;
    u32::from_le_bytes([a, b, c, d])
}

/// The section, out of `sections` (at least one), of an id that begins with `order`.
pub(crate) fn section_of(order: u32, sections: usize) -> usize {
    ((u64::from(order) * sections as u64) >> 32) as usize
}

/// Number of entries of a section whose sealed form has this many bytes.
pub(crate) fn section_entries(sealed_bytes: usize) -> usize {
    (sealed_bytes - TAG_BYTES) / ENTRY_BYTES
}

/// Decodes a section into its entries, ascending.
pub fn decode_section(bytes: &[u8]) -> Result<Vec<Entry>, FormatError> {
    let (words, rest) = bytes.as_chunks::<ENTRY_BYTES>();
    if !rest.is_empty() {
        return Err(FormatError::invalid("a section of it is cut short"));
    }
    let entries: Vec<Entry> = words
        .iter()
        .map(|&[a, b, c, d, e, f, g, h]| Entry {
            key: u32::from_le_bytes([a, b, c, d]),
            part: u32::from_le_bytes([e, f, g, h]),
        })
        .collect();
    match entries.is_sorted_by(|entry, next| entry < next) {
        true => Ok(entries),
        false => Err(FormatError::invalid("a section of it is not in order")),
    }
}

/// Encodes a section.
pub fn encode_section(entries: &[Entry]) -> Vec<u8> {
    let words = entries.iter().flat_map(|entry| [entry.key, entry.part]);
    words.flat_map(u32::to_le_bytes).collect()
}

/// The parts that may describe an id with this key.
pub(crate) fn parts_of(entries: &[Entry], key: u32) -> impl Iterator<Item = u32> {
    let first = entries.partition_point(|entry| entry.key < key);
    let found = entries[first..].iter();
    found
        .take_while(move |entry| entry.key == key)
        .map(|entry| entry.part)
}

/// Collects the entries of the sections of an index file.
#[derive(Debug, Default)]
pub(crate) struct Sections {
    entries: Vec<(u32, Entry)>,
}

impl Sections {
    /// Adds the blobs of a part.
    pub(crate) fn add(&mut self, number: u32, part: &Part) {
        let ids = part.frames.iter().flat_map(|frame| &frame.blobs);
        self.entries.extend(ids.map(|(id, _)| {
            let entry = Entry {
                key: key(id),
                part: number,
            };
            (order(id), entry)
        }));
    }

    /// The sections, in order.
    pub(crate) fn finish(mut self) -> Vec<Vec<Entry>> {
        let count = self.entries.len().div_ceil(SECTION_ENTRIES);
        let place = |&(order, entry): &(u32, Entry)| (section_of(order, count), entry);
        self.entries.sort_unstable_by_key(place);
        // A part may describe a blob twice.
        self.entries.dedup_by_key(|entry| place(entry));
        let mut sections = vec![Vec::new(); count];
        for (order, entry) in self.entries {
            sections[section_of(order, count)].push(entry);
        }
        sections
    }
}
