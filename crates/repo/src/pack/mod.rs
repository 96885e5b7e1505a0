//! Packs: the files that hold the blobs. This is the format; [`packer`] writes, `crate::blobs` reads.
//!
//! ```text
//! | header 16 | salt 32 | frame 0 | frame 1 | ... | directory | tail 8 |
//! ```
//!
//! A frame is a few blobs compressed and sealed together (about 64 KiB before compression). The sealed directory
//! lists frames and blobs; the tail locates the directory. A pack's name is the plain BLAKE3 hash of all its
//! bytes, so a store can be scrubbed without the password.
//!
//! The frames of an *external pack* have no content: each is the place of some blocks in an image outside of the
//! repository (`crate::images`). Its directory names the image.

pub mod external_frame;
pub(crate) mod open;
pub(crate) mod packer;
pub(crate) mod place;

use stillframe_page::hash::ContentId;

use crate::crypto::{Cipher, Keys, Nonce, SALT_BYTES, TAG_BYTES, random};
use crate::error::RepoError;
use crate::format::file_hash::FileHash;
use crate::format::image_record::{IMAGE_ID_BYTES, ImageId};
use crate::format::layout::{Cursor, FileKind, FormatError, HEADER_BYTES, header, read_header};

/// Bytes before the first frame.
pub const PREAMBLE_BYTES: usize = HEADER_BYTES + SALT_BYTES;

/// Bytes after the directory.
pub const TAIL_BYTES: usize = 8;

/// Length in bytes at which a pack is closed.
pub(crate) const PACK_BYTES_TARGET: u64 = 64 << 20;

/// Limits of the packs that are written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackLimits {
    /// Length in bytes of the frames at which a pack is closed.
    pub(crate) stored_bytes: u64,
    /// Length in bytes of the plain directory at which a pack is closed, however well its blobs compress. The
    /// directory is in memory until an index file describes the pack.
    pub(crate) directory_bytes: usize,
}

impl PackLimits {
    /// The limits, except in tests.
    pub(crate) const STANDARD: PackLimits = PackLimits {
        stored_bytes: PACK_BYTES_TARGET,
        directory_bytes: 16 << 20,
    };
}

/// Maximum length in bytes of a pack that is read. Offsets of frames fit 32 bits.
pub const PACK_BYTES_MAX: u64 = 1 << 30;

/// Plain bytes at which a frame is closed: zstd has gained nearly all it can at this size, while one page still
/// costs only 64 KiB of decompression (figures: `docs/format.md`).
pub(crate) const FRAME_PLAIN_TARGET: usize = 64 << 10;

/// Maximum length in bytes of a blob, and so of a frame: a root table of 2 TiB of 4 KiB pages fits.
pub const BLOB_BYTES_MAX: usize = 32 << 20;

/// A frame as the directory describes it. Its blobs are adjacent in its plain bytes; the frames are adjacent in
/// the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// How its bytes are encoded (`stillframe_page::encoding::Kind`).
    pub kind: u8,
    /// Bytes in the file, with the authentication tag.
    pub stored_bytes: u32,
    /// Bytes before encoding.
    pub plain_bytes: u32,
    /// Its blobs, and the length of each.
    pub blobs: Vec<(ContentId, u32)>,
}

/// The frames of a pack, in file order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Directory {
    /// The image that has the content of its frames, if the pack is an external one.
    pub image: Option<ImageId>,
    /// The frames.
    pub frames: Vec<Frame>,
}

/// A pack as an index file describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexedPack {
    /// The pack's name.
    pub pack: FileHash,
    /// What is in it.
    pub directory: Directory,
}

/// Bytes that a frame takes in the directory, without its blobs.
pub(crate) const FRAME_ENTRY_BYTES: usize = 1 + 4 + 4 + 4;
const BLOB_ENTRY_BYTES: usize = 32 + 4;

/// Bytes of a directory without its frames.
const DIRECTORY_HEAD_BYTES: usize = IMAGE_ID_BYTES + 4;

/// The kind of all frames of an external pack, and of no other.
pub const KIND_EXTERNAL: u8 = 128;

/// Bytes that a frame of `blobs` blobs takes in the directory.
pub(crate) fn frame_entry_bytes(blobs: usize) -> usize {
    FRAME_ENTRY_BYTES + blobs * BLOB_ENTRY_BYTES
}

