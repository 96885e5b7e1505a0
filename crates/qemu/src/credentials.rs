//! The credentials that a VM ran with. They are recorded with each checkpoint, because a restored VM must have no
//! more rights than the VM had.

use serde::{Deserialize, Serialize};
use stillframe_sys::credentials as kernel;
use stillframe_sys::process::Process;

/// The rights of a QEMU process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    /// The user id.
    pub uid: u32,
    /// The group id.
    pub gid: u32,
    /// The supplementary group ids.
    pub groups: Vec<u32>,
    /// The permitted capabilities: bit N is capability number N (capabilities(7)).
    pub capabilities: u64,
    /// Whether programs that it runs can gain no privileges.
    pub no_new_privs: bool,
    /// The label of the kernel's security module, if the process is confined by one.
    pub security_label: Option<String>,
    /// The control group, in the unified hierarchy.
    pub control_group: Option<String>,
}

#[cfg(test)]
impl Credentials {
    /// Those of an ordinary user: a group of the same number, nothing else.
    pub(crate) fn of_user(uid: u32) -> Credentials {
        Credentials {
            uid,
            gid: uid,
            groups: vec![uid],
            capabilities: 0,
            no_new_privs: false,
            security_label: None,
            control_group: None,
        }
    }
}

impl Credentials {
    /// Reads them; none when the process has ended.
    pub fn of(process: &Process) -> Option<Credentials> {
        let kernel::Credentials {
            uid,
            gid,
            groups,
            capabilities,
            no_new_privs,
        } = process.credentials().ok()?;
        Some(Credentials {
            uid,
            gid,
            groups,
            capabilities,
            no_new_privs,
            security_label: process.security_label(),
            control_group: process.control_group(),
        })
    }

    /// The credentials of this process.
    pub(crate) fn own() -> Option<Credentials> {
        let pid = i32::try_from(std::process::id()).ok()?;
        Credentials::of(&Process::open(pid).ok()?)
    }

    /// Gives this process, which is about to become another program, these credentials.
    pub(crate) fn assume(&self) -> Result<(), kernel::AssumeError> {
        kernel::assume(&kernel::Credentials {
            uid: self.uid,
            gid: self.gid,
            groups: self.groups.clone(),
            capabilities: self.capabilities,
            no_new_privs: self.no_new_privs,
        })
    }
}
