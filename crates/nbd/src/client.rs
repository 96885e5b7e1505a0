//! The client: an export that is open, its extents and its content.

use std::io::{self, BufReader, Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::error::NbdError;
use crate::negotiation::{Negotiated, negotiate};
use crate::ranges::{Extent, pieces};
use crate::reads::Reads;
use crate::wire::{CHUNK_BYTES, Chunk, ChunkKind, Command, Request, decode_error, decode_status};

/// Reads in flight. QEMU carries out 16 of one connection at a time (`MAX_NBD_REQUESTS` of its nbd/server.c).
const READS_MAX: usize = 16;
/// Upper bound on one read, in bytes. Together with [`READS_MAX`] it bounds the memory to 4 MiB.
const READ_BYTES_MAX: u32 = 256 << 10;
/// Upper bound on a range whose status is queried at once, in bytes; a power of two, so that it keeps ranges aligned.
const STATUS_BYTES_MAX: u64 = 1 << 31;
/// Upper bound on the payload of a chunk without data, in bytes. QEMU describes at most 128 Ki ranges at once.
const PAYLOAD_BYTES_MAX: u32 = 2 << 20;

/// Takes a piece of a disk: its offset and its bytes.
pub type TakePiece<'t, E> = &'t mut dyn FnMut(u64, &[u8]) -> Result<(), E>;

/// A connection to one export.
#[derive(Debug)]
pub struct Client<S = UnixStream> {
    pub(crate) stream: BufReader<S>,
    pub(crate) export: Negotiated,
    next_cookie: u64,
}

impl Client {
    /// Opens an export with these metadata contexts. The server may be silent for `limit`, here and later.
    ///
    /// # Errors
    /// The server refuses it, or speaks another protocol.
    pub fn open(
        socket: UnixStream,
        export: &str,
        contexts: &[&str],
        limit: Duration,
    ) -> Result<Client, NbdError> {
        socket.set_read_timeout(Some(limit))?;
        socket.set_write_timeout(Some(limit))?;
        Client::over(socket, export, contexts)
    }
}

impl Client {
    /// The server may be silent for this long from here on.
    ///
    /// # Errors
    /// The kernel refuses it: zero is no limit.
    pub fn limit_silence(&mut self, limit: Duration) -> io::Result<()> {
        let socket = self.stream.get_ref();
        socket.set_read_timeout(Some(limit))?;
        socket.set_write_timeout(Some(limit))
    }
}

impl<S: Read + Write> Client<S> {
    /// The same over any stream.
    pub(crate) fn over(
        mut stream: S,
        export: &str,
        contexts: &[&str],
    ) -> Result<Client<S>, NbdError> {
        let export = negotiate(&mut stream, export, contexts)?;
        Ok(Client {
            stream: BufReader::new(stream),
            export,
            next_cookie: 1,
        })
    }

    /// Length of the disk in bytes.
    pub fn bytes(&self) -> u64 {
        self.export.bytes
    }

    /// The status of a range in a metadata context, by its number among those that were named: ascending extents without
    /// gaps. Neighbours with the same flags are one extent.
    ///
    /// # Errors
    /// The server fails, or the range is not on the disk.
    pub fn extents(&mut self, context: usize, range: Range<u64>) -> Result<Vec<Extent>, NbdError> {
        self.expect_inside(&range)?;
        let mut extents: Vec<Extent> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let length = (range.end - at).min(STATUS_BYTES_MAX);
            for (bytes, flags) in self.status(context, at, length as u32)? {
                // The last one may reach behind the range.
                let end = range.end.min(at + u64::from(bytes));
                match extents.last_mut() {
                    Some(last) if last.flags == flags => last.bytes.end = end,
                    _ => extents.push(Extent {
                        bytes: at..end,
                        flags,
                    }),
                }
                at = end;
                if at == range.end {
                    break;
                }
            }
        }
        Ok(extents)
    }

    /// Reads ranges, several at a time. `take` gets the bytes in the order of the ranges, in pieces of at most 256 KiB, each
    /// with its offset.
    ///
    /// # Errors
    /// The server fails, a range is not on the disk, or an error of `take`. The connection is of no more use then.
    pub fn read<E: From<NbdError>>(
        &mut self,
        ranges: impl IntoIterator<Item = Range<u64>>,
        take: TakePiece<'_, E>,
    ) -> Result<(), E> {
        let bytes_max = READ_BYTES_MAX.min(self.export.request_bytes_max);
        let pieces = ranges
            .into_iter()
            .flat_map(|range| pieces(range, bytes_max));
        let mut pieces = pieces.peekable();
        let mut reads = Reads::default();
        while pieces.peek().is_some() || reads.len() > 0 {
            while reads.len() < READS_MAX
                && let Some((offset, length)) = pieces.next()
            {
                self.expect_inside(&(offset..offset.saturating_add(length.into())))?;
                let cookie = self.request(Command::Read, offset, length)?;
                reads.add(cookie, offset, length);
            }
            self.receive(&mut reads)?;
            while let Some((offset, bytes)) = reads.take_oldest()? {
                take(offset, &bytes)?;
                reads.reuse(bytes);
            }
        }
        Ok(())
    }

    /// Says goodbye, so that the server does not call it an error.
    ///
    /// # Errors
    /// The connection failed.
    pub fn close(mut self) -> Result<(), NbdError> {
        self.request(Command::Disconnect, 0, 0)?;
        Ok(())
    }

    pub(crate) fn expect_inside(&self, range: &Range<u64>) -> Result<(), NbdError> {
        let bytes = self.export.bytes;
        match range.start <= range.end && range.end <= bytes {
            true => Ok(()),
            false => Err(NbdError::Outside {
                offset: range.start,
                end: range.end,
                bytes,
            }),
        }
    }

    pub(crate) fn request(
        &mut self,
        command: Command,
        offset: u64,
        length: u32,
    ) -> Result<u64, NbdError> {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let request = Request {
            flags: 0,
            command: command as u16,
            cookie,
            offset,
            length,
        };
        self.stream.get_mut().write_all(&request.encode())?;
        Ok(cookie)
    }

    /// The lengths and flags of the first ranges behind `offset`, at least one.
    fn status(
        &mut self,
        context: usize,
        offset: u64,
        length: u32,
    ) -> Result<Vec<(u32, u32)>, NbdError> {
        let wanted = self.export.contexts.get(context).copied();
        let wanted = wanted.ok_or_else(|| NbdError::protocol("no such metadata context"))?;
        let cookie = self.request(Command::BlockStatus, offset, length)?;
        let mut found = Vec::new();
        loop {
            let chunk = self.head()?;
            if chunk.cookie != cookie {
                return Err(NbdError::protocol("a reply to no request"));
            }
            let payload = self.payload(chunk.length)?;
            match chunk.kind {
                ChunkKind::BlockStatus => {
                    let (id, ranges) = decode_status(&payload)?;
                    if id == wanted {
                        found = ranges;
                    }
                }
                ChunkKind::Error => {
                    return Err(refused("describe", &payload, offset, length.into())?);
                }
                ChunkKind::None => {}
                ChunkKind::Data | ChunkKind::Hole => {
                    return Err(NbdError::protocol("data without a read"));
                }
            }
            if chunk.done {
                break;
            }
        }
        // A range of no bytes would be queried again and again.
        match found.is_empty() || found.iter().any(|&(bytes, _)| bytes == 0) {
            true => Err(NbdError::protocol("a status of no bytes")),
            false => Ok(found),
        }
    }

    /// Receives one chunk of a read.
    fn receive(&mut self, reads: &mut Reads) -> Result<(), NbdError> {
        let chunk = self.head()?;
        match chunk.kind {
            ChunkKind::Data => {
                let limit = reads.data_bytes_max(chunk.cookie)?;
                let length = chunk.length as usize;
                if !(8..=limit).contains(&length) {
                    return Err(NbdError::protocol("a chunk that no read is for"));
                }
                let mut offset = [0; 8];
                self.stream.read_exact(&mut offset)?;
                let offset = u64::from_be_bytes(offset);
                let place = reads.place(chunk.cookie, offset, length - 8)?;
                self.stream.read_exact(place)?;
            }
            ChunkKind::Hole => {
                let payload = self.payload(chunk.length)?;
                reads.hole(chunk.cookie, &payload)?;
            }
            ChunkKind::Error => {
                let payload = self.payload(chunk.length)?;
                // Decoded before it is looked for, so that a broken one is reported as such.
                let (number, message) = decode_error(&payload)?;
                reads.fail(chunk.cookie, |offset, length| NbdError::Request {
                    action: "read",
                    offset,
                    length,
                    message,
                    source: io::Error::from_raw_os_error(number.cast_signed()),
                })?;
            }
            ChunkKind::None => drop(self.payload(chunk.length)?),
            ChunkKind::BlockStatus => return Err(NbdError::protocol("a status without a query")),
        }
        match chunk.done {
            true => reads.done(chunk.cookie),
            false => Ok(()),
        }
    }

    /// The head of the next chunk.
    fn head(&mut self) -> Result<Chunk, NbdError> {
        let mut head = [0; CHUNK_BYTES];
        self.stream.read_exact(&mut head)?;
        Chunk::decode(&head)
    }

    pub(crate) fn payload(&mut self, length: u32) -> Result<Vec<u8>, NbdError> {
        if length > PAYLOAD_BYTES_MAX {
            return Err(NbdError::protocol(format!("a chunk of {length} bytes")));
        }
        let mut payload = vec![0; length as usize];
        self.stream.read_exact(&mut payload)?;
        Ok(payload)
    }
}

/// The error of an error chunk.
pub(crate) fn refused(
    action: &'static str,
    payload: &[u8],
    offset: u64,
    length: u64,
) -> Result<NbdError, NbdError> {
    let (number, message) = decode_error(payload)?;
    Ok(NbdError::Request {
        action,
        offset,
        length,
        message,
        source: io::Error::from_raw_os_error(number.cast_signed()),
    })
}
