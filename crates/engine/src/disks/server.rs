//! QEMU's NBD server, on a socket in a directory of ours: no other program connects.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};

use stillframe_qemu::monitor::{Monitor, MonitorError};
use thiserror::Error;

use crate::runtime::OwnSocket;

/// What the socket is for, in its name.
const SOCKET: &str = "disks";

/// Why the server does not run.
#[derive(Debug, Error)]
pub enum ServerError {
    /// The socket cannot be made.
    #[error("cannot make a socket for QEMU's NBD server")]
    Socket(#[source] io::Error),
    /// It runs already.
    #[error(
        "QEMU's NBD server has exports of another client; it has only one. Wait until that has ended"
    )]
    Taken,
    /// QEMU has one server, which another client may have started.
    #[error(
        "QEMU does not start its NBD server; it has only one, and another client may use it. Wait until that has ended"
    )]
    Refused(#[source] MonitorError),
}

/// A server that takes connections while this exists.
#[derive(Debug)]
pub(crate) struct Server(OwnSocket);

impl Server {
    /// Starts it, for this number of connections at a time.
    ///
    /// # Errors
    /// QEMU has one already.
    pub fn start(monitor: &mut Monitor, connections: usize) -> Result<Server, ServerError> {
        let (socket, listener) = OwnSocket::bind(SOCKET).map_err(ServerError::Socket)?;
        listen(monitor, &listener, connections)?;
        Ok(Server(socket))
    }

    /// A connection. QEMU may end one that says nothing for ten seconds.
    ///
    /// # Errors
    /// The server has ended.
    pub fn connect(&self) -> Result<UnixStream, ServerError> {
        self.0.connect().map_err(ServerError::Socket)
    }
}

/// Starts the server, and returns this number of connections to it, which are to be used soon.
///
/// # Errors
/// QEMU has one already.
pub(crate) fn start(
    monitor: &mut Monitor,
    connections: usize,
) -> Result<Vec<UnixStream>, ServerError> {
    let (socket, listener) = OwnSocket::bind(SOCKET).map_err(ServerError::Socket)?;
    let connected = (0..connections).map(|_| socket.connect());
    let connected = connected.collect::<io::Result<Vec<UnixStream>>>();
    let connected = connected.map_err(ServerError::Socket)?;
    // Its name is gone before QEMU listens.
    drop(socket);
    listen(monitor, &listener, connections)?;
    Ok(connected)
}

fn listen(
    monitor: &mut Monitor,
    listener: &UnixListener,
    connections: usize,
) -> Result<(), ServerError> {
    let started = monitor.start_exports(listener, connections);
    started.map_err(ServerError::Refused)
}
