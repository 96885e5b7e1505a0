//! The byte stream below the frames: TCP, encrypted or not.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use rustls::{ClientConnection, ServerConnection, StreamOwned};

/// An established stream. Reads and writes have a timeout.
#[derive(Debug)]
pub enum Stream {
    /// Plain text.
    Plain(TcpStream),
    /// TLS, on the side that connected.
    Client(Box<StreamOwned<ClientConnection, TcpStream>>),
    /// TLS, on the side that listened.
    Server(Box<StreamOwned<ServerConnection, TcpStream>>),
}

/// Closes a stream that another thread reads or writes, which fails then.
#[derive(Debug)]
pub struct Closer(TcpStream);

impl Closer {
    /// Closes it.
    pub fn close(&self) {
        // One that is closed already needs no more.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

impl Stream {
    fn socket(&self) -> &TcpStream {
        match self {
            Stream::Plain(socket) => socket,
            Stream::Client(stream) => &stream.sock,
            Stream::Server(stream) => &stream.sock,
        }
    }

    /// What closes it from another thread.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn closer(&self) -> io::Result<Closer> {
        self.socket().try_clone().map(Closer)
    }

    /// Waits for something to read, or the end of the stream, for at most `limit`, which is not zero. An error is left
    /// for the next read.
    pub fn has_input(&mut self, limit: Duration) -> bool {
        // What has come may be a part of the encryption only, as a session ticket.
        let taken = match self {
            Stream::Plain(_) => return readable(self.socket(), limit),
            Stream::Client(stream) => stream.conn.process_new_packets(),
            Stream::Server(stream) => stream.conn.process_new_packets(),
        };
        if taken.is_ok_and(|state| state.plaintext_bytes_to_read() == 0)
            && !readable(self.socket(), limit)
        {
            return false;
        }
        match self {
            Stream::Plain(_) => true,
            Stream::Client(stream) => decrypted(&mut stream.conn, &mut stream.sock),
            Stream::Server(stream) => decrypted(&mut stream.conn, &mut stream.sock),
        }
    }

    /// Sets the timeout of each later read and write. A socket that has none any more fails the next of them.
    pub fn limit_silence(&self, silence_max: Duration) {
        let socket = self.socket();
        let _ = socket.set_read_timeout(Some(silence_max));
        let _ = socket.set_write_timeout(Some(silence_max));
    }
}

/// Whether a read would not wait.
fn readable(socket: &TcpStream, limit: Duration) -> bool {
    let before = socket.read_timeout();
    let limited = socket.set_read_timeout(Some(limit));
    let peeked = socket.peek(&mut [0]);
    let restored = before.and_then(|before| socket.set_read_timeout(before));
    let waited = |error: io::Error| {
        matches!(
            error.kind(),
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
        )
    };
    limited.and(restored).is_err() || !peeked.is_err_and(waited)
}

/// Takes what has come; whether the next read has something, or fails.
fn decrypted<D>(connection: &mut rustls::ConnectionCommon<D>, socket: &mut TcpStream) -> bool {
    let before = connection.process_new_packets();
    if before.is_ok_and(|state| state.plaintext_bytes_to_read() == 0)
        && !matches!(connection.read_tls(socket), Ok(1..))
    {
        return true;
    }
    let state = connection.process_new_packets();
    !state.is_ok_and(|state| state.plaintext_bytes_to_read() == 0 && !state.peer_has_closed())
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(stream) => stream.read(buffer),
            Stream::Client(stream) => stream.read(buffer),
            Stream::Server(stream) => stream.read(buffer),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(stream) => stream.write(bytes),
            Stream::Client(stream) => stream.write(bytes),
            Stream::Server(stream) => stream.write(bytes),
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Plain(stream) => stream.write_vectored(slices),
            Stream::Client(stream) => stream.write_vectored(slices),
            Stream::Server(stream) => stream.write_vectored(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Plain(stream) => stream.flush(),
            Stream::Client(stream) => stream.flush(),
            Stream::Server(stream) => stream.flush(),
        }
    }
}

/// A socket whose reads and writes all end by one deadline: a peer that sends a byte now and then gains no time.
pub(crate) struct UntilDeadline<'s> {
    pub socket: &'s TcpStream,
    pub deadline: Instant,
}

impl UntilDeadline<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        match self.deadline.checked_duration_since(Instant::now()) {
            Some(left) if !left.is_zero() => Ok(Some(left)),
            _ => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

impl UntilDeadline<'_> {
    /// Copies the next bytes without taking them.
    pub fn peek(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(self.left()?)?;
        self.socket.peek(buffer)
    }
}

impl Read for UntilDeadline<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.socket.set_read_timeout(self.left()?)?;
        self.socket.read(buffer)
    }
}

impl Write for UntilDeadline<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.set_write_timeout(self.left()?)?;
        self.socket.write(bytes)
    }

    /// TLS writes its last records, an alert among them, in one call.
    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.socket.set_write_timeout(self.left()?)?;
        self.socket.write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()
    }
}
