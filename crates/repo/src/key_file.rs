//! Key files: the master key, wrapped by a key made from a password.
//!
//! Argon2id makes each guess of the password cost memory and time; its cost stands in the file, so
//! that later versions can raise it. A plain checksum over the file tells damage (which no
//! password mends) from a wrong password.

use argon2::{Algorithm, Argon2, Block, Params, Version};
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use zeroize::Zeroizing;

use crate::config::RepositoryId;
use crate::crypto::{Cipher, MasterKey, Password, TAG_BYTES, Use, random};
use crate::error::RepoError;
use crate::layout::{
    Cursor, FORMAT_VERSION, FileKind, FormatError, header_of_version, read_header,
};

/// What one guess of the password costs.
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
    /// What new key files get: the second of the two choices that RFC 9106 recommends. About a tenth of a
    /// second of four threads together.
    pub(crate) const STANDARD: Cost = Cost {
        memory_kib: 64 * 1024,
        passes: 3,
        lanes: 4,
    };

    /// Costs beyond these are refused when read: a hostile key file must not eat the machine.
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

/// The decoded file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyFile {
    version: u32,
    /// The cost of the password.
    pub cost: Cost,
    salt: [u8; 32],
    wrapped: [u8; 32 + TAG_BYTES],
}

/// Reads a key file without opening it.
pub fn decode(bytes: &[u8]) -> Result<KeyFile, FormatError> {
    let mut cursor = Cursor::new(bytes);
    let version = read_header(&mut cursor, FileKind::Key)?;
    let cost = Cost {
        memory_kib: cursor.u32()?,
        passes: cursor.u32()?,
        lanes: cursor.u32()?,
    };
    let salt = cursor.array()?;
    let wrapped = cursor.array()?;
    let checked = bytes.len() - cursor.left();
    if cursor.array()? != *blake3::hash(&bytes[..checked]).as_bytes() {
        return Err(FormatError::Mismatch {
            what: "its checksum",
        });
    }
    cursor.finish()?;
    cost.check()?;
    Ok(KeyFile {
        version,
        cost,
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
) -> Result<Vec<u8>, RepoError> {
    wrap_as_of(FORMAT_VERSION, master, password, cost, repository)
}

fn wrap_as_of(
    version: u32,
    master: &MasterKey,
    password: &Password,
    cost: Cost,
    repository: RepositoryId,
) -> Result<Vec<u8>, RepoError> {
    let salt = random::<32>()?;
    let mut wrapped = master.to_vec();
    let cipher = wrapping_cipher(password, &salt, cost)?;
    let bound = bound(version, cost, &salt, repository);
    cipher.seal((Use::Body, 0), &bound, &mut wrapped, 0);
    let mut bytes = header_of_version(FileKind::Key, version).to_vec();
    bytes.extend_from_slice(&cost_bytes(cost));
    bytes.extend_from_slice(&salt);
    bytes.extend_from_slice(&wrapped);
    let checksum = *blake3::hash(&bytes).as_bytes();
    bytes.extend_from_slice(&checksum);
    Ok(bytes)
}

impl KeyFile {
    /// The master key, or `None` when the password is not the one.
    pub(crate) fn unwrap(
        &self,
        password: &Password,
        repository: RepositoryId,
    ) -> Result<Option<MasterKey>, RepoError> {
        let cipher = wrapping_cipher(password, &self.salt, self.cost)?;
        let mut sealed = Zeroizing::new(self.wrapped);
        let bound = bound(self.version, self.cost, &self.salt, repository);
        let Ok(plain) = cipher.open((Use::Body, 0), &bound, &mut sealed[..]) else {
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
    // A third of the time is the kernel's, for pages touched for the first time: each thread takes its share.
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

/// The wrapped key is tied to everything before it and to the repository it opens.
fn bound(version: u32, cost: Cost, salt: &[u8], repository: RepositoryId) -> Vec<u8> {
    let mut bytes = header_of_version(FileKind::Key, version).to_vec();
    bytes.extend_from_slice(&cost_bytes(cost));
    bytes.extend_from_slice(salt);
    bytes.extend_from_slice(&repository.0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::FORMAT_VERSION_OLDEST;

    const CHEAP: Cost = Cost {
        memory_kib: 8,
        passes: 1,
        lanes: 1,
    };

    #[test]
    fn only_the_right_password_and_repository_open_it() {
        let master = Zeroizing::new([9; 32]);
        let here = RepositoryId([1; 16]);
        let file = wrap(&master, &Password::new("right"), CHEAP, here).unwrap();
        let key = decode(&file).unwrap();
        let open = |password: &str, id| key.unwrap(&Password::new(password), id).unwrap();
        assert_eq!(open("right", here), Some(master));
        assert_eq!(open("wrong", here), None);
        assert_eq!(open("", here), None);
        assert_eq!(open("right", RepositoryId([2; 16])), None);
    }

    /// The key is tied to the header that its file has, not to the one that would be written now.
    #[test]
    fn keys_of_every_version_open() {
        let master = Zeroizing::new([9; 32]);
        let (password, here) = (Password::new("p"), RepositoryId([1; 16]));
        for version in FORMAT_VERSION_OLDEST..=FORMAT_VERSION {
            let file = wrap_as_of(version, &master, &password, CHEAP, here).unwrap();
            let key = decode(&file).unwrap();
            assert_eq!(key.unwrap(&password, here).unwrap(), Some(master.clone()));
            let bound = [&file[..60], &here.0].concat();
            let cipher = wrapping_cipher(&password, &file[28..60], CHEAP).unwrap();
            let mut wrapped = file[60..108].to_vec();
            assert!(cipher.open((Use::Body, 0), &bound, &mut wrapped).is_ok());
        }
    }

    #[test]
    fn every_flipped_bit_and_cut_is_damage() {
        let master = Zeroizing::new([9; 32]);
        let file = wrap(&master, &Password::new("p"), CHEAP, RepositoryId([1; 16])).unwrap();
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
            let mut bytes = header_of_version(FileKind::Key, FORMAT_VERSION).to_vec();
            bytes.extend_from_slice(&cost_bytes(cost));
            bytes.extend_from_slice(&[0; 80]);
            let checksum = *blake3::hash(&bytes).as_bytes();
            bytes.extend_from_slice(&checksum);
            assert!(decode(&bytes).is_err(), "{cost:?}");
        }
    }
}
