//! Keys and sealing. One random master key; everything else is derived from it.
//!
//! ```text
//! password --argon2id(salt, cost)--> wrapping key --AES-256-GCM--> master key (random, 32 bytes)
//! master --BLAKE3 derive_key(context)--> content-id key, checkpoint-id key,
//!                                        pack key, index key, manifest key
//! pack / index / manifest key --keyed BLAKE3(the file's random 32-byte salt)--> that file's key
//! ```
//!
//! A file's key is used for that file alone, so nonces are plain counters and never repeat under one key, however
//! many files a repository has.

pub mod key_file;
pub(crate) mod sealed_file;

use ring::aead::{self, AES_256_GCM, Aad, LessSafeKey, UnboundKey};
use stillframe_page::hash::ContentHasher;
use zeroize::Zeroizing;

use crate::error::RepoError;
use crate::format::layout::FormatError;

/// Bytes that sealing adds: the authentication tag.
pub(crate) const TAG_BYTES: usize = 16;

/// Bytes of the random salt each sealed file carries.
pub(crate) const SALT_BYTES: usize = 32;

const CONTENT_ID: &str = "stillframe repository 1 content id key";
const CHECKPOINT_ID: &str = "stillframe repository 1 checkpoint id key";
const PACK: &str = "stillframe repository 1 pack key";
const INDEX: &str = "stillframe repository 1 index key";
const MANIFEST: &str = "stillframe repository 1 manifest key";

/// The secret from which all other keys are derived.
pub(crate) type MasterKey = Zeroizing<[u8; 32]>;

/// A password, wiped from memory when dropped.
pub struct Password(Zeroizing<Vec<u8>>);

impl Password {
    /// A password from its bytes, taken as they are (no trimming, no Unicode folding).
    pub fn new(bytes: impl Into<Vec<u8>>) -> Password {
        Password(Zeroizing::new(bytes.into()))
    }

    /// A random password, for a repository that ends with this process.
    pub fn random() -> Result<Password, RepoError> {
        Ok(Password::new(random::<32>()?))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

// The password must not reach a log through a derived `Debug`.
impl std::fmt::Debug for Password {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Password(..)")
    }
}

/// The keys of an open repository.
pub(crate) struct Keys {
    content_id: MasterKey,
    checkpoint_id: MasterKey,
    pack: MasterKey,
    index: MasterKey,
    manifest: MasterKey,
}

impl Keys {
    pub(crate) fn derive(master: &MasterKey) -> Keys {
        let derive = |context| Zeroizing::new(blake3::derive_key(context, &master[..]));
        Keys {
            content_id: derive(CONTENT_ID),
            checkpoint_id: derive(CHECKPOINT_ID),
            pack: derive(PACK),
            index: derive(INDEX),
            manifest: derive(MANIFEST),
        }
    }

    pub(crate) fn hasher(&self) -> ContentHasher {
        ContentHasher::keyed(*self.content_id)
    }

    /// The id of a checkpoint: the keyed hash of its manifest file.
    pub(crate) fn checkpoint_id(&self, file: &[u8]) -> [u8; 32] {
        *blake3::keyed_hash(&self.checkpoint_id, file).as_bytes()
    }

    pub(crate) fn pack_cipher(&self, salt: &[u8; SALT_BYTES]) -> Cipher {
        Cipher::for_file(&self.pack, salt)
    }

    pub(crate) fn index_cipher(&self, salt: &[u8; SALT_BYTES]) -> Cipher {
        Cipher::for_file(&self.index, salt)
    }

    pub(crate) fn manifest_cipher(&self, salt: &[u8; SALT_BYTES]) -> Cipher {
        Cipher::for_file(&self.manifest, salt)
    }
}

/// The nonce of a sealed piece of a file: a domain, and a number in it. Never used twice under one file's key. The
/// domains and their numbers are part of the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Nonce {
    /// A frame of a pack, by its number.
    Frame(u32),
    /// The directory of a pack, the head of an index file, or the one body of any other file.
    Body,
    /// A part of an index file, by its number.
    Part(u32),
    /// A section of an index file, by its number.
    Section(u32),
}

impl Nonce {
    /// The number in 64 bits, then the domain in 32, both little-endian.
    fn bytes(self) -> [u8; 12] {
        let (domain, number) = match self {
            Nonce::Frame(number) => (0_u32, number),
            Nonce::Body => (1, 0),
            Nonce::Part(number) => (2, number),
            Nonce::Section(number) => (3, number),
        };
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&u64::from(number).to_le_bytes());
        bytes[8..].copy_from_slice(&domain.to_le_bytes());
        bytes
    }
}

/// AES-256-GCM under the key of one file. `ring` interleaves encryption and hash in one assembly loop: it takes a
/// tenth of an eager restore of incompressible pages, where the crate `aes-gcm` took a fifth. Its expanded key of
/// one file is not wiped from memory when dropped; the keys that it is made from are.
pub(crate) struct Cipher(LessSafeKey);

impl Cipher {
    fn for_file(kind_key: &MasterKey, salt: &[u8; SALT_BYTES]) -> Cipher {
        Cipher::new(&Zeroizing::new(
            *blake3::keyed_hash(kind_key, salt).as_bytes(),
        ))
    }

