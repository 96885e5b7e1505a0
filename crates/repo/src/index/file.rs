//! Index files: copies of pack directories, so that opening a repository reads a few files instead of the ends of
//! all packs. One is written with each checkpoint, or several. They can be rebuilt from the packs.
//!
//! An index file may name others that it supersedes. Those are ignored from the moment it exists, whether or not
//! they have been removed; so prune can be killed at any point.
//!
//! ```text
//! | header 16 | salt 32 | head length 4 | head | part | part | ... | section | section | ... |
//! ```
//!
//! Head, parts and sections are sealed one by one, so that each can be verified without the others;
//! [`crate::index::layout`] describes their content.

#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;

use std::collections::HashSet;
use std::ops::Range;

use crate::crypto::{Cipher, Keys, Nonce, SALT_BYTES, TAG_BYTES, random};
use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::format::layout::{Cursor, FileKind, FormatError, HEADER_BYTES, header, read_header};
use crate::index::layout::{
    Entry, Head, HeadPack, PART_BYTES_TARGET, Part, Sections, decode_section, encode_section,
    section_entries,
};
use crate::pack::{Directory, IndexedPack, PREAMBLE_BYTES, ensure_kinds, frame_entry_bytes};
use crate::store::local::{Area, LocalStore};

/// Maximum length in bytes of an index file that is read.
pub(crate) const INDEX_BYTES_MAX: u64 = 512 << 20;

/// Bytes before the head: header, salt and the head's length.
pub(crate) const FRONT_BYTES: usize = HEADER_BYTES + SALT_BYTES + 4;

/// The contents of an index file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IndexFile {
    /// The index files that this one supersedes.
    pub supersedes: Vec<FileHash>,
    /// The packs that it describes.
    pub packs: Vec<IndexedPack>,
}

impl IndexFile {
    /// The whole file, sealed.
    pub(crate) fn seal(&self, keys: &Keys) -> Result<Vec<u8>, RepoError> {
        let mut builder = IndexBuilder::new(keys, self.supersedes.clone())?;
        for entry in &self.packs {
            builder.add(entry);
        }
        Ok(builder.finish())
    }
}

/// Builds an index file pack by pack: a large one decoded as a whole would take several times the memory, and a
/// watch merges files often.
pub(crate) struct IndexBuilder {
    cipher: Cipher,
    preamble: [u8; PREAMBLE_BYTES],
    head: Head,
    /// The parts so far, sealed.
    parts: Vec<u8>,
    sections: Sections,
    known: HashSet<FileHash>,
}

impl IndexBuilder {
    /// An index file with no packs yet.
    pub(crate) fn new(keys: &Keys, supersedes: Vec<FileHash>) -> Result<IndexBuilder, RepoError> {
        let salt = random::<SALT_BYTES>()?;
        let mut preamble = [0; PREAMBLE_BYTES];
        preamble[..HEADER_BYTES].copy_from_slice(&header(FileKind::Index));
        preamble[HEADER_BYTES..].copy_from_slice(&salt);
        Ok(IndexBuilder {
            cipher: keys.index_cipher(&salt),
            preamble,
            head: Head {
                supersedes,
                ..Head::default()
            },
            parts: Vec::new(),
            sections: Sections::default(),
            known: HashSet::new(),
        })
    }

    /// Adds a pack, unless the file has it already.
    pub(crate) fn add(&mut self, entry: &IndexedPack) {
        if !self.known.insert(entry.pack) {
            return;
        }
        let before = self.head.parts.len();
        let mut part = Part {
            first_frame: 0,
            offset: PREAMBLE_BYTES as u32,
            frames: Vec::new(),
        };
        let mut bytes = 0;
        for frame in &entry.directory.frames {
            bytes += frame_entry_bytes(frame.blobs.len());
            part.frames.push(frame.clone());
            if bytes >= PART_BYTES_TARGET {
                self.close(&mut part);
                bytes = 0;
            }
        }
        if !part.frames.is_empty() {
            self.close(&mut part);
        }
        // A pack is at most 1 GiB long (checked when the directory was read or made).
        self.head.packs.push(HeadPack {
            pack: entry.pack,
            file_bytes: entry.directory.file_bytes() as u32,
            parts: (self.head.parts.len() - before) as u32,
            image: entry.directory.image,
        });
    }

    /// Seals a part and continues with the frame after it.
    fn close(&mut self, part: &mut Part) {
        let number = self.head.parts.len() as u32;
        self.sections.add(number, part);
        let mut sealed = part.encode();
        self.cipher
            .seal(Nonce::Part(number), &self.preamble, &mut sealed, 0);
        self.head.parts.push(sealed.len() as u32);
        self.parts.extend_from_slice(&sealed);
        part.first_frame += part.frames.len() as u32;
        part.offset = part.end() as u32;
        part.frames.clear();
    }

