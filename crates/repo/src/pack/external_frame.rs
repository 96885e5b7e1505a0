//! Frames of external packs: the place of some blocks in an image.
//!
//! ```text
//! | image 16 | offset in the image 8 |
//! ```

use crate::format::image_record::{IMAGE_ID_BYTES, ImageId};
use crate::format::layout::{Cursor, FormatError};

/// Where the content of a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExternalPlace {
    /// The image.
    pub image: ImageId,
    /// The offset of its first byte.
    pub offset: u64,
}

impl ExternalPlace {
    /// Encodes the payload of a frame.
    pub fn encode(&self) -> [u8; IMAGE_ID_BYTES + 8] {
        let mut bytes = [0; IMAGE_ID_BYTES + 8];
        bytes[..IMAGE_ID_BYTES].copy_from_slice(&ImageId::encode(Some(self.image)));
        bytes[IMAGE_ID_BYTES..].copy_from_slice(&self.offset.to_le_bytes());
        bytes
    }

    /// Decodes the payload of a frame.
    pub fn decode(payload: &[u8]) -> Result<ExternalPlace, FormatError> {
        let mut cursor = Cursor::new(payload);
        let image = ImageId::decode(cursor.array()?);
        let image = image.ok_or_else(|| FormatError::invalid("a frame of it names no image"))?;
        let offset = u64::from_le_bytes(cursor.array()?);
        cursor.finish()?;
        Ok(ExternalPlace { image, offset })
    }
}
