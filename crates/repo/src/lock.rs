//! Locks between processes: many writers and readers (shared), or one that removes (exclusive).
//!
//! ```text
//! shared:     write own file -> list -> no exclusive one?  held
//!                                    -> one?  remove own file, wait, again
//! exclusive:  write own file -> list -> alone?             held
//!                                    -> shared ones?  keep the file (newcomers wait), wait, list again
//!                                    -> another exclusive one?  remove own file, wait a random time, again
//! ```
//!
//! Writing before looking is what makes it safe: of two that want the lock at once at least one
//! sees the other. A lock is stale when its process is gone (same boot, same process numbers) or
//! when it has not been refreshed for half an hour; stale ones are removed by whoever meets them.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::crypto::random;
use crate::error::RepoError;
use crate::holder::{Holder, is_gone};
use crate::layout::FormatError;
use crate::local::{Area, LocalStore};

/// How often a holder shows that it lives.
const REFRESH: Duration = Duration::from_secs(5 * 60);

/// After this long without a refresh a lock is stale whoever holds it.
pub(crate) const STALE_AFTER: Duration = Duration::from_secs(30 * 60);

pub(crate) const LOCK_BYTES_MAX: u64 = 64 << 10;

const LOCK_VERSION: u32 = 1;

/// What a lock allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LockKind {
    /// Adding and reading; any number at once.
    Shared,
    /// Removing; alone.
    Exclusive,
}

/// The contents of a lock file: JSON, for people to read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockRecord {
    version: u32,
    /// What the holder may do.
    pub kind: LockKind,
    /// Who holds it.
    #[serde(flatten)]
    pub holder: Holder,
    /// When it was taken (RFC 3339).
    pub since: String,
    /// When the holder last showed that it lives (RFC 3339).
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
        .map_err(|error| FormatError::invalid(format!("it is no lock: {error}")))?;
    if record.version > LOCK_VERSION {
        return Err(FormatError::FutureVersion {
            found: record.version,
            known: LOCK_VERSION,
        });
    }
    Ok(record)
}

/// A held lock; dropping it gives it up.
pub(crate) struct Lock {
    file: LockFile,
    // Dropping the sender ends the refresher.
    stop: Option<Sender<()>>,
    refresher: Option<JoinHandle<()>>,
}

struct LockFile {
    store: Arc<LocalStore>,
    name: String,
}

impl Drop for LockFile {
    fn drop(&mut self) {
        // What cannot be removed now becomes stale when this process ends.
        let _ = self.store.remove(Area::Locks, &self.name);
    }
}

impl Lock {
    /// Takes a lock, waiting up to `wait` for conflicting ones to go.
    pub(crate) fn take(
        store: &Arc<LocalStore>,
        kind: LockKind,
        wait: Duration,
    ) -> Result<Lock, RepoError> {
        let deadline = Instant::now() + wait;
        let mut record = LockRecord::of_this_process(kind);
        let mut own: Option<LockFile> = None;
        loop {
            let file = match own.take() {
                Some(file) => file,
                None => LockFile::write(store, &record)?,
            };
            let Some(other) = conflict(store, kind, &file.name)? else {
                return Lock::hold(file, record);
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(RepoError::Locked {
                    by: Box::new(other),
                });
            }
            if kind == LockKind::Exclusive && other.kind == LockKind::Shared {
                own = Some(file);
            } else {
                drop(file);
            }
            std::thread::sleep(pause()?.min(left));
            record.refreshed = Timestamp::now().to_string();
        }
    }

    fn hold(file: LockFile, record: LockRecord) -> Result<Lock, RepoError> {
        let (stop, stopped) = channel();
        let (store, name) = (file.store.clone(), file.name.clone());
        let refresh = move || {
            let mut record = record;
            while stopped.recv_timeout(REFRESH) == Err(RecvTimeoutError::Timeout) {
                record.refreshed = Timestamp::now().to_string();
                // A lock someone removed is lost, not to be brought back; see `assert_held`.
                // A refresh that fails is tried again; six in a row make the lock stale.
                if store
                    .length(Area::Locks, &name)
                    .is_ok_and(|len| len.is_some())
                {
                    let _ = store.create_lock(&name, &record.encode());
                }
            }
        };
        let refresher = std::thread::Builder::new()
            .name("lock refresh".into())
            .spawn(refresh)
            .map_err(|source| RepoError::System {
                what: "a thread",
                source,
            })?;
        Ok(Lock {
            file,
            stop: Some(stop),
            refresher: Some(refresher),
        })
    }

