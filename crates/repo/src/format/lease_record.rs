//! The contents of a lease file.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::format::layout::FormatError;
use crate::format::lock_owner::LockOwner;
use crate::format::manifest::CheckpointId;

/// Maximum length in bytes of a lease file that is read.
pub(crate) const LEASE_BYTES_MAX: u64 = 64 << 10;

const LEASE_VERSION: u32 = 1;

/// The contents of a lease file: JSON, for people to read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRecord {
    version: u32,
    /// The leased checkpoint.
    pub checkpoint: CheckpointId,
    /// The QEMU whose memory is not complete.
    #[serde(flatten)]
    pub holder: LockOwner,
    /// When the lease was taken (RFC 3339).
    pub since: String,
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}

impl fmt::Display for LeaseRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (since {})", self.holder, self.since)
    }
}

/// Reads a lease file.
pub fn decode(bytes: &[u8]) -> Result<LeaseRecord, FormatError> {
    let wrong =
        |error: serde_json::Error| FormatError::invalid(format!("it is not a lease: {error}"));
    let Version { version } = serde_json::from_slice(bytes).map_err(wrong)?;
    // Checked first: a newer version may have other fields.
    if version > LEASE_VERSION {
        return Err(FormatError::FutureVersion {
            found: version,
            known: LEASE_VERSION,
        });
    }
    serde_json::from_slice(bytes).map_err(wrong)
}

impl LeaseRecord {
    pub(crate) fn new(checkpoint: CheckpointId, holder: LockOwner) -> LeaseRecord {
        LeaseRecord {
            version: LEASE_VERSION,
            checkpoint,
            holder,
            since: Timestamp::now().to_string(),
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        // Strings and numbers under string keys: serialization cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }
}
