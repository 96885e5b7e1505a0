//! The fault handler of write faults: the first write to a protected page waits for it (synchronous tracking), so
//! that copy-on-write can save a page before it changes.
//!
//! The handler's thread does nothing else. While the guest runs it waits for no other thread. It saves pages into
//! buffers made beforehand. When they are used up, a page is left to the copier if that is at work, and its writer
//! waits for it. If it is not, the writer must not wait: the copier begins when QEMU has answered, and QEMU's main
//! thread may be such a writer. The page is saved into a new buffer then, and past a limit it is not saved.
//!
//! A first write costs a message to this thread and back. Writers mostly continue with the next page. So the pages
//! behind a faulting page are unprotected with it, more of them each time that this prediction holds.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use stillframe_fault::{self as fault, Point};
use stillframe_page::{PAGE, PAGE_BYTES};
use stillframe_sys::pagemap::Pagemap;
use stillframe_sys::process::AddressRange;
use stillframe_sys::uffd::{Event, Uffd};

use crate::memory::block::{Block, Guest};
use crate::tracking::claims::{Claims, OnFault};

use crate::guardian::{HEARTBEAT, Heartbeat};
use crate::tracking::error::TrackerError;
use crate::tracking::protection::still_protected;

/// Pages that can be saved on a fault before the copier has to take them over: 16 MiB.
const SAVED_MAX: usize = 4096;
/// Pages beyond these that can be saved before the copier begins: 48 MiB.
const EXTRA_MAX: u64 = 12288;
/// Upper bound on the pages unprotected at one fault.
const AHEAD_MAX: u64 = 64;
/// Faults handled before the thread checks for other work.
const FAULTS_A_TURN: u32 = 1024;
/// How long the thread stays awake for the next fault: one that finds it so takes 13 us, one that has
/// to wake it 54. The next of a guest that writes much comes within this.
const AWAKE: Duration = Duration::from_micros(60);

/// A page saved because it was about to be written.
#[derive(Debug)]
pub struct Saved {
    /// Number of its block.
    pub block: usize,
    /// Its number in the block.
    pub page: u64,
    /// Its content.
    pub bytes: Box<[u8; PAGE]>,
}

/// A block as the fault handler sees it.
#[derive(Debug)]
struct Served {
    range: AddressRange,
    block: Arc<Block>,
    claims: Claims,
}

/// The state that both sides share.
#[derive(Debug)]
struct Shared {
    uffd: Arc<Uffd>,
    pagemap: Arc<Pagemap>,
    blocks: Vec<Served>,
    faults: AtomicU64,
    /// How far the copier is; odd while vCPUs may wait for it.
    copier_at: AtomicU64,
    failed: AtomicBool,
    /// Pages of this capture that were saved into new buffers.
    extra: AtomicU64,
    /// The thread has ended by itself: pages change unsaved from then on.
    ended: AtomicBool,
    stop: AtomicBool,
    /// The pause lock, held while a fault is handled, from the check of the page's state until the page is
    /// unprotected; see [`FaultHandler::pause_lock`].
    pause_lock: Arc<Mutex<()>>,
}

impl Shared {
    /// Whether a [`CopierAtWork`] lives.
    fn copier_is_at_work(&self) -> bool {
        !self.copier_at.load(Ordering::Acquire).is_multiple_of(2)
    }
}

/// While this lives, vCPUs may wait for the copier: see [`FaultHandler::copier_at_work`].
#[derive(Debug)]
pub struct CopierAtWork(Arc<Shared>);

impl CopierAtWork {
    /// The copier continues with other pages.
    pub fn step(&self) {
        self.0.copier_at.fetch_add(2, Ordering::AcqRel);
    }
}

impl Drop for CopierAtWork {
    fn drop(&mut self) {
        self.0.copier_at.fetch_add(1, Ordering::AcqRel);
    }
}

/// The thread, and the way to it. Dropped, it ends the thread, which unregisters all ranges.
#[derive(Debug)]
pub struct FaultHandler {
    shared: Arc<Shared>,
    wake: std::os::fd::OwnedFd,
    thread: Option<JoinHandle<()>>,
    saved: Receiver<Saved>,
    empty: Sender<Box<[u8; PAGE]>>,
}

impl FaultHandler {
    /// Starts the fault handler, with heartbeats for as long as faults are handled.
    pub fn start(
        uffd: Arc<Uffd>,
        pagemap: Arc<Pagemap>,
        blocks: impl Iterator<Item = Arc<Block>>,
        heartbeat: Heartbeat,
    ) -> io::Result<FaultHandler> {
        let blocks = blocks.map(|block| Served {
            range: block.range(),
            claims: Claims::new(block.pages()),
            block,
        });
        let shared = Arc::new(Shared {
            uffd,
            pagemap,
            blocks: blocks.collect(),
            faults: AtomicU64::new(0),
            copier_at: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            extra: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            pause_lock: Arc::default(),
        });
        let (to_copier, saved) = unbounded();
        let (empty, buffers) = bounded(SAVED_MAX);
        for _ in 0..SAVED_MAX {
            // Ones, because zeroed memory would come untouched from the allocator.
            if empty.send(Box::new([1; PAGE])).is_err() {
                break;
            }
        }
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let woken = wake.try_clone()?;
        let server = Server {
            shared: shared.clone(),
            saved: to_copier,
            buffers,
            expected: 0,
            ahead: 1,
        };
        let thread = std::thread::Builder::new()
            .name("fault handler".into())
            .spawn(move || server.run(&woken, heartbeat))?;
        Ok(FaultHandler {
            shared,
            wake,
            thread: Some(thread),
            saved,
            empty,
        })
    }

