//! The server: shows the content of disks that never change to clients, several requests at a time.
//!
//! ```text
//!   Server::serve ──> negotiation ──> Session
//!        receive  ──requests──> queue ──> workers ──> Export::read, Export::allocation
//!           └── errors, flushes ──> Replies <── content, extents ──┘
//! ```
//!
//! One thread receives the requests of a connection, and four carry them out. They share the socket under a lock, which
//! is held for one piece of a structured reply or for a whole simple reply.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod hold;
mod input;
mod negotiation;
mod replies;
mod requests;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Write};
use std::net::Shutdown;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::NbdError;
use crate::ranges::{Extent, pieces};
use crate::wire::EIO;
pub use hold::Hold;
use input::Deadline;
use negotiation::{Session, negotiate};
use replies::{Replies, ranges};
use requests::{Query, Subject, receive};

/// Threads that carry out the requests of one connection.
const WORKERS: usize = 4;
/// Upper bound on the requests of one connection that no worker has begun. More of them stay in the socket.
const QUEUE_MAX: usize = 16;
/// Upper bound on the content that is read and sent at once, in bytes, if the client takes structured replies.
const PIECE_BYTES: u32 = 256 << 10;
/// How long a client may take to negotiate, unless the caller says otherwise.
const NEGOTIATION_LIMIT: Duration = Duration::from_secs(10);

/// What a server shows to its clients: the content of one disk, which never changes.
pub trait Export: Send + Sync {
    /// Length in bytes.
    fn bytes(&self) -> u64;

    /// Fills `into` with the content at `offset`. Several threads call it at once. The range is on the disk.
    ///
    /// # Errors
    /// The content cannot be had. The client gets `EIO` with the text of the error, and the connection goes on.
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;

    /// Describes a beginning of this range, which is not empty and is on the disk: ascending extents without gaps, the
    /// first of which begins where the range does. The last may end behind the range. The flags are those of
    /// `base:allocation`: [`Extent::HOLE`] and [`Extent::ZERO`].
    ///
    /// # Errors
    /// As those of [`read`](Export::read). Extents with a gap and no extents are an error, too.
    fn allocation(&self, range: Range<u64>) -> io::Result<Vec<Extent>>;
}

/// Exports by their names.
type Exports<'e> = BTreeMap<String, Arc<dyn Export + 'e>>;

/// How a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The client opened no export: it left before, or wanted one that is not there.
    Unopened,
    /// The client disconnected. All its requests have replies, unless it closed the connection before it took them.
    Disconnected,
    /// The connection was closed between two requests, without a word. Requests in flight may have no reply.
    Closed,
}

/// Shows exports for reading to any number of clients.
///
/// A connection takes five threads. Its memory is at most 1 MiB of content if the client takes structured replies, and
/// 128 MiB if it does not: a simple reply is whole, up to 32 MiB, and four are carried out at once.
pub struct Server<'e> {
    exports: Exports<'e>,
    negotiation_limit: Duration,
}

impl<'e> Server<'e> {
    /// A server of these exports, by their names. A name has at most 4096 bytes, else no client can open it.
    pub fn new(exports: BTreeMap<String, Arc<dyn Export + 'e>>) -> Server<'e> {
        Server {
            exports,
            negotiation_limit: NEGOTIATION_LIMIT,
        }
    }

    /// Limits the time from the greeting until the client has opened an export; 10 s without this. After that a client may
    /// be silent for any time.
    #[must_use]
    pub fn negotiation_limit(self, limit: Duration) -> Server<'e> {
        Server {
            negotiation_limit: limit,
            ..self
        }
    }

    /// Serves one connection until its client leaves. Several threads may serve connections at once. To end a connection,
    /// shut down a clone of its socket; `serve` returns when the calls of the export that are under way have returned.
    ///
    /// # Errors
    /// The connection failed, the client breaks the protocol, or takes too long to negotiate. The connection is closed.
    ///
    /// # Panics
    /// An export panicked. The connection is closed.
    pub fn serve(&self, socket: UnixStream) -> Result<Ended, NbdError> {
        let mut within = Deadline {
            socket: &socket,
            begin: Instant::now(),
            limit: self.negotiation_limit,
        };
        let session = match negotiate(&mut within, &self.exports) {
            Ok(Some(session)) => session,
            Err(error) if is_closed(&error) => return Ok(Ended::Unopened),
            outcome => return outcome.map(|_| Ended::Unopened),
        };
        socket.set_read_timeout(None)?;
        socket.set_write_timeout(None)?;
        match transmit(&socket, &session) {
            Err(error) if is_closed(&error) => Ok(Ended::Closed),
            outcome => outcome,
        }
    }
}

