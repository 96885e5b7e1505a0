//! What the fuzz targets reach of index files: one whose head, parts and sections are all given, sealed as if its
//! author had the key.

use zeroize::Zeroizing;

use super::{FRONT_BYTES, FileKind, OpenIndex, compare_sections, head_bytes, header, visit_parts};
use crate::crypto::{Keys, SALT_BYTES, TAG_BYTES, Use};
use crate::format::layout::FormatError;
use crate::index::layout::Head;

/// Reads a file that has `head`, and behind it parts and sections as long as the head says, made from `rest`
/// as far as that goes. How many blobs its parts hold, where its sections agree.
pub fn whole(head: &[u8], mut rest: &[u8]) -> Result<usize, FormatError> {
    const SALT: [u8; SALT_BYTES] = [0; SALT_BYTES];
    let keys = Keys::derive(&Zeroizing::new([1; 32]));
    let cipher = keys.index_cipher(&SALT);
    let preamble = [&header(FileKind::Index)[..], &SALT].concat();
    let head_length = ((head.len() + TAG_BYTES) as u32).to_le_bytes();
    let mut file = [&preamble[..], &head_length, head].concat();
    let bound = file[..FRONT_BYTES].to_vec();
    cipher.seal((Use::Body, 0), &bound, &mut file, FRONT_BYTES);
    let lengths = Head::decode(head).unwrap_or_default();
    for (purpose, lengths) in [(Use::Part, lengths.parts), (Use::Section, lengths.sections)] {
        for (number, length) in (0..).zip(lengths) {
            let plain = (length as usize).saturating_sub(TAG_BYTES).min(rest.len());
            let start = file.len();
            file.extend_from_slice(&rest[..plain]);
            rest = &rest[plain..];
            cipher.seal((purpose, number), &preamble, &mut file, start);
        }
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
