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
//! Writing before listing makes it safe: of two processes that take the lock at once, at least one sees the
//! other. A lock is stale when its process is gone (same boot, same process numbers). A lock whose process is
//! known to be alive is never stale. Where neither is known (another machine, another container), a lock is stale
//! half an hour after its file was last written, by the clock of the file system. The process that finds a stale
//! lock removes it.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use jiff::Timestamp;
use stillframe_fault::{self as fault, Point};

use crate::crypto::random;
use crate::error::RepoError;
use crate::format::layout::FormatError;
use crate::format::lock_owner::Life;
use crate::format::lock_record::{LOCK_BYTES_MAX, LockKind, LockRecord, decode};
use crate::store::local::{Area, LocalStore};

/// How often an owner refreshes its lock.
const REFRESH: Duration = Duration::from_secs(5 * 60);

/// After this long without a refresh a lock is stale, unless its owner is known to be alive.
pub(crate) const STALE_AFTER: Duration = Duration::from_secs(30 * 60);

/// How long a remover waits for writers and readers to finish. New writers and readers wait meanwhile.
pub(crate) const EXCLUSIVE_WAIT: Duration = Duration::from_secs(30);

/// A held lock; a drop releases it.
pub(crate) struct Lock {
    file: LockFile,
    // Dropping the sender ends the refresher.
    stop: Option<Sender<()>>,
    refresher: Option<JoinHandle<()>>,
}

struct LockFile {
    store: Arc<LocalStore>,
    name: String,
    /// When it was written: by the file system's clock, and by this process' own.
    written: (SystemTime, Instant),
}

impl Drop for LockFile {
    fn drop(&mut self) {
        // A file that cannot be removed now becomes stale when this process ends.
        let _ = self.store.remove(Area::Locks, &self.name);
    }
}

impl Lock {
    /// Takes a lock, waiting up to `wait` for the release of conflicting ones.
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
                // Waiting can take longer than a lock lasts without a refresh.
                Some(file) if file.written.1.elapsed() < REFRESH => file,
                Some(file) => file.rewrite(&record)?,
                None => LockFile::write(store, &record)?,
            };
            let Some(other) = conflict(&file, kind)? else {
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
            let interval = fault::interval(Point::LockRefresh, REFRESH);
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                record.refreshed = Timestamp::now().to_string();
                // A lock that was removed is lost and not written again; see `assert_held`. A refresh that fails
                // is repeated; six failures in a row make the lock stale.
                if fault::at(Point::LockRefresh).is_ok()
                    && store
                        .length(Area::Locks, &name)
                        .is_ok_and(|len| len.is_some())
                {
                    let _ = store.create_passing(Area::Locks, &name, &record.encode());
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

    /// Whether this lock is still held, and no process waits for its release.
    pub(crate) fn is_undisputed(&self) -> bool {
        let disputed = || conflict(&self.file, LockKind::Shared);
        self.assert_held().is_ok() && matches!(disputed(), Ok(None))
    }

    /// An error if another process took this lock for stale and removed it. Called before every step that relies
    /// on no prune having run.
    pub(crate) fn assert_held(&self) -> Result<(), RepoError> {
        // The file is opened: a network file system may answer `stat` from its cache.
        match self.file.store.open(Area::Locks, &self.file.name) {
            Ok(_) => Ok(()),
            Err(error) if error.is_absent() => Err(RepoError::LockLost {
                file: self.file.store.label(Area::Locks, &self.file.name),
            }),
            Err(error) => Err(error),
        }
    }

    /// The time by the file system's clock, from which the ages of its files are computed.
    pub(crate) fn now(&self) -> SystemTime {
        self.file.now()
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(refresher) = self.refresher.take() {
            // A running refresh must not write the file again after it is removed.
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
            written: (SystemTime::UNIX_EPOCH, Instant::now()),
        };
        file.rewrite(record)
    }

    /// Writes the file, in place of an existing one.
    fn rewrite(mut self, record: &LockRecord) -> Result<LockFile, RepoError> {
        self.store
            .create_passing(Area::Locks, &self.name, &record.encode())?;
        match self.store.modified(Area::Locks, &self.name)? {
            Some(at) => self.written = (at, Instant::now()),
            None => {
                return Err(RepoError::LockLost {
                    file: self.store.label(Area::Locks, &self.name),
                });
            }
        }
        Ok(self)
    }

    /// The time by the file system's clock. After a suspend of the machine it is early, so files seem younger
    /// than they are.
    fn now(&self) -> SystemTime {
        self.written.0 + self.written.1.elapsed()
    }
}

/// Whether a lock whose file was last written `age` ago is stale.
pub(crate) fn is_stale(record: &LockRecord, age: Duration) -> bool {
    match record.holder.life() {
        Life::Gone => true,
        Life::Alive => false,
        Life::Unknown => age > STALE_AFTER,
    }
}

/// A live lock of another owner that conflicts with one of `kind`. Removes stale locks that it finds.
fn conflict(own: &LockFile, kind: LockKind) -> Result<Option<LockRecord>, RepoError> {
    let store = &own.store;
    let mut found = None;
    for name in store.names(Area::Locks)? {
        if name == own.name || !name.ends_with(".lock") {
            continue;
        }
        let bytes = match store.read(Area::Locks, &name, LOCK_BYTES_MAX) {
            Err(error) if error.is_absent() => continue,
            other => other?,
        };
        // Queried after the read, so that a refresh in between counts.
        let age = age(store, Area::Locks, &name, own.now())?;
        let record = match decode(&bytes) {
            Ok(record) => record,
            // A crash of the machine can leave half a lock; a new lock appears complete.
            Err(FormatError::Invalid { .. }) if age > STALE_AFTER => {
                store.remove(Area::Locks, &name)?;
                continue;
            }
            Err(error) => return Err(RepoError::format(store.label(Area::Locks, &name), &error)),
        };
        if is_stale(&record, age) {
            store.remove(Area::Locks, &name)?;
        } else if kind == LockKind::Exclusive || record.kind == LockKind::Exclusive {
            // An exclusive lock takes precedence: it decides how to wait.
            if found.is_none() || record.kind == LockKind::Exclusive {
                found = Some(record);
            }
        }
    }
    Ok(found)
}

/// How long ago a file was last written; zero if it is gone, or was written after `now`.
pub(crate) fn age(
    store: &LocalStore,
    area: Area,
    name: &str,
    now: SystemTime,
) -> Result<Duration, RepoError> {
    let written = store.modified(area, name)?;
    let age = written.and_then(|at| now.duration_since(at).ok());
    Ok(age.unwrap_or_default())
}

/// The delay before the next attempt: random, so that two processes that collide separate.
fn pause() -> Result<Duration, RepoError> {
    let [byte] = random::<1>()?;
    Ok(Duration::from_millis(20 + u64::from(byte) / 4))
}