/// Whether a client closed the connection before it took all replies: the kernel reports that as an error.
fn is_closed(error: &NbdError) -> bool {
    let NbdError::Io(error) = error else {
        return false;
    };
    matches!(
        error.kind(),
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset
    )
}

/// The transmission phase.
fn transmit(socket: &UnixStream, session: &Session<'_>) -> Result<Ended, NbdError> {
    let replies = Replies::new(socket, session.structured);
    thread::scope(|scope| {
        // At the end of this closure the queue is closed, and the scope waits for the workers.
        let (queue, queued) = sync_channel(QUEUE_MAX);
        let queued = Arc::new(Mutex::new(queued));
        let hang_up = HangUp(Some(socket));
        for _ in 0..WORKERS {
            // The workers have the only ends of the queue: sending fails when all of them have failed.
            let (queued, replies) = (Arc::clone(&queued), &replies);
            let worker = move || run_worker(&queued, session, replies, socket);
            thread::Builder::new()
                .name("nbd-worker".to_owned())
                .spawn_scoped(scope, worker)?;
        }
        drop(queued);
        let ended = receive(socket, session, &replies, |query| queue.send(query).is_ok())?;
        if ended == Ended::Disconnected {
            hang_up.not_now();
        }
        Ok(ended)
    })
}

/// Shuts a connection down when it is dropped: the threads that wait for its client end.
struct HangUp<'s>(Option<&'s UnixStream>);

impl HangUp<'_> {
    /// Leaves the connection as it is.
    fn not_now(mut self) {
        self.0 = None;
    }
}

impl Drop for HangUp<'_> {
    fn drop(&mut self) {
        if let Some(socket) = self.0 {
            // It fails if the client has closed it already.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// Carries requests out until there are no more, or the client takes no more replies.
fn run_worker(
    queued: &Mutex<Receiver<Query>>,
    session: &Session<'_>,
    replies: &Replies<&UnixStream>,
    socket: &UnixStream,
) {
    // An export that panics must not leave a guest waiting for its reply for ever.
    let hang_up = HangUp(Some(socket));
    let mut buffer = Vec::new();
    loop {
        // The lock is held while the thread waits: one worker waits for the queue, the others for the lock.
        let next = queued.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(query) = next else {
            return hang_up.not_now();
        };
        if answer(&query, session, replies, &mut buffer).is_err() {
            return;
        }
    }
}

/// Replies to a request with what the export has. `buffer` is kept between requests.
///
/// # Errors
/// The client takes no replies any more.
fn answer(
    query: &Query,
    session: &Session<'_>,
    replies: &Replies<impl Write>,
    buffer: &mut Vec<u8>,
) -> io::Result<()> {
    let Query { cookie, range, .. } = query;
    let export = &*session.export;
    let extents_max = match query.subject {
        Subject::Content => return content(query, session, replies, buffer),
        Subject::Allocation { extents_max } => extents_max,
    };
    let found = export.allocation(range.clone());
    match found.and_then(|extents| ranges(range, &extents, extents_max)) {
        Ok(ranges) => replies.allocation(*cookie, &ranges),
        Err(error) => replies.refuse(*cookie, EIO, &error.to_string()),
    }
}

/// Replies to a read.
fn content(
    query: &Query,
    session: &Session<'_>,
    replies: &Replies<impl Write>,
    buffer: &mut Vec<u8>,
) -> io::Result<()> {
    let Range { start, end } = query.range;
    let parts = match session.structured {
        true => pieces(start..end, PIECE_BYTES).collect(),
        // A simple reply says at its beginning whether the whole content can be had.
        false => vec![(start, (end - start) as u32)],
    };
    for (offset, length) in parts {
        let length = length as usize;
        if buffer.len() < length {
            buffer.resize(length, 0);
        }
        let bytes = &mut buffer[..length];
        if let Err(error) = session.export.read(offset, bytes) {
            return replies.refuse(query.cookie, EIO, &error.to_string());
        }
        let last = offset + length as u64 == end;
        replies.content(query.cookie, offset, bytes, last)?;
    }
    if buffer.len() > PIECE_BYTES as usize {
        *buffer = Vec::new();
    }
    Ok(())
}
