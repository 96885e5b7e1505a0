//! Claims decide whether the copier or the fault handler saves a page before the guest writes it. Never both,
//! never neither, and neither ever waits for the other.
//!
//! ```text
//!            arm            claim                done
//!   IDLE ----------> ARMED ----------> BUSY ----------------> IDLE
//!                     |  \ fault: claims it too, and saves     ^
//!        fault, no    |                | fault                 |
//!        room to save v                v                 done  |
//!                  ARMED_WANTED -> BUSY_WANTED -----------------+  the saver unprotects the page
//! ```
//!
//! (Copy-on-write checkpointing, section 4.3: each page is saved exactly once.) The states are tried
//! in every order of steps by the model test below.

use std::sync::atomic::{AtomicU8, Ordering};

/// Nothing is to be saved: the page may be unprotected.
const IDLE: u8 = 0;
/// The page is to be saved before it is unprotected.
const ARMED: u8 = 1;
/// The same, and a writer waits.
const ARMED_WANTED: u8 = 2;
/// Being saved.
const BUSY: u8 = 3;
/// The same, and a writer waits.
const BUSY_WANTED: u8 = 4;

/// One page's state, shared between threads.
pub trait Cell {
    /// A cell in state 0.
    fn idle() -> Self;
    /// Reads it.
    fn load(&self) -> u8;
    /// Sets it; returns the old value.
    fn swap(&self, new: u8) -> u8;
    /// Sets it if it is `current`; whether it was.
    fn change(&self, current: u8, new: u8) -> bool;
}

/// The same for the atomics of the standard library and of the model.
macro_rules! atomic_cell {
    ($atomic:ty) => {
        impl Cell for $atomic {
            fn idle() -> $atomic {
                <$atomic>::new(IDLE)
            }

            fn load(&self) -> u8 {
                <$atomic>::load(self, Ordering::Acquire)
            }

            fn swap(&self, new: u8) -> u8 {
                <$atomic>::swap(self, new, Ordering::AcqRel)
            }

            fn change(&self, current: u8, new: u8) -> bool {
                self.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
                    .is_ok()
            }
        }
    };
}

atomic_cell!(AtomicU8);

/// The fault handler's action on a page that a thread wants to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFault {
    /// Unprotect it.
    Open,
    /// It is the caller's: save it, call [`Claims::done`], unprotect it.
    Save,
    /// Nothing: the thread that saves it, now or later, unprotects it.
    Leave,
}

/// The states of a block's pages.
#[derive(Debug)]
pub struct Claims<C = AtomicU8> {
    cells: Vec<C>,
}

impl<C: Cell> Claims<C> {
    /// Claims for this many pages; nothing is to be saved of them.
    pub fn new(pages: u64) -> Claims<C> {
        Claims {
            cells: (0..pages).map(|_| C::idle()).collect(),
        }
    }

    /// The page, which is protected, is to be saved. The guest is stopped.
    pub fn arm(&self, page: u64) {
        self.cells[page as usize].swap(ARMED);
    }

    /// For the copier: whether the page is now the caller's to save.
    pub fn claim(&self, page: u64) -> bool {
        let cell = &self.cells[page as usize];
        loop {
            match cell.load() {
                ARMED if cell.change(ARMED, BUSY) => return true,
                ARMED_WANTED if cell.change(ARMED_WANTED, BUSY_WANTED) => return true,
                ARMED | ARMED_WANTED => {}
                _ => return false,
            }
        }
    }

    /// For the thread that claimed a page, when it is saved: whether a writer waits, for which the page
    /// must be unprotected.
    pub fn done(&self, page: u64) -> bool {
        self.cells[page as usize].swap(IDLE) == BUSY_WANTED
    }

    /// A thread wants to write the page and waits. `room`: whether the caller could save it.
    pub fn fault(&self, page: u64, room: bool) -> OnFault {
        let cell = &self.cells[page as usize];
        loop {
            match cell.load() {
                IDLE => return OnFault::Open,
                ARMED if room && cell.change(ARMED, BUSY) => return OnFault::Save,
                ARMED if !room && cell.change(ARMED, ARMED_WANTED) => return OnFault::Leave,
                BUSY if cell.change(BUSY, BUSY_WANTED) => return OnFault::Leave,
                ARMED_WANTED | BUSY_WANTED => return OnFault::Leave,
                _ => {}
            }
        }
    }

    /// Whether a writer waits until the page is saved.
    #[cfg(test)]
    pub fn is_wanted(&self, page: u64) -> bool {
        matches!(self.cells[page as usize].load(), ARMED_WANTED | BUSY_WANTED)
    }

    /// Whether a page that no thread waits for may be unprotected along with a neighbour, as [`Claims::fault`]
    /// says; [`OnFault::Leave`] when it is being saved.
    pub fn neighbour(&self, page: u64, room: bool) -> OnFault {
        let cell = &self.cells[page as usize];
        match cell.load() {
            IDLE => OnFault::Open,
            ARMED if room && cell.change(ARMED, BUSY) => OnFault::Save,
            _ => OnFault::Leave,
        }
    }
}

