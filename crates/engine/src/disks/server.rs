//! QEMU's NBD server, on a socket in a directory of ours: no other program connects.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use stillframe_qemu::monitor::{Monitor, MonitorError};
use stillframe_sys::private_dir::{PrivateDir, PrivateError};
use thiserror::Error;

use crate::runtime;

/// The name of the socket, for as long as it takes to connect to it.
const SOCKET: &str = "disks";

/// Why the server does not run.
#[derive(Debug, Error)]
pub enum ServerError {
    /// There is no directory for the socket.
    #[error(transparent)]
    Directory(#[from] PrivateError),
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
pub(crate) struct Server {
    directory: PrivateDir,
    name: String,
}

impl Server {
    /// Starts it, for this number of connections at a time.
    ///
    /// # Errors
    /// QEMU has one already.
    pub fn start(monitor: &mut Monitor, connections: usize) -> Result<Server, ServerError> {
        let (server, listener) = Server::bind()?;
        server.listen(monitor, &listener, connections)?;
        Ok(server)
    }

    fn bind() -> Result<(Server, UnixListener), ServerError> {
        let server = Server {
            directory: runtime::open()?,
            name: format!("{SOCKET}-{}", std::process::id()),
        };
        // One of a process that had the same number.
        let _ = server.directory.remove(&server.name);
        let listener = UnixListener::bind(server.path()).map_err(ServerError::Socket)?;
        Ok((server, listener))
    }

    fn listen(
        &self,
        monitor: &mut Monitor,
        listener: &UnixListener,
        connections: usize,
    ) -> Result<(), ServerError> {
        let started = monitor.start_exports(listener, connections);
        started.map_err(ServerError::Refused)
    }

    /// A connection. QEMU may end one that says nothing for ten seconds.
    ///
    /// # Errors
    /// The server has ended.
    pub fn connect(&self) -> Result<UnixStream, ServerError> {
        UnixStream::connect(self.path()).map_err(ServerError::Socket)
    }

    fn path(&self) -> PathBuf {
        // Its own path may be too long for a socket.
        let directory = self.directory.as_fd().as_raw_fd();
        PathBuf::from(format!("/proc/self/fd/{directory}")).join(&self.name)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.directory.remove(&self.name);
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
    let (server, listener) = Server::bind()?;
    let connected = (0..connections).map(|_| server.connect());
    let connected = connected.collect::<Result<Vec<UnixStream>, _>>()?;
    // Its name is gone before QEMU listens.
    let Server { directory, name } = &server;
    let _ = directory.remove(name);
    server.listen(monitor, &listener, connections)?;
    Ok(connected)
}
