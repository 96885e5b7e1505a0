//! A TCP connection through the test, which can cut and delay it.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

/// How often it is looked for a connection, or for the end.
const LOOK: Duration = Duration::from_millis(2);

/// How long the other end of a silenced connection is not told that one end has closed it.
const SILENT_FOR: Duration = Duration::from_secs(60);
/// Bytes read with one call.
const PIECE_BYTES: usize = 64 << 10;
/// Pieces on their way in one direction.
const PIECES_MAX: usize = 256;

/// Passes each connection on to one address. It ends when dropped.
#[derive(Debug)]
pub struct Relay {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// How long what arrives is held.
    delay: Duration,
    ends: AtomicBool,
    /// How often connections were silenced: those of before pass on nothing any more.
    silenced: AtomicUsize,
    open: Mutex<Vec<TcpStream>>,
}

impl Shared {
    fn open(&self) -> std::sync::MutexGuard<'_, Vec<TcpStream>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Relay {
    /// A relay to this address, on this host.
    pub fn start(to: SocketAddr) -> Result<Relay> {
        Relay::delayed(to, Duration::ZERO)
    }

    /// The same; each byte takes so long in each direction.
    pub fn delayed(to: SocketAddr, delay: Duration) -> Result<Relay> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            delay,
            ..Shared::default()
        });
        let relay = Relay {
            address: listener.local_addr()?,
            shared: shared.clone(),
        };
        thread::spawn(move || {
            while !shared.ends.load(Ordering::Relaxed) {
                match listener.accept() {
                    // One that cannot be passed on is closed.
                    Ok((near, _)) => drop(pass_on(near, to, shared.clone())),
                    Err(_) => thread::sleep(LOOK),
                }
            }
        });
        Ok(relay)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Passes nothing on any more, over the connections that there are. Neither end is told. New ones are passed on.
    pub fn silence(&self) {
        self.shared.silenced.fetch_add(1, Ordering::Relaxed);
    }

    /// Cuts all connections. Returns how many there were. New ones are passed on.
    pub fn cut(&self) -> usize {
        let open = std::mem::take(&mut *self.shared.open());
        for stream in &open {
            let _ = stream.shutdown(Shutdown::Both);
        }
        open.len() / 2
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::Relaxed);
        self.cut();
    }
}

fn pass_on(near: TcpStream, to: SocketAddr, shared: Arc<Shared>) -> Result<()> {
    near.set_nonblocking(false)?;
    let far = TcpStream::connect(to)?;
    for stream in [&near, &far] {
        stream.set_nodelay(true)?;
    }
    let copies = [near.try_clone()?, far.try_clone()?];
    shared.open().extend(copies);
    let (near_too, far_too) = (near.try_clone()?, far.try_clone()?);
    let other = shared.clone();
    thread::spawn(move || pump(near, far, &shared));
    thread::spawn(move || pump(far_too, near_too, &other));
    Ok(())
}

/// Copies until one end closes; closes the other then. What is on its way is bounded.
fn pump(mut from: TcpStream, to: TcpStream, shared: &Shared) {
    let (send, receive) = mpsc::sync_channel(PIECES_MAX);
    let delay = shared.delay;
    let silenced = || shared.silenced.load(Ordering::Relaxed);
    let before = silenced();
    let writer = thread::spawn(move || deliver(&receive, to, delay));
    let mut buffer = vec![0; PIECE_BYTES];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        if silenced() == before
            && send
                .send((Instant::now(), buffer[..read].to_vec()))
                .is_err()
        {
            break;
        }
    }
    if silenced() != before {
        // The other end is not told of this end, either.
        thread::sleep(SILENT_FOR);
    }
    drop(send);
    let _ = writer.join();
    let _ = from.shutdown(Shutdown::Both);
}

fn deliver(pieces: &Receiver<(Instant, Vec<u8>)>, mut to: TcpStream, delay: Duration) {
    for (came, piece) in pieces {
        thread::sleep((came + delay).saturating_duration_since(Instant::now()));
        if to.write_all(&piece).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}
