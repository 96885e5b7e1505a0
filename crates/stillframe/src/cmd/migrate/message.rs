//! What `migrate` and the `watch` of the same VM say to each other over the control socket: lines of JSON.
//!
//! ```text
//!   migrate ── Request ──────────────────────────────────────────────────────> watch
//!           <── Accepted ── Begun ── Event ... Rehearsed ... ── Report or Failed
//! ```
//!
//! A `migrate` that closes the connection earlier cancels the migration.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use stillframe_engine::migration::{MigrateEvent, MigrateOptions, MigrateReport};
use thiserror::Error;

/// Upper bound on a request, in bytes.
pub const REQUEST_BYTES_MAX: usize = 64 << 10;
/// Upper bound on an answer, in bytes.
pub const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Bytes that are read at once.
const READ_BYTES: usize = 4 << 10;

/// A migration that the watch of the VM is to perform.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Address of the destination.
    pub to: String,
    /// Absolute path of the directory with this host's certificate; without, plain text.
    pub certs: Option<PathBuf>,
    /// How the VM is migrated.
    pub options: MigrateOptions,
    /// Whether the migration is rehearsed first.
    pub rehearse: bool,
}

/// What the watch says of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// The migration begins when the checkpoint in progress is done.
    Accepted,
    /// The migration begins.
    Begun,
    /// The engine reports this.
    Event(MigrateEvent),
    /// The rehearsal has succeeded.
    Rehearsed,
    /// The VM runs at the destination.
    Report(MigrateReport),
    /// The request was refused, or the migration failed.
    Failed {
        /// The error and its causes.
        error: String,
        /// The exit code for it.
        exit_code: i32,
    },
}

/// Why no message was received.
#[derive(Debug, Error)]
pub enum MessageError {
    /// The connection was closed between two messages.
    #[error("the connection was closed")]
    Closed,
    /// The message did not come in time.
    #[error("no message came within {} s", .0.as_secs())]
    Silent(Duration),
    /// The message has no end within its limit.
    #[error("the message is longer than {0} bytes")]
    TooLong(usize),
    /// The message is something else.
    #[error("the message is not as this version of stillframe sends it")]
    Malformed(#[source] serde_json::Error),
    /// The connection failed.
    #[error("the connection failed")]
    Io(#[source] io::Error),
}

/// Receives messages from a stream.
#[derive(Debug)]
pub struct Receiver {
    stream: UnixStream,
    /// Received, and not taken yet.
    buffer: Vec<u8>,
    bytes_max: usize,
}

impl Receiver {
    /// Messages of at most `bytes_max` bytes.
    pub fn new(stream: UnixStream, bytes_max: usize) -> Receiver {
        Receiver {
            stream,
            buffer: Vec::new(),
            bytes_max,
        }
    }

    /// Waits for the next message, for at most `limit` if there is one.
    ///
    /// # Errors
    /// [`MessageError::Closed`] and others.
    pub fn receive<M: for<'m> Deserialize<'m>>(
        &mut self,
        limit: Option<Duration>,
    ) -> Result<M, MessageError> {
        let begin = Instant::now();
        let line = loop {
            if let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
                break self.buffer.drain(..=end).collect::<Vec<u8>>();
            }
            if self.buffer.len() > self.bytes_max {
                return Err(MessageError::TooLong(self.bytes_max));
            }
            self.read(begin, limit)?;
        };
        serde_json::from_slice(&line).map_err(MessageError::Malformed)
    }

    fn read(&mut self, begin: Instant, limit: Option<Duration>) -> Result<(), MessageError> {
        let left = limit.map(|limit| limit.saturating_sub(begin.elapsed()));
        let silent = || MessageError::Silent(limit.unwrap_or_default());
        if left.is_some_and(|left| left.is_zero()) {
            return Err(silent());
        }
        self.stream
            .set_read_timeout(left)
            .map_err(MessageError::Io)?;
        let mut bytes = [0; READ_BYTES];
        match self.stream.read(&mut bytes) {
            Ok(0) => Err(MessageError::Closed),
            Ok(read) => {
                self.buffer.extend_from_slice(&bytes[..read]);
                Ok(())
            }
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted => Ok(()),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Err(silent()),
                io::ErrorKind::ConnectionReset => Err(MessageError::Closed),
                _ => Err(MessageError::Io(error)),
            },
        }
    }

    /// Waits until the other side closes the connection, whatever it sends before.
    pub fn wait_for_end(mut self) {
        let _ = self.stream.set_read_timeout(None);
        while matches!(self.stream.read(&mut [0; READ_BYTES]), Ok(1..)) {}
    }
}

/// Sends a message within this time.
///
/// # Errors
/// The other side has closed the connection, or takes nothing.
pub fn send(mut stream: &UnixStream, message: &impl Serialize, limit: Duration) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.set_write_timeout(Some(limit))?;
    stream.write_all(&line)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Option<Duration> = Some(Duration::from_millis(50));

    fn receiver(bytes_max: usize) -> (UnixStream, Receiver) {
        let (other, stream) = UnixStream::pair().unwrap();
        (other, Receiver::new(stream, bytes_max))
    }

    #[test]
    fn messages_are_received_one_by_one() {
        let (other, mut receiver) = receiver(ANSWER_BYTES_MAX);
        let failed = Answer::Failed {
            error: "two\nlines".to_owned(),
            exit_code: 5,
        };
        for answer in [&Answer::Accepted, &failed] {
            send(&other, answer, Duration::from_secs(1)).unwrap();
        }
        drop(other);
        assert_eq!(receiver.receive::<Answer>(None).unwrap(), Answer::Accepted);
        assert_eq!(receiver.receive::<Answer>(None).unwrap(), failed);
        let end = receiver.receive::<Answer>(None);
        assert!(matches!(end, Err(MessageError::Closed)), "{end:?}");
    }

    #[test]
    fn a_silent_or_verbose_peer_is_given_up() {
        let (mut other, mut receiver) = receiver(10);
        let silent = receiver.receive::<Answer>(SOON);
        assert!(matches!(silent, Err(MessageError::Silent(_))), "{silent:?}");
        other.write_all(b"nothing\n").unwrap();
        let garbage = receiver.receive::<Answer>(SOON);
        assert!(
            matches!(garbage, Err(MessageError::Malformed(_))),
            "{garbage:?}"
        );
        other.write_all(b"no end of this line").unwrap();
        let long = receiver.receive::<Answer>(SOON);
        assert!(matches!(long, Err(MessageError::TooLong(10))), "{long:?}");
    }
}
