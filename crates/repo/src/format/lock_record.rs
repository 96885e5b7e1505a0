//! The contents of a lock file.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::format::layout::FormatError;
use crate::format::lock_owner::LockOwner;

pub(crate) const LOCK_BYTES_MAX: u64 = 64 << 10;

const LOCK_VERSION: u32 = 1;

/// What a lock allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LockKind {
    /// Adding and reading, by any number of processes.
    Shared,
    /// Removing, by one process alone.
    Exclusive,
}

/// The contents of a lock file: JSON, for people to read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockRecord {
    version: u32,
    /// What the owner may do.
    pub kind: LockKind,
    /// The lock owner.
    #[serde(flatten)]
    pub holder: LockOwner,
    /// When it was taken (RFC 3339).
    pub since: String,
    /// When the owner last refreshed it (RFC 3339), by its own clock; informative. Ages are computed from the
    /// file's modification time.
    pub refreshed: String,
}

impl fmt::Display for LockRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            LockKind::Shared => "shared",
            LockKind::Exclusive => "exclusive",
        };
        write!(f, "{} ({kind} since {})", self.holder, self.since)
    }
}

/// Reads a lock file.
pub fn decode(bytes: &[u8]) -> Result<LockRecord, FormatError> {
    let record: LockRecord = serde_json::from_slice(bytes)
        .map_err(|error| FormatError::invalid(format!("it is not a lock: {error}")))?;
    if record.version > LOCK_VERSION {
        return Err(FormatError::FutureVersion {
            found: record.version,
            known: LOCK_VERSION,
        });
    }
    Ok(record)
}

impl LockRecord {
    pub(crate) fn of_this_process(kind: LockKind) -> LockRecord {
        let now = Timestamp::now().to_string();
        LockRecord {
            version: LOCK_VERSION,
            kind,
            holder: LockOwner::of_this_process(),
            since: now.clone(),
            refreshed: now,
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        // Strings and numbers under string keys: serialization cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }
}
