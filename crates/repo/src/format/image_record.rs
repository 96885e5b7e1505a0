//! The contents of the file of an image: which file outside of the repository has the blocks of external packs.

use std::fmt;
use std::num::NonZeroU128;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use stillframe_page::hash::ContentId;

use crate::format::id_text;
use crate::format::layout::FormatError;

/// Length in bytes of an image's id.
pub(crate) const IMAGE_ID_BYTES: usize = 16;

/// Maximum length in bytes of the path of an image.
const PATH_BYTES_MAX: usize = 4096;

/// A random number that names an indexed image. An image whose content changes and is indexed again gets another.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageId(NonZeroU128);

impl ImageId {
    /// The id of these bytes; none if all are zero.
    pub fn decode(bytes: [u8; IMAGE_ID_BYTES]) -> Option<ImageId> {
        NonZeroU128::new(u128::from_be_bytes(bytes)).map(ImageId)
    }

    /// The inverse of [`ImageId::decode`].
    pub fn encode(id: Option<ImageId>) -> [u8; IMAGE_ID_BYTES] {
        id.map_or(0, |id| id.0.get()).to_be_bytes()
    }

    /// The inverse of its text; `None` unless `text` is 32 lower-case hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<ImageId> {
        let id = u128::from_str_radix(text, 16).ok()?;
        let id = ImageId(NonZeroU128::new(id)?);
        (id.to_string() == text).then_some(id)
    }
}

impl fmt::Display for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ImageId({self})")
    }
}

impl TryFrom<String> for ImageId {
    type Error = &'static str;

    fn try_from(text: String) -> Result<ImageId, &'static str> {
        ImageId::from_hex(&text).ok_or("an image id that is not 32 hexadecimal digits")
    }
}

impl From<ImageId> for String {
    fn from(id: ImageId) -> String {
        id.to_string()
    }
}

/// An indexed image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageRecord {
    /// Its id, which is also the file's name.
    pub id: ImageId,
    /// The absolute path at which it was indexed last.
    pub path: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// When it was last changed, as its file system said.
    pub modified: Timestamp,
    /// Keyed hash of all ids of its blocks and of where they lie: images of equal content have equal ones.
    #[serde(with = "id_text")]
    pub content: ContentId,
    /// Number of its blocks of 4 KiB that are in external packs.
    pub blocks: u64,
    /// When it was indexed.
    pub indexed: Timestamp,
}

/// Decodes the plain body of an image's file.
pub fn decode(body: &[u8]) -> Result<ImageRecord, FormatError> {
    let record: ImageRecord = serde_json::from_slice(body)
        .map_err(|error| FormatError::invalid(format!("it does not describe an image: {error}")))?;
    match record.path.starts_with('/') && record.path.len() <= PATH_BYTES_MAX {
        true => Ok(record),
        false => Err(FormatError::invalid("it names no absolute path")),
    }
}

impl ImageRecord {
    /// Encodes the plain body.
    pub fn encode(&self) -> Vec<u8> {
        // Strings and numbers under string keys: serialization cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }
}
