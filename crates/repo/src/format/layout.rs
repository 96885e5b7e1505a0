//! The 16-byte header of repository files, and a cursor that reads numbers from untrusted bytes. `docs/format.md`
//! has pictures.

use stillframe_page::varint;
use thiserror::Error;

/// The format version that this program writes, and the only one that it reads. No release used another.
pub const FORMAT_VERSION: u32 = 2;

/// Length of the header in bytes. Every file begins with it, except locks and leases.
pub const HEADER_BYTES: usize = 16;

const MAGIC: &[u8; 4] = b"STLF";

/// The kinds of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// The repository's identity.
    Config,
    /// A password-wrapped master key.
    Key,
    /// Blobs.
    Pack,
    /// Locations of blobs.
    Index,
    /// A checkpoint.
    Manifest,
    /// The pages that a restored VM accesses first.
    WorkingSet,
    /// Where an image is that has blobs.
    Image,
}

impl FileKind {
    fn tag(self) -> &'static [u8; 4] {
        match self {
            FileKind::Config => b"CONF",
            FileKind::Key => b"KEYF",
            FileKind::Pack => b"PACK",
            FileKind::Index => b"INDX",
            FileKind::Manifest => b"MANI",
            FileKind::WorkingSet => b"WSET",
            FileKind::Image => b"IMAG",
        }
    }
}

/// Why bytes cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FormatError {
    /// The bytes end too early.
    #[error("it ends too early: {needed} more bytes were expected where {left} are left")]
    Truncated {
        /// Bytes needed next.
        needed: u64,
        /// Bytes left.
        left: u64,
    },
    /// The bytes do not end where they should.
    #[error("{bytes} bytes follow after its end")]
    Trailing {
        /// Number of bytes that follow.
        bytes: u64,
    },
    /// The header is not one of this kind of file.
    #[error("its header is not that of a {expected:?} file")]
    WrongKind {
        /// The kind it should have.
        expected: FileKind,
    },
    /// A version outside what this program reads.
    #[error("format version {found} is newer than {known}")]
    FutureVersion {
        /// The version found.
        found: u32,
        /// The newest known.
        known: u32,
    },
    /// A stored checksum, hash or authentication tag does not match.
    #[error("{what} does not match its contents")]
    Mismatch {
        /// The checksum, hash or tag.
        what: &'static str,
    },
    /// A field holds a value it cannot have.
    #[error("{what}")]
    Invalid {
        /// The field, and the reason.
        what: String,
    },
}

impl FormatError {
    pub(crate) fn invalid(what: impl Into<String>) -> FormatError {
        FormatError::Invalid { what: what.into() }
    }
}

/// The header of a file of `kind`: magic, kind, version, and a checksum of the three. A flipped bit of the
/// version is thereby reported as damage, not as a future version.
pub fn header(kind: FileKind) -> [u8; HEADER_BYTES] {
    header_of_version(kind, FORMAT_VERSION)
}

pub(crate) fn header_of_version(kind: FileKind, version: u32) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..4].copy_from_slice(MAGIC);
    bytes[4..8].copy_from_slice(kind.tag());
    bytes[8..12].copy_from_slice(&version.to_le_bytes());
    let check = *blake3::hash(&bytes[..12]).as_bytes();
    bytes[12..].copy_from_slice(&check[..4]);
    bytes
}

/// Reads a header of the version that this program knows.
pub fn read_header(bytes: &mut Cursor<'_>, kind: FileKind) -> Result<(), FormatError> {
    let found: [u8; HEADER_BYTES] = bytes.array()?;
    if found[..4] != MAGIC[..] || found[4..8] != kind.tag()[..] {
        return Err(FormatError::WrongKind { expected: kind });
    }
    let version = u32::from_le_bytes([found[8], found[9], found[10], found[11]]);
    if found != header_of_version(kind, version) {
        return Err(FormatError::Mismatch {
            what: "its header checksum",
        });
    }
    match version {
        FORMAT_VERSION => Ok(()),
        found if found < FORMAT_VERSION => Err(FormatError::invalid(format!(
            "it has format version {found}, which no released program wrote; this one knows version {FORMAT_VERSION}"
        ))),
        found => Err(FormatError::FutureVersion {
            found,
            known: FORMAT_VERSION,
        }),
    }
}

