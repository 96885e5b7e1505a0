//! Answering those who touch a page that is not there yet.
//!
//! A few threads do nothing else, each with what it needs to read from the repository. Behind a page comes
//! what is quickly made along with it.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use stillframe_repo::PageReader;
use stillframe_sys::uffd::{Event, UffdError};

use super::memory::{FillError, LazyMemory};
use super::trouble::Trouble;
use crate::capture::block::PAGE_BYTES;

/// Pages on each side that may come with one: frames are 16 pages.
const REACH: u64 = 15;
/// Zero pages that come with one.
const ZEROS_TOGETHER: u64 = 16;
/// How long until a page that could not be had is tried again.
const AGAIN: Duration = Duration::from_millis(200);

/// One of the threads.
pub(super) struct Server<'m, 'a> {
    pub(super) memory: &'m LazyMemory<'a>,
    pub(super) reader: PageReader<'a>,
    pub(super) trouble: &'m Trouble,
    /// Readable when it is time to end.
    pub(super) end: &'m OwnedFd,
}

impl Server<'_, '_> {
    /// Serves until the end. An error means that the VM is gone, or that the kernel fails us.
    pub(super) fn run(mut self) -> Result<(), FillError> {
        while self.wait()? {
            // Another thread may have been faster.
            if let Some(Event::Fault { address, .. }) = self.memory.uffd.next_event()? {
                self.serve(address)?;
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
        let Some((number, page)) = self.memory.find(address) else {
            // Nothing else is registered.
            return Ok(());
        };
        self.memory.note_fault();
        let mut failed = false;
        loop {
            match self.fill(number, page) {
                Ok(()) => break,
                Err(FillError::Repo(error)) => {
                    self.trouble.of_a_page(&error, &mut failed);
                    if !self.pause(AGAIN) {
                        return Ok(());
                    }
                }
                Err(error) => return Err(error),
            }
        }
        if failed {
            self.trouble.is_over();
        }
        Ok(())
    }

    fn fill(&mut self, number: usize, page: u64) -> Result<(), FillError> {
        let memory = self.memory;
        let block = &memory.blocks[number];
        if block.is_settled(page) {
            memory.put_discarded(number, page)?;
            return memory.wake(number, page);
        }
        if block.map.is_zero(page)? {
            let mut end = page + 1;
            while end < block.map.pages().min(page + ZEROS_TOGETHER)
                && !block.is_settled(end)
                && block.map.is_known_zero(end)
            {
                end += 1;
            }
            memory.put_zeros(number, page..end)?;
            memory.note_asked(number, page..end);
            return memory.wake(number, page);
        }
        let first = page.saturating_sub(REACH);
        let end = block.map.pages().min(page + REACH + 1);
        let near: Vec<u64> = (first..end)
            .filter(|&other| other != page && !block.is_settled(other))
            .collect();
        let mut failure = None;
        let mut sink = |first: u64, bytes: &[u8]| {
            let put = memory.put(number, first, bytes);
            memory.note_asked(number, first..first + bytes.len() as u64 / PAGE_BYTES);
            let put = put.and_then(|()| match first == page {
                true => memory.wake(number, page),
                false => Ok(()),
            });
            put.map_err(|error| {
                let text = error.to_string();
                failure = Some(error);
                io::Error::other(text)
            })
        };
        let read = self.reader.read_near(&block.map, page, &near, &mut sink);
        match failure {
            Some(failure) => Err(failure),
            None => Ok(read?),
        }
    }
}
