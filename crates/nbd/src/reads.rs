//! Reads in flight: each has its buffer, and knows which of its bytes have come.

use std::collections::VecDeque;
use std::ops::Range;

use crate::error::NbdError;
use crate::wire::Fields;

/// One read in flight.
#[derive(Debug)]
struct Reading {
    cookie: u64,
    offset: u64,
    bytes: Vec<u8>,
    /// Ranges of the buffer that have come, as they came.
    covered: Vec<Range<usize>>,
    /// What is wrong with it, if the server cannot read it.
    failed: Option<NbdError>,
    done: bool,
}

/// The reads in flight, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Reads {
    flying: VecDeque<Reading>,
    /// Buffers for the next ones.
    spare: Vec<Vec<u8>>,
}

impl Reads {
    pub(crate) fn len(&self) -> usize {
        self.flying.len()
    }

    /// A read that was requested.
    pub(crate) fn add(&mut self, cookie: u64, offset: u64, length: u32) {
        let mut bytes = self.spare.pop().unwrap_or_default();
        // Each byte will be written: by data, or by a hole.
        bytes.resize(length as usize, 0);
        self.flying.push_back(Reading {
            cookie,
            offset,
            bytes,
            covered: Vec::new(),
            failed: None,
            done: false,
        });
    }

    fn find(&mut self, cookie: u64) -> Result<&mut Reading, NbdError> {
        let found = self
            .flying
            .iter_mut()
            .find(|read| read.cookie == cookie && !read.done);
        found.ok_or_else(|| NbdError::protocol("a reply to no request"))
    }

    /// Upper bound on the bytes of a chunk of this read: its data and an offset.
    pub(crate) fn data_bytes_max(&mut self, cookie: u64) -> Result<usize, NbdError> {
        Ok(self.find(cookie)?.bytes.len() + 8)
    }

    /// The part of the buffer that the next `length` bytes of data are for.
    pub(crate) fn place(
        &mut self,
        cookie: u64,
        offset: u64,
        length: usize,
    ) -> Result<&mut [u8], NbdError> {
        let read = self.find(cookie)?;
        let range = read.range(offset, length)?;
        read.covered.push(range.clone());
        Ok(&mut read.bytes[range])
    }

    /// A hole, from the payload of its chunk.
    pub(crate) fn hole(&mut self, cookie: u64, payload: &[u8]) -> Result<(), NbdError> {
        let mut fields = Fields(payload);
        let (offset, length) = (fields.u64()?, fields.u32()?);
        self.place(cookie, offset, length as usize)?.fill(0);
        Ok(())
    }

    /// The server cannot read it: `fault` makes the error, from its offset and its length.
    pub(crate) fn fail(
        &mut self,
        cookie: u64,
        fault: impl FnOnce(u64, u64) -> NbdError,
    ) -> Result<(), NbdError> {
        let read = self.find(cookie)?;
        let fault = fault(read.offset, read.bytes.len() as u64);
        read.failed.get_or_insert(fault);
        Ok(())
    }

    /// Its last chunk has come.
    pub(crate) fn done(&mut self, cookie: u64) -> Result<(), NbdError> {
        self.find(cookie)?.done = true;
        Ok(())
    }

    /// The oldest read, if it is done: its offset and its bytes.
    ///
    /// # Errors
    /// The server could not read it, or bytes came twice or not at all.
    pub(crate) fn take_oldest(&mut self) -> Result<Option<(u64, Vec<u8>)>, NbdError> {
        let Some(oldest) = self.flying.pop_front_if(|read| read.done) else {
            return Ok(None);
        };
        if let Some(error) = oldest.failed {
            return Err(error);
        }
        let mut covered = oldest.covered;
        covered.sort_unstable_by_key(|range| range.start);
        let mut end = 0;
        for range in covered {
            if range.start != end {
                return Err(NbdError::protocol("a read with bytes twice or missing"));
            }
            end = range.end;
        }
        match end == oldest.bytes.len() {
            true => Ok(Some((oldest.offset, oldest.bytes))),
            false => Err(NbdError::protocol("a read without its last bytes")),
        }
    }

    /// Gives a buffer back.
    pub(crate) fn reuse(&mut self, buffer: Vec<u8>) {
        self.spare.push(buffer);
    }
}

impl Reading {
    /// A range of the disk as one of the buffer.
    fn range(&self, offset: u64, length: usize) -> Result<Range<usize>, NbdError> {
        let outside = || NbdError::protocol("bytes that no request was for");
        if length == 0 {
            return Err(NbdError::protocol("a chunk of no bytes"));
        }
        let start = offset.checked_sub(self.offset).ok_or_else(outside)?;
        let start = usize::try_from(start).map_err(|_| outside())?;
        let end = start.checked_add(length).ok_or_else(outside)?;
        match end <= self.bytes.len() {
            true => Ok(start..end),
            false => Err(outside()),
        }
    }
}
