//! Keys of unlocked repositories, in this user's keyring in the kernel (keyrings(7), user-keyring(7)). Processes of the
//! user and of root can read them; they are never on disk, and vanish after a time or at a reboot.

use std::time::Duration;

use linux_keyutils::{Key, KeyError, KeyRing, KeyRingIdentifier};
use stillframe_repo::{RepositoryId, UnlockedKey};
use thiserror::Error;
use zeroize::Zeroizing;

/// A failed operation on the keyring.
#[derive(Debug, Error)]
#[error("cannot {action} the key in the kernel's keyring: {reason}")]
pub struct KeyringError {
    action: &'static str,
    reason: KeyError,
}

/// Stores the key for this long.
pub fn keep(id: RepositoryId, key: &UnlockedKey, time: Duration) -> Result<(), KeyringError> {
    let failed = |reason| KeyringError {
        action: "store",
        reason,
    };
    let ring = ring().map_err(failed)?;
    let kept = ring.add_key(&name(id), key.bytes()).map_err(failed)?;
    let limited = kept.set_timeout(usize::try_from(time.as_secs()).unwrap_or(usize::MAX).max(1));
    limited.map_err(|reason| {
        // A key without a timeout must not remain.
        let _ = kept.invalidate();
        failed(reason)
    })
}

/// The key, if the repository is unlocked.
pub fn find(id: RepositoryId) -> Option<UnlockedKey> {
    let bytes = Zeroizing::new(kept(id)?.read_to_vec().ok()?);
    UnlockedKey::from_bytes(&bytes)
}

/// Removes the key; returns whether there was one.
pub fn end(id: RepositoryId) -> Result<bool, KeyringError> {
    let Some(key) = kept(id) else {
        return Ok(false);
    };
    let ended = key.invalidate();
    ended.map(|()| true).map_err(|reason| KeyringError {
        action: "remove",
        reason,
    })
}

fn kept(id: RepositoryId) -> Option<Key> {
    ring().ok()?.search(&name(id)).ok()
}

fn ring() -> Result<KeyRing, KeyError> {
    KeyRing::from_special_id(KeyRingIdentifier::User, true)
}

fn name(id: RepositoryId) -> String {
    format!("stillframe:{id}")
}
