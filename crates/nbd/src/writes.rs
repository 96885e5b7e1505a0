//! Writing: several requests in flight, each of which the server confirms.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::ops::Range;

use crate::client::{Client, refused};
use crate::error::NbdError;
use crate::ranges::pieces;
use crate::wire::{
    CHUNK_BYTES, Chunk, ChunkKind, Command, SIMPLE_REPLY_BYTES, SimpleReply, is_simple_reply,
};

/// Requests in flight. With [`WRITE_BYTES_MAX`] they take at most 8 MiB of the server's memory.
const WRITES_MAX: usize = 8;
/// Upper bound on one write, in bytes: whole clusters of an image, which then needs not read what is around them.
const WRITE_BYTES_MAX: u32 = 1 << 20;
/// Upper bound on one range of zeros, in bytes. Where the server has to write them, it is not silent for too long.
const ZERO_BYTES_MAX: u32 = 64 << 20;

/// A request that the server has not confirmed.
#[derive(Debug)]
struct Writing {
    cookie: u64,
    action: &'static str,
    offset: u64,
    length: u32,
}

/// Writes to an export. What was handed over is on stable storage when [`finish`](Writer::finish) has returned.
#[derive(Debug)]
pub struct Writer<'c, S> {
    client: &'c mut Client<S>,
    flying: VecDeque<Writing>,
}

impl<S: Read + Write> Client<S> {
    /// Begins to write.
    ///
    /// # Errors
    /// The export is for reading only, or takes no ranges of zeros or no flush.
    pub fn writer(&mut self) -> Result<Writer<'_, S>, NbdError> {
        match self.export.is_writable() {
            true => Ok(Writer {
                client: self,
                flying: VecDeque::new(),
            }),
            false => Err(NbdError::NotWritable),
        }
    }
}

impl<S: Read + Write> Writer<'_, S> {
    /// Writes these bytes there.
    ///
    /// # Errors
    /// The server fails this request or one before it, or the range is not on the disk. The connection is of no more use
    /// then.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), NbdError> {
        let end = offset.saturating_add(bytes.len() as u64);
        let bytes_max = WRITE_BYTES_MAX.min(self.client.export.request_bytes_max);
        for (at, length) in self.pieces(offset..end, bytes_max)? {
            let start = (at - offset) as usize;
            self.request(Command::Write, "write", at, length)?;
            let payload = &bytes[start..start + length as usize];
            self.client.stream.get_mut().write_all(payload)?;
        }
        Ok(())
    }

    /// Makes this range read as zeros, as a hole where the image can have one.
    ///
    /// # Errors
    /// As those of [`write`](Writer::write).
    pub fn write_zeros(&mut self, range: Range<u64>) -> Result<(), NbdError> {
        for (at, length) in self.pieces(range, ZERO_BYTES_MAX)? {
            self.request(Command::WriteZeros, "write zeros to", at, length)?;
        }
        Ok(())
    }

    /// Has the server flush what is written so far, without waiting for it: less is left for the end.
    ///
    /// # Errors
    /// As those of [`write`](Writer::write).
    pub fn flush(&mut self) -> Result<(), NbdError> {
        self.request(Command::Flush, "flush", 0, 0)
    }

    /// Waits until all is written, and has the server flush it: until then a server keeps parts of an image in its memory.
    ///
    /// # Errors
    /// The server fails a request.
    pub fn finish(mut self) -> Result<(), NbdError> {
        self.wait()?;
        self.flush()?;
        self.wait()
    }

    fn wait(&mut self) -> Result<(), NbdError> {
        while !self.flying.is_empty() {
            self.receive()?;
        }
        Ok(())
    }

    fn pieces(
        &self,
        range: Range<u64>,
        bytes_max: u32,
    ) -> Result<impl Iterator<Item = (u64, u32)> + use<S>, NbdError> {
        self.client.expect_inside(&range)?;
        Ok(pieces(range, bytes_max))
    }

    fn request(
        &mut self,
        command: Command,
        action: &'static str,
        offset: u64,
        length: u32,
    ) -> Result<(), NbdError> {
        while self.flying.len() >= WRITES_MAX {
            self.receive()?;
        }
        let cookie = self.client.request(command, offset, length)?;
        self.flying.push_back(Writing {
            cookie,
            action,
            offset,
            length,
        });
        Ok(())
    }

    /// Receives one reply. It need not have the form of replies to reads.
    fn receive(&mut self) -> Result<(), NbdError> {
        let mut head = [0; SIMPLE_REPLY_BYTES];
        self.client.stream.read_exact(&mut head)?;
        if is_simple_reply(&head) {
            let reply = SimpleReply::decode(&head)?;
            let done = self.take(reply.cookie)?;
            return match reply.error {
                0 => Ok(()),
                number => Err(NbdError::Request {
                    action: done.action,
                    offset: done.offset,
                    length: done.length.into(),
                    message: None,
                    source: io::Error::from_raw_os_error(number.cast_signed()),
                }),
            };
        }
        let mut chunk = [0; CHUNK_BYTES];
        chunk[..SIMPLE_REPLY_BYTES].copy_from_slice(&head);
        let rest = &mut chunk[SIMPLE_REPLY_BYTES..];
        self.client.stream.read_exact(rest)?;
        let chunk = Chunk::decode(&chunk)?;
        let payload = self.client.payload(chunk.length)?;
        match (chunk.kind, chunk.done) {
            (ChunkKind::Error, _) => {
                let done = self.take(chunk.cookie)?;
                Err(refused(
                    done.action,
                    &payload,
                    done.offset,
                    done.length.into(),
                )?)
            }
            (ChunkKind::None, true) => self.take(chunk.cookie).map(drop),
            _ => Err(NbdError::protocol("a write is replied to with data")),
        }
    }

    /// The request that a reply is for.
    fn take(&mut self, cookie: u64) -> Result<Writing, NbdError> {
        let at = self.flying.iter().position(|one| one.cookie == cookie);
        let found = at.and_then(|at| self.flying.remove(at));
        found.ok_or_else(|| NbdError::protocol("a reply to no request"))
    }
}
