//! Carries the bytes between a QEMU's socket and the other host, over one connection for each direction.
//!
//! Each direction has a thread. A side that has no bytes says each second that it lives, so that a link that is cut is
//! noticed soon: a write of the guest may be waiting for it.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::SendFlags;
use stillframe_link::Closer;

use super::DiskError;
use crate::connection::ConnectionError;
use crate::connection::framing::Kind;
use crate::connection::message::{Control, Message};
use crate::migration::limiter::Limiter;
use crate::migration::{BEAT, Wire};

/// Bytes that are read at once: few enough to be sent in a moment where the bandwidth is limited.
const PIECE: usize = 64 << 10;

/// How long a link may be silent, or take nothing, and how long a write of the guest waits for the other side. Then the
/// connection is given up, and the guest goes on. Less than the 30 s after which a guest's driver gives up a request.
const STALL_MAX: Duration = Duration::from_secs(10);

/// What both threads of a relay share.
struct Shared {
    begin: Instant,
    bytes: AtomicU64,
    /// When QEMU's last request was passed on that had no answer at all since, in milliseconds from the beginning; 0: there
    /// is none.
    unanswered: AtomicU64,
    /// Whether the guest waits for answers.
    limited: AtomicBool,
    failure: Mutex<Option<String>>,
}

/// Zeros, which are no reply of an NBD server, and longer than any reply to a client that only writes.
const NO_REPLY: [u8; 1 << 10] = [0; 1 << 10];

/// What QEMU is at its end of the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// It exports an image.
    Server,
    /// It writes to an export. It must never see the end of the socket: it would connect again, to whatever has the number
    /// then that its own descriptor had, read from it, and close it (QEMU, `socket_get_fd` in util/qemu-sockets.c, and
    /// `nbd_reconnect_attempt` in block/nbd.c). After a reply that is none, or a `yank`, it never does.
    Client,
}

/// One disk's way to the other host. Dropped, it is closed.
pub(super) struct Relay {
    shared: Arc<Shared>,
    ends: Arc<Ends>,
}

/// What is closed when one direction has failed.
struct Ends {
    socket: UnixStream,
    role: Role,
    closers: [Closer; 2],
}

impl Ends {
    fn close(&self) {
        match self.role {
            // What is closed already needs no more.
            Role::Server => drop(self.socket.shutdown(Shutdown::Both)),
            Role::Client => end_client(&self.socket),
        }
        self.closers.iter().for_each(Closer::close);
    }
}

