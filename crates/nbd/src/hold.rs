//! A server that greets its client and answers nothing: a client that opens an export there waits until it is let go.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::wire::{CLIENT_FLAGS_BYTES, greeting};

/// Our end of the connection with such a client. Dropped, it lets the client go, whatever process has a copy. If its process dies
/// it does so with the last copy.
#[derive(Debug)]
pub struct Hold {
    socket: UnixStream,
}

impl Hold {
    /// A hold, and the end for its client, which finds the greeting there.
    ///
    /// # Errors
    /// The kernel makes no socket pair.
    pub fn pair() -> io::Result<(Hold, UnixStream)> {
        let (mut socket, theirs) = UnixStream::pair()?;
        socket.write_all(&greeting())?;
        Ok((Hold { socket }, theirs))
    }

    /// Waits for the client. Returns false if it has not come within `limit`, which is not zero.
    ///
    /// # Errors
    /// It left, or the socket was shut down.
    pub fn wait(&mut self, limit: Duration) -> io::Result<bool> {
        self.socket.set_read_timeout(Some(limit))?;
        match self.socket.read_exact(&mut [0; CLIENT_FLAGS_BYTES]) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Lets the client go, whatever process has a copy of this end.
    ///
    /// # Errors
    /// The socket was shut down before.
    pub fn release(&self) -> io::Result<()> {
        self.socket.shutdown(Shutdown::Both)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // It was shut down before.
        let _ = self.release();
    }
}

impl AsFd for Hold {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::Client;

    #[test]
    fn a_client_waits_until_it_is_let_go() {
        let (mut hold, theirs) = Hold::pair().unwrap();
        assert!(!hold.wait(Duration::from_millis(1)).unwrap());
        let copy = hold.as_fd().try_clone_to_owned().unwrap();
        let client = thread::spawn(|| Client::open(theirs, "any", &[], Duration::from_secs(60)));
        while !hold.wait(Duration::from_secs(1)).unwrap() {}
        assert!(!client.is_finished());
        hold.release().unwrap();
        client.join().unwrap().unwrap_err();
        drop(copy);
        hold.wait(Duration::from_secs(1)).unwrap_err();
    }
}
