//! Locks between the threads of this process.

use std::sync::{Mutex, MutexGuard};

/// Takes a lock whose data stays whole even if another thread panicked while holding it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}