    pub(crate) fn new(key: &MasterKey) -> Cipher {
        // It fails only for keys that are not 32 bytes long.
        let key = UnboundKey::new(&AES_256_GCM, &key[..]).expect("a key of 32 bytes");
        Cipher(LessSafeKey::new(key))
    }

    /// Encrypts `buffer[start..]` in place and appends the tag, which also authenticates `bound`.
    pub(crate) fn seal(&self, nonce: Nonce, bound: &[u8], buffer: &mut Vec<u8>, start: usize) {
        let nonce = aead::Nonce::assume_unique_for_key(nonce.bytes());
        let bound = Aad::from(bound);
        let sealed = self
            .0
            .seal_in_place_separate_tag(nonce, bound, &mut buffer[start..]);
        // AES-GCM fails only above 64 GiB in one message; the largest here is a frame or an index file, both held
        // in memory and bounded far below.
        let tag = sealed.expect("a message below the AES-GCM limit");
        buffer.extend_from_slice(tag.as_ref());
    }

    /// Checks and decrypts in place; returns the plain part of `sealed`.
    pub(crate) fn open<'a>(
        &self,
        nonce: Nonce,
        bound: &[u8],
        sealed: &'a mut [u8],
    ) -> Result<&'a [u8], FormatError> {
        let length = sealed.len();
        if length < TAG_BYTES {
            return Err(FormatError::Truncated {
                needed: TAG_BYTES as u64,
                left: length as u64,
            });
        }
        let nonce = aead::Nonce::assume_unique_for_key(nonce.bytes());
        let opened = self.0.open_in_place(nonce, Aad::from(bound), sealed);
        opened
            .map(|plain| &*plain)
            .map_err(|_| FormatError::Mismatch {
                what: "its authentication tag",
            })
    }
}

/// Random bytes from the operating system.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], RepoError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| RepoError::System {
        what: "random bytes",
        source: std::io::Error::other(error.to_string()),
    })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// AES-256-GCM as standardized: test case 16 of the specification of GCM (McGrew and Viega), with its nonce.
    #[test]
    fn sealed_bytes_are_those_of_the_standard() {
        let hex = |text: &str| -> Vec<u8> {
            let digits = (0..text.len()).step_by(2);
            let bytes = digits.map(|at| u8::from_str_radix(&text[at..at + 2], 16));
            bytes.collect::<Result<_, _>>().unwrap()
        };
        let key = hex("feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308");
        let key: MasterKey = Zeroizing::new(key.try_into().unwrap());
        let cipher = Cipher(LessSafeKey::new(
            UnboundKey::new(&AES_256_GCM, &key[..]).unwrap(),
        ));
        let mut buffer = hex(
            "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39",
        );
        let bound = hex("feedfacedeadbeeffeedfacedeadbeefabaddad2");
        let nonce: [u8; 12] = hex("cafebabefacedbaddecaf888").try_into().unwrap();
        let tag = cipher
            .0
            .seal_in_place_separate_tag(
                aead::Nonce::assume_unique_for_key(nonce),
                Aad::from(&bound),
                &mut buffer,
            )
            .unwrap();
        buffer.extend_from_slice(tag.as_ref());
        assert_eq!(
            buffer,
            hex(
                "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f66276fc6ece0f4e1768cddf8853bb2d551b"
            )
        );
    }

    #[test]
    fn nonces_are_those_of_the_format() {
        for (nonce, domain, number) in [
            (Nonce::Frame(0x0102_0304), 0, [4, 3, 2, 1]),
            (Nonce::Body, 1, [0; 4]),
            (Nonce::Part(5), 2, [5, 0, 0, 0]),
            (Nonce::Section(u32::MAX), 3, [255; 4]),
        ] {
            let [a, b, c, d] = number;
            assert_eq!(nonce.bytes(), [a, b, c, d, 0, 0, 0, 0, domain, 0, 0, 0]);
        }
    }

    #[test]
    fn sealing_binds_contents_position_and_surroundings() {
        let keys = Keys::derive(&Zeroizing::new([1; 32]));
        let cipher = keys.pack_cipher(&[2; 32]);
        let mut sealed = b"..secret".to_vec();
        cipher.seal(Nonce::Frame(5), b"bound", &mut sealed, 2);
        assert_eq!(sealed.len(), 8 + TAG_BYTES);
        let open = |cipher: &Cipher, nonce, bound: &[u8]| {
            let mut copy = sealed[2..].to_vec();
            cipher.open(nonce, bound, &mut copy).map(<[u8]>::to_vec)
        };
        assert_eq!(open(&cipher, Nonce::Frame(5), b"bound").unwrap(), b"secret");
        assert!(open(&cipher, Nonce::Frame(6), b"bound").is_err());
        assert!(open(&cipher, Nonce::Part(5), b"bound").is_err());
        assert!(open(&cipher, Nonce::Frame(5), b"Bound").is_err());
        assert!(open(&keys.pack_cipher(&[3; 32]), Nonce::Frame(5), b"bound").is_err());
        assert!(open(&keys.index_cipher(&[2; 32]), Nonce::Frame(5), b"bound").is_err());
        assert!(
            cipher
                .open(Nonce::Frame(5), b"bound", &mut [0; 15])
                .is_err()
        );
    }
}