    /// The states of a block's pages.
    pub fn claims(&self, block: usize) -> &Claims {
        &self.shared.blocks[block].claims
    }

    /// The pause lock: while it is held no fault is handled. It is held while pages are protected and armed in the
    /// pause. A fault that was received before must not unprotect a page afterwards; the copier may have woken its
    /// writer since. No vCPU waits for the lock, because all are stopped.
    pub fn pause_lock(&self) -> Arc<Mutex<()>> {
        self.shared.pause_lock.clone()
    }

    /// Waits for the fault that is being handled, if there is one: then the page that it saves can be taken.
    pub fn wait_until_idle(&self) {
        drop(
            self.shared
                .pause_lock
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// A page saved on a fault, if there is one; to be given back with [`FaultHandler::recycle`].
    pub fn take_saved(&self) -> Option<Saved> {
        self.saved.try_recv().ok()
    }

    /// The buffer may be used again.
    pub fn recycle(&self, bytes: Box<[u8; PAGE]>) {
        // The channel has room for those made beforehand; the others are freed.
        let _ = self.empty.try_send(bytes);
    }

    /// The copier begins: vCPUs may wait for it to copy pages, until this is dropped. While it
    /// makes no step, heartbeats stop.
    pub fn copier_at_work(&self) -> CopierAtWork {
        self.shared.copier_at.fetch_add(1, Ordering::AcqRel);
        CopierAtWork(self.shared.clone())
    }

    /// Faults handled since the last call.
    pub fn take_faults(&self) -> u64 {
        self.shared.faults.swap(0, Ordering::Relaxed)
    }

    /// A new capture begins: forgets pages that could not be saved up to now. All saved pages were taken.
    pub fn begin(&self) {
        self.shared.failed.store(false, Ordering::Release);
        self.shared.extra.store(0, Ordering::Release);
    }

    /// Whether faults are still handled.
    ///
    /// # Errors
    /// [`TrackerError::HandlerEnded`]: nothing is protected any more.
    pub fn serves(&self) -> Result<(), TrackerError> {
        match self.shared.ended.load(Ordering::Acquire) {
            true => Err(TrackerError::HandlerEnded),
            false => Ok(()),
        }
    }

    /// Whether every page that was written since the last call had been saved; otherwise the
    /// capture is worthless.
    ///
    /// # Errors
    /// [`TrackerError::NotSaved`] for a page, [`TrackerError::HandlerEnded`] for all pages from now on.
    pub fn take_failure(&self) -> Result<(), TrackerError> {
        let failed = self.shared.failed.swap(false, Ordering::AcqRel);
        self.serves()?;
        match failed {
            true => Err(TrackerError::NotSaved),
            false => Ok(()),
        }
    }
}

impl Drop for FaultHandler {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // Cannot fail: the counter is far from full. If it does, the thread looks soon anyway.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The thread.
struct Server {
    shared: Arc<Shared>,
    saved: Sender<Saved>,
    buffers: Receiver<Box<[u8; PAGE]>>,
    /// The address behind the pages that were unprotected last, and how many these were.
    expected: u64,
    ahead: u64,
}

impl Server {
    fn run(mut self, woken: &impl AsFd, heartbeat: Heartbeat) {
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: HEARTBEAT.subsec_nanos().into(),
        };
        heartbeat.beat();
        let mut beaten = Instant::now();
        let mut copier_at = 0;
        // However this ends.
        let _release = Release {
            shared: self.shared.clone(),
            heartbeat: &heartbeat,
        };
        while !self.shared.stop.load(Ordering::Acquire) {
            // Each heartbeat wakes the guardian: not at every fault.
            if beaten.elapsed() >= HEARTBEAT {
                let copier_was_at = copier_at;
                copier_at = self.shared.copier_at.load(Ordering::Acquire);
                // vCPUs wait for the copier too: if it makes no step, they block.
                if copier_at.is_multiple_of(2) || copier_at != copier_was_at {
                    heartbeat.beat();
                }
                beaten = Instant::now();
            }
            let mut waited = [
                PollFd::new(&*self.shared.uffd, PollFlags::IN),
                PollFd::new(woken, PollFlags::IN),
            ];
            match poll(&mut waited, Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
            if self.turn().is_err() {
                return;
            }
        }
    }

    /// Handles the pending faults, and faults that follow soon.
    fn turn(&mut self) -> io::Result<()> {
        let mut served = 0;
        let mut last = None;
        while served < FAULTS_A_TURN {
            match self.shared.uffd.next_event().map_err(io::Error::other)? {
                Some(Event::Fault { address, .. }) => {
                    fault::at(Point::CopyOnWriteFault)?;
                    self.serve(address);
                    served += 1;
                    last = Some(Instant::now());
                }
                None if last.is_some_and(|last| last.elapsed() < AWAKE) => std::hint::spin_loop(),
                None => break,
            }
        }
        Ok(())
    }

    fn serve(&mut self, address: u64) {
        self.shared.faults.fetch_add(1, Ordering::Relaxed);
        let shared = self.shared.clone();
        // Nothing is behind it that a panic could leave half done.
        let _open = shared
            .pause_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut blocks = shared.blocks.iter().enumerate();
        let Some((number, served)) = blocks.find(|(_, served)| served.range.contains(address))
        else {
            // Nothing else is registered; if it is, no thread may wait for it.
            let start = address - address % PAGE_BYTES;
            let end = start + PAGE_BYTES;
            return self.open(AddressRange { start, end });
        };
        let first = (address - served.range.start) / PAGE_BYTES;
        self.ahead = match address == self.expected {
            true => (self.ahead * 2).min(AHEAD_MAX),
            false => 1,
        };
        let end = (first + self.ahead).min(served.block.pages());
        let mut next = first;
        while next < end {
            let room = !self.buffers.is_empty();
            let what = match next == first {
                // Left to the copier only if it is at work.
                true => served
                    .claims
                    .fault(next, room || !shared.copier_is_at_work()),
                false => served.claims.neighbour(next, room),
            };
            match what {
                OnFault::Open => {}
                // A fault proves that its own page was protected.
                OnFault::Save => self.save(number, served, next, next == first),
                OnFault::Leave => break,
            }
            next += 1;
        }
        if next > first {
            let start = served.range.start + first * PAGE_BYTES;
            self.expected = served.range.start + next * PAGE_BYTES;
            self.open(AddressRange {
                start,
                end: self.expected,
            });
        }
    }

    /// Saves a page that was claimed. If that fails, its writer continues all the same. A page that is not
    /// known to have been protected is checked: [`still_protected`] has the reasons.
    fn save(&self, number: usize, served: &Served, page: u64, protected: bool) {
        let saved = self.buffer().is_some_and(|mut bytes| {
            let wanted = page..page + 1;
            let from = std::slice::from_ref(&wanted);
            let read = served
                .block
                .read(Guest::Running, &mut [&mut bytes[..]], from);
            let pagemap = &self.shared.pagemap;
            let unchanged =
                protected || still_protected(pagemap, &served.block, from).unwrap_or(false);
            let saved = Saved {
                block: number,
                page,
                bytes,
            };
            read.is_ok() && unchanged && self.saved.send(saved).is_ok()
        });
        if !saved {
            self.shared.failed.store(true, Ordering::Release);
        }
        // The caller unprotects it, whether or not another thread waits for it too.
        served.claims.done(page);
    }

    fn buffer(&self) -> Option<Box<[u8; PAGE]>> {
        let new = || {
            let extra = self.shared.extra.fetch_add(1, Ordering::AcqRel);
            (extra < EXTRA_MAX).then(|| Box::new([0; PAGE]))
        };
        self.buffers.try_recv().ok().or_else(new)
    }

    /// Unprotects the page at the start of the range, which a thread waits for, and its neighbours if it can.
    fn open(&self, range: AddressRange) {
        let first = AddressRange {
            start: range.start,
            end: range.start + PAGE_BYTES,
        };
        let uffd = &self.shared.uffd;
        if uffd.unprotect(range).is_err() && uffd.unprotect(first).is_err() {
            // The page may be gone (a hot-unplug): the waiting thread then finds that out.
            let _ = uffd.wake(first);
        }
    }
}

/// The end of the thread, whatever its cause: a request to stop, an error, a panic. From here on no thread
/// handles faults, so no page may be protected.
struct Release<'h> {
    shared: Arc<Shared>,
    heartbeat: &'h Heartbeat,
}

impl Drop for Release<'_> {
    fn drop(&mut self) {
        let shared = &self.shared;
        // Before a page can change unsaved.
        if !shared.stop.load(Ordering::Acquire) {
            shared.ended.store(true, Ordering::SeqCst);
        }
        // All of them, whatever comes of one.
        let blocks = shared.blocks.iter();
        let kept = blocks.fold(false, |kept, served| {
            kept | shared.uffd.unregister(served.range).is_err()
        });
        // Otherwise heartbeats stop, and the guardian ends this process: the VM waits for it.
        if !kept {
            self.heartbeat.let_go();
        }
    }
}

#[cfg(test)]
mod tests;
