//! QEMU's NBD server, started on a socket that has no name when it takes connections: no other program connects.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use stillframe_qemu::monitor::{Monitor, MonitorError};
use stillframe_sys::private_dir::PrivateError;
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

/// Starts the server, and returns this number of connections to it.
///
/// # Errors
/// QEMU has one already.
pub(crate) fn start(
    monitor: &mut Monitor,
    connections: usize,
) -> Result<Vec<UnixStream>, ServerError> {
    let directory = runtime::open()?;
    let name = format!("{SOCKET}-{}", std::process::id());
    // Its own path may be too long for a socket.
    let path = PathBuf::from(format!("/proc/self/fd/{}", directory.as_fd().as_raw_fd()));
    let path = path.join(&name);
    // One of a process that had the same number.
    let _ = directory.remove(&name);
    let listener = UnixListener::bind(&path).map_err(ServerError::Socket)?;
    let connected: Result<Vec<UnixStream>, _> = (0..connections)
        .map(|_| UnixStream::connect(&path))
        .collect();
    let _ = directory.remove(&name);
    let connected = connected.map_err(ServerError::Socket)?;
    let started = monitor.start_exports(&listener, connections);
    started.map_err(ServerError::Refused)?;
    Ok(connected)
}
