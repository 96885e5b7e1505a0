//! Credentials of a process: user, groups, capabilities (credentials(7), capabilities(7)).
//!
//! [`Process::credentials`] reads those of another process, [`assume`] gives them to this one before it
//! becomes another program.

use std::fs;
use std::io;

use rustix::process::{Gid, Uid};
use rustix::thread::CapabilitySet;

use crate::process::{Process, ProcessError, status_line};
use crate::security_label::SecurityLabel;

/// Links below `/proc/PID` that show what a process can see of the host.
const NAMESPACES: [&str; 6] = ["ns/mnt", "ns/user", "ns/net", "ns/pid", "ns/ipc", "root"];

/// The credentials that the kernel checks when a process requests something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The effective user id.
    pub uid: u32,
    /// The effective group id.
    pub gid: u32,
    /// The supplementary group ids.
    pub groups: Vec<u32>,
    /// The permitted capabilities: bit N is capability number N.
    pub capabilities: u64,
    /// Whether programs that it runs can gain no privileges (`PR_SET_NO_NEW_PRIVS`).
    pub no_new_privs: bool,
}

/// Credentials that this process may not take.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step}")]
pub struct AssumeError {
    /// The step, as the end of "cannot".
    step: String,
    /// The kernel's error.
    #[source]
    source: io::Error,
}

impl Process {
    /// The credentials of the main thread. Every user may read them.
    ///
    /// # Errors
    /// [`ProcessError::Gone`], [`ProcessError::Malformed`].
    pub fn credentials(&self) -> Result<Credentials, ProcessError> {
        let status = self.read_text("status", "read the status")?;
        parse(&status).ok_or_else(|| ProcessError::Malformed {
            pid: self.pid(),
            file: "status",
            line: "no line Uid, Gid, Groups, CapPrm or NoNewPrivs".to_owned(),
        })
    }

    /// The label of the kernel's security module (SELinux context, AppArmor profile), if the process is
    /// confined by one.
    pub fn security_label(&self) -> Option<String> {
        let label = self.read_text("attr/current", "read the label").ok()?;
        let label = label.trim_end_matches(['\n', '\0']);
        (!label.is_empty() && label != "unconfined").then(|| label.to_owned())
    }

    /// Whether the kernel may keep the process from more than it keeps every process of its user from: by a seccomp
    /// filter, a security label that confines, or namespaces or a root directory other than ours. Also where one of
    /// these cannot be read.
    pub fn is_confined(&self) -> bool {
        let status = self.read_text("status", "read the status");
        let is_filtered = status
            .ok()
            .and_then(|text| status_line(&text, "Seccomp:").map(|mode| mode != "0"));
        let label = self.security_label();
        let label_confines = label
            .is_some_and(|text| SecurityLabel::parse(&text).is_none_or(|label| label.confines()));
        let link =
            |process: &str, name: &str| fs::read_link(format!("/proc/{process}/{name}")).ok();
        let pid = self.pid().to_string();
        let differs = |name: &&str| {
            let theirs = link(&pid, name);
            theirs.is_none() || theirs != link("self", name)
        };
        is_filtered != Some(false) || label_confines || NAMESPACES.iter().any(differs)
    }

    /// The control group in the unified hierarchy, such as `/machine.slice/vm.scope` (cgroups(7)).
    pub fn control_group(&self) -> Option<String> {
        let text = self.read_text("cgroup", "read the control groups").ok()?;
        let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
        Some(path.to_owned())
    }
}

fn parse(status: &str) -> Option<Credentials> {
    // Real, effective, saved, file system.
    let effective = |key| {
        let line = status_line(status, key)?;
        line.split_ascii_whitespace().nth(1)?.parse().ok()
    };
    let groups = status_line(status, "Groups:")?.split_ascii_whitespace();
    Some(Credentials {
        uid: effective("Uid:")?,
        gid: effective("Gid:")?,
        groups: groups.map(str::parse).collect::<Result<_, _>>().ok()?,
        capabilities: u64::from_str_radix(status_line(status, "CapPrm:")?, 16).ok()?,
        no_new_privs: status_line(status, "NoNewPrivs:")? == "1",
    })
}

/// Whether this process acts as root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The effective user id of this process.
pub fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Takes on other credentials, for good. To be called by a process of one thread that is about to become
/// another program: the kernel keeps credentials for each thread.
///
/// A user other than root gets no capabilities. Root gets, with the next program, at most
/// `capabilities`.
///
/// # Errors
/// [`AssumeError`]; the process has some of the new credentials then, and must end.
pub fn assume(wanted: &Credentials) -> Result<(), AssumeError> {
    let failed = |step: String| {
        move |errno: rustix::io::Errno| AssumeError {
            step,
            source: errno.into(),
        }
    };
    let (uid, gid) = (Uid::from_raw(wanted.uid), Gid::from_raw(wanted.gid));
    if uid.is_root() {
        limit_capabilities(wanted.capabilities)
            .map_err(failed("give up capabilities".to_owned()))?;
    }
    let mut groups = wanted.groups.clone();
    groups.sort_unstable();
    if rustix::process::getgroups().is_ok_and(|now| sorted(&now) != groups) {
        let groups: Vec<Gid> = groups.into_iter().map(Gid::from_raw).collect();
        let step = format!("take the groups {:?}", wanted.groups);
        rustix::thread::set_thread_groups(&groups).map_err(failed(step))?;
    }
    let step = format!("become group {}", wanted.gid);
    rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(failed(step))?;
    let _ = rustix::thread::clear_ambient_capability_set();
    let step = format!("become user {}", wanted.uid);
    rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(failed(step))?;
    if wanted.no_new_privs {
        let step = "refuse new privileges".to_owned();
        rustix::thread::set_no_new_privs(true).map_err(failed(step))?;
    }
    Ok(())
}

fn sorted(groups: &[Gid]) -> Vec<u32> {
    let mut groups: Vec<u32> = groups.iter().map(|gid| gid.as_raw()).collect();
    groups.sort_unstable();
    groups
}

/// Takes from the bounding set all that is not in `keep`: root has every capability of that set after execve(2).
fn limit_capabilities(keep: u64) -> rustix::io::Result<()> {
    for bit in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << bit);
        if keep & one.bits() == 0
            // The kernel knows fewer than 64 capabilities: EINVAL for the others.
            && rustix::thread::capability_is_in_bounding_set(one).unwrap_or(false)
        {
            rustix::thread::remove_capability_from_bounding_set(one)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_read_whole_or_not_at_all() {
        let status = "Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nGroups:\t9 10 \n\
                      CapPrm:\t00000000000000ff\nNoNewPrivs:\t1\n";
        let expected = Credentials {
            uid: 2,
            gid: 6,
            groups: vec![9, 10],
            capabilities: 0xff,
            no_new_privs: true,
        };
        assert_eq!(parse(status), Some(expected));
        let alone = status.replace("9 10 ", "");
        assert_eq!(parse(&alone).expect("read").groups, Vec::<u32>::new());
        for line in ["Uid:", "Groups:", "CapPrm:", "NoNewPrivs:"] {
            assert_eq!(parse(&status.replace(line, "Other:")), None, "{line}");
        }
        assert_eq!(parse(&status.replace("9 10 ", "9 x")), None);
    }

    #[test]
    fn our_own_credentials_are_those_the_kernel_reports() {
        let pid = i32::try_from(std::process::id()).expect("pids are small");
        let ours = Process::open(pid).expect("ourselves").credentials();
        assert_eq!(ours.expect("readable").uid, own_uid());
    }
}
