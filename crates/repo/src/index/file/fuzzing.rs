//! The entry point of the fuzz targets for index files: a file with given head, parts and sections, sealed with a
//! known key.

use zeroize::Zeroizing;

use super::{FRONT_BYTES, FileKind, OpenIndex, compare_sections, head_bytes, header, visit_parts};
use crate::crypto::{Keys, Nonce, SALT_BYTES, TAG_BYTES};
use crate::format::layout::FormatError;
use crate::index::layout::Head;

/// Reads a file with `head`, and with parts and sections of the lengths in the head, filled from `rest`. Returns
/// the number of blobs of its parts, if its sections match them.
pub fn whole(head: &[u8], mut rest: &[u8]) -> Result<usize, FormatError> {
    const SALT: [u8; SALT_BYTES] = [0; SALT_BYTES];
    let keys = Keys::derive(&Zeroizing::new([1; 32]));
    let cipher = keys.index_cipher(&SALT);
    let preamble = [&header(FileKind::Index)[..], &SALT].concat();
    let head_length = ((head.len() + TAG_BYTES) as u32).to_le_bytes();
    let mut file = [&preamble[..], &head_length, head].concat();
    let bound = file[..FRONT_BYTES].to_vec();
    cipher.seal(Nonce::Body, &bound, &mut file, FRONT_BYTES);
    let lengths = Head::decode(head).unwrap_or_default();
    let parts = (0..).map(Nonce::Part).zip(lengths.parts);
    let sections = (0..).map(Nonce::Section).zip(lengths.sections);
    for (nonce, length) in parts.chain(sections) {
        let plain = (length as usize).saturating_sub(TAG_BYTES).min(rest.len());
        let start = file.len();
        file.extend_from_slice(&rest[..plain]);
        rest = &rest[plain..];
        cipher.seal(nonce, &preamble, &mut file, start);
    }
    let length = file.len() as u64;
    let bytes = head_bytes(&file)?;
    let open = OpenIndex::new(&keys, &mut file[..FRONT_BYTES + bytes], length)?;
    let mut blobs = 0;
    visit_parts(&open, &mut file.clone(), &mut |pack| {
        let frames = pack.directory.frames.iter();
        blobs += frames.map(|frame| frame.blobs.len()).sum::<usize>();
    })?;
    compare_sections(&open, &mut file)?;
    Ok(blobs)
}
