//! Leases keep a checkpoint from being removed while a lazily restored VM still has to read it.
//!
//! The lock of the restoring process ends with that process. Its VM then waits for another process to continue
//! the restore (`restore --resume`), and needs the checkpoint. So a lease belongs to the VM's QEMU: it holds
//! until the VM's memory is complete, or QEMU ends. `forget` leaves out a leased checkpoint, so everything that
//! it refers to stays in use for `prune`.
//!
//! A lease of another machine or container cannot be compared with its process, and holds until it is broken. A
//! waiting VM sends no heartbeat, so the age of its lease means nothing.

use std::sync::Arc;

use crate::error::RepoError;
use crate::format::layout::FormatError;
use crate::format::lease_record::{LEASE_BYTES_MAX, LeaseRecord, decode};
use crate::format::lock_owner::{Life, LockOwner};
use crate::format::manifest::CheckpointId;
use crate::repository::Reader;
use crate::store::local::{Area, LocalStore};
use crate::store::lock::{Lock, STALE_AFTER, age};

/// The suffix of the names of lease files.
const SUFFIX: &str = ".lease";

/// The name of the lease file of a VM. A process that continues the restore gets the same name.
fn name(record: &LeaseRecord) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&record.checkpoint.0);
    for text in [&record.holder.boot, &record.holder.pid_namespace] {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    }
    hasher.update(&record.holder.pid.to_le_bytes());
    hasher.update(&record.holder.start_time.to_le_bytes());
    let hash = hasher.finalize().to_hex();
    format!("{}{SUFFIX}", &hash[..32])
}

/// Whether the VM has certainly ended.
pub(crate) fn is_over(record: &LeaseRecord) -> bool {
    record.holder.life() == Life::Gone
}

/// A lease that was taken. After a drop it stays until the VM ends.
pub struct Lease {
    store: Arc<LocalStore>,
    record: LeaseRecord,
}

impl Lease {
    /// Ends the lease, because the VM's memory is complete.
    pub fn end(self) -> Result<(), RepoError> {
        self.store.remove(Area::Leases, &name(&self.record))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if is_over(&self.record) {
            // The next `forget` or `prune` removes a file that cannot be removed now.
            let _ = self.store.remove(Area::Leases, &name(&self.record));
        }
    }
}

impl Reader<'_> {
    /// Keeps a checkpoint from being removed until the VM of process `pid` has all its memory, or ends.
    /// `start_time` is when that process started, in clock ticks since boot. Takes over the lease of a killed
    /// process for the same VM.
    ///
    /// # Errors
    /// [`RepoError::ReadOnly`] and [`RepoError::NoSpace`] where no lease can be written; [`RepoError::NotFound`]
    /// where the checkpoint was forgotten already.
    pub fn lease(
        &self,
        checkpoint: &CheckpointId,
        pid: u32,
        start_time: u64,
    ) -> Result<Lease, RepoError> {
        let store = &self.repository().store;
        let record = LeaseRecord::new(*checkpoint, LockOwner::of(pid, start_time));
        store.create_passing(Area::Leases, &name(&record), &record.encode())?;
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

/// The leases in force, by the names of their files. With the exclusive lock, removes leases of VMs that have
/// ended, and remains that a crash of the machine has left.
pub(crate) fn in_force(
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
            Ok(record) if whole && !is_over(&record) => {
                found.push((name, record));
                continue;
            }
            Ok(_) if whole => true,
            Err(error @ FormatError::FutureVersion { .. }) => {
                return Err(RepoError::format(store.label(Area::Leases, &name), &error));
            }
            // A crash of the machine can leave half a lease; a new one appears complete.
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
