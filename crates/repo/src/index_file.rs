//! Index files: sealed copies of pack directories, so that opening a repository reads a few files
//! instead of the ends of all packs. One is written with each checkpoint; they are a cache that
//! can be made again from the packs.
//!
//! An index file may name others it takes the place of. Those count as gone from the moment it
//! exists, whether or not they have been removed yet; that is what makes pruning safe to kill.

use std::collections::HashSet;

use crate::crypto::Keys;
use crate::error::RepoError;
use crate::layout::{Cursor, FileKind, FormatError};
use crate::local::{Area, LocalStore};
use crate::pack::{Directory, FileHash};
use crate::sealed_file::open_file;

/// The largest index file that is read.
const INDEX_BYTES_MAX: u64 = 512 << 20;

/// One pack in an index file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexedPack {
    /// The pack's name.
    pub pack: FileHash,
    /// What is in it.
    pub directory: Directory,
}

/// The contents of an index file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IndexFile {
    /// The index files this one takes the place of.
    pub supersedes: Vec<FileHash>,
    /// The packs it tells of.
    pub packs: Vec<IndexedPack>,
}

impl IndexFile {
    /// Writes the plain form.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.encoded_bytes());
        bytes.extend_from_slice(&(self.supersedes.len() as u32).to_le_bytes());
        for name in &self.supersedes {
            bytes.extend_from_slice(&name.0);
        }
        bytes.extend_from_slice(&(self.packs.len() as u32).to_le_bytes());
        for entry in &self.packs {
            let directory = entry.directory.encode();
            bytes.extend_from_slice(&entry.pack.0);
            bytes.extend_from_slice(&(directory.len() as u32).to_le_bytes());
            bytes.extend_from_slice(&directory);
        }
        bytes
    }

    fn encoded_bytes(&self) -> usize {
        let packs = self.packs.iter();
        let packs = packs.map(|entry| PACK_ENTRY_BYTES + entry.directory.encoded_bytes());
        4 + self.supersedes.len() * 32 + 4 + packs.sum::<usize>()
    }

    /// Reads the plain form.
    pub fn decode(bytes: &[u8]) -> Result<IndexFile, FormatError> {
        let mut packs = Vec::new();
        let supersedes = decode(bytes, |pack, directory| {
            let directory = Directory::decode(directory)?;
            packs.push(IndexedPack { pack, directory });
            Ok(())
        })?;
        Ok(IndexFile { supersedes, packs })
    }
}

/// What comes before a directory: the pack's name, and how long the directory is.
const PACK_ENTRY_BYTES: usize = 32 + 4;

/// Reads the plain form of an index file; the files it takes the place of. Hands over each pack with
/// its directory as it is written.
fn decode<'a>(
    bytes: &'a [u8],
    mut on_pack: impl FnMut(FileHash, &'a [u8]) -> Result<(), FormatError>,
) -> Result<Vec<FileHash>, FormatError> {
    let mut cursor = Cursor::new(bytes);
    let count = cursor.count(32)?;
    let mut supersedes = Vec::with_capacity(count);
    for _ in 0..count {
        supersedes.push(FileHash(cursor.array()?));
    }
    for _ in 0..cursor.count(PACK_ENTRY_BYTES)? {
        let pack = FileHash(cursor.array()?);
        let length = cursor.u32()? as usize;
        on_pack(pack, cursor.take(length)?)?;
    }
    cursor.finish()?;
    Ok(supersedes)
}

/// Puts index files together as they are written: taken apart they would need several times the
/// memory, and a watch does this all the time.
pub(crate) struct Merged {
    bytes: Vec<u8>,
    /// Where the number of packs stands.
    count_at: usize,
    known: HashSet<FileHash>,
}

impl Merged {
    /// An index file with no packs yet that will be about so long.
    pub(crate) fn new(supersedes: Vec<FileHash>, bytes: usize) -> Merged {
        let file = IndexFile {
            supersedes,
            packs: Vec::new(),
        };
        let mut merged = Vec::with_capacity(bytes + file.encoded_bytes());
        merged.extend_from_slice(&file.encode());
        Merged {
            count_at: merged.len() - 4,
            bytes: merged,
            known: HashSet::new(),
        }
    }

    /// Adds the packs of another file, given in its plain form, that are not in this one yet.
    pub(crate) fn add(&mut self, file: &[u8]) -> Result<(), FormatError> {
        decode(file, |pack, directory| {
            if self.known.insert(pack) {
                self.bytes.extend_from_slice(&pack.0);
                let length = directory.len() as u32;
                self.bytes.extend_from_slice(&length.to_le_bytes());
                self.bytes.extend_from_slice(directory);
            }
            Ok(())
        })?;
        Ok(())
    }

    /// The plain form.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        let count = (self.known.len() as u32).to_le_bytes();
        self.bytes[self.count_at..self.count_at + 4].copy_from_slice(&count);
        self.bytes
    }
}

/// Reads one index file and checks it against its name; its contents and its length in bytes.
pub(crate) fn read_index_file(
    store: &LocalStore,
    keys: &Keys,
    name: FileHash,
) -> Result<(IndexFile, u64), RepoError> {
    read_plain(store, keys, name, IndexFile::decode)
}

/// As [`read_index_file`], with the plain form handed to `decode`.
pub(crate) fn read_plain<T>(
    store: &LocalStore,
    keys: &Keys,
    name: FileHash,
    decode: impl FnOnce(&[u8]) -> Result<T, FormatError>,
) -> Result<(T, u64), RepoError> {
    let text = name.to_string();
    let mut bytes = store.read(Area::Index, &text, INDEX_BYTES_MAX)?;
    let length = bytes.len() as u64;
    let open = || {
        if FileHash::of(&bytes) != name {
            return Err(FormatError::Mismatch { what: "its name" });
        }
        decode(open_file(FileKind::Index, keys, &mut bytes)?)
    };
    open()
        .map(|decoded| (decoded, length))
        .map_err(|error| RepoError::format(store.label(Area::Index, &text), &error))
}