impl Directory {
    /// Encodes the directory in plain form.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.encoded_bytes());
        bytes.extend_from_slice(&ImageId::encode(self.image));
        bytes.extend_from_slice(&(self.frames.len() as u32).to_le_bytes());
        for frame in &self.frames {
            encode_frame(frame, &mut bytes);
        }
        bytes
    }

    /// Length of the plain form.
    pub fn encoded_bytes(&self) -> usize {
        let frames = self.frames.iter();
        DIRECTORY_HEAD_BYTES
            + frames
                .map(|frame| frame_entry_bytes(frame.blobs.len()))
                .sum::<usize>()
    }

    /// Decodes a directory in plain form. The result is consistent: lengths add up and stay within the limits.
    pub fn decode(bytes: &[u8]) -> Result<Directory, FormatError> {
        let mut cursor = Cursor::new(bytes);
        let image = ImageId::decode(cursor.array()?);
        let count = cursor.count(FRAME_ENTRY_BYTES)?;
        let mut frames = Vec::with_capacity(count);
        for _ in 0..count {
            frames.push(decode_frame(&mut cursor)?);
        }
        cursor.finish()?;
        ensure_kinds(image, &frames)?;
        let directory = Directory { image, frames };
        if directory.file_bytes() > PACK_BYTES_MAX {
            return Err(FormatError::invalid(
                "its frames make a pack beyond the limit",
            ));
        }
        Ok(directory)
    }

    /// Number of blobs.
    pub(crate) fn blobs(&self) -> usize {
        self.frames.iter().map(|frame| frame.blobs.len()).sum()
    }

    /// Length in bytes of the pack with this directory.
    pub fn file_bytes(&self) -> u64 {
        let frames: u64 = self.frames.iter().map(|f| u64::from(f.stored_bytes)).sum();
        (PREAMBLE_BYTES + self.encoded_bytes() + TAG_BYTES + TAIL_BYTES) as u64 + frames
    }
}

/// An error unless all of the frames are external, or none, as the pack is.
pub(crate) fn ensure_kinds(image: Option<ImageId>, frames: &[Frame]) -> Result<(), FormatError> {
    let is_external = |frame: &Frame| frame.kind == KIND_EXTERNAL;
    match frames
        .iter()
        .all(|frame| is_external(frame) == image.is_some())
    {
        true => Ok(()),
        false => Err(FormatError::invalid(
            "its directory mixes blocks of an image with content",
        )),
    }
}

/// Appends the entry of a frame in a directory.
pub(crate) fn encode_frame(frame: &Frame, bytes: &mut Vec<u8>) {
    bytes.push(frame.kind);
    bytes.extend_from_slice(&frame.stored_bytes.to_le_bytes());
    bytes.extend_from_slice(&frame.plain_bytes.to_le_bytes());
    bytes.extend_from_slice(&(frame.blobs.len() as u32).to_le_bytes());
    for (id, length) in &frame.blobs {
        bytes.extend_from_slice(&id.0);
        bytes.extend_from_slice(&length.to_le_bytes());
    }
}

/// The inverse of [`encode_frame`]; the lengths add up.
pub(crate) fn decode_frame(cursor: &mut Cursor<'_>) -> Result<Frame, FormatError> {
    let kind = cursor.u8()?;
    let stored_bytes = cursor.u32()?;
    let plain_bytes = cursor.u32()?;
    let count = cursor.count(BLOB_ENTRY_BYTES)?;
    let (entries, _) = cursor.take(count * BLOB_ENTRY_BYTES)?.as_chunks();
    let blobs: Vec<(ContentId, u32)> = entries
        .iter()
        .map(|&[ref id @ .., a, b, c, d]: &[u8; BLOB_ENTRY_BYTES]| {
            (ContentId(*id), u32::from_le_bytes([a, b, c, d]))
        })
        .collect();
    if blobs.iter().any(|&(_, length)| length == 0) {
        return Err(FormatError::invalid("its directory names an empty blob"));
    }
    let sum: u64 = blobs.iter().map(|&(_, length)| u64::from(length)).sum();
    // An unknown kind is reported when the frame is read; lengths must be valid before that.
    let stored_least = TAG_BYTES as u32;
    if sum != u64::from(plain_bytes)
        || plain_bytes as usize > BLOB_BYTES_MAX
        || count == 0
        || stored_bytes < stored_least
        || stored_bytes - stored_least > plain_bytes
    {
        return Err(FormatError::invalid(
            "lengths in its directory do not add up",
        ));
    }
    Ok(Frame {
        kind,
        stored_bytes,
        plain_bytes,
        blobs,
    })
}

/// The start of a pack: header and salt, from which its key follows.
pub(crate) type Preamble = [u8; PREAMBLE_BYTES];

/// A preamble with a fresh salt.
pub(crate) fn new_preamble() -> Result<Preamble, RepoError> {
    let mut preamble = [0; PREAMBLE_BYTES];
    preamble[..HEADER_BYTES].copy_from_slice(&header(FileKind::Pack));
    preamble[HEADER_BYTES..].copy_from_slice(&random::<SALT_BYTES>()?);
    Ok(preamble)
}

