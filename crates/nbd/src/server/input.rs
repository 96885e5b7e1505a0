//! Reading from a client: a deadline over several reads, and the end of the connection between two messages.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A socket whose reads and writes fail after a deadline, however slowly the client sends and takes bytes.
#[derive(Debug)]
pub(crate) struct Deadline<'s> {
    pub(crate) socket: &'s UnixStream,
    pub(crate) begin: Instant,
    pub(crate) limit: Duration,
}

impl Deadline<'_> {
    /// Lets the next read and write wait until the deadline.
    fn set(&self) -> io::Result<()> {
        let left = self.limit.saturating_sub(self.begin.elapsed());
        if left.is_zero() {
            return Err(ErrorKind::WouldBlock.into());
        }
        self.socket.set_read_timeout(Some(left))?;
        self.socket.set_write_timeout(Some(left))
    }

    /// A wait that ends at the deadline is reported like an operation that would have to wait.
    fn explain(&self, error: io::Error) -> io::Error {
        match error.kind() {
            ErrorKind::WouldBlock => io::Error::new(
                ErrorKind::TimedOut,
                format!("no export was opened within {:?}", self.limit),
            ),
            _ => error,
        }
    }
}

impl Read for Deadline<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.set().and_then(|()| self.socket.read(into));
        read.map_err(|error| self.explain(error))
    }
}

impl Write for Deadline<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.set().and_then(|()| self.socket.write(bytes));
        written.map_err(|error| self.explain(error))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads the head of the next message. Returns false if the client has closed the connection before its first byte.
///
/// # Errors
/// The connection failed, or ended within the head.
pub(crate) fn read_head(input: &mut impl Read, head: &mut [u8]) -> io::Result<bool> {
    let first = loop {
        match input.read(head) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            read => break read?,
        }
    };
    if first == 0 {
        return Ok(false);
    }
    input.read_exact(&mut head[first..])?;
    Ok(true)
}
