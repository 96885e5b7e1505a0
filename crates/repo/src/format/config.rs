//! The file `config`: it marks a directory as a repository, with its format version and id.

use crate::format::layout::{Cursor, FileKind, FormatError, header, read_header};

/// The repository's random identity; all its keys are bound to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RepositoryId(pub [u8; 16]);

impl std::fmt::Display for RepositoryId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Encodes the file: header, id, checksum.
pub fn encode(id: RepositoryId) -> Vec<u8> {
    let mut bytes = header(FileKind::Config).to_vec();
    bytes.extend_from_slice(&id.0);
    let checksum = *blake3::hash(&bytes).as_bytes();
    bytes.extend_from_slice(&checksum);
    bytes
}

/// Decodes the file.
pub fn decode(bytes: &[u8]) -> Result<RepositoryId, FormatError> {
    let mut cursor = Cursor::new(bytes);
    read_header(&mut cursor, FileKind::Config)?;
    let id = RepositoryId(cursor.array()?);
    let checked = bytes.len() - cursor.left();
    if cursor.array()? != *blake3::hash(&bytes[..checked]).as_bytes() {
        return Err(FormatError::Mismatch {
            what: "its checksum",
        });
    }
    cursor.finish()?;
    Ok(id)
}
