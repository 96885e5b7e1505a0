//! Key files: the master key, wrapped by a key made from a password.
//!
//! Argon2id makes each guess of a password cost memory and time. The cost is stored in the file, so that later
//! versions can raise it. A plain checksum over the file distinguishes damage from a wrong password. A label
//! records who made the file, and when.

use std::fs;

use argon2::{Algorithm, Argon2, Block, Params, Version};
use jiff::Timestamp;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::crypto::{Cipher, MasterKey, Nonce, Password, TAG_BYTES, random};
use crate::error::RepoError;
use crate::format::config::RepositoryId;
use crate::format::layout::{Cursor, FileKind, FormatError, header, read_header};

/// Maximum number of key files of a repository. Each is tried in turn and costs 0.1 s or more.
pub const KEYS_MAX: usize = 64;

/// Maximum length of a label in bytes.
const LABEL_BYTES_MAX: usize = 1024;
/// Maximum length in bytes of the name of a host or user in it.
const NAME_BYTES_MAX: usize = 255;

/// The cost of one guess of the password.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// Memory in KiB.
    pub memory_kib: u32,
    /// Passes over the memory.
    pub passes: u32,
    /// Lanes.
    pub lanes: u32,
}

impl Cost {
    /// The cost of new key files: the second of the two choices that RFC 9106 recommends, about 0.1 s with four
    /// threads.
    pub const STANDARD: Cost = Cost {
        memory_kib: 64 * 1024,
        passes: 3,
        lanes: 4,
    };

    /// Next to none, for a password that cannot be guessed at any speed.
    pub const NONE: Cost = Cost {
        memory_kib: 8,
        passes: 1,
        lanes: 1,
    };

    /// Limits of the costs that are read: a hostile key file must not exhaust the machine.
    const MEMORY_KIB_MAX: u32 = 2 * 1024 * 1024;
    const PASSES_MAX: u32 = 64;
    const LANES_MAX: u32 = 64;

    fn check(self) -> Result<Params, FormatError> {
        if self.memory_kib > Cost::MEMORY_KIB_MAX
            || self.passes > Cost::PASSES_MAX
            || self.lanes > Cost::LANES_MAX
        {
            return Err(FormatError::invalid(format!(
                "its password cost ({self:?}) is beyond the limits"
            )));
        }
        Params::new(self.memory_kib, self.passes, self.lanes, Some(32))
            .map_err(|error| FormatError::invalid(format!("its password cost is wrong: {error}")))
    }
}

/// When, where and by whom a key file was made; informative, and not encrypted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Label {
    /// When (RFC 3339).
    pub created: Timestamp,
    /// The machine's name.
    pub host: String,
    /// The user's name, or number.
    pub user: String,
}

impl Label {
    /// A label of this process with the current time.
    pub(crate) fn of_now() -> Label {
        let host = rustix::system::uname();
        let mut host = host.nodename().to_string_lossy().into_owned();
        host.truncate(host.floor_char_boundary(NAME_BYTES_MAX));
        Label {
            created: Timestamp::now(),
            host,
            user: user(),
        }
    }