    /// The whole file.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        let mut sections = Vec::new();
        for (number, entries) in (0..).zip(self.sections.finish()) {
            let mut sealed = encode_section(&entries);
            self.cipher
                .seal(Nonce::Section(number), &self.preamble, &mut sealed, 0);
            self.head.sections.push(sealed.len() as u32);
            sections.extend_from_slice(&sealed);
        }
        let head = self.head.encode();
        let mut file = Vec::with_capacity(
            FRONT_BYTES + head.len() + TAG_BYTES + self.parts.len() + sections.len(),
        );
        file.extend_from_slice(&self.preamble);
        file.extend_from_slice(&((head.len() + TAG_BYTES) as u32).to_le_bytes());
        let bound = file.clone();
        file.extend_from_slice(&head);
        self.cipher
            .seal(Nonce::Body, &bound, &mut file, FRONT_BYTES);
        file.extend_from_slice(&self.parts);
        file.extend_from_slice(&sections);
        file
    }
}

/// The length of the head in bytes, tag included, from the first bytes of an index file.
pub(crate) fn head_bytes(front: &[u8]) -> Result<usize, FormatError> {
    let mut cursor = Cursor::new(front);
    read_header(&mut cursor, FileKind::Index)?;
    cursor.take(SALT_BYTES)?;
    Ok(cursor.u32()? as usize)
}

/// An index file whose head has been read. It opens the parts and sections.
pub(crate) struct OpenIndex {
    cipher: Cipher,
    preamble: [u8; PREAMBLE_BYTES],
    pub(crate) head: Head,
    /// The offset of each part, then the end of the last one; likewise for the sections.
    parts: Vec<u32>,
    sections: Vec<u32>,
}

impl OpenIndex {
    /// Opens the head of an index file of `file_bytes` bytes. `front` is the head and all before it.
    pub(crate) fn new(
        keys: &Keys,
        front: &mut [u8],
        file_bytes: u64,
    ) -> Result<OpenIndex, FormatError> {
        let (bound, sealed) = front.split_at_mut(FRONT_BYTES);
        let mut cursor = Cursor::new(bound);
        read_header(&mut cursor, FileKind::Index)?;
        let cipher = keys.index_cipher(&cursor.array()?);
        let preamble = Cursor::new(bound).array()?;
        let begin = (FRONT_BYTES + sealed.len()) as u64;
        let head = Head::decode(cipher.open(Nonce::Body, bound, sealed)?)?;
        let (parts, end) = offsets(begin, &head.parts);
        let (sections, end) = offsets(end, &head.sections);
        if end != file_bytes || end > INDEX_BYTES_MAX {
            return Err(FormatError::invalid("its length is not what its head says"));
        }
        Ok(OpenIndex {
            cipher,
            preamble,
            head,
            parts,
            sections,
        })
    }

    /// The byte range of a part in the file.
    pub(crate) fn part(&self, number: u32) -> Result<Range<u32>, FormatError> {
        let at = number as usize;
        match self.parts.get(at..at + 2) {
            Some(&[start, end]) => Ok(start..end),
            _ => Err(FormatError::invalid(
                "a section of it names a part that does not exist",
            )),
        }
    }

    pub(crate) fn open_part(&self, number: u32, sealed: &mut [u8]) -> Result<Part, FormatError> {
        let plain = self
            .cipher
            .open(Nonce::Part(number), &self.preamble, sealed)?;
        Part::decode(plain)
    }

    /// Number of blobs that the sections list.
    pub(crate) fn blobs(&self) -> usize {
        let lengths = self.head.sections.iter();
        lengths
            .map(|&length| section_entries(length as usize))
            .sum()
    }

    /// The byte range of a section in the file.
    pub(crate) fn section(&self, number: u32) -> Range<u32> {
        self.sections[number as usize]..self.sections[number as usize + 1]
    }

    pub(crate) fn open_section(
        &self,
        number: u32,
        sealed: &mut [u8],
    ) -> Result<Vec<Entry>, FormatError> {
        let plain = self
            .cipher
            .open(Nonce::Section(number), &self.preamble, sealed)?;
        decode_section(plain)
    }

    /// A part of a whole file.
    fn part_of(&self, file: &mut [u8], number: u32) -> Result<Part, FormatError> {
        let Range { start, end } = self.part(number)?;
        self.open_part(number, &mut file[start as usize..end as usize])
    }
}