/// Reads little-endian numbers and byte strings from the front of a slice. Never panics, and never allocates
/// memory by a number that it has read.
#[derive(Debug, Clone)]
pub struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    /// A cursor at the start of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { rest: bytes }
    }

    /// Number of bytes left.
    pub fn left(&self) -> usize {
        self.rest.len()
    }

    /// The next `len` bytes.
    pub fn take(&mut self, len: usize) -> Result<&'a [u8], FormatError> {
        let Some((taken, rest)) = self.rest.split_at_checked(len) else {
            return Err(FormatError::Truncated {
                needed: len as u64,
                left: self.rest.len() as u64,
            });
        };
        self.rest = rest;
        Ok(taken)
    }

    /// The next `N` bytes as an array.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let Some((taken, rest)) = self.rest.split_first_chunk::<N>() else {
            return Err(FormatError::Truncated {
                needed: N as u64,
                left: self.rest.len() as u64,
            });
        };
        self.rest = rest;
        Ok(*taken)
    }

    /// The next byte.
    pub fn u8(&mut self) -> Result<u8, FormatError> {
        Ok(self.array::<1>()?[0])
    }

    /// The next four bytes as a number.
    pub fn u32(&mut self) -> Result<u32, FormatError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// The next eight bytes as a number.
    pub fn u64(&mut self) -> Result<u64, FormatError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// The next number of 1 to 5 bytes (`stillframe_page::varint`).
    pub fn varint(&mut self) -> Result<u32, FormatError> {
        varint::take(&mut self.rest).map_err(|error| FormatError::invalid(error.to_string()))
    }

    /// A count of items of at least `item_bytes` bytes each. A count whose items do not fit the remaining bytes
    /// is an error, so those bytes bound the memory taken.
    pub fn count(&mut self, item_bytes: usize) -> Result<usize, FormatError> {
        let count = self.u32()? as usize;
        let needed = count as u64 * item_bytes as u64;
        if needed > self.rest.len() as u64 {
            return Err(FormatError::Truncated {
                needed,
                left: self.rest.len() as u64,
            });
        }
        Ok(count)
    }

    /// An error unless every byte was read.
    pub fn finish(self) -> Result<(), FormatError> {
        match self.rest.len() as u64 {
            0 => Ok(()),
            bytes => Err(FormatError::Trailing { bytes }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_back_and_every_flipped_bit_is_damage() {
        let good = header(FileKind::Pack);
        assert_eq!(read_header(&mut Cursor::new(&good), FileKind::Pack), Ok(()));
        assert!(read_header(&mut Cursor::new(&good), FileKind::Index).is_err());
        for bit in 0..HEADER_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            let error = read_header(&mut Cursor::new(&bad), FileKind::Pack).unwrap_err();
            assert!(
                !matches!(error, FormatError::FutureVersion { .. }),
                "bit {bit}"
            );
        }
    }

    #[test]
    fn a_future_version_is_reported() {
        let next = header_of_version(FileKind::Config, FORMAT_VERSION + 1);
        assert_eq!(
            read_header(&mut Cursor::new(&next), FileKind::Config),
            Err(FormatError::FutureVersion {
                found: FORMAT_VERSION + 1,
                known: FORMAT_VERSION
            })
        );
    }

    #[test]
    fn a_count_larger_than_the_bytes_is_refused() {
        let bytes = u32::MAX.to_le_bytes();
        assert!(Cursor::new(&bytes).count(36).is_err());
    }
}
