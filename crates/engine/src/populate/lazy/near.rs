//! Filling a page that somebody waits for, or is about to, and behind it what is quickly made along with it.

use std::io;

use stillframe_repo::{PageReader, Reader, RepoError};
use stillframe_sys::uffd::Waiters;

use super::ahead::Ahead;
use super::asked::Page;
use super::memory::{FillError, LazyMemory};
use crate::capture::block::PAGE_BYTES;

/// Pages on each side that may come with one: frames are 16 pages.
const REACH: u64 = 15;
/// Zero pages that come with one.
const ZEROS_TOGETHER: u64 = 16;

/// Fills single pages. The state of one thread.
pub(super) struct Near<'m, 'a> {
    memory: &'m LazyMemory<'a>,
    reader: PageReader<'m>,
}

impl<'m, 'a> Near<'m, 'a> {
    pub(super) fn new(
        memory: &'m LazyMemory<'a>,
        reader: &'m Reader<'_>,
    ) -> Result<Near<'m, 'a>, RepoError> {
        Ok(Near {
            memory,
            reader: PageReader::new(reader)?,
        })
    }

    /// Fills a page that is not settled, and then others near it. Returns how many pages that were. Those who
    /// wait for the page are woken as soon as it is there, or left to the caller.
    pub(super) fn fill(
        &mut self,
        (number, page): Page,
        waiters: Waiters,
    ) -> Result<u64, FillError> {
        let memory = self.memory;
        let wake = || match waiters {
            Waiters::Wake => memory.wake(number, page),
            Waiters::Leave => Ok(()),
        };
        let block = &memory.blocks[number];
        if block.map.is_zero(page)? {
            let mut end = page + 1;
            while end < block.map.pages().min(page + ZEROS_TOGETHER)
                && !block.is_settled(end)
                && block.map.is_known_zero(end)
            {
                end += 1;
            }
            memory.put_zeros(number, page..end)?;
            wake()?;
            return Ok(end - page);
        }
        let first = page.saturating_sub(REACH);
        let end = block.map.pages().min(page + REACH + 1);
        let near: Vec<u64> = (first..end)
            .filter(|&other| other != page && !block.is_settled(other))
            .collect();
        let mut failure = None;
        let mut pages = 0;
        let mut sink = |first: u64, bytes: &[u8]| {
            pages += bytes.len() as u64 / PAGE_BYTES;
            let put = match first == page {
                true => memory
                    .put(number, first, bytes, waiters)
                    .and_then(|()| wake()),
                false => memory.put(number, first, bytes, Waiters::Wake),
            };
            put.map_err(|error| {
                let text = error.to_string();
                failure = Some(error);
                io::Error::other(text)
            })
        };
        let read = self.reader.read_near(&block.map, page, &near, &mut sink);
        match failure {
            Some(failure) => Err(failure),
            None => {
                read?;
                Ok(pages)
            }
        }
    }

    /// Fills the next page of the working set, if it is not settled. Returns how many pages that were, or
    /// nothing when the working set has come to its end.
    pub(super) fn fill_ahead(&mut self, ahead: &Ahead) -> Result<Option<u64>, FillError> {
        match ahead.take() {
            Some((number, page)) if !self.memory.blocks[number].is_settled(page) => {
                self.fill((number, page), Waiters::Wake).map(Some)
            }
            Some(_) => Ok(Some(0)),
            None => Ok(None),
        }
    }
}