/// Has an NBD client fail its requests, these and later ones.
fn end_client(socket: &UnixStream) {
    // One that is gone needs no more; in a full socket it finds what it was not waiting for, too.
    let _ = rustix::net::send(socket, &NO_REPLY, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// Reads and discards what an NBD client sends until it has closed its socket, so that it does not wait for that.
fn discard(mut socket: &UnixStream) {
    let mut piece = vec![0; PIECE];
    loop {
        match socket.read(&mut piece) {
            Ok(0) => return,
            Err(error) if !is_timeout(&error) && error.kind() != io::ErrorKind::Interrupted => {
                return;
            }
            _ => {}
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.ends.close();
    }
}

impl Relay {
    /// Relays between QEMU's socket and two connections: what QEMU sends goes `out`.
    ///
    /// # Errors
    /// No descriptor or thread is left.
    pub fn start(
        (socket, role): (UnixStream, Role),
        out: Wire,
        back: Wire,
        limiter: Arc<Limiter>,
    ) -> Result<Relay, DiskError> {
        for wire in [&out, &back] {
            wire.limit_silence(STALL_MAX);
        }
        let clone = || socket.try_clone().map_err(DiskError::Socket);
        let closer = |wire: &Wire| wire.closer().map_err(DiskError::Socket);
        let limited = socket.set_read_timeout(Some(BEAT));
        limited.map_err(DiskError::Socket)?;
        let ends = Arc::new(Ends {
            socket: clone()?,
            role,
            closers: [closer(&out)?, closer(&back)?],
        });
        let shared = Arc::new(Shared {
            begin: Instant::now(),
            bytes: AtomicU64::new(0),
            unanswered: AtomicU64::new(0),
            limited: AtomicBool::new(false),
            failure: Mutex::default(),
        });
        let relay = Relay { shared, ends };
        let from_qemu = clone()?;
        relay.direction(move |shared| {
            let sent = outward(&from_qemu, out, &limiter, shared);
            (sent, (role == Role::Client).then_some(from_qemu))
        })?;
        relay.direction(move |shared| (inward(back, (socket, role), shared), None))?;
        Ok(relay)
    }

    /// Runs a direction on a thread, which discards what comes from the socket that is left at its end.
    fn direction(
        &self,
        run: impl FnOnce(&Shared) -> (Result<(), ConnectionError>, Option<UnixStream>) + Send + 'static,
    ) -> Result<(), DiskError> {
        let (shared, ends) = (Arc::clone(&self.shared), Arc::clone(&self.ends));
        let thread = thread::Builder::new().name("disk".to_owned());
        let thread = thread.spawn(move || {
            let (Err(error), left) = run(&shared) else {
                return;
            };
            let failure = shared.failure.lock();
            let mut failure = failure.unwrap_or_else(PoisonError::into_inner);
            failure.get_or_insert(crate::in_words(&error));
            // The reason is there before the end shows.
            drop(failure);
            ends.close();
            drop(ends);
            if let Some(socket) = left {
                discard(&socket);
            }
        });
        thread.map(drop).map_err(DiskError::Thread)
    }

    /// Bytes that were sent to the other host.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::Relaxed)
    }

    /// From here on the connection is given up when the other side does not answer for long.
    pub fn limit_answers(&self) {
        self.shared.limited.store(true, Ordering::Relaxed);
    }

    /// Why it has ended early.
    pub fn failure(&self) -> Option<String> {
        let failure = self.shared.failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Shared {
    fn now(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_millis()).map_or(u64::MAX, |now| now.max(1))
    }

    fn requested(&self) {
        let now = self.now();
        // The first request counts.
        let _ = self
            .unanswered
            .compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn check_answers(&self) -> Result<(), ConnectionError> {
        let since = self.unanswered.load(Ordering::Relaxed);
        let waits = since > 0 && self.limited.load(Ordering::Relaxed);
        match waits && self.now().saturating_sub(since) > STALL_MAX.as_millis() as u64 {
            true => Err(ConnectionError::NoAnswer {
                seconds: STALL_MAX.as_secs(),
            }),
            false => Ok(()),
        }
    }
}

/// Sends what QEMU writes, until it closes its socket.
fn outward(
    mut qemu: &UnixStream,
    mut wire: Wire,
    limiter: &Limiter,
    shared: &Shared,
) -> Result<(), ConnectionError> {
    let mut piece = vec![0; PIECE];
    loop {
        let read = match qemu.read(&mut piece) {
            Ok(0) => return wire.send_control(&Control::Last),
            Ok(read) => {
                shared.requested();
                read
            }
            // Nothing, which is sent as such.
            Err(error) if is_timeout(&error) => 0,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(ConnectionError::Socket(error)),
        };
        wire.send(Kind::Disk, &piece[..read])?;
        limiter.wait(read as u64);
        shared.bytes.store(wire.bytes_sent(), Ordering::Relaxed);
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

/// Hands QEMU what comes, until the other one has closed its socket.
fn inward(
    mut wire: Wire,
    (mut qemu, role): (UnixStream, Role),
    shared: &Shared,
) -> Result<(), ConnectionError> {
    loop {
        match wire.receive_message()? {
            Message::Disk(bytes) if bytes.is_empty() => shared.check_answers()?,
            Message::Disk(bytes) => {
                shared.unanswered.store(0, Ordering::Relaxed);
                qemu.write_all(&bytes).map_err(ConnectionError::Socket)?;
            }
            Message::Control(Control::Last) => match role {
                Role::Server => {
                    let closed = qemu.shutdown(Shutdown::Write);
                    return closed.map_err(ConnectionError::Socket);
                }
                // A client that has ended itself finds nothing wrong with it.
                Role::Client => {
                    let why = "its QEMU has ended the export".to_owned();
                    return Err(ConnectionError::GaveUp { why });
                }
            },
            other => return Err(other.unexpected()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use stillframe_link::Stream;

    use super::*;
    use crate::connection::Connection;

    /// A connection, and its other end.
    fn wire() -> (Wire, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        (Connection::new(Stream::Plain(ours)), theirs)
    }

    /// What QEMU reads when both connections have ended, and its socket, from which it has read that.
    fn ended(role: Role) -> (io::Result<usize>, UnixStream) {
        let (ours, mut qemu) = UnixStream::pair().unwrap();
        let ((out, far_out), (back, far_back)) = (wire(), wire());
        let relay = Relay::start((ours, role), out, back, Arc::new(Limiter::new(None))).unwrap();
        qemu.write_all(b"request").unwrap();
        assert_eq!(relay.failure(), None);
        drop((far_out, far_back));
        let mut read = vec![1; 2 * NO_REPLY.len()];
        let bytes = qemu.read(&mut read);
        // The reason was there before.
        assert!(relay.failure().is_some());
        assert!(
            bytes
                .as_ref()
                .is_ok_and(|&bytes| read[..bytes].iter().all(|&byte| byte == 0))
        );
        (bytes, qemu)
    }

    #[test]
    fn a_client_gets_no_reply_and_never_the_end() {
        let (bytes, mut qemu) = ended(Role::Client);
        assert!(bytes.unwrap() >= 4);
        // More than a socket holds.
        qemu.write_all(&vec![7; 4 << 20]).unwrap();
        qemu.set_read_timeout(Some(Duration::from_millis(200)))
            .unwrap();
        let mut rest = Vec::new();
        let error = qemu.read_to_end(&mut rest).unwrap_err();
        assert!(is_timeout(&error), "{error}");
        assert!(rest.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_server_gets_the_end() {
        assert_eq!(ended(Role::Server).0.unwrap(), 0);
    }
}
