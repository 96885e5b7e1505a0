//! The launch helper: the short-lived process that becomes the new QEMU.
//!
//! It is this same executable, started with [`SUBCOMMAND`]. It reads an [`Order`] from its standard input, a
//! socket. It starts a session of its own, joins the VM's control group, requests its security label for QEMU, and
//! takes on its user, groups and capabilities. Then it waits for one byte, and becomes QEMU. QEMU keeps the pid and
//! finds the socket as the connection of its own monitor. If the socket closes before that byte, the helper ends.
//! No shell and no search path is involved.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::Access;
use serde::{Deserialize, Serialize};

use super::confinement;
use crate::arguments::own_monitor;
use crate::credentials::Credentials;

/// The hidden subcommand under which the executable acts as launch helper: a binary that links this crate
/// calls [`run`] for it.
pub const SUBCOMMAND: &str = "launch-helper";

/// How a helper ends that did not become the program.
pub(super) const EXIT_NOT_STARTED: i32 = 125;

/// Upper bound on an order, in bytes; a command line is at most 2 MiB (execve(2)).
const ORDER_BYTES_MAX: usize = 16 << 20;

/// Lets the helper continue.
const GO: u8 = b'g';

/// Variables of the environment that the new program keeps. Everything else (passwords, `LD_PRELOAD`,
/// `QEMU_MODULE_DIR`) is removed.
const KEPT: &[&str] = &["PATH", "LANG", "LANGUAGE", "TZ", "TMPDIR"];
/// Variables that belong to the user of this process: kept where the new program has the same user.
const KEPT_FOR_US: &[&str] = &["HOME", "USER", "LOGNAME", "XDG_RUNTIME_DIR"];

/// The program and the credentials that the helper takes on.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Order {
    /// The program, an absolute path.
    pub program: PathBuf,
    /// Its arguments without `argv[0]`.
    pub arguments: Vec<String>,
    /// The credentials it runs with; none for the user of this process.
    pub credentials: Option<Credentials>,
    /// Whether the socket becomes its monitor.
    pub monitor: bool,
    /// A folder in which it must be able to make a socket.
    pub socket_folder: Option<PathBuf>,
}

/// This executable, whatever lies at its path by now.
pub fn this_program() -> PathBuf {
    "/proc/self/exe".into()
}

/// A command that starts the helper in a clean environment, and our end of its socket. The order is sent
/// with [`send`].
pub(super) fn command(helper: &Path, order: &Order) -> io::Result<(Command, UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    let mut command = Command::new(helper);
    command
        .arg(SUBCOMMAND)
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .env_clear();
    let ours_too = order.credentials.is_none();
    let kept = KEPT_FOR_US.iter().filter(|_| ours_too).chain(KEPT);
    for name in kept {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    let locale = |name: &std::ffi::OsString| name.to_str().is_some_and(|n| n.starts_with("LC_"));
    command.envs(std::env::vars_os().filter(|(name, _)| locale(name)));
    Ok((command, ours))
}

/// Sends the order; the helper prepares itself and waits for [`go`].
pub(super) fn send(mut socket: &UnixStream, order: &Order) -> io::Result<()> {
    let text = serde_json::to_vec(order)?;
    let length = u32::try_from(text.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    socket.write_all(&length.to_le_bytes())?;
    socket.write_all(&text)
}

/// Lets the helper become the program.
pub(super) fn go(mut socket: &UnixStream) -> io::Result<()> {
    socket.write_all(&[GO])
}

/// Runs the subcommand. Returns only when the program was not started, with the exit code.
pub fn run() -> i32 {
    match become_program() {
        Ok(never) => match never {},
        Err(Failure::Quiet) => EXIT_NOT_STARTED,
        Err(Failure::Words(words)) => {
            let _ = writeln!(io::stderr(), "{words}");
            EXIT_NOT_STARTED
        }
    }
}

enum Failure {
    /// The starter is gone, or changed its mind.
    Quiet,
    Words(String),
}

fn become_program() -> Result<std::convert::Infallible, Failure> {
    let stdin = io::stdin();
    let socket = stdin
        .as_fd()
        .try_clone_to_owned()
        .map_err(|_| Failure::Quiet)?;
    let mut socket = UnixStream::from(socket);
    let order = receive(&mut socket).ok_or(Failure::Quiet)?;
    let cannot = |what: String| move |error: io::Error| Failure::Words(format!("{what}: {error}"));
    // It fails only for the leader of a process group, which is no leader of a session's only if it was
    // started as one.
    let _ = rustix::process::setsid();
    if let Some(credentials) = &order.credentials {
        confinement::take_on(credentials).map_err(Failure::Words)?;
        let assumed = credentials.assume();
        assumed.map_err(|error| {
            let source = std::error::Error::source(&error).map(ToString::to_string);
            Failure::Words(format!("{error}: {}", source.unwrap_or_default()))
        })?;
    }
    if let Some(folder) = &order.socket_folder {
        let flags = rustix::fs::AtFlags::EACCESS;
        let wanted = Access::WRITE_OK | Access::EXEC_OK;
        rustix::fs::accessat(rustix::fs::CWD, folder, wanted, flags).map_err(|errno| {
            let (folder, uid) = (folder.display(), stillframe_sys::credentials::own_uid());
            let what = format!(
                "user {uid}, which the VM ran as, cannot make a socket in {folder}; name another folder for the monitor"
            );
            cannot(what)(errno.into())
        })?;
    }
    let mut byte = [0];
    match socket.read(&mut byte) {
        Ok(1) if byte == [GO] => {}
        _ => return Err(Failure::Quiet),
    }
    let mut program = Command::new(&order.program);
    program.args(&order.arguments).stdin(Stdio::null());
    if order.monitor {
        // execve(2) does not close it, unlike `socket`.
        let kept = rustix::io::dup(&socket).map_err(|_| Failure::Quiet)?;
        use std::os::fd::IntoRawFd;
        program.args(own_monitor(kept.into_raw_fd()));
    }
    let error = program.exec();
    if let Some(words) = confinement::not_run(order.credentials.as_ref(), &error) {
        return Err(Failure::Words(words));
    }
    Err(cannot(format!("cannot run {}", order.program.display()))(
        error,
    ))
}

/// None when the socket closes, or brings something else.
fn receive(socket: &mut UnixStream) -> Option<Order> {
    let mut length = [0; 4];
    socket.read_exact(&mut length).ok()?;
    let length = usize::try_from(u32::from_le_bytes(length)).ok()?;
    if length > ORDER_BYTES_MAX {
        return None;
    }
    let mut text = vec![0; length];
    socket.read_exact(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}
