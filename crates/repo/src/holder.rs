//! Who holds a lock, and whether they are still there.

use std::fmt;
use std::fs;

use rustix::process::{Pid, test_kill_process};
use serde::{Deserialize, Serialize};

/// A process, described so that another process can tell whether it is gone: its number alone
/// would not do, since numbers are used again, after a reboot at the latest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The machine's name.
    pub host: String,
    /// The machine's id (`/etc/machine-id`): the same name at another boot of the same machine.
    pub machine: String,
    /// `/proc/sys/kernel/random/boot_id`: this boot of this machine.
    pub boot: String,
    /// The namespace `pid` counts in (`/proc/self/ns/pid`): containers count their own.
    pub pid_namespace: String,
    /// The process number.
    pub pid: u32,
    /// When the process started, in clock ticks since boot (`/proc/PID/stat`, field 22).
    pub start_time: u64,
    /// The program.
    pub program: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "process {} ({}) on {}",
            self.pid, self.program, self.host
        )
    }
}

impl Holder {
    pub(crate) fn of_this_process() -> Holder {
        let pid = std::process::id();
        let program = std::env::current_exe().unwrap_or_default();
        Holder {
            host: rustix::system::uname()
                .nodename()
                .to_string_lossy()
                .into_owned(),
            machine: machine(),
            boot: boot(),
            pid_namespace: pid_namespace(),
            pid,
            start_time: stat(pid).map(|(_, started)| started).unwrap_or_default(),
            program: program.display().to_string(),
        }
    }
}

/// Whether the holder certainly is gone. Unsure (another machine, another container) counts as
/// there: the age of its last refresh decides then.
pub(crate) fn is_gone(holder: &Holder) -> bool {
    let here = Holder::of_this_process();
    let known = [&here.host, &here.machine, &here.boot, &here.pid_namespace];
    if known.iter().any(|text| text.is_empty()) {
        return false;
    }
    if holder.boot != here.boot {
        return holder.host == here.host && holder.machine == here.machine;
    }
    holder.pid_namespace == here.pid_namespace && !is_alive(holder)
}

/// Whether the process is there, in this boot and namespace. Asks by signal 0, because /proc may
/// hide other users' processes.
fn is_alive(holder: &Holder) -> bool {
    let pid = i32::try_from(holder.pid).ok().and_then(Pid::from_raw);
    let Some(pid) = pid else { return false };
    if test_kill_process(pid) == Err(rustix::io::Errno::SRCH) {
        return false;
    }
    match stat(holder.pid) {
        Some((state, started)) => state != "Z" && started == holder.start_time,
        None => true,
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

/// State and start time from `/proc/PID/stat` (fields 3 and 22), counted from behind the program
/// name, which may hold anything.
fn stat(pid: u32) -> Option<(String, u64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?.to_owned();
    Some((state, fields.nth(18)?.parse().ok()?))
}
