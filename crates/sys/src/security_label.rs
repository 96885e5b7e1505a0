//! Labels of security modules (SELinux contexts, AppArmor profiles), for a process that is about to become
//! another program.
//!
//! A label is the content of `/proc/PID/attr/current`. Its form shows its module: AppArmor writes `profile (mode)`,
//! SELinux `user:role:type` with or without `:level`. Others (Smack) cannot be given to the next program.

use std::fs;
use std::io;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;

/// Upper bound on the written bytes: the kernel takes no more than a page at once.
const TEXT_BYTES_MAX: usize = 4095;

/// Attributes of the calling thread: only it may write them.
const OWN: &str = "/proc/thread-self/attr";

/// Modes of an AppArmor profile that hinder a process in nothing.
const MODES_WITHOUT_EFFECT: &[&str] = &["complain", "unconfined"];
/// The SELinux type of processes that the policy leaves alone.
const TYPE_WITHOUT_EFFECT: &str = "unconfined_t";

/// A module that gives labels to processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecurityModule {
    /// SELinux.
    SeLinux,
    /// AppArmor.
    AppArmor,
}

impl std::fmt::Display for SecurityModule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            SecurityModule::SeLinux => "SELinux",
            SecurityModule::AppArmor => "AppArmor",
        })
    }
}

impl SecurityModule {
    /// The one of this host, if it has one: the kernel answers for one module at `attr/current`.
    pub fn of_this_host() -> Option<SecurityModule> {
        let label = fs::read_to_string(format!("{OWN}/current")).ok()?;
        let label = label.trim_end_matches(['\n', '\0']);
        match label {
            // AppArmor's label of a process without a profile.
            "unconfined" => Some(SecurityModule::AppArmor),
            label => Some(SecurityLabel::parse(label)?.module()),
        }
    }
}

/// Why a label cannot be given to the next program.
#[derive(Debug, thiserror::Error)]
#[error("{module} does not take it")]
pub struct LabelError {
    module: SecurityModule,
    /// The kernel's error.
    #[source]
    source: io::Error,
}

/// A label that was understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SecurityLabel {
    /// A SELinux context.
    SeLinux {
        /// The context, whole.
        context: String,
    },
    /// An AppArmor profile, or several on top of each other.
    AppArmor {
        /// Its name, without the mode.
        profile: String,
        /// `enforce`, `complain` and others.
        mode: String,
    },
}

impl SecurityLabel {
    /// Reads what `/proc/PID/attr/current` showed, without the end of the line. None for a form that is
    /// not known.
    pub fn parse(label: &str) -> Option<SecurityLabel> {
        if label.contains(char::is_control) || label.len() > TEXT_BYTES_MAX / 2 {
            return None;
        }
        let in_brackets = label
            .strip_suffix(')')
            .and_then(|rest| rest.rsplit_once(" ("));
        if let Some((profile, mode)) = in_brackets {
            let is_mode = !mode.is_empty() && mode.bytes().all(|byte| byte.is_ascii_lowercase());
            let is_name = !profile.is_empty() && profile.trim() == profile;
            return (is_mode && is_name).then(|| SecurityLabel::AppArmor {
                profile: profile.to_owned(),
                mode: mode.to_owned(),
            });
        }
        let parts: Vec<&str> = label.splitn(4, ':').collect();
        let is_context =
            parts.len() >= 3 && parts.iter().all(|part| !part.is_empty()) && !label.contains(' ');
        is_context.then(|| SecurityLabel::SeLinux {
            context: label.to_owned(),
        })
    }

    /// The module that it is of.
    pub fn module(&self) -> SecurityModule {
        match self {
            SecurityLabel::SeLinux { .. } => SecurityModule::SeLinux,
            SecurityLabel::AppArmor { .. } => SecurityModule::AppArmor,
        }
    }

    /// Whether it hinders a process in anything: a profile in complain mode, for one, does not.
    pub fn confines(&self) -> bool {
        match self {
            SecurityLabel::SeLinux { context } => {
                context.split(':').nth(2) != Some(TYPE_WITHOUT_EFFECT)
            }
            SecurityLabel::AppArmor { mode, .. } => !MODES_WITHOUT_EFFECT.contains(&mode.as_str()),
        }
    }

