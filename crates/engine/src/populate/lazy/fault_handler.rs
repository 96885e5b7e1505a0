//! The fault handlers of a lazy restore: they answer faults on pages that are not there yet.
//!
//! A few threads do nothing else, each with a page fetcher of its own.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use stillframe_fault::{self as fault, Point};
use stillframe_sys::uffd::{Event, UffdError, Waiters};

use crate::populate::lazy::fault_around::FaultAround;
use crate::populate::lazy::fault_batching::FaultBatching;
use crate::populate::lazy::memory::{FillError, LazyMemory};
use crate::populate::lazy::prefetch_queue::PrefetchQueue;
use crate::populate::lazy::stall::Stall;
use crate::source::PageSource;
use stillframe_page::GuestPage;

/// How long until a page that could not be read is tried again.
const AGAIN: Duration = Duration::from_millis(200);

/// One fault handler thread.
pub(super) struct FaultHandler<'m, S: PageSource> {
    /// Its number among them.
    pub(super) number: usize,
    pub(super) memory: &'m LazyMemory<S>,
    pub(super) fault_around: FaultAround<'m, S>,
    pub(super) prefetch_queue: &'m PrefetchQueue,
    /// Fault batching; `None` under a rate limit, where no following pages are populated with a fault.
    pub(super) batching: Option<&'m FaultBatching>,
    pub(super) stall: &'m Stall,
    /// Readable when it is time to end.
    pub(super) end: &'m OwnedFd,
}

impl<S: PageSource> FaultHandler<'_, S> {
    /// Handles faults until the end. An error means that the VM is gone, or that the kernel refuses a call.
    pub(super) fn run(mut self) -> Result<(), FillError> {
        while self.wait()? {
            // Another thread may have been faster.
            if let Some(Event::Fault { address, .. }) = self.memory.uffd.next_event()? {
                self.stall.begins(self.number);
                // It only hangs there: a fault that is not handled waits for ever.
                let _ = fault::at(Point::LazyFault);
                self.serve(address)?;
                self.stall.ends(self.number);
            }
        }
        Ok(())
    }

    /// Waits for a fault; `false` when it is time to end.
    fn wait(&self) -> Result<bool, FillError> {
        loop {
            let mut waited = [
                PollFd::new(self.end, PollFlags::IN),
                PollFd::new(&self.memory.uffd, PollFlags::IN),
            ];
            match poll(&mut waited, None) {
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(UffdError::Events(error.into()).into()),
                Ok(_) => return Ok(waited[0].revents().is_empty()),
            }
        }
    }

    /// Waits a while; `false` when it is time to end.
    fn pause(&self, time: Duration) -> bool {
        let timeout = Timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: time.subsec_nanos().into(),
        };
        let mut waited = [PollFd::new(self.end, PollFlags::IN)];
        !matches!(poll(&mut waited, Some(&timeout)), Ok(1..))
    }

    fn serve(&mut self, address: u64) -> Result<(), FillError> {
        let Some(page) = self.memory.find(address) else {
            // Nothing else is registered.
            return Ok(());
        };
        self.memory.note_fault();
        let mut failed = false;
        loop {
            match self.fill(page) {
                Ok(()) => break,
                Err(FillError::Source(error)) => {
                    self.stall.of_a_page(&error, &mut failed);
                    if !self.pause(AGAIN) {
                        return Ok(());
                    }
                }
                Err(error) => return Err(error),
            }
        }
        if failed {
            self.stall.is_over();
        }
        Ok(())
    }

    fn fill(&mut self, page: GuestPage) -> Result<(), FillError> {
        let memory = self.memory;
        if memory.is_populated(page) {
            memory.put_discarded(page)?;
            return memory.wake(page);
        }
        memory.trace.note(self.prefetch_queue.taken(), page);
        let batching = self.batching.filter(|_| self.prefetch_queue.predicts(page));
        let Some(batching) = batching else {
            return self.fault_around.fill(page, Waiters::Wake);
        };
        let begin = Instant::now();
        let time = batching.time(begin);
        self.fault_around.fill(page, Waiters::Leave)?;
        // A page that cannot be read now is read later; no thread waits for it.
        while begin.elapsed() < time
            && matches!(
                self.fault_around.fill_from(self.prefetch_queue),
                Ok(Some(_))
            )
        {}
        batching.let_go(Instant::now());
        memory.wake(page)
    }
}
