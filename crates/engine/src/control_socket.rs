//! The control socket of a process that keeps a VM attached. Another process of the same user connects to it, to request
//! work that only the attached process can do.
//!
//! ```text
//!   RUNTIME_DIRECTORY/4711-89012345.watch      named after the QEMU: its pid and its start time
//! ```
//!
//! The runtime directory is for its owner alone, and the credentials of each peer are checked as well. The socket of a
//! process that was killed stays until the next one replaces it, or until the QEMU has ended; no connection succeeds.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use rustix::fs::{AtFlags, statat};
use rustix::net::sockopt::socket_peercred;
use stillframe_qemu::target::{self, Selector};
use stillframe_sys::private_dir::{PrivateDir, PrivateError};
use stillframe_sys::process::Process;
use thiserror::Error;

use crate::runtime;

/// Why a process has no control socket.
#[derive(Debug, Error)]
pub enum ControlError {
    /// There is no directory for it.
    #[error("cannot use the directory for control sockets")]
    Directory(#[from] PrivateError),
    /// The kernel refused.
    #[error("cannot make the control socket {path}")]
    Socket {
        /// Where it was to be.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// A connection between two processes of one user.
#[derive(Debug)]
pub struct Peer {
    /// The connection.
    pub stream: UnixStream,
    /// The other process.
    pub pid: i32,
}

/// The file of a control socket. Dropping it removes the file, unless another process has replaced it.
#[derive(Debug)]
pub struct SocketFile {
    directory: PrivateDir,
    name: String,
    /// Device and inode number.
    identity: (u64, u64),
}

/// Accepts connections.
#[derive(Debug)]
pub struct ControlListener(UnixListener);

/// Makes the control socket of the process that is attached to this QEMU. A socket that is left there is replaced.
///
/// # Errors
/// The VM can be used without.
pub fn listen(qemu: &Process) -> Result<(SocketFile, ControlListener), ControlError> {
    listen_in(runtime::open()?, runtime::control_socket_name(qemu))
}

/// Connects to the process that is attached to this VM. `None` if the VM is not found, or if there is no such process.
pub fn connect(selector: &Selector) -> Option<Peer> {
    let qemu = target::find(selector).ok()?.process;
    let directory = PrivateDir::open(&runtime::directory()).ok()??;
    connect_in(&directory, &runtime::control_socket_name(&qemu))
}

fn listen_in(
    directory: PrivateDir,
    name: String,
) -> Result<(SocketFile, ControlListener), ControlError> {
    let path = directory.path().join(&name);
    let failed = |source| ControlError::Socket { path, source };
    // It gets its name when it accepts connections.
    let new = format!("{name}.new-{}", std::process::id());
    directory.remove(&new)?;
    let bound = UnixListener::bind(address(&directory, &new)).and_then(|listener| {
        let stat = statat(&directory, &new, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok((listener, (stat.st_dev, stat.st_ino)))
    });
    let (listener, identity) = bound.map_err(failed)?;
    directory.rename(&new, &name)?;
    let file = SocketFile {
        directory,
        name,
        identity,
    };
    Ok((file, ControlListener(listener)))
}

fn connect_in(directory: &PrivateDir, name: &str) -> Option<Peer> {
    let stream = UnixStream::connect(address(directory, name)).ok()?;
    trusted(stream)
}

/// An address that is short wherever the directory lies: a socket's may have 107 bytes.
fn address(directory: &PrivateDir, name: &str) -> PathBuf {
    let descriptor = rustix::fd::AsFd::as_fd(directory).as_raw_fd();
    PathBuf::from(format!("/proc/self/fd/{descriptor}/{name}"))
}

/// The peer, if it is a process of this user or of root.
fn trusted(stream: UnixStream) -> Option<Peer> {
    let peer = socket_peercred(&stream).ok()?;
    let ours = peer.uid.is_root() || peer.uid == rustix::process::geteuid();
    ours.then(|| Peer {
        stream,
        pid: peer.pid.as_raw_nonzero().get(),
    })
}

impl ControlListener {
    /// Waits for the next connection. Those of other users are closed.
    ///
    /// # Errors
    /// That of the kernel.
    pub fn accept(&self) -> io::Result<Peer> {
        loop {
            let (stream, _) = self.0.accept()?;
            if let Some(peer) = trusted(stream) {
                return Ok(peer);
            }
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let stat = statat(&self.directory, &self.name, AtFlags::SYMLINK_NOFOLLOW);
        if stat.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == self.identity) {
            // One that stays is replaced or removed later.
            let _ = self.directory.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn a_peer_connects_until_the_file_is_dropped() {
        let root = tempfile::tempdir().unwrap();
        // Longer than the address of a socket may be.
        let path = root.path().join("x".repeat(120));
        let directory = || PrivateDir::create(&path).unwrap();
        assert!(connect_in(&directory(), "a.watch").is_none());
        let (file, listener) = listen_in(directory(), "a.watch".to_owned()).unwrap();
        let mut client = connect_in(&directory(), "a.watch").unwrap();
        client.stream.write_all(b"x").unwrap();
        let mut server = listener.accept().unwrap();
        server.stream.read_exact(&mut [0]).unwrap();
        let own = std::process::id() as i32;
        assert_eq!((client.pid, server.pid), (own, own));
        drop(file);
        assert_eq!(directory().names().unwrap(), [""; 0]);
    }

    #[test]
    fn a_left_over_socket_is_replaced_and_a_successor_keeps_its_own() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("run");
        let directory = || PrivateDir::create(&path).unwrap();
        let (killed, listener) = listen_in(directory(), "a.watch".to_owned()).unwrap();
        drop(listener);
        assert!(connect_in(&directory(), "a.watch").is_none());
        let (_file, _listener) = listen_in(directory(), "a.watch".to_owned()).unwrap();
        assert!(connect_in(&directory(), "a.watch").is_some());
        drop(killed);
        assert!(connect_in(&directory(), "a.watch").is_some());
    }
}