    /// Has this thread take on the label with its next execve(2), and not before.
    ///
    /// To be called with the rights of root: AppArmor may give less to others than they ask for. Changes of the
    /// user in between keep the request.
    ///
    /// # Errors
    /// [`LabelError`]; the next program would not have the label then.
    pub fn for_next_program(&self) -> Result<(), LabelError> {
        let text = self.request();
        let cannot = |source| LabelError {
            module: self.module(),
            source,
        };
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let mut file = Err(Errno::NOENT);
        for name in self.files() {
            file = rustix::fs::openat(CWD, format!("{OWN}/{name}"), flags, Mode::empty());
            if !matches!(file, Err(Errno::NOENT)) {
                break;
            }
        }
        let file = file.map_err(|errno| cannot(errno.into()))?;
        // One write: each is a request of its own.
        let written = rustix::io::write(&file, text.as_bytes());
        let written = written.map_err(|errno| cannot(errno.into()))?;
        match written == text.len() {
            true => Ok(()),
            false => Err(cannot(io::ErrorKind::WriteZero.into())),
        }
    }

    /// Where the module takes requests: its own folder, or that of the only module on older kernels.
    fn files(&self) -> [&'static str; 2] {
        match self {
            SecurityLabel::SeLinux { .. } => ["selinux/exec", "exec"],
            SecurityLabel::AppArmor { .. } => ["apparmor/exec", "exec"],
        }
    }

    fn request(&self) -> String {
        match self {
            SecurityLabel::SeLinux { context } => context.clone(),
            SecurityLabel::AppArmor { profile, .. } => format!("exec {profile}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(label: &str) -> (SecurityModule, bool, String) {
        let label = SecurityLabel::parse(label).expect("understood");
        (label.module(), label.confines(), label.request())
    }

    #[test]
    fn labels_of_apparmor() {
        use SecurityModule::AppArmor;
        let table = [
            ("libvirt-1f2e (enforce)", true, "exec libvirt-1f2e"),
            ("libvirt-1f2e (kill)", true, "exec libvirt-1f2e"),
            ("a//&:ns:b (mixed)", true, "exec a//&:ns:b"),
            ("/opt/my vm (x) (enforce)", true, "exec /opt/my vm (x)"),
            ("vm (complain)", false, "exec vm"),
            ("vm (unconfined)", false, "exec vm"),
        ];
        for (label, confines, request) in table {
            assert_eq!(read(label), (AppArmor, confines, request.to_owned()));
        }
    }

    #[test]
    fn labels_of_selinux() {
        let svirt = "system_u:system_r:svirt_t:s0:c392,c662";
        let (module, confines, request) = read(svirt);
        assert_eq!((module, confines), (SecurityModule::SeLinux, true));
        assert_eq!(request, svirt);
        assert!(read("system_u:system_r:svirt_t").1);
        let unconfined = "unconfined_u:unconfined_r:unconfined_t:s0-s0:c0.c1023";
        assert!(!read(unconfined).1);
    }

    #[test]
    fn other_labels_are_not_understood() {
        let long = format!("{} (enforce)", "a".repeat(TEXT_BYTES_MAX));
        for label in [
            "",
            "_",
            "User",
            "a:b",
            "a::c",
            ":b:c",
            "a:b:c d",
            "a\nb (enforce)",
            "a:b:c\0",
            "vm ()",
            " (enforce)",
            " vm (enforce)",
            "vm (Enforce)",
            "vm(enforce)",
            &long,
        ] {
            assert_eq!(SecurityLabel::parse(label), None, "{label:?}");
        }
    }

    /// On hosts without a security module, on which our tests run, no label is taken, and none is believed.
    #[test]
    fn a_label_of_a_module_that_is_not_here_is_not_taken() {
        let here = SecurityModule::of_this_host();
        for label in ["no_u:no_r:no_such_t:s0", "no-such-profile-here (enforce)"] {
            let label = SecurityLabel::parse(label).expect("understood");
            if here.is_none_or(|here| here != label.module()) {
                assert!(label.for_next_program().is_err(), "{label:?}");
            }
        }
    }
}