#[cfg(test)]
mod tests {
    //! The model: a guest that writes a page, the handler of its fault, and the copier, in every
    //! order of their steps. The page is protected and contains 1; the guest writes 2; the saved content
    //! must be 1, once, and the guest must get to write.

    use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    use super::*;

    atomic_cell!(AtomicU8);

    struct World {
        claims: Claims<AtomicU8>,
        content: AtomicU32,
        open: AtomicBool,
        saved: AtomicU32,
        times_saved: AtomicU32,
        /// The pause lock of the fault handler.
        pause_lock: Mutex<()>,
    }

    impl World {
        fn new() -> Arc<World> {
            let world = World {
                claims: Claims::new(1),
                content: AtomicU32::new(1),
                open: AtomicBool::new(false),
                saved: AtomicU32::new(0),
                times_saved: AtomicU32::new(0),
                pause_lock: Mutex::new(()),
            };
            world.claims.arm(0);
            Arc::new(world)
        }

        fn save(&self) {
            self.saved
                .store(self.content.load(Ordering::Acquire), Ordering::Release);
            self.times_saved.fetch_add(1, Ordering::AcqRel);
        }

        fn open(&self) {
            self.open.store(true, Ordering::Release);
        }

        /// The guest's write, where it gets to it, and the steps of the fault handler.
        fn write(&self, room: bool) {
            let pause_lock = self.pause_lock.lock().unwrap();
            match self.claims.fault(0, room) {
                OnFault::Open => self.open(),
                OnFault::Save => {
                    self.save();
                    self.claims.done(0);
                    self.open();
                }
                OnFault::Leave => {}
            }
            drop(pause_lock);
            // The copier wakes a guest that still waits; see `finish`.
            if self.open.load(Ordering::Acquire) {
                self.content.store(2, Ordering::Release);
            }
        }

        /// The steps of the copier, to its end: then the page must be saved, by either of the two.
        fn copy(&self, hot: bool) {
            if self.claims.claim(0) {
                self.save();
                if self.claims.done(0) || hot {
                    self.open();
                }
            }
            drop(self.pause_lock.lock().unwrap());
            assert_eq!(self.times_saved.load(Ordering::Acquire), 1);
            assert_eq!(self.saved.load(Ordering::Acquire), 1);
        }

        fn finish(&self) {
            assert!(
                self.open.load(Ordering::Acquire),
                "the guest waits for ever"
            );
            assert_eq!(self.times_saved.load(Ordering::Acquire), 1);
            assert_eq!(self.saved.load(Ordering::Acquire), 1);
        }
    }

    fn in_every_order(room: bool, hot: bool) {
        loom::model(move || {
            let world = World::new();
            let guest = {
                let world = world.clone();
                thread::spawn(move || world.write(room))
            };
            world.copy(hot);
            guest.join().unwrap();
            world.finish();
        });
    }

    #[test]
    fn a_page_is_saved_once_before_it_is_written_and_its_writer_goes_on() {
        for room in [true, false] {
            for hot in [true, false] {
                in_every_order(room, hot);
            }
        }
    }

    /// Two vCPUs write the same page: two faults, handled one after the other.
    #[test]
    fn several_writers_of_a_page_all_go_on() {
        for room in [true, false] {
            loom::model(move || {
                let world = World::new();
                let guest = {
                    let world = world.clone();
                    thread::spawn(move || {
                        world.write(room);
                        world.write(room);
                    })
                };
                world.copy(false);
                guest.join().unwrap();
                world.finish();
            });
        }
    }

    #[test]
    fn a_window_that_is_given_up_leaves_no_writer_behind() {
        loom::model(|| {
            let world = World::new();
            let guest = {
                let world = world.clone();
                thread::spawn(move || world.write(false))
            };
            // Claimed and not saved: see `CopyOnWrite::give_up`.
            if world.claims.claim(0) && world.claims.done(0) {
                world.open();
            }
            guest.join().unwrap();
            assert!(world.open.load(Ordering::Acquire));
        });
    }

    /// A neighbour of a page that faults, while the copier comes along.
    #[test]
    fn a_neighbour_is_opened_only_when_it_is_saved() {
        loom::model(|| {
            let world = World::new();
            let server = {
                let world = world.clone();
                thread::spawn(move || {
                    let _pause_lock = world.pause_lock.lock().unwrap();
                    match world.claims.neighbour(0, true) {
                        OnFault::Open => {
                            assert_eq!(world.times_saved.load(Ordering::Acquire), 1);
                        }
                        OnFault::Save => {
                            world.save();
                            world.claims.done(0);
                        }
                        OnFault::Leave => {}
                    }
                })
            };
            world.copy(true);
            server.join().unwrap();
            assert_eq!(world.times_saved.load(Ordering::Acquire), 1);
        });
    }
}