    /// Whether this lock is still held, and nobody waits for its end.
    pub(crate) fn is_undisputed(&self) -> bool {
        let LockFile { store, name } = &self.file;
        let disputed = || conflict(store, LockKind::Shared, name);
        self.assert_held().is_ok() && matches!(disputed(), Ok(None))
    }

    /// An error if someone took this lock for stale and removed it. To be asked before anything
    /// that relies on nobody having pruned.
    pub(crate) fn assert_held(&self) -> Result<(), RepoError> {
        match self.file.store.length(Area::Locks, &self.file.name)? {
            Some(_) => Ok(()),
            None => Err(RepoError::LockLost {
                file: self.file.store.label(Area::Locks, &self.file.name),
            }),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(refresher) = self.refresher.take() {
            // A refresh under way must not write the file again after it is removed.
            let _ = refresher.join();
        }
    }
}

impl LockFile {
    fn write(store: &Arc<LocalStore>, record: &LockRecord) -> Result<LockFile, RepoError> {
        let name = format!("{:032x}.lock", u128::from_le_bytes(random()?));
        let file = LockFile {
            store: store.clone(),
            name,
        };
        store.create_lock(&file.name, &record.encode())?;
        Ok(file)
    }
}

impl LockRecord {
    fn of_this_process(kind: LockKind) -> LockRecord {
        let now = Timestamp::now().to_string();
        LockRecord {
            version: LOCK_VERSION,
            kind,
            holder: Holder::of_this_process(),
            since: now.clone(),
            refreshed: now,
        }
    }

    fn encode(&self) -> Vec<u8> {
        // Strings and numbers under string keys: nothing here can fail to become JSON.
        serde_json::to_vec(self).unwrap_or_default()
    }

    pub(crate) fn is_stale(&self) -> bool {
        if is_gone(&self.holder) {
            return true;
        }
        let refreshed: Result<Timestamp, _> = self.refreshed.parse();
        refreshed.is_ok_and(|at| Timestamp::now().duration_since(at) > to_signed(STALE_AFTER))
    }
}

fn to_signed(duration: Duration) -> jiff::SignedDuration {
    jiff::SignedDuration::from_secs(duration.as_secs() as i64)
}

/// A live lock of someone else that conflicts with one of `kind`. Removes stale ones it meets.
fn conflict(
    store: &LocalStore,
    kind: LockKind,
    own: &str,
) -> Result<Option<LockRecord>, RepoError> {
    let mut found = None;
    for name in store.names(Area::Locks)? {
        if name == own || !name.ends_with(".lock") {
            continue;
        }
        let bytes = match store.read(Area::Locks, &name, LOCK_BYTES_MAX) {
            Err(error) if error.is_absent() => continue,
            other => other?,
        };
        let record = match decode(&bytes) {
            Ok(record) => record,
            // Half a lock is what a crash of the machine leaves; a new one appears whole.
            Err(FormatError::Invalid { .. }) if is_old(store, &name)? => {
                store.remove(Area::Locks, &name)?;
                continue;
            }
            Err(error) => return Err(RepoError::format(store.label(Area::Locks, &name), &error)),
        };
        if record.is_stale() {
            store.remove(Area::Locks, &name)?;
        } else if kind == LockKind::Exclusive || record.kind == LockKind::Exclusive {
            // An exclusive one matters more: it decides how to wait.
            if found.is_none() || record.kind == LockKind::Exclusive {
                found = Some(record);
            }
        }
    }
    Ok(found)
}

fn is_old(store: &LocalStore, name: &str) -> Result<bool, RepoError> {
    let changed = store.modified(Area::Locks, name)?;
    Ok(changed.is_some_and(|at| at.elapsed().is_ok_and(|age| age > STALE_AFTER)))
}

/// How long to wait before looking again: random, so that two that collide part.
fn pause() -> Result<Duration, RepoError> {
    let [byte] = random::<1>()?;
    Ok(Duration::from_millis(20 + u64::from(byte) / 4))
}
