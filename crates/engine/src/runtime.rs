//! Where the engine keeps files on the host while VMs live, outside of repositories:
//!
//! ```text
//!   /run/stillframe/                 root; $XDG_RUNTIME_DIR/stillframe for other users
//!     run!vm!x.qmp.log               the log of the QEMU with the monitor /run/vm/x.qmp
//!     run!vm!x.qmp.filling           a lazy restore that is not complete (restore::filling_record)
//!     run!vm!x.qmp.filling-pages
//!     4711-89012345.watch          the control socket of the process that watches this QEMU (control_socket)
//!     disks-4712.socket            a socket of process 4712 for as long as it works (OwnSocket)
//!   /dev/shm/stillframe-UID/         memory templates of clones (template)
//! ```
//!
//! No file lies next to the monitor, whose directory may be one that other users can write. Both directories are
//! for their owner alone, and are refused where another user made them ([`PrivateDir`]).
//!
//! Templates do not lie under `/run`: that is often a tmpfs of a tenth of the machine's memory, `/dev/shm` one
//! of half of it. A mount of our own would need CAP_SYS_ADMIN, and would not be seen from other mount namespaces.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::{Duration, SystemTime};

use rustix::fs::{FlockOperation, flock};
use stillframe_sys::private_dir::{self, Access, PrivateDir, PrivateError};
use stillframe_sys::process::{Process, ProcessError};
use stillframe_sys::system;

/// The environment variable that names another runtime directory.
pub const DIRECTORY_VARIABLE: &str = "STILLFRAME_RUNTIME_DIR";
/// The directory's name in one that is made for such directories.
const NAME: &str = "stillframe";
/// The end of the name of a QEMU's log.
const LOG: &str = ".log";
/// The end of the name of a socket that a process has while it works.
const OWN_SOCKET: &str = ".socket";
/// The end of the name of a control socket.
const CONTROL_SOCKET: &str = ".watch";
/// The log of a QEMU that has ended is kept for this long if it said anything: a week.
const LOG_KEPT: Duration = Duration::from_secs(7 * 24 * 3600);

/// Where files for VMs that live lie.
pub fn directory() -> PathBuf {
    let absolute = |variable| std::env::var_os(variable).map(PathBuf::from);
    let absolute = |variable| absolute(variable).filter(|path| path.is_absolute());
    if let Some(named) = absolute(DIRECTORY_VARIABLE) {
        return named;
    }
    let user = rustix::process::geteuid();
    if user.is_root() {
        return Path::new("/run").join(NAME);
    }
    let of_session = Path::new("/run/user").join(user.as_raw().to_string());
    match absolute("XDG_RUNTIME_DIR") {
        Some(runtime) => runtime.join(NAME),
        None if of_session.is_dir() => of_session.join(NAME),
        None => PathBuf::from(format!("/tmp/{NAME}-{}", user.as_raw())),
    }
}

/// Where the memory templates of clones lie, unless the user names another directory.
pub fn templates() -> PathBuf {
    let user = rustix::process::geteuid().as_raw();
    PathBuf::from(format!("/dev/shm/{NAME}-{user}"))
}

/// Where the QEMU with this monitor writes its messages, unless the user names another file.
pub fn default_log(qmp: &Path) -> PathBuf {
    directory().join(file_name(qmp, LOG))
}

/// The name of a file that belongs to the VM with this monitor.
pub(crate) fn file_name(qmp: &Path, suffix: &str) -> String {
    // The same directory under two names is one.
    let parent = qmp.parent().and_then(|parent| parent.canonicalize().ok());
    let real = match (parent, qmp.file_name()) {
        (Some(parent), Some(name)) => parent.join(name),
        _ => qmp.to_owned(),
    };
    format!("{}{suffix}", private_dir::as_file_name(&real))
}

/// The name of the control socket of the process that watches this QEMU. Process ids are used again; together with the
/// start time they name one process.
pub(crate) fn control_socket_name(qemu: &Process) -> String {
    format!("{}-{}{CONTROL_SOCKET}", qemu.pid(), qemu.start_time())
}

/// Makes the runtime directory, if need be, and opens it. The first time, files of VMs that have ended are
/// removed.
pub(crate) fn open() -> Result<PrivateDir, PrivateError> {
    static SWEPT: Once = Once::new();
    let directory = PrivateDir::create(&directory())?;
    SWEPT.call_once(|| remove_ended(&directory));
    Ok(directory)
}

