//! How a run of page bytes is written down: as nothing (all zero), as it is, or compressed.
//!
//! One encoder works on one page or on a frame of many; the caller keeps the kind and the plain length beside the
//! payload. Decoding trusts nothing: it never makes more than the given plain length, and fails unless it makes
//! exactly that.

use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};
use thiserror::Error;
use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::compress_bound;

use crate::is_zero;

/// The kind of a payload. The numbers are part of the repository format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Every plain byte is zero; the payload is empty.
    Zero = 0,
    /// The payload is the plain bytes.
    Raw = 1,
    /// The payload is one Zstandard frame (RFC 8878).
    Zstd = 2,
    /// The payload is one LZ4 block. Only connections have it.
    Lz4 = 3,
}

impl Kind {
    /// The kind a stored number stands for.
    pub fn from_number(number: u8) -> Result<Kind, EncodingError> {
        match number {
            0 => Ok(Kind::Zero),
            1 => Ok(Kind::Raw),
            2 => Ok(Kind::Zstd),
            3 => Ok(Kind::Lz4),
            _ => Err(EncodingError::UnknownKind { kind: number }),
        }
    }

    /// The stored number.
    pub fn number(self) -> u8 {
        self as u8
    }
}

/// Why bytes could not be encoded or decoded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EncodingError {
    /// A kind no version of the format has used so far.
    #[error("page encoding {kind} is unknown: damaged data, or written by a newer version")]
    UnknownKind {
        /// The number found.
        kind: u8,
    },
    /// The payload does not give the number of bytes it should.
    #[error("encoded data should give {expected} bytes but gives {found}")]
    WrongLength {
        /// The requested length in plain bytes.
        expected: usize,
        /// Plain bytes the payload holds.
        found: usize,
    },
    /// A zero run that carries payload bytes.
    #[error("a run of zeros carries {bytes} payload bytes where it should carry none")]
    PayloadOnZero {
        /// Payload bytes found.
        bytes: usize,
    },
    /// The compressor refused.
    #[error("compression failed")]
    Compress(#[source] std::io::Error),
    /// The same, of LZ4.
    #[error("compression failed")]
    CompressLz4(#[source] lz4_flex::block::CompressError),
    /// The compressed payload is malformed or larger than it should be.
    #[error("compressed data is malformed")]
    Decompress(#[source] std::io::Error),
    /// The same, of LZ4.
    #[error("compressed data is malformed")]
    DecompressLz4(#[source] lz4_flex::block::DecompressError),
}

/// How bytes that are not all zero are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Compression {
    /// Not at all.
    None,
    /// As an LZ4 block.
    Lz4,
    /// With Zstandard at this level; negative ones are faster.
    Zstd(i32),
}

/// Encodes runs of bytes. Holds a compression context: make one per thread and keep it.
pub struct Encoder {
    compression: Compression,
    zstd: Compressor<'static>,
}

/// Compression must win at least 1/16 of the length; below that reading it back costs more time
/// than the bytes are worth.
const GAIN_SHARE_MIN: usize = 16;

impl Encoder {
    /// An encoder that compresses in this way.
    ///
    /// # Errors
    /// There is no memory for it, or Zstandard has no such level.
    pub fn new(compression: Compression) -> Result<Encoder, EncodingError> {
        let mut encoder = Encoder {
            compression: Compression::None,
            zstd: Compressor::default(),
        };
        encoder.set(compression)?;
        Ok(encoder)
    }

    /// Compresses in this way from now on.
    ///
    /// # Errors
    /// Zstandard has no such level.
    pub fn set(&mut self, compression: Compression) -> Result<(), EncodingError> {
        if let Compression::Zstd(level) = compression {
            let set = self.zstd.set_compression_level(level);
            set.map_err(EncodingError::Compress)?;
        }
        self.compression = compression;
        Ok(())
    }

    /// Appends the payload of `plain` to `out` and returns its kind. `out` keeps its content.
    ///
    /// # Errors
    /// The compressor failed.
    pub fn encode(&mut self, plain: &[u8], out: &mut Vec<u8>) -> Result<Kind, EncodingError> {
        if is_zero(plain) {
            return Ok(Kind::Zero);
        }
        let start = out.len();
        if let Some(kind) = self.compress(plain, out)? {
            if out.len() - start <= plain.len() - plain.len().div_ceil(GAIN_SHARE_MIN) {
                return Ok(kind);
            }
            out.truncate(start);
        }
        out.extend_from_slice(plain);
        Ok(Kind::Raw)
    }

    /// Appends the compressed bytes, if they are compressed at all.
    fn compress(&mut self, plain: &[u8], out: &mut Vec<u8>) -> Result<Option<Kind>, EncodingError> {
        let start = out.len();
        let (kind, bytes) = match self.compression {
            Compression::None => return Ok(None),
            Compression::Lz4 => {
                out.resize(start + get_maximum_output_size(plain.len()), 0);
                let packed = compress_into(plain, &mut out[start..]);
                (Kind::Lz4, packed.map_err(EncodingError::CompressLz4)?)
            }
            Compression::Zstd(_) => {
                out.resize(start + compress_bound(plain.len()), 0);
                let packed = self.zstd.compress_to_buffer(plain, &mut out[start..]);
                (Kind::Zstd, packed.map_err(EncodingError::Compress)?)
            }
        };
        out.truncate(start + bytes);
        Ok(Some(kind))
    }
}

/// Decodes what [`Encoder`] made. Holds a decompression context: make one per thread.
pub struct Decoder {
    decompressor: Decompressor<'static>,
}

impl Decoder {
    /// A decoder.
    pub fn new() -> Result<Decoder, EncodingError> {
        let decompressor = Decompressor::new().map_err(EncodingError::Decompress)?;
        Ok(Decoder { decompressor })
    }

    /// Replaces the contents of `out` by the `plain_bytes` bytes that `payload` stands for. The
    /// caller bounds `plain_bytes`; on an error `out` is empty.
    pub fn decode(
        &mut self,
        kind: u8,
        payload: &[u8],
        plain_bytes: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), EncodingError> {
        // The old content of the buffer is overwritten: clearing it would fill it with zeros first, again for each frame.
        out.resize(plain_bytes, 0);
        let decoded = self.decode_into(kind, payload, out);
        decoded.inspect_err(|_| out.clear())
    }

    /// Fills `out` with the bytes that `payload` stands for. After an error its content is of no use.
    ///
    /// # Errors
    /// `payload` is damaged, or stands for another number of bytes.
    pub fn decode_into(
        &mut self,
        kind: u8,
        payload: &[u8],
        out: &mut [u8],
    ) -> Result<(), EncodingError> {
        let found = match Kind::from_number(kind)? {
            Kind::Zero if !payload.is_empty() => {
                return Err(EncodingError::PayloadOnZero {
                    bytes: payload.len(),
                });
            }
            Kind::Zero => {
                out.fill(0);
                out.len()
            }
            Kind::Raw => {
                if payload.len() == out.len() {
                    out.copy_from_slice(payload);
                }
                payload.len()
            }
            kind @ (Kind::Zstd | Kind::Lz4) => self.decompress(kind, payload, out)?,
        };
        match found == out.len() {
            true => Ok(()),
            false => Err(EncodingError::WrongLength {
                expected: out.len(),
                found,
            }),
        }
    }

    /// Returns how many bytes there are.
    fn decompress(
        &mut self,
        kind: Kind,
        payload: &[u8],
        out: &mut [u8],
    ) -> Result<usize, EncodingError> {
        if kind == Kind::Lz4 {
            return decompress_into(payload, out).map_err(EncodingError::DecompressLz4);
        }
        let made = self.decompressor.decompress_to_buffer(payload, out);
        made.map_err(EncodingError::Decompress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ZSTD: Compression = Compression::Zstd(1);

    fn encode_with(compression: Compression, plain: &[u8]) -> (Kind, Vec<u8>) {
        let mut out = Vec::new();
        let mut encoder = Encoder::new(compression).unwrap();
        let kind = encoder.encode(plain, &mut out).unwrap();
        (kind, out)
    }

    fn encode(plain: &[u8]) -> (Kind, Vec<u8>) {
        encode_with(ZSTD, plain)
    }

    fn compression() -> impl Strategy<Value = Compression> {
        prop_oneof![
            Just(Compression::None),
            Just(Compression::Lz4),
            (-7..=19).prop_map(Compression::Zstd),
        ]
    }

    fn decode(kind: u8, payload: &[u8], plain_bytes: usize) -> Result<Vec<u8>, EncodingError> {
        let mut out = vec![1, 2, 3];
        let result = Decoder::new()
            .unwrap()
            .decode(kind, payload, plain_bytes, &mut out);
        if result.is_err() {
            assert!(out.is_empty());
        }
        result.map(|()| out)
    }

    /// Bytes of every compressibility: repeats of a few symbols up to noise.
    fn plain() -> impl Strategy<Value = Vec<u8>> {
        (0_u8..=8, prop::collection::vec(any::<u8>(), 0..9000)).prop_map(|(bits, mut bytes)| {
            let mask = u8::MAX.checked_shr(u32::from(8 - bits)).unwrap_or(0);
            bytes.iter_mut().for_each(|byte| *byte &= mask);
            bytes
        })
    }

    proptest! {
        #[test]
        fn round_trip(plain in plain(), compression in compression()) {
            let (kind, payload) = encode_with(compression, &plain);
            prop_assert!(payload.len() <= plain.len());
            prop_assert_eq!(decode(kind.number(), &payload, plain.len()).unwrap(), plain);
        }

        #[test]
        fn hostile_payloads_give_an_error_or_exactly_the_length_asked(
            kind: u8, payload in prop::collection::vec(any::<u8>(), 0..300), plain_bytes in 0..5000_usize,
        ) {
            if let Ok(out) = decode(kind, &payload, plain_bytes) {
                prop_assert_eq!(out.len(), plain_bytes);
            }
        }

        #[test]
        fn a_damaged_or_cut_payload_never_makes_more_than_asked(
            plain in plain(), lz4: bool, at: prop::sample::Index, bit in 0..8_u32, cut: bool, asked in 0..9000_usize,
        ) {
            let compression = if lz4 { Compression::Lz4 } else { ZSTD };
            let (kind, mut payload) = encode_with(compression, &plain);
            if !payload.is_empty() {
                let at = at.index(payload.len());
                if cut { payload.truncate(at) } else { payload[at] ^= 1_u8 << bit }
            }
            if let Ok(out) = decode(kind.number(), &payload, asked) {
                prop_assert_eq!(out.len(), asked);
            }
        }
    }

    #[test]
    fn each_kind_is_chosen_where_it_should_be() {
        assert_eq!(encode(&[0; 4096]), (Kind::Zero, vec![]));
        assert_eq!(encode(&[]).0, Kind::Zero);
        assert_eq!(encode(&[7; 4096]).0, Kind::Zstd);
        assert_eq!(encode_with(Compression::Lz4, &[7; 4096]).0, Kind::Lz4);
        assert_eq!(encode_with(Compression::None, &[7; 4096]).0, Kind::Raw);
        let mut state = 1_u64;
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (state >> 56) as u8
        })
        .take(65536)
        .collect();
        assert_eq!(encode(&noise), (Kind::Raw, noise.clone()));
        assert_eq!(encode_with(Compression::Lz4, &noise), (Kind::Raw, noise));
    }

    #[test]
    fn the_compression_changes_between_two_runs() {
        let mut out = Vec::new();
        let mut encoder = Encoder::new(Compression::Lz4).unwrap();
        assert_eq!(encoder.encode(&[7; 4096], &mut out).unwrap(), Kind::Lz4);
        encoder.set(Compression::Zstd(3)).unwrap();
        assert_eq!(encoder.encode(&[7; 4096], &mut out).unwrap(), Kind::Zstd);
    }

    #[test]
    fn encoding_appends() {
        let mut out = b"head".to_vec();
        let mut encoder = Encoder::new(ZSTD).unwrap();
        encoder.encode(&[7; 4096], &mut out).unwrap();
        assert!(out.starts_with(b"head"));
        assert_eq!(decode(2, &out[4..], 4096).unwrap(), vec![7; 4096]);
    }

    #[test]
    fn an_unknown_kind_is_named() {
        let error = decode(4, &[], 10).unwrap_err();
        assert!(matches!(error, EncodingError::UnknownKind { kind: 4 }));
    }

    #[test]
    fn a_payload_of_another_length_is_refused() {
        assert!(matches!(
            decode(1, &[1, 2], 3).unwrap_err(),
            EncodingError::WrongLength {
                expected: 3,
                found: 2
            }
        ));
        let (_, payload) = encode(&[7; 4096]);
        assert!(decode(2, &payload, 4095).is_err());
        assert!(decode(2, &payload, 4097).is_err());
        assert!(decode(0, &[0], 1).is_err());
    }
}
