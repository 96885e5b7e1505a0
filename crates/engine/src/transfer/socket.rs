//! The stream of a transfer: a Unix socket between two processes of the same user.

use std::fs;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

use crate::connection::Connection;

/// How long the other side may be silent, or take nothing: it starts QEMU, reads or compares all of memory meanwhile.
const SILENCE_MAX: Duration = Duration::from_secs(120);

/// Why there is no connection.
#[derive(Debug, Error)]
pub enum SocketError {
    /// The socket cannot be made or reached.
    #[error("cannot {doing} {path}")]
    Io {
        /// The action that failed.
        doing: &'static str,
        /// The socket.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// Another user is at the other end.
    #[error(
        "the process at the other end of {path} belongs to user {uid}: a VM is sent to, and received from, the same user only"
    )]
    OtherUser {
        /// The socket.
        path: PathBuf,
        /// That user.
        uid: u32,
    },
}

/// Waits for one sender at a new socket, which is removed when it has come. The file appears when a sender can
/// connect, not before.
///
/// # Errors
/// The socket exists already or cannot be made, or the sender belongs to another user.
pub fn accept(path: &Path) -> Result<Connection<UnixStream>, SocketError> {
    let failed = |doing| move |source| failed(doing, path, source);
    let listener = listen(path).map_err(failed("listen on"))?;
    let accepted = listener.accept();
    let removed = fs::remove_file(path);
    let (stream, _) = accepted.map_err(failed("accept a sender on"))?;
    removed.map_err(failed("remove"))?;
    of_the_same_user(stream, path)
}

/// A socket has a file from `bind` on, and refuses senders until `listen`: it gets its name after both.
fn listen(path: &Path) -> io::Result<UnixListener> {
    let mut unnamed = path.as_os_str().to_owned();
    unnamed.push(".new");
    let unnamed = Path::new(&unnamed);
    let listener = UnixListener::bind(unnamed)?;
    let named = fs::hard_link(unnamed, path);
    fs::remove_file(unnamed)?;
    named.map(|()| listener)
}

/// Connects to a receiver.
///
/// # Errors
/// No process listens there, or one of another user does.
pub fn connect(path: &Path) -> Result<Connection<UnixStream>, SocketError> {
    let stream = UnixStream::connect(path);
    let stream = stream.map_err(|source| failed("connect to", path, source))?;
    of_the_same_user(stream, path)
}

fn of_the_same_user(
    stream: UnixStream,
    path: &Path,
) -> Result<Connection<UnixStream>, SocketError> {
    let failed = |source: io::Error| failed("use", path, source);
    let peer = rustix::net::sockopt::socket_peercred(&stream);
    let peer = peer.map_err(|error| failed(error.into()))?;
    if peer.uid != rustix::process::geteuid() {
        return Err(SocketError::OtherUser {
            path: path.to_owned(),
            uid: peer.uid.as_raw(),
        });
    }
    stream.set_read_timeout(Some(SILENCE_MAX)).map_err(failed)?;
    stream
        .set_write_timeout(Some(SILENCE_MAX))
        .map_err(failed)?;
    Ok(Connection::new(stream))
}

fn failed(doing: &'static str, path: &Path, source: io::Error) -> SocketError {
    SocketError::Io {
        doing,
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_file_that_is_there_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        fs::write(&path, "another's").unwrap();
        let error = accept(&path).unwrap_err();
        assert!(matches!(
            error,
            SocketError::Io {
                doing: "listen on",
                ..
            }
        ));
        assert_eq!(fs::read(&path).unwrap(), b"another's");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    /// Scripts wait for the file.
    #[test]
    fn a_socket_that_is_seen_is_listened_on() {
        let folder = tempfile::tempdir().unwrap();
        for number in 0..2000 {
            let path = folder.path().join(number.to_string());
            let receiver = thread::spawn({
                let path = path.clone();
                move || accept(&path).map(|_| ())
            });
            while !path.exists() {}
            connect(&path).unwrap();
            receiver.join().unwrap().unwrap();
        }
    }
}
