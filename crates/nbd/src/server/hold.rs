//! A server whose one client waits for what it reads until it is let go.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::net::Shutdown;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Export;
use super::input::{Deadline, read_head};
use super::negotiation::{Session, negotiate};
use super::replies::Replies;
use super::requests::{Action, Query, action};
use crate::error::NbdError;
use crate::ranges::Extent;
use crate::wire::{REQUEST_BYTES, Request};

/// Our end of the connection with such a client. Dropped, it lets the client go, whatever process has a copy. If its process dies
/// it does so with the last copy.
pub struct Hold {
    socket: UnixStream,
    session: Session<'static>,
    /// The read that waits.
    waiting: Option<Query>,
}

/// What the client opens: a little of no content.
struct Nothing;

impl Nothing {
    const BYTES: u64 = 4096;
}

impl Export for Nothing {
    fn bytes(&self) -> u64 {
        Nothing::BYTES
    }

    fn read(&self, _offset: u64, into: &mut [u8]) -> io::Result<()> {
        into.fill(0);
        Ok(())
    }

    fn allocation(&self, range: Range<u64>) -> io::Result<Vec<Extent>> {
        let flags = Extent::HOLE | Extent::ZERO;
        Ok(vec![Extent {
            bytes: range,
            flags,
        }])
    }
}

impl Hold {
    /// The name of what the client opens.
    pub const EXPORT: &str = "hold";

    /// Negotiates with a client until it has opened [`Hold::EXPORT`].
    ///
    /// # Errors
    /// It does not within `limit`.
    pub fn open(socket: UnixStream, limit: Duration) -> Result<Hold, NbdError> {
        let export: Arc<dyn Export> = Arc::new(Nothing);
        let exports = BTreeMap::from([(Hold::EXPORT.to_owned(), export)]);
        let mut within = Deadline {
            socket: &socket,
            begin: Instant::now(),
            limit,
        };
        let session = negotiate(&mut within, &exports)?;
        let session = session.ok_or(ErrorKind::UnexpectedEof);
        Ok(Hold {
            session: session.map_err(io::Error::from)?,
            socket,
            waiting: None,
        })
    }

    /// Waits until the client reads. Returns false if it has not within `limit`, which is not zero.
    ///
    /// # Errors
    /// It left, or the socket was shut down.
    pub fn wait(&mut self, limit: Duration) -> Result<bool, NbdError> {
        self.socket.set_read_timeout(Some(limit))?;
        while self.waiting.is_none() {
            let mut head = [0; REQUEST_BYTES];
            match read_head(&mut &self.socket, &mut head) {
                Ok(true) => {}
                Ok(false) => return Err(io::Error::from(ErrorKind::UnexpectedEof).into()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error.into()),
            }
            let request = Request::decode(&head)?;
            let replies = self.replies();
            match action(&self.session, &request) {
                Action::Query(query) => self.waiting = Some(query),
                Action::Confirm => replies.confirm(request.cookie)?,
                Action::Refuse { error, why } => replies.refuse(request.cookie, error, why)?,
                Action::Disconnect => {
                    return Err(io::Error::from(ErrorKind::ConnectionAborted).into());
                }
            }
        }
        Ok(true)
    }

    /// Replies to the read: the client goes on. It may read again.
    ///
    /// # Errors
    /// It does not wait any more: the socket was shut down.
    pub fn release(&mut self) -> Result<(), NbdError> {
        let Some(Query { cookie, range, .. }) = self.waiting.take() else {
            return Ok(());
        };
        let zeros = vec![0; (range.end - range.start) as usize];
        let sent = self.replies().content(cookie, range.start, &zeros, true);
        Ok(sent?)
    }

    /// Lets the client go, and has its reads fail from here on.
    pub fn shut_down(&self) {
        // It was shut down before, or the client has left.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    fn replies(&self) -> Replies<&UnixStream> {
        Replies::new(&self.socket, self.session.structured)
    }
}

impl std::fmt::Debug for Hold {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let waiting = self.waiting.is_some();
        out.debug_struct("Hold").field("waiting", &waiting).finish()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.shut_down();
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

    const LIMIT: Duration = Duration::from_secs(60);
    const SOON: Duration = Duration::from_millis(1);

    fn opened() -> (Hold, Client) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let client = thread::spawn(|| Client::open(theirs, Hold::EXPORT, &[], LIMIT).unwrap());
        (Hold::open(ours, LIMIT).unwrap(), client.join().unwrap())
    }

    fn read(mut client: Client) -> thread::JoinHandle<Result<(Client, usize), NbdError>> {
        thread::spawn(move || {
            let mut read = 0;
            client.read(std::iter::once(0..512), &mut |_, bytes| {
                read += bytes.len();
                Ok::<(), NbdError>(())
            })?;
            Ok((client, read))
        })
    }

    #[test]
    fn a_client_waits_until_it_is_let_go_each_time() {
        let (mut hold, mut client) = opened();
        for _ in 0..3 {
            assert!(!hold.wait(SOON).unwrap());
            let reading = read(client);
            while !hold.wait(LIMIT).unwrap() {}
            assert!(!reading.is_finished());
            hold.release().unwrap();
            let (back, bytes) = reading.join().unwrap().unwrap();
            assert_eq!(bytes, 512);
            client = back;
        }
        drop(client);
        assert!(hold.wait(LIMIT).is_err());
    }

    #[test]
    fn a_copy_that_is_shut_down_lets_it_go_and_that_shows() {
        let (mut hold, client) = opened();
        let copy = UnixStream::from(hold.as_fd().try_clone_to_owned().unwrap());
        let reading = read(client);
        while !hold.wait(LIMIT).unwrap() {}
        copy.shutdown(Shutdown::Both).unwrap();
        assert!(reading.join().unwrap().is_err());
        assert!(hold.release().is_err());
    }

    #[test]
    fn a_hold_that_is_dropped_lets_its_client_go_whatever_copies_there_are() {
        let (mut hold, client) = opened();
        let _copy = hold.as_fd().try_clone_to_owned().unwrap();
        let reading = read(client);
        while !hold.wait(LIMIT).unwrap() {}
        drop(hold);
        assert!(reading.join().unwrap().is_err());
    }
}