/// Decodes the preamble and returns the salt.
pub fn decode_preamble(bytes: &[u8]) -> Result<[u8; SALT_BYTES], FormatError> {
    let mut cursor = Cursor::new(bytes);
    read_header(&mut cursor, FileKind::Pack)?;
    cursor.array()
}

/// The associated data of a frame: the preamble of the pack, and the frame's entry in the directory. Its number
/// is the nonce, so a sealed frame is valid at one position of one pack only.
fn frame_bound(preamble: &Preamble, kind: u8, plain_bytes: u32) -> [u8; PREAMBLE_BYTES + 5] {
    let mut bound = [0; PREAMBLE_BYTES + 5];
    bound[..PREAMBLE_BYTES].copy_from_slice(preamble);
    bound[PREAMBLE_BYTES] = kind;
    bound[PREAMBLE_BYTES + 1..].copy_from_slice(&plain_bytes.to_le_bytes());
    bound
}

/// The cipher of one pack.
pub(crate) struct PackCipher {
    cipher: Cipher,
    preamble: Preamble,
}

impl PackCipher {
    pub(crate) fn new(keys: &Keys, preamble: Preamble) -> Result<PackCipher, FormatError> {
        let salt = decode_preamble(&preamble)?;
        Ok(PackCipher {
            cipher: keys.pack_cipher(&salt),
            preamble,
        })
    }

    pub(crate) fn preamble(&self) -> &Preamble {
        &self.preamble
    }

    /// Seals an encoded frame in place.
    pub(crate) fn seal_frame(&self, number: u32, kind: u8, plain_bytes: u32, bytes: &mut Vec<u8>) {
        let bound = frame_bound(&self.preamble, kind, plain_bytes);
        self.cipher.seal(Nonce::Frame(number), &bound, bytes, 0);
    }

    /// Opens a frame in place; the result is still encoded.
    pub(crate) fn open_frame<'a>(
        &self,
        number: u32,
        kind: u8,
        plain_bytes: u32,
        sealed: &'a mut [u8],
    ) -> Result<&'a [u8], FormatError> {
        let bound = frame_bound(&self.preamble, kind, plain_bytes);
        self.cipher.open(Nonce::Frame(number), &bound, sealed)
    }

    /// The bytes that end a pack: sealed directory and tail.
    pub(crate) fn seal_directory(&self, directory: &Directory) -> Vec<u8> {
        let mut bytes = directory.encode();
        let tail = encode_tail(
            directory.frames.len() as u32,
            (bytes.len() + TAG_BYTES) as u32,
        );
        let bound = [&self.preamble[..], &tail].concat();
        self.cipher.seal(Nonce::Body, &bound, &mut bytes, 0);
        bytes.extend_from_slice(&tail);
        bytes
    }

    /// Opens a sealed directory; `tail` is the pack's last bytes.
    pub(crate) fn open_directory(
        &self,
        tail: [u8; TAIL_BYTES],
        sealed: &mut [u8],
    ) -> Result<Directory, FormatError> {
        let bound = [&self.preamble[..], &tail].concat();
        let plain = self.cipher.open(Nonce::Body, &bound, sealed)?;
        Directory::decode(plain)
    }
}

fn encode_tail(frames: u32, directory_bytes: u32) -> [u8; TAIL_BYTES] {
    let mut tail = [0; TAIL_BYTES];
    tail[..4].copy_from_slice(&frames.to_le_bytes());
    tail[4..].copy_from_slice(&directory_bytes.to_le_bytes());
    tail
}

/// Decodes the tail: where in a pack of `file_bytes` bytes the sealed directory lies.
pub fn decode_tail(
    tail: [u8; TAIL_BYTES],
    file_bytes: u64,
) -> Result<std::ops::Range<u64>, FormatError> {
    let [a, b, c, d, e, f, g, h] = tail;
    let (frames, length) = (
        u32::from_le_bytes([a, b, c, d]),
        u64::from(u32::from_le_bytes([e, f, g, h])),
    );
    let least =
        (TAG_BYTES + DIRECTORY_HEAD_BYTES) as u64 + u64::from(frames) * FRAME_ENTRY_BYTES as u64;
    let room = file_bytes.saturating_sub((PREAMBLE_BYTES + TAIL_BYTES) as u64);
    if file_bytes > PACK_BYTES_MAX || length > room || length < least {
        return Err(FormatError::invalid("its tail does not fit its length"));
    }
    let end = file_bytes - TAIL_BYTES as u64;
    Ok(end - length..end)
}
