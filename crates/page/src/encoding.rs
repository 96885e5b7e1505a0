//! How a run of page bytes is written down: as nothing (all zero), as it is, or compressed.
//!
//! One encoder works on one page or on a frame of many; the caller keeps the kind and the plain length beside the
//! payload. Decoding trusts nothing: it never makes more than the given plain length, and fails unless it makes
//! exactly that.

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
}

impl Kind {
    /// The kind a stored number stands for.
    pub fn from_number(number: u8) -> Result<Kind, EncodingError> {
        match number {
            0 => Ok(Kind::Zero),
            1 => Ok(Kind::Raw),
            2 => Ok(Kind::Zstd),
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
    /// The compressed payload is malformed or larger than it should be.
    #[error("compressed data is malformed")]
    Decompress(#[source] std::io::Error),
}

/// Encodes runs of bytes. Holds a compression context: make one per thread and keep it.
pub struct Encoder {
    compressor: Compressor<'static>,
}

/// Compression must win at least 1/16 of the length; below that reading it back costs more time
/// than the bytes are worth.
const GAIN_SHARE_MIN: usize = 16;

impl Encoder {
    /// An encoder with a Zstandard level (the repository uses 1; negative is faster).
    pub fn new(level: i32) -> Result<Encoder, EncodingError> {
        let compressor = Compressor::new(level).map_err(EncodingError::Compress)?;
        Ok(Encoder { compressor })
    }

    /// Appends the payload of `plain` to `out` and returns its kind. `out` keeps its content.
    pub fn encode(&mut self, plain: &[u8], out: &mut Vec<u8>) -> Result<Kind, EncodingError> {
        if is_zero(plain) {
            return Ok(Kind::Zero);
        }
        let start = out.len();
        out.resize(start + compress_bound(plain.len()), 0);
        let packed = self.compressor.compress_to_buffer(plain, &mut out[start..]);
        let packed = packed.map_err(EncodingError::Compress)?;
        out.truncate(start + packed);
        if packed <= plain.len() - plain.len().div_ceil(GAIN_SHARE_MIN) {
            return Ok(Kind::Zstd);
        }
        out.truncate(start);
        out.extend_from_slice(plain);
        Ok(Kind::Raw)
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
        let kind = Kind::from_number(kind).inspect_err(|_| out.clear())?;
        // Decompression overwrites the old content of the buffer: clearing it would fill it with zeros first, again
        // for each frame.
        if kind != Kind::Zstd {
            out.clear();
        }
        match kind {
            Kind::Zero if !payload.is_empty() => {
                return Err(EncodingError::PayloadOnZero {
                    bytes: payload.len(),
                });
            }
            Kind::Zero => out.resize(plain_bytes, 0),
            Kind::Raw => out.extend_from_slice(payload),
            Kind::Zstd => self.decompress(payload, plain_bytes, out)?,
        }
        if out.len() != plain_bytes {
            let found = out.len();
            out.clear();
            return Err(EncodingError::WrongLength {
                expected: plain_bytes,
                found,
            });
        }
        Ok(())
    }

    fn decompress(
        &mut self,
        payload: &[u8],
        plain_bytes: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), EncodingError> {
        out.resize(plain_bytes, 0);
        match self
            .decompressor
            .decompress_to_buffer(payload, out.as_mut_slice())
        {
            Ok(made) => out.truncate(made),
            Err(cause) => {
                out.clear();
                return Err(EncodingError::Decompress(cause));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encode(plain: &[u8]) -> (Kind, Vec<u8>) {
        let mut out = Vec::new();
        let kind = Encoder::new(1).unwrap().encode(plain, &mut out).unwrap();
        (kind, out)
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
        fn round_trip(plain in plain()) {
            let (kind, payload) = encode(&plain);
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
            plain in plain(), at: prop::sample::Index, bit in 0..8_u32, cut: bool, asked in 0..9000_usize,
        ) {
            let (kind, mut payload) = encode(&plain);
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
        let mut state = 1_u64;
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (state >> 56) as u8
        })
        .take(65536)
        .collect();
        assert_eq!(encode(&noise), (Kind::Raw, noise));
    }

    #[test]
    fn encoding_appends() {
        let mut out = b"head".to_vec();
        let mut encoder = Encoder::new(1).unwrap();
        encoder.encode(&[7; 4096], &mut out).unwrap();
        assert!(out.starts_with(b"head"));
        assert_eq!(decode(2, &out[4..], 4096).unwrap(), vec![7; 4096]);
    }

    #[test]
    fn an_unknown_kind_is_named() {
        let error = decode(3, &[], 10).unwrap_err();
        assert!(matches!(error, EncodingError::UnknownKind { kind: 3 }));
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
