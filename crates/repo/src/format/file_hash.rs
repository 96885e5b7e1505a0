//! The names of packs, index files and key files.

use std::fmt;

use stillframe_page::hash::ContentId;

/// The name of a pack, an index file or a key file: the plain BLAKE3 hash of its bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileHash(pub [u8; 32]);

impl FileHash {
    /// The name of a file with these bytes.
    pub fn of(bytes: &[u8]) -> FileHash {
        FileHash(*blake3::hash(bytes).as_bytes())
    }

    /// The inverse of `Display`.
    pub fn from_name(name: &str) -> Option<FileHash> {
        ContentId::from_hex(name).map(|id| FileHash(id.0))
    }

    /// Its first eight bytes, as a value for hash tables.
    pub(crate) fn short(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

impl fmt::Display for FileHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        ContentId(self.0).fmt(f)
    }
}

impl fmt::Debug for FileHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileHash({self})")
    }
}
