//! Leases: what a lazily restored VM still has to read is kept from being removed.
//!
//! The lock of the restoring process ends with that process; its VM then waits for another process to go
//! on (`restore --resume`), and needs the checkpoint. So a lease belongs to the VM's QEMU: it holds until
//! the VM's memory is complete, or QEMU ends. `forget` leaves out a leased checkpoint, and so everything
//! that it refers to stays used for `prune`.
//!
//! A lease of another machine or container cannot be compared with its process and holds until it is
//! broken: a VM that waits shows no sign of life, so age says nothing.

use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::error::RepoError;
use crate::holder::{Holder, Life};
use crate::layout::FormatError;
use crate::local::{Area, LocalStore};
use crate::lock::{Lock, STALE_AFTER, age};
use crate::manifest::CheckpointId;
use crate::repository::Reader;

/// The longest lease file that is read.
pub(crate) const LEASE_BYTES_MAX: u64 = 64 << 10;

const LEASE_VERSION: u32 = 1;

/// What the name of a lease file ends in.
const SUFFIX: &str = ".lease";

/// The contents of a lease file: JSON, for people to read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRecord {
    version: u32,
    /// The checkpoint that must stay.
    pub checkpoint: CheckpointId,
    /// The QEMU whose memory is not complete.
    #[serde(flatten)]
    pub holder: Holder,
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
    let wrong = |error: serde_json::Error| FormatError::invalid(format!("it is no lease: {error}"));
    let Version { version } = serde_json::from_slice(bytes).map_err(wrong)?;
    // Before the rest is read, which may look different then.
    if version > LEASE_VERSION {
        return Err(FormatError::FutureVersion {
            found: version,
            known: LEASE_VERSION,
        });
    }
    serde_json::from_slice(bytes).map_err(wrong)
}

impl LeaseRecord {
    /// One VM has one name for its lease, so that a process which goes on with a restore finds it.
    fn name(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.checkpoint.0);
        for text in [&self.holder.boot, &self.holder.pid_namespace] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        hasher.update(&self.holder.pid.to_le_bytes());
        hasher.update(&self.holder.start_time.to_le_bytes());
        let hash = hasher.finalize().to_hex();
        format!("{}{SUFFIX}", &hash[..32])
    }

    /// Whether the VM has certainly ended.
    pub(crate) fn is_over(&self) -> bool {
        self.holder.life() == Life::Gone
    }
}

/// A lease that was taken. Dropped, it stays for as long as the VM lives.
pub struct Lease {
    store: Arc<LocalStore>,
    record: LeaseRecord,
}

impl Lease {
    /// Gives it up: the VM's memory is complete.
    pub fn end(self) -> Result<(), RepoError> {
        self.store.remove(Area::Leases, &self.record.name())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.record.is_over() {
            // What cannot be removed now the next `forget` or `prune` removes.
            let _ = self.store.remove(Area::Leases, &self.record.name());
        }
    }
}

impl Reader<'_> {
    /// Keeps a checkpoint from being removed until the VM of this process (its number, and when it
    /// started in clock ticks since boot) has all its memory, or ends. Also takes up the lease that a
    /// killed process took for the VM.
    ///
    /// # Errors
    /// [`RepoError::ReadOnly`] and [`RepoError::NoSpace`] where no lease can be left;
    /// [`RepoError::NotFound`] where the checkpoint was forgotten already.
    pub fn lease(
        &self,
        checkpoint: &CheckpointId,
        pid: u32,
        start_time: u64,
    ) -> Result<Lease, RepoError> {
        let store = &self.repository().store;
        let record = LeaseRecord {
            version: LEASE_VERSION,
            checkpoint: *checkpoint,
            holder: Holder::of(pid, start_time),
            since: Timestamp::now().to_string(),
        };
        // Strings and numbers under string keys: nothing here can fail to become JSON.
        let bytes = serde_json::to_vec(&record).unwrap_or_default();
        store.create_passing(Area::Leases, &record.name(), &bytes)?;
        let lease = Lease {
            store: store.clone(),
            record,
        };
        // The reader's lock keeps it from being forgotten after this.
        match self.repository().has_manifest(checkpoint)? {
            true => Ok(lease),
            false => {
                lease.end()?;
                Err(RepoError::NotFound {
                    name: checkpoint.to_hex(),
                    vm: None,
                })
            }
        }
    }
}

/// The leases that hold, by the names of their files. With the exclusive lock, removes those of VMs that have ended and what a crash of
/// the machine left of one.
pub(crate) fn that_hold(
    store: &LocalStore,
    lock: Option<&Lock>,
) -> Result<Vec<(String, LeaseRecord)>, RepoError> {
    let mut found = Vec::new();
    for name in store.names(Area::Leases)? {
        let whole = name.ends_with(SUFFIX);
        let bytes = match store.read(Area::Leases, &name, LEASE_BYTES_MAX) {
            Err(error) if error.is_absent() => continue,
            other => other?,
        };
        let over = match decode(&bytes) {
            Ok(record) if whole && !record.is_over() => {
                found.push((name, record));
                continue;
            }
            Ok(_) if whole => true,
            Err(error @ FormatError::FutureVersion { .. }) => {
                return Err(RepoError::format(store.label(Area::Leases, &name), &error));
            }
            // A crash of the machine leaves half a lease; a new one appears whole.
            decoded => {
                let old = match lock {
                    Some(lock) => age(store, Area::Leases, &name, lock.now())? > STALE_AFTER,
                    None => false,
                };
                match decoded {
                    Err(error) if whole && !old => {
                        return Err(RepoError::format(store.label(Area::Leases, &name), &error));
                    }
                    _ => old,
                }
            }
        };
        if over && lock.is_some() {
            store.remove(Area::Leases, &name)?;
        }
    }
    Ok(found)
}
