//! The key files of a repository: one for each password, all of the same master key.
//!
//! Adding, removing and changing a password touches key files only. Stored data stays encrypted under the same
//! master key: a removed password no longer opens this repository, but together with an older copy of its key
//! file it still gives the master key.

use std::path::Path;
use std::sync::Arc;

use crate::crypto::key_file::KEYS_MAX;
use crate::crypto::key_file::{self, Cost, Label};
use crate::crypto::{MasterKey, Password};
use crate::error::RepoError;
use crate::format::config::RepositoryId;
use crate::format::file_hash::FileHash;
use crate::format::lock_record::LockKind;
use crate::repository::{Unlocked, read_id, read_key, unlock};
use crate::store::local::{Area, LocalStore};
use crate::store::lock::EXCLUSIVE_WAIT;
use crate::store::lock::Lock;

/// A repository opened to list or change its passwords.
pub struct Keyring {
    pub(crate) store: Arc<LocalStore>,
    id: RepositoryId,
    master: MasterKey,
    used: String,
    cost: Cost,
}

/// One key file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyInfo {
    /// Its name: the hash of the file.
    pub id: String,
    /// When, where and by whom it was made; `None` if it cannot be read.
    pub label: Option<Label>,
    /// Whether it is the one that the password opened.
    pub used: bool,
    /// Why it cannot be read.
    pub damage: Option<String>,
}

impl Keyring {
    /// Opens a repository with any of its passwords.
    pub fn open(dir: &Path, password: &Password) -> Result<Keyring, RepoError> {
        Keyring::open_at(LocalStore::new(dir), password, Cost::STANDARD)
    }

    pub(crate) fn open_at(
        store: LocalStore,
        password: &Password,
        cost: Cost,
    ) -> Result<Keyring, RepoError> {
        let id = read_id(&store)?;
        let Unlocked { master, key } = unlock(&store, password, id)?;
        Ok(Keyring {
            store: Arc::new(store),
            id,
            master,
            used: key,
            cost,
        })
    }

    /// All key files, by name.
    pub fn list(&self) -> Result<Vec<KeyInfo>, RepoError> {
        let mut names = self.store.names(Area::Keys)?;
        names.sort_unstable();
        let info = |id: String| {
            let (label, damage) = match read_key(&self.store, &id) {
                Ok(key) => (Some(key.label), None),
                Err(error) => (None, Some(error.to_string())),
            };
            KeyInfo {
                used: id == self.used,
                id,
                label,
                damage,
            }
        };
        Ok(names.into_iter().map(info).collect())
    }

    /// Adds a password, durably. Returns the name of its key.
    pub fn add(&self, password: &Password) -> Result<String, RepoError> {
        // So that no prune removes the file while it is being written.
        let lock = Lock::take(&self.store, LockKind::Shared, EXCLUSIVE_WAIT)?;
        let name = self.write(password)?;
        lock.assert_held()?;
        Ok(name)
    }

    /// Removes a password, durably: that of the key whose name begins with `start`. The key that the password
    /// opened stays, so that a password known to work always remains.
    pub fn remove(&self, start: &str) -> Result<String, RepoError> {
        let lock = Lock::take(&self.store, LockKind::Exclusive, EXCLUSIVE_WAIT)?;
        let name = self.find(start)?;
        if name == self.used {
            return Err(RepoError::KeyInUse { name });
        }
        self.remove_but_used(&name, &lock)?;
        Ok(name)
    }

    /// Replaces the password that opened the keyring: adds the new one, then removes the old one. After a kill in
    /// between, both open the repository. Returns the names of the new key and of the old one.
    pub fn change(self, password: &Password) -> Result<(String, String), RepoError> {
        let lock = Lock::take(&self.store, LockKind::Exclusive, EXCLUSIVE_WAIT)?;
        let new = self.write(password)?;
        let old = self.used.clone();
        let now = Keyring {
            used: new.clone(),
            ..self
        };
        now.remove_but_used(&old, &lock)?;
        Ok((new, old))
    }

    /// Writes a key file, and verifies that it opens.
    fn write(&self, password: &Password) -> Result<String, RepoError> {
        let keys = self.store.names(Area::Keys)?.len();
        if keys >= KEYS_MAX {
            return Err(RepoError::TooManyKeys {
                keys,
                limit: KEYS_MAX,
            });
        }
        let label = Label::of_now();
        let file = key_file::wrap(&self.master, password, self.cost, self.id, &label)?;
        let name = FileHash::of(&file).to_string();
        self.store.create(Area::Keys, &name, &file)?;
        let master = read_key(&self.store, &name)?.unwrap(password, self.id)?;
        match master {
            Some(master) if master == self.master => Ok(name),
            _ => Err(RepoError::Damaged {
                file: self.store.label(Area::Keys, &name),
                what: "it was just written, and does not open with its password".into(),
            }),
        }
    }

    /// Removes a key file, if the one in use exists and is undamaged.
    fn remove_but_used(&self, name: &str, lock: &Lock) -> Result<(), RepoError> {
        read_key(&self.store, &self.used)?;
        lock.assert_held()?;
        self.store.remove(Area::Keys, name)?;
        self.store.sync_area(Area::Keys)
    }

    fn find(&self, start: &str) -> Result<String, RepoError> {
        let mut found = self.store.names(Area::Keys)?;
        found.retain(|name| !start.is_empty() && name.starts_with(start));
        match (found.pop(), found.is_empty()) {
            (Some(name), true) => Ok(name),
            (Some(_), false) => Err(RepoError::AmbiguousKey {
                start: start.to_owned(),
            }),
            (None, _) => Err(RepoError::NoSuchKey {
                start: start.to_owned(),
            }),
        }
    }
}

impl std::fmt::Debug for Keyring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Keyring({})", self.id)
    }
}
