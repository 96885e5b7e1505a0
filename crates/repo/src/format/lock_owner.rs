//! The owner of a lock or lease, and whether its process is still alive.

use std::fmt;
use std::fs;

use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};

/// A process, described so that another process can determine whether it has ended. Its number alone does not
/// suffice: numbers are reused, at the latest after a reboot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockOwner {
    /// The machine's name.
    pub host: String,
    /// The machine's id (`/etc/machine-id`), the same at every boot.
    pub machine: String,
    /// `/proc/sys/kernel/random/boot_id`: this boot of this machine.
    pub boot: String,
    /// The namespace of `pid` (`/proc/self/ns/pid`); each container has its own.
    pub pid_namespace: String,
    /// The process number.
    pub pid: u32,
    /// When the process started, in clock ticks since boot (`/proc/PID/stat`, field 22).
    pub start_time: u64,
    /// The program.
    pub program: String,
}

impl fmt::Display for LockOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "process {} ({}) on {}",
            self.pid, self.program, self.host
        )
    }
}

impl LockOwner {
    pub(crate) fn of_this_process() -> LockOwner {
        let pid = std::process::id();
        let started = stat(pid).map(|(_, started)| started).unwrap_or_default();
        LockOwner::of(pid, started)
    }

    /// A process of this machine, by its number and when it started (in clock ticks since boot).
    pub(crate) fn of(pid: u32, start_time: u64) -> LockOwner {
        let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        LockOwner {
            host: rustix::system::uname()
                .nodename()
                .to_string_lossy()
                .into_owned(),
            machine: machine(),
            boot: boot(),
            pid_namespace: pid_namespace(),
            pid,
            start_time,
            program: program.display().to_string(),
        }
    }
}

/// Whether a process is alive, as far as this process can determine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    /// It is running.
    Alive,
    /// It has ended, or its machine has rebooted.
    Gone,
    /// It is a process of another machine or container.
    Unknown,
}

impl LockOwner {
    /// Whether the process is alive, as far as this process can determine.
    pub(crate) fn life(&self) -> Life {
        let here = LockOwner::of_this_process();
        let known = [&here.host, &here.machine, &here.boot, &here.pid_namespace];
        if known.iter().any(|text| text.is_empty()) {
            return Life::Unknown;
        }
        if self.boot != here.boot {
            let same_machine = self.host == here.host && self.machine == here.machine;
            return if same_machine {
                Life::Gone
            } else {
                Life::Unknown
            };
        }
        match self.pid_namespace == here.pid_namespace {
            true => life_here(self),
            false => Life::Unknown,
        }
    }
}

/// The state of a process of this boot and namespace. It is checked by signal 0, because /proc may hide the
/// processes of other users.
fn life_here(holder: &LockOwner) -> Life {
    let pid = i32::try_from(holder.pid).ok().and_then(Pid::from_raw);
    let Some(pid) = pid else { return Life::Gone };
    if test_kill_process(pid) == Err(rustix::io::Errno::SRCH) {
        return Life::Gone;
    }
    match stat(holder.pid) {
        Some((state, started)) if state != "Z" && started == holder.start_time => Life::Alive,
        Some(_) => Life::Gone,
        // Another process may have this number now.
        None => Life::Unknown,
    }
}

fn read_line(path: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.trim().to_owned()
}

fn machine() -> String {
    read_line("/etc/machine-id")
}

fn boot() -> String {
    read_line("/proc/sys/kernel/random/boot_id")
}

fn pid_namespace() -> String {
    let link = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    link.display().to_string()
}

/// State and start time from `/proc/PID/stat` (fields 3 and 22), counted after the program name, which may
/// contain any character.
fn stat(pid: u32) -> Option<(String, u64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?.to_owned();
    Some((state, fields.nth(18)?.parse().ok()?))
}
