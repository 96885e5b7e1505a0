//! Opening packs and decoding their frames.

use std::fs::File;

use stillframe_page::encoding::Decoder;

use crate::crypto::Keys;
use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::format::layout::FormatError;
use crate::pack::place::FrameInfo;
use crate::pack::{PREAMBLE_BYTES, PackCipher};
use crate::store::local::{Area, LocalStore};
use crate::store::read_exact_at;

/// Opens a pack and reads its preamble.
pub(crate) fn open_pack(
    store: &LocalStore,
    keys: &Keys,
    name: FileHash,
) -> Result<(File, PackCipher, String), RepoError> {
    let text = name.to_string();
    let label = store.label(Area::Packs, &text);
    let file = match store.open(Area::Packs, &text) {
        Err(error) if error.is_absent() => {
            return Err(RepoError::Damaged {
                file: label,
                what: "it is missing".into(),
            });
        }
        other => other?,
    };
    let mut preamble = [0; PREAMBLE_BYTES];
    read_exact_at(&file, &mut preamble, 0, &label)?;
    let cipher =
        PackCipher::new(keys, preamble).map_err(|error| RepoError::format(&label, &error))?;
    Ok((file, cipher, label))
}

/// Decodes the opened content of a frame into `plain`.
pub(crate) fn decode_payload(
    decoder: &mut Decoder,
    number: u32,
    frame: FrameInfo,
    payload: &[u8],
    plain: &mut Vec<u8>,
) -> Result<(), FormatError> {
    decoder
        .decode(frame.kind, payload, frame.plain_bytes as usize, plain)
        .map_err(|error| FormatError::invalid(format!("frame {number}: {error}")))
}
