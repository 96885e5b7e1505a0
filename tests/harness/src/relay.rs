//! A TCP connection through the test, which can cut it.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Result;

/// How often it is looked for a connection, or for the end.
const LOOK: Duration = Duration::from_millis(2);

/// Passes each connection on to one address. It ends when dropped.
#[derive(Debug)]
pub struct Relay {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    ends: AtomicBool,
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
        let listener = TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let shared = Arc::new(Shared::default());
        let relay = Relay {
            address: listener.local_addr()?,
            shared: shared.clone(),
        };
        thread::spawn(move || {
            while !shared.ends.load(Ordering::Relaxed) {
                match listener.accept() {
                    // One that cannot be passed on is closed.
                    Ok((near, _)) => drop(pass_on(near, to, &shared)),
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

fn pass_on(near: TcpStream, to: SocketAddr, shared: &Shared) -> Result<()> {
    near.set_nonblocking(false)?;
    let far = TcpStream::connect(to)?;
    for stream in [&near, &far] {
        stream.set_nodelay(true)?;
    }
    let copies = [near.try_clone()?, far.try_clone()?];
    shared.open().extend(copies);
    let (near_too, far_too) = (near.try_clone()?, far.try_clone()?);
    thread::spawn(move || pump(near, far));
    thread::spawn(move || pump(far_too, near_too));
    Ok(())
}

/// Copies until one end closes; closes the other then.
fn pump(mut from: TcpStream, mut to: TcpStream) {
    let mut buffer = vec![0; 256 << 10];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        if to.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}
