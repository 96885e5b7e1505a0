//! Keys of unlocked repositories, in the kernel's keyring of this user: processes of the user (and root)
//! can have them, nothing of them is on disk, and they go after a time, or with the machine's next start
//! (keyrings(7), user-keyring(7)).

use std::time::Duration;

use linux_keyutils::{Key, KeyError, KeyRing, KeyRingIdentifier};
use stillframe_repo::{RepositoryId, UnlockedKey};
use thiserror::Error;
use zeroize::Zeroizing;

/// Why the keyring does not help.
#[derive(Debug, Error)]
#[error("the kernel's keyring does not {action} the key: {reason}")]
pub struct KeyringError {
    action: &'static str,
    reason: KeyError,
}

/// Keeps the key for this long.
pub fn keep(id: RepositoryId, key: &UnlockedKey, time: Duration) -> Result<(), KeyringError> {
    let failed = |reason| KeyringError {
        action: "take",
        reason,
    };
    let ring = ring().map_err(failed)?;
    let kept = ring.add_key(&name(id), key.bytes()).map_err(failed)?;
    let limited = kept.set_timeout(usize::try_from(time.as_secs()).unwrap_or(usize::MAX).max(1));
    limited.map_err(|reason| {
        // Never without an end.
        let _ = kept.invalidate();
        failed(reason)
    })
}

/// The key, where one is kept.
pub fn find(id: RepositoryId) -> Option<UnlockedKey> {
    let bytes = Zeroizing::new(kept(id)?.read_to_vec().ok()?);
    UnlockedKey::from_bytes(&bytes)
}

/// Gives the key up; whether one was kept.
pub fn end(id: RepositoryId) -> Result<bool, KeyringError> {
    let Some(key) = kept(id) else {
        return Ok(false);
    };
    let ended = key.invalidate();
    ended.map(|()| true).map_err(|reason| KeyringError {
        action: "give up",
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
