//! Index files: sealed copies of pack directories, so that opening a repository reads a few files
//! instead of the ends of all packs. One is written with each checkpoint; they are a cache that
//! can be made again from the packs.
//!
//! An index file may name others it takes the place of. Those count as gone from the moment it
//! exists, whether or not they have been removed yet; that is what makes pruning safe to kill.

use crate::layout::{Cursor, FormatError};
use crate::pack::{Directory, FileHash};

/// The largest index file that is read.
pub(crate) const INDEX_BYTES_MAX: u64 = 512 << 20;

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
        let mut bytes = Vec::new();
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

    /// Reads the plain form.
    pub fn decode(bytes: &[u8]) -> Result<IndexFile, FormatError> {
        let mut cursor = Cursor::new(bytes);
        let count = cursor.count(32)?;
        let mut supersedes = Vec::with_capacity(count);
        for _ in 0..count {
            supersedes.push(FileHash(cursor.array()?));
        }
        let count = cursor.count(32 + 4)?;
        let mut packs = Vec::with_capacity(count);
        for _ in 0..count {
            let pack = FileHash(cursor.array()?);
            let length = cursor.u32()? as usize;
            let directory = Directory::decode(cursor.take(length)?)?;
            packs.push(IndexedPack { pack, directory });
        }
        cursor.finish()?;
        Ok(IndexFile { supersedes, packs })
    }
}
