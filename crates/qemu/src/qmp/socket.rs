//! Connecting a unix socket and waiting on it, both with a deadline.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::QmpError;

/// Longest path that fits a socket address, in bytes (unix(7): 108 with the closing zero).
const ADDRESS_PATH_BYTES_MAX: usize = 107;

/// How often a full accept queue is tried again, in milliseconds.
const RETRY_MS: u64 = 5;

/// The event to wait for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Ready {
    Read,
    Write,
}

/// Connects to `path`. A queue full of other waiting clients counts as busy.
pub(crate) fn connect(path: &Path, deadline: Instant) -> Result<UnixStream, QmpError> {
    let refused = |source: io::Error| QmpError::Refused {
        path: path.to_owned(),
        source,
    };
    // Holds the directory open while a long path goes by way of /proc/self/fd.
    let (address, _directory) = address(path).map_err(refused)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(io::Error::from)?;
    loop {
        match rustix::net::connect(&socket, &address) {
            Ok(()) => break,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(RETRY_MS));
            }
            Err(Errno::AGAIN) => {
                return Err(QmpError::Busy {
                    path: path.to_owned(),
                });
            }
            Err(errno) => return Err(refused(errno.into())),
        }
    }
    rustix::io::ioctl_fionbio(&socket, false).map_err(io::Error::from)?;
    Ok(UnixStream::from(socket))
}

pub(crate) fn address(path: &Path) -> io::Result<(SocketAddrUnix, Option<File>)> {
    if path.as_os_str().len() <= ADDRESS_PATH_BYTES_MAX {
        return Ok((SocketAddrUnix::new(path)?, None));
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidFilename.into());
    };
    let directory = File::open(parent)?;
    let short = Path::new("/proc/self/fd")
        .join(directory.as_raw_fd().to_string())
        .join(name);
    Ok((SocketAddrUnix::new(&short)?, Some(directory)))
}

/// Waits until `socket` is ready or `deadline` has passed (false). A hang-up counts as ready: the next call on the
/// socket reports it.
pub(crate) fn wait_ready(
    socket: &impl AsFd,
    ready: Ready,
    deadline: Instant,
) -> Result<bool, QmpError> {
    let flags = match ready {
        Ready::Read => PollFlags::IN,
        Ready::Write => PollFlags::OUT,
    };
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // A span too long for the kernel's clock type is as good as a day; the loop continues.
        const DAY: Timespec = Timespec {
            tv_sec: 24 * 3600,
            tv_nsec: 0,
        };
        let limit = Timespec::try_from(left).unwrap_or(DAY);
        match rustix::event::poll(&mut [PollFd::new(socket, flags)], Some(&limit)) {
            Ok(0) if deadline <= Instant::now() => return Ok(false),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(errno) => return Err(io::Error::from(errno).into()),
        }
    }
}