    fn encode(&self) -> Vec<u8> {
        // Strings under string keys: serialization cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

/// The name of this process' user from `/etc/passwd`, or its number if it has no entry there.
fn user() -> String {
    let number = rustix::process::geteuid().as_raw().to_string();
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let lines = users.lines().map(|line| line.split(':'));
    let mut named = lines.filter_map(|mut fields| {
        let name = fields.next()?;
        (fields.nth(1)? == number && name.len() <= NAME_BYTES_MAX).then(|| name.to_owned())
    });
    named.next().unwrap_or(number)
}

/// The decoded file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyFile {
    /// The cost of the password.
    pub cost: Cost,
    /// Who made it, and when.
    pub label: Label,
    /// The label as encoded in the file.
    label_bytes: Vec<u8>,
    salt: [u8; 32],
    wrapped: [u8; 32 + TAG_BYTES],
}

/// Decodes a key file without unwrapping its key.
pub fn decode(bytes: &[u8]) -> Result<KeyFile, FormatError> {
    let mut cursor = Cursor::new(bytes);
    read_header(&mut cursor, FileKind::Key)?;
    let cost = Cost {
        memory_kib: cursor.u32()?,
        passes: cursor.u32()?,
        lanes: cursor.u32()?,
    };
    let salt = cursor.array()?;
    let wrapped = cursor.array()?;
    let length = usize::from(u16::from_le_bytes(cursor.array()?));
    if length > LABEL_BYTES_MAX {
        return Err(FormatError::invalid("its label is too long"));
    }
    let label_bytes = cursor.take(length)?.to_vec();
    let checked = bytes.len() - cursor.left();
    if cursor.array()? != *blake3::hash(&bytes[..checked]).as_bytes() {
        return Err(FormatError::Mismatch {
            what: "its checksum",
        });
    }
    cursor.finish()?;
    cost.check()?;
    let label = serde_json::from_slice(&label_bytes)
        .map_err(|error| FormatError::invalid(format!("its label cannot be decoded: {error}")))?;
    Ok(KeyFile {
        cost,
        label,
        label_bytes,
        salt,
        wrapped,
    })
}

/// Wraps `master` under `password` and returns the file.
pub(crate) fn wrap(
    master: &MasterKey,
    password: &Password,
    cost: Cost,
    repository: RepositoryId,
    label: &Label,
) -> Result<Vec<u8>, RepoError> {
    let label = label.encode();
    let salt = random::<32>()?;
    // With space for the tag: growing the vector would leave a copy of the key that is not wiped.
    let mut wrapped = Zeroizing::new(Vec::with_capacity(master.len() + TAG_BYTES));
    wrapped.extend_from_slice(&master[..]);
    let cipher = wrapping_cipher(password, &salt, cost)?;
    let bound = bound(cost, &salt, repository, &label);
    cipher.seal(Nonce::Body, &bound, &mut wrapped, 0);
    let mut bytes = header(FileKind::Key).to_vec();
    bytes.extend_from_slice(&cost_bytes(cost));
    bytes.extend_from_slice(&salt);
    bytes.extend_from_slice(&wrapped);
    // Fits 16 bits: a label has two names of up to 255 bytes each and a time.
    bytes.extend_from_slice(&(label.len() as u16).to_le_bytes());
    bytes.extend_from_slice(&label);
    let checksum = *blake3::hash(&bytes).as_bytes();
    bytes.extend_from_slice(&checksum);
    Ok(bytes)
}

impl KeyFile {
    /// The master key, or `None` if the password is wrong.
    pub(crate) fn unwrap(
        &self,
        password: &Password,
        repository: RepositoryId,
    ) -> Result<Option<MasterKey>, RepoError> {
        let cipher = wrapping_cipher(password, &self.salt, self.cost)?;
        let mut sealed = Zeroizing::new(self.wrapped);
        let label = &self.label_bytes;
        let bound = bound(self.cost, &self.salt, repository, label);
        let Ok(plain) = cipher.open(Nonce::Body, &bound, &mut sealed[..]) else {
            return Ok(None);
        };
        let mut master = Zeroizing::new([0; 32]);
        master.copy_from_slice(plain);
        Ok(Some(master))
    }
}

fn wrapping_cipher(password: &Password, salt: &[u8], cost: Cost) -> Result<Cipher, RepoError> {
    let refused = |what: String| RepoError::KeyDerivation { what };
    let params = cost.check().map_err(|error| refused(error.to_string()))?;
    let mut key = Zeroizing::new([0; 32]);
    // The kernel spends a third of the time on pages accessed for the first time: several threads share it.
    let blocks = (0..params.block_count()).into_par_iter();
    let mut memory: Vec<Block> = blocks.map(|_| Block::new()).collect();
    Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
        .hash_password_into_with_memory(password.bytes(), salt, &mut key[..], &mut memory)
        .map_err(|error| refused(error.to_string()))?;
    Ok(Cipher::new(&key))
}

fn cost_bytes(cost: Cost) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&cost.memory_kib.to_le_bytes());
    bytes[4..8].copy_from_slice(&cost.passes.to_le_bytes());
    bytes[8..].copy_from_slice(&cost.lanes.to_le_bytes());
    bytes
}

/// The associated data of the wrapped key: all else in the file, and the id of the repository that it opens.
fn bound(cost: Cost, salt: &[u8], repository: RepositoryId, label: &[u8]) -> Vec<u8> {
    let mut bytes = header(FileKind::Key).to_vec();
    bytes.extend_from_slice(&cost_bytes(cost));
    bytes.extend_from_slice(salt);
    bytes.extend_from_slice(&repository.0);
    bytes.extend_from_slice(label);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHEAP: Cost = Cost {
        memory_kib: 8,
        passes: 1,
        lanes: 1,
    };

    #[test]
    fn only_the_right_password_and_repository_open_it() {
        let master = Zeroizing::new([9; 32]);
        let here = RepositoryId([1; 16]);
        let label = Label::of_now();
        let file = wrap(&master, &Password::new("right"), CHEAP, here, &label).unwrap();
        let key = decode(&file).unwrap();
        let open = |password: &str, id| key.unwrap(&Password::new(password), id).unwrap();
        assert_eq!(key.label, label);
        assert_eq!(open("right", here), Some(master));
        assert_eq!(open("wrong", here), None);
        assert_eq!(open("", here), None);
        assert_eq!(open("right", RepositoryId([2; 16])), None);
    }

    #[test]
    fn every_flipped_bit_and_cut_is_damage() {
        let master = Zeroizing::new([9; 32]);
        let (password, here) = (Password::new("p"), RepositoryId([1; 16]));
        let file = wrap(&master, &password, CHEAP, here, &Label::of_now()).unwrap();
        for bit in 0..file.len() * 8 {
            let mut bad = file.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&bad).is_err(), "bit {bit}");
        }
        for len in 0..file.len() {
            assert!(decode(&file[..len]).is_err(), "cut to {len}");
        }
    }

    #[test]
    fn an_absurd_cost_is_refused() {
        for cost in [
            Cost {
                memory_kib: u32::MAX,
                ..CHEAP
            },
            Cost {
                memory_kib: 0,
                ..CHEAP
            },
            Cost { passes: 0, ..CHEAP },
            Cost { lanes: 0, ..CHEAP },
            Cost { lanes: 65, ..CHEAP },
        ] {
            let mut bytes = header(FileKind::Key).to_vec();
            bytes.extend_from_slice(&cost_bytes(cost));
            bytes.extend_from_slice(&[0; 80]);
            let label = Label::of_now().encode();
            bytes.extend_from_slice(&(label.len() as u16).to_le_bytes());
            bytes.extend_from_slice(&label);
            let checksum = *blake3::hash(&bytes).as_bytes();
            bytes.extend_from_slice(&checksum);
            assert!(decode(&bytes).is_err(), "{cost:?}");
        }
    }
}
