//! What a client requests after the negotiation: what is decided without the content of the disk.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::ops::Range;

use super::Ended;
use super::input::read_head;
use super::negotiation::Session;
use super::replies::Replies;
use crate::error::NbdError;
use crate::wire::{Command, EINVAL, EPERM, REQ_ONE, REQUEST_BYTES, REQUEST_BYTES_ALWAYS, Request};

/// What a request wants to know of a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subject {
    /// Its bytes.
    Content,
    /// Where there is data.
    Allocation {
        /// Upper bound on the extents of the reply.
        extents_max: usize,
    },
}

/// A request that needs the export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Query {
    pub(crate) cookie: u64,
    pub(crate) subject: Subject,
    /// Bytes of the disk, which has them.
    pub(crate) range: Range<u64>,
}

/// Upper bound on the extents of a reply: 32 KiB, and a client can ask for the rest.
const EXTENTS_MAX: usize = 4096;

/// What the server does with a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Replies when the export has replied.
    Query(Query),
    /// Replies that it is done.
    Confirm,
    /// Replies that it is not done.
    Refuse {
        /// The number of the error.
        error: u32,
        /// Its text, for clients that take one.
        why: &'static str,
    },
    /// Ends the connection once all other requests have replies.
    Disconnect,
}

/// Receives requests until the client leaves, and passes those that need the export to `enqueue`, which returns false
/// when the client takes no more replies.
///
/// # Errors
/// The connection failed, or the client breaks the protocol.
pub(crate) fn receive(
    input: impl Read,
    session: &Session<'_>,
    replies: &Replies<impl Write>,
    mut enqueue: impl FnMut(Query) -> bool,
) -> Result<Ended, NbdError> {
    let mut input = BufReader::new(input);
    let mut head = [0; REQUEST_BYTES];
    while read_head(&mut input, &mut head)? {
        let request = Request::decode(&head)?;
        skip_payload(&mut input, &request)?;
        match action(session, &request) {
            Action::Query(query) => {
                if !enqueue(query) {
                    return Ok(Ended::Closed);
                }
            }
            Action::Confirm => replies.confirm(request.cookie)?,
            Action::Refuse { error, why } => replies.refuse(request.cookie, error, why)?,
            Action::Disconnect => return Ok(Ended::Disconnected),
        }
    }
    Ok(Ended::Closed)
}

/// Skips the bytes that a write brings along.
fn skip_payload(input: &mut impl BufRead, request: &Request) -> Result<(), NbdError> {
    if request.command != Command::Write as u16 {
        return Ok(());
    }
    let length = request.length;
    if length > REQUEST_BYTES_ALWAYS {
        return Err(NbdError::protocol(format!("a write of {length} bytes")));
    }
    let skipped = io::copy(&mut input.take(length.into()), &mut io::sink())?;
    match skipped == u64::from(length) {
        true => Ok(()),
        false => Err(NbdError::Io(ErrorKind::UnexpectedEof.into())),
    }
}

/// Decides what is done with a request.
pub(super) fn action(session: &Session<'_>, request: &Request) -> Action {
    let refuse = |error, why| Action::Refuse { error, why };
    let Some(command) = Command::of(request.command) else {
        return refuse(EINVAL, "there is no such command");
    };
    let length = u64::from(request.length);
    let end = request.offset.checked_add(length);
    let range = end
        .filter(|&end| end <= session.bytes)
        .map(|end| request.offset..end);
    let query = |subject, range| {
        Action::Query(Query {
            cookie: request.cookie,
            subject,
            range,
        })
    };
    match (command, range) {
        (Command::Disconnect, _) => Action::Disconnect,
        (Command::Write | Command::Trim | Command::WriteZeros | Command::Resize, _) => {
            refuse(EPERM, "the export is for reading only")
        }
        (Command::Flush, _) => Action::Confirm,
        (Command::Read | Command::BlockStatus, None) => {
            refuse(EINVAL, "these bytes are not on the disk")
        }
        (Command::Read, Some(range)) => match request.flags {
            0 if request.length > REQUEST_BYTES_ALWAYS => {
                refuse(EINVAL, "a read has at most 32 MiB")
            }
            0 if range.is_empty() => Action::Confirm,
            0 => query(Subject::Content, range),
            _ => refuse(EINVAL, "a read has no such flags"),
        },
        (Command::BlockStatus, Some(range)) => match request.flags {
            _ if !session.allocation => refuse(EINVAL, "no metadata context was selected"),
            _ if range.is_empty() => refuse(EINVAL, "a range of no bytes has no status"),
            0 => query(
                Subject::Allocation {
                    extents_max: EXTENTS_MAX,
                },
                range,
            ),
            REQ_ONE => query(Subject::Allocation { extents_max: 1 }, range),
            _ => refuse(EINVAL, "a block status has no such flags"),
        },
    }
}