/// The process that a record names; `None` when it has ended. Process ids are used again, so the record has the boot
/// of the machine and the start time (clock ticks since that boot), too.
///
/// # Errors
/// The process may not be examined.
pub(crate) fn recorded_process(
    boot: &str,
    pid: i32,
    start_time: u64,
) -> Result<Option<Process>, ProcessError> {
    if boot != system::boot_id() {
        return Ok(None);
    }
    match Process::open(pid) {
        Ok(process) => Ok(Some(process).filter(|found| found.start_time() == start_time)),
        Err(ProcessError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A socket of this process in the runtime directory, by which a program that it works with reaches it. Its name goes when it is
/// dropped; that of a process which was killed goes when the next one opens the directory.
#[derive(Debug)]
pub(crate) struct OwnSocket {
    directory: PrivateDir,
    name: String,
}

impl OwnSocket {
    /// Makes it, and listens. A process has one of each purpose at a time.
    ///
    /// # Errors
    /// There is no directory for it, or the kernel refuses it.
    pub fn bind(purpose: &str) -> io::Result<(OwnSocket, UnixListener)> {
        let socket = OwnSocket {
            directory: open().map_err(io::Error::other)?,
            name: format!("{purpose}-{}{OWN_SOCKET}", std::process::id()),
        };
        // One of a process that had the same number.
        let _ = socket.directory.remove(&socket.name);
        let listener = UnixListener::bind(socket.short_path())?;
        Ok((socket, listener))
    }

    /// Connects to it.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn connect(&self) -> io::Result<UnixStream> {
        UnixStream::connect(self.short_path())
    }

    /// Its path for other processes.
    pub fn path(&self) -> PathBuf {
        directory().join(&self.name)
    }

    /// Its own path may be too long for a socket.
    fn short_path(&self) -> PathBuf {
        let directory = self.directory.as_fd().as_raw_fd();
        PathBuf::from(format!("/proc/self/fd/{directory}")).join(&self.name)
    }

    /// Whether the process that a socket is named after has ended.
    fn is_left(name: &str) -> bool {
        let pid = name
            .rsplit('-')
            .next()
            .and_then(|pid| pid.parse::<u32>().ok());
        pid.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists())
    }
}

impl Drop for OwnSocket {
    fn drop(&mut self) {
        let _ = self.directory.remove(&self.name);
    }
}

/// Removes files of ended VMs. A file that cannot be removed now is removed another time.
fn remove_ended(directory: &PrivateDir) {
    for name in directory.names().unwrap_or_default() {
        if name.ends_with(LOG) {
            let _ = remove_log(directory, &name);
        } else if let Some(qemu) = name.strip_suffix(CONTROL_SOCKET)
            && !may_live(qemu)
        {
            let _ = directory.remove(&name);
        } else if let Some(socket) = name.strip_suffix(OWN_SOCKET)
            && OwnSocket::is_left(socket)
        {
            let _ = directory.remove(&name);
        }
    }
}

/// Whether the QEMU that a control socket is named after may be alive.
fn may_live(name: &str) -> bool {
    let Some((Ok(pid), Ok(start_time))) = name
        .split_once('-')
        .map(|(pid, start_time)| (pid.parse(), start_time.parse()))
    else {
        return true;
    };
    !matches!(
        recorded_process(&system::boot_id(), pid, start_time),
        Ok(None)
    )
}

/// QEMU has the lock of its log for as long as it lives (`qemu::launch`).
fn remove_log(directory: &PrivateDir, name: &str) -> Result<(), PrivateError> {
    let Some(log) = directory.file(name, Access::Read)? else {
        return Ok(());
    };
    if flock(&log, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Ok(());
    }
    let metadata = log.metadata().ok();
    let said_lately = metadata.is_some_and(|metadata| {
        let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        let age = SystemTime::now().duration_since(modified);
        metadata.len() > 0 && age.unwrap_or_default() < LOG_KEPT
    });
    match said_lately {
        true => Ok(()),
        false => directory.remove(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_directory_under_two_names_is_one() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("real")).unwrap();
        symlink("real", root.path().join("link")).unwrap();
        let name = |path: &str| file_name(&root.path().join(path), ".log");
        assert_eq!(name("link/x.qmp"), name("real/x.qmp"));
        assert_ne!(name("real/x.qmp"), name("x.qmp"));
        assert!(name("x.qmp").ends_with("!x.qmp.log"));
    }

    #[test]
    fn sockets_go_when_their_process_has_ended() {
        let root = tempfile::tempdir().unwrap();
        let directory = PrivateDir::create(&root.path().join("run")).unwrap();
        let own = Process::open(std::process::id() as i32).unwrap();
        let lives = control_socket_name(&own);
        let ended = format!("{}-{}.watch", own.pid(), own.start_time() + 1);
        let at_work = format!("disks-{}.socket", own.pid());
        // Greater than any process id.
        let killed = "disks-4194305.socket";
        for name in [lives.as_str(), &ended, "other.watch", &at_work, killed] {
            directory.write(name, b"").unwrap();
        }
        remove_ended(&directory);
        let mut left = directory.names().unwrap();
        left.sort();
        let mut expected = [lives.as_str(), &at_work, "other.watch"];
        expected.sort_unstable();
        assert_eq!(left, expected);
    }

    #[test]
    fn logs_go_when_their_qemu_has_ended_and_said_nothing() {
        let root = tempfile::tempdir().unwrap();
        let directory = PrivateDir::create(&root.path().join("run")).unwrap();
        directory.write("silent.log", b"").unwrap();
        directory.write("spoke.log", b"words").unwrap();
        directory.write("other", b"").unwrap();
        directory.write("lives.log", b"").unwrap();
        let lives = directory.file("lives.log", Access::Write).unwrap().unwrap();
        flock(&lives, FlockOperation::LockShared).unwrap();
        remove_ended(&directory);
        let mut left = directory.names().unwrap();
        left.sort();
        assert_eq!(left, ["lives.log", "other", "spoke.log"]);
    }
}
