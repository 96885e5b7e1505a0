//! Settings of the whole host: tests that change them run apart from all others, and one after the other.

use std::sync::{Mutex, MutexGuard, PoisonError};

mod huge_pages;
mod merging;
mod moving;
mod vhost;

/// Waits until no other test changes the host's settings. To be held for the whole test.
fn alone() -> MutexGuard<'static, ()> {
    static SETTINGS: Mutex<()> = Mutex::new(());
    SETTINGS.lock().unwrap_or_else(PoisonError::into_inner)
}
