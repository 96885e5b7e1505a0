//! Cancels a migration from another thread, or from its own while it reports something.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use stillframe_engine::migration::Wire;
use stillframe_link::Closer;

use crate::interrupt::Interrupts;

/// Time between two looks for a signal.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Cancels a migration: closes its first connection, so that it fails, if the VM was not given up yet.
#[derive(Default)]
pub struct Cancellation(Mutex<Cancelled>);

#[derive(Default)]
struct Cancelled {
    cancelled: bool,
    closer: Option<Closer>,
}

impl Cancellation {
    /// Has the migration over this connection fail.
    pub fn cancel(&self) {
        let mut state = self.state();
        state.cancelled = true;
        if let Some(closer) = state.closer.take() {
            closer.close();
        }
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.state().cancelled
    }

    /// The migration is over this connection from here on.
    pub fn cover(&self, wire: &Wire) {
        let mut state = self.state();
        // Without another descriptor it cannot be cancelled.
        state.closer = wire.closer().ok();
        if state.cancelled
            && let Some(closer) = state.closer.take()
        {
            closer.close();
        }
    }

    /// The migration has ended, and the connection closes.
    pub fn end(&self) {
        self.state().closer = None;
    }

    /// Performs a migration that a signal cancels.
    pub fn on_interrupt<T>(&self, interrupts: &Interrupts, migrate: impl FnOnce() -> T) -> T {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let looks = scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    if interrupts.aborts() {
                        return self.cancel();
                    }
                    thread::park_timeout(LOOK_EVERY);
                }
            });
            let migrated = migrate();
            over.store(true, Ordering::Relaxed);
            looks.thread().unpark();
            migrated
        })
    }

    fn state(&self) -> MutexGuard<'_, Cancelled> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
