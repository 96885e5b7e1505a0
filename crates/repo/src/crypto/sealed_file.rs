//! Files with one sealed body: manifests, working sets and images.
//!
//! ```text
//! | header 16 | salt 32 | sealed body, the last 16 bytes its authentication tag |
//! ```

use crate::crypto::{Cipher, Keys, Nonce, SALT_BYTES, TAG_BYTES, random};
use crate::error::RepoError;
use crate::format::layout::{Cursor, FileKind, FormatError, HEADER_BYTES, header, read_header};

/// Seals a body as a file of its own key: header, salt, sealed body.
pub(crate) fn seal_file(
    kind: FileKind,
    keys: &Keys,
    mut body: Vec<u8>,
) -> Result<Vec<u8>, RepoError> {
    let salt = random::<SALT_BYTES>()?;
    let mut file = Vec::with_capacity(HEADER_BYTES + SALT_BYTES + body.len() + TAG_BYTES);
    file.extend_from_slice(&header(kind));
    file.extend_from_slice(&salt);
    let bound = file.clone();
    let start = file.len();
    file.append(&mut body);
    file_cipher(kind, keys, &salt).seal(Nonce::Body, &bound, &mut file, start);
    Ok(file)
}

/// The inverse of [`seal_file`]; decrypts in place.
pub(crate) fn open_file<'a>(
    kind: FileKind,
    keys: &Keys,
    file: &'a mut [u8],
) -> Result<&'a [u8], FormatError> {
    let mut cursor = Cursor::new(file);
    read_header(&mut cursor, kind)?;
    let salt = cursor.array::<SALT_BYTES>()?;
    let (bound, sealed) = file.split_at_mut(HEADER_BYTES + SALT_BYTES);
    file_cipher(kind, keys, &salt).open(Nonce::Body, bound, sealed)
}

fn file_cipher(kind: FileKind, keys: &Keys, salt: &[u8; SALT_BYTES]) -> Cipher {
    match kind {
        // Each has a salt of its own, and the header of its kind is authenticated.
        FileKind::Manifest | FileKind::WorkingSet | FileKind::Image => keys.manifest_cipher(salt),
        _ => keys.index_cipher(salt),
    }
}