/// The offsets of adjacent pieces from `begin` on, followed by the end of the last one; and that end in 64 bits.
fn offsets(begin: u64, lengths: &[u32]) -> (Vec<u32>, u64) {
    let mut at = begin;
    let mut offsets = vec![at as u32];
    for &length in lengths {
        at += u64::from(length);
        // Beyond 4 GiB the file is refused.
        offsets.push(at as u32);
    }
    (offsets, at)
}

/// Reads one index file and checks it against its name. Returns its contents, and its length in bytes.
pub(crate) fn read_index_file(
    store: &LocalStore,
    keys: &Keys,
    name: FileHash,
) -> Result<(IndexFile, u64), RepoError> {
    let mut packs = Vec::new();
    let (supersedes, bytes) = visit_index_file(store, keys, name, |entry| packs.push(entry))?;
    Ok((IndexFile { supersedes, packs }, bytes))
}

/// As [`read_index_file`], one pack at a time.
pub(crate) fn visit_index_file(
    store: &LocalStore,
    keys: &Keys,
    name: FileHash,
    mut on_pack: impl FnMut(IndexedPack),
) -> Result<(Vec<FileHash>, u64), RepoError> {
    with_file(store, keys, name, |file, open| {
        visit_parts(&open, file, &mut on_pack)?;
        Ok(open.head.supersedes)
    })
}

fn visit_parts(
    open: &OpenIndex,
    file: &mut [u8],
    on_pack: &mut impl FnMut(IndexedPack),
) -> Result<(), FormatError> {
    let wrong = || FormatError::invalid("the parts of a pack's directory do not fit together");
    let mut number = 0;
    for entry in &open.head.packs {
        let mut directory = Directory {
            image: entry.image,
            ..Directory::default()
        };
        let mut end = PREAMBLE_BYTES as u64;
        for _ in 0..entry.parts {
            let part = open.part_of(file, number)?;
            number += 1;
            let follows = part.first_frame as usize == directory.frames.len();
            if !follows || u64::from(part.offset) != end {
                return Err(wrong());
            }
            end = part.end();
            directory.frames.extend(part.frames);
        }
        ensure_kinds(entry.image, &directory.frames)?;
        if directory.file_bytes() != u64::from(entry.file_bytes) {
            return Err(wrong());
        }
        on_pack(IndexedPack {
            pack: entry.pack,
            directory,
        });
    }
    Ok(())
}

/// Reads an index file and compares its sections with its parts: lookups of single blobs must find what a read of
/// the whole file finds.
pub(crate) fn check_sections(
    store: &LocalStore,
    keys: &Keys,
    name: FileHash,
) -> Result<(), RepoError> {
    with_file(store, keys, name, |file, open| {
        compare_sections(&open, file)
    })
    .map(|_| ())
}

fn compare_sections(open: &OpenIndex, file: &mut [u8]) -> Result<(), FormatError> {
    let mut expected = Sections::default();
    for number in 0..open.head.parts.len() as u32 {
        expected.add(number, &open.part_of(file, number)?);
    }
    let expected = expected.finish();
    let mut same = expected.len() == open.head.sections.len();
    for (number, entries) in (0..open.head.sections.len() as u32).zip(expected) {
        let Range { start, end } = open.section(number);
        let sealed = &mut file[start as usize..end as usize];
        same &= open.open_section(number, sealed)? == entries;
    }
    match same {
        true => Ok(()),
        false => Err(FormatError::invalid(
            "its sections do not match its parts: rebuild the index",
        )),
    }
}

/// Reads a whole index file and checks it against its name. Returns the result of `work`, which gets the bytes
/// and the opened head, and the length in bytes.
fn with_file<T>(
    store: &LocalStore,
    keys: &Keys,
    name: FileHash,
    work: impl FnOnce(&mut [u8], OpenIndex) -> Result<T, FormatError>,
) -> Result<(T, u64), RepoError> {
    let text = name.to_string();
    let mut file = store.read(Area::Index, &text, INDEX_BYTES_MAX)?;
    let length = file.len() as u64;
    let open = || {
        if FileHash::of(&file) != name {
            return Err(FormatError::Mismatch { what: "its name" });
        }
        let bytes = head_bytes(&file)?;
        Cursor::new(&file[FRONT_BYTES..]).take(bytes)?;
        let open = OpenIndex::new(keys, &mut file[..FRONT_BYTES + bytes], length)?;
        work(&mut file, open)
    };
    open()
        .map(|made| (made, length))
        .map_err(|error| RepoError::format(store.label(Area::Index, &text), &error))
}
