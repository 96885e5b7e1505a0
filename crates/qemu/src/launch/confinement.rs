//! The confinement of the new QEMU: the security label and the control group that the VM had.
//!
//! A label that confined the VM is given back, or the restore is refused: a confined VM never starts unconfined
//! without the user's word. A control group is given back if this host has it. Otherwise the VM starts in the group
//! of this process, and this is reported.

use std::io;
use std::path::PathBuf;

use stillframe_sys::control_group::{ControlGroup, ControlGroupError};
use stillframe_sys::process::Process;
use stillframe_sys::security_label::{SecurityLabel, SecurityModule};

use super::{LaunchError, LaunchOptions, LaunchPlan};
use crate::arguments::{CommandLine, Properties};
use crate::credentials::Credentials;

/// The root of the hierarchy limits no process.
const ROOT_GROUP: &str = "/";
/// Groups of login sessions, which come and go with them.
const SESSIONS: &str = "/user.slice";

/// The parts that the user wants left out.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Without {
    pub label: bool,
    pub group: bool,
}

impl Without {
    pub(super) fn of(options: &LaunchOptions) -> Without {
        Without {
            label: options.without_label,
            group: options.without_group,
        }
    }
}

/// The means of confinement that this host has.
pub(super) struct Host {
    pub module: Option<SecurityModule>,
    /// Whether QEMU can join the group with this path.
    pub group: fn(&str) -> Result<(), ControlGroupError>,
}

impl Host {
    pub(super) fn this() -> Host {
        Host {
            module: SecurityModule::of_this_host(),
            group: |path| ControlGroup::open(path)?.expect_thawed(),
        }
    }
}

/// Removes from the launch helper's credentials the parts that it cannot or shall not give back. Returns the
/// differences from before, in words for the user.
pub(super) fn limit(
    credentials: &mut Credentials,
    now: Option<&Credentials>,
    without: Without,
    host: &Host,
) -> Result<Vec<String>, LaunchError> {
    let then = credentials.clone();
    let mut changes = Vec::new();
    if !gives_label(&then, without, host)? {
        credentials.security_label = None;
        changes.extend(lost_label(&then, now));
    }
    if let Some(why) = lacks_group(&then, now, without, host) {
        credentials.control_group = None;
        let lost = lost_group(&then, now);
        changes.extend(lost.map(|lost| match why {
            Some(why) => format!("{lost}: {why}"),
            None => lost,
        }));
    }
    Ok(changes)
}

/// Whether QEMU gets the label. A label that confined nothing is left to the policy of this host.
fn gives_label(then: &Credentials, without: Without, host: &Host) -> Result<bool, LaunchError> {
    let Some(text) = then.security_label.as_ref().filter(|_| !without.label) else {
        return Ok(false);
    };
    let refused = |why: String| LaunchError::LabelNotGiven {
        label: text.clone(),
        why,
    };
    let label = SecurityLabel::parse(text);
    let label = label.ok_or_else(|| refused("it is of no known form".to_owned()))?;
    if label.confines() && host.module != Some(label.module()) {
        return Err(refused(format!("this host has no {}", label.module())));
    }
    Ok(label.confines())
}

/// Why QEMU does not join the VM's group, as far as there are words for it; none where it does.
fn lacks_group(
    then: &Credentials,
    now: Option<&Credentials>,
    without: Without,
    host: &Host,
) -> Option<Option<String>> {
    let group = then.control_group.as_ref()?;
    let is_ours = now.and_then(|now| now.control_group.as_ref()) == Some(group);
    if group == ROOT_GROUP || is_ours || without.group {
        return Some(None);
    }
    (host.group)(group)
        .err()
        .map(|error| Some(in_words(&error)))
}

fn in_words(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// The confinement of the VM that a QEMU like this process would lose.
pub(super) fn lost(then: &Credentials, now: Option<&Credentials>) -> Vec<String> {
    let label = lost_label(then, now);
    label.into_iter().chain(lost_group(then, now)).collect()
}

fn lost_label(then: &Credentials, now: Option<&Credentials>) -> Option<String> {
    let label = then.security_label.as_ref()?;
    let is_ours = now.and_then(|now| now.security_label.as_ref()) == Some(label);
    (!is_ours).then(|| format!("it is not confined by the security label {label}, as the VM was"))
}

fn lost_group(then: &Credentials, now: Option<&Credentials>) -> Option<String> {
    let group = then.control_group.as_ref()?;
    let is_ours = now.and_then(|now| now.control_group.as_ref()) == Some(group);
    let limits = group != ROOT_GROUP && !group.starts_with(SESSIONS);
    (limits && !is_ours)
        .then(|| format!("it is not in the control group {group}, whose limits the VM had"))
}

/// QEMU's sandbox refuses new privileges by itself. SELinux gives no label to a process that refuses them already, so
/// then it is left to the sandbox.
pub(super) fn leave_to_sandbox(credentials: &mut Credentials, line: &CommandLine) {
    let is_on = |value| Properties::parse(value, "enable").is_on("enable");
    if credentials.security_label.is_some() && line.values("sandbox").any(is_on) {
        credentials.no_new_privs = false;
    }
}

/// Has this process, which still has all rights, join the group, and take on the label with the next program.
/// Returns the failure, and the remedy.
pub(super) fn take_on(credentials: &Credentials) -> Result<(), String> {
    if let Some(path) = &credentials.control_group {
        let joined = ControlGroup::open(path).and_then(|group| group.join());
        joined.map_err(|error| {
            let why = in_words(&error);
            format!("it cannot join the VM's control group {path}: {why}; --without-group starts it outside")
        })?;
    }
    let label = credentials.security_label.as_deref();
    if let Some(label) = label.and_then(SecurityLabel::parse) {
        let requested = label.for_next_program();
        requested.map_err(|error| label_refused(credentials, &in_words(&error)))?;
    }
    Ok(())
}

/// The error of a program that was not run with the label.
fn label_refused(credentials: &Credentials, why: &str) -> String {
    let label = credentials.security_label.clone().unwrap_or_default();
    let why = why.to_owned();
    LaunchError::LabelNotGiven { label, why }.to_string()
}

/// The note on a program that was not run: the label it was to have, if any.
pub(super) fn not_run(credentials: Option<&Credentials>, error: &io::Error) -> Option<String> {
    let credentials = credentials.filter(|these| these.security_label.is_some())?;
    Some(label_refused(
        credentials,
        &format!("QEMU was not run: {error}"),
    ))
}

impl LaunchPlan {
    /// Fails unless a QEMU that was started has the label that it is to have.
    pub(super) fn expect_label(&self, qemu: &Process) -> Result<(), LaunchError> {
        let wanted = self.credentials.as_ref();
        let Some(label) = wanted.and_then(|these| these.security_label.as_ref()) else {
            return Ok(());
        };
        match qemu.security_label() {
            Some(found) if found == *label => Ok(()),
            found => Err(LaunchError::LabelNotGiven {
                label: label.clone(),
                why: match found {
                    Some(found) => format!("QEMU had {found} instead"),
                    None => "QEMU had none".to_owned(),
                },
            }),
        }
    }

    /// The file into which a process that joins the VM's control group writes its id, where QEMU starts in one.
    pub fn control_group_file(&self) -> Option<PathBuf> {
        let path = self.credentials.as_ref()?.control_group.as_ref()?;
        Some(ControlGroup::open(path).ok()?.processes_file())
    }

    /// The security label that QEMU starts with, if it is given one.
    pub fn security_label(&self) -> Option<SecurityLabel> {
        SecurityLabel::parse(self.credentials.as_ref()?.security_label.as_ref()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const APPARMOR: &str = "libvirt-1f2e (enforce)";
    const SELINUX: &str = "system_u:system_r:svirt_t:s0:c392,c662";
    const GROUP: &str = "/machine.slice/vm.scope";

    fn credentials(label: Option<&str>, group: &str) -> Credentials {
        Credentials {
            uid: 0,
            gid: 0,
            groups: Vec::new(),
            capabilities: 0,
            no_new_privs: true,
            security_label: label.map(str::to_owned),
            control_group: Some(group.to_owned()),
        }
    }

    fn host(module: Option<SecurityModule>) -> Host {
        Host {
            module,
            group: |path| match path {
                GROUP => Ok(()),
                _ => Err(ControlGroupError::Missing),
            },
        }
    }

    /// The remaining label and group, and the number of changes that are reported.
    fn limited(
        then: &Credentials,
        without: Without,
        module: Option<SecurityModule>,
    ) -> Result<(bool, bool, Vec<String>), LaunchError> {
        let now = credentials(None, "/ours");
        let mut given = then.clone();
        let changes = limit(&mut given, Some(&now), without, &host(module))?;
        let label = given.security_label.is_some();
        Ok((label, given.control_group.is_some(), changes))
    }

    #[test]
    fn a_label_is_given_or_refused() {
        let here = [
            (APPARMOR, SecurityModule::AppArmor),
            (SELINUX, SecurityModule::SeLinux),
        ];
        for (label, module) in here {
            let then = credentials(Some(label), GROUP);
            let given = limited(&then, Without::default(), Some(module)).expect("given");
            assert_eq!(given, (true, true, Vec::new()));
            let others = here.map(|(_, module)| module);
            let other = others.into_iter().find(|other| *other != module);
            for elsewhere in [None, other] {
                let error = limited(&then, Without::default(), elsewhere).expect_err(label);
                let words = error.to_string();
                let names = [label, "--without-label", &module.to_string()];
                assert!(names.iter().all(|name| words.contains(name)), "{words}");
                let without = Without {
                    label: true,
                    group: false,
                };
                let (label_given, group, changes) =
                    limited(&then, without, elsewhere).expect("left out");
                assert!(!label_given && group);
                assert_eq!(changes.len(), 1, "{changes:?}");
                assert!(changes[0].contains(label), "{changes:?}");
            }
        }
        let smack = credentials(Some("User"), "/");
        assert!(limited(&smack, Without::default(), None).is_err());
    }

    #[test]
    fn a_label_that_confined_nothing_is_reported() {
        for label in ["vm (complain)", "u:r:unconfined_t:s0"] {
            let then = credentials(Some(label), "/");
            for module in [None, Some(SecurityModule::AppArmor)] {
                let (given, _, changes) =
                    limited(&then, Without::default(), module).expect("not refused");
                assert!(!given && changes.len() == 1, "{changes:?}");
            }
        }
    }

    #[test]
    fn a_group_is_joined_where_it_exists() {
        let none = Without::default();
        let (_, joined, changes) = limited(&credentials(None, GROUP), none, None).expect("planned");
        assert!(joined && changes.is_empty(), "{changes:?}");
        let gone = credentials(None, "/machine.slice/gone.scope");
        let (_, joined, changes) = limited(&gone, none, None).expect("planned");
        assert!(!joined);
        assert_eq!(
            changes,
            [
                "it is not in the control group /machine.slice/gone.scope, whose limits the VM had: this host has no such group"
            ]
        );
        // The root, ours, and that of a login session that is over.
        for group in ["/", "/ours", "/user.slice/user-0.slice/session-1.scope"] {
            let (_, joined, changes) =
                limited(&credentials(None, group), none, None).expect("planned");
            assert!(!joined && changes.is_empty(), "{changes:?}");
        }
        let without = Without {
            label: false,
            group: true,
        };
        let (_, joined, changes) =
            limited(&credentials(None, GROUP), without, None).expect("planned");
        assert!(!joined && changes.len() == 1, "{changes:?}");
    }

    #[test]
    fn a_sandbox_refuses_new_privileges_by_itself() {
        let table = [
            (Some(SELINUX), "-sandbox on,obsolete=deny", false),
            (Some(SELINUX), "-sandbox enable=on", false),
            (Some(SELINUX), "-sandbox off", true),
            (Some(SELINUX), "-nodefaults", true),
            (None, "-sandbox on", true),
        ];
        for (label, words, expected) in table {
            let line = format!("qemu {words}");
            let argv: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let mut these = credentials(label, "/");
            leave_to_sandbox(&mut these, &CommandLine::parse(&argv));
            assert_eq!(these.no_new_privs, expected, "{words}");
        }
    }

    /// Our tests run on hosts without a security module. There the process that is to become QEMU refuses a label
    /// too, and the label does not show at a process that became QEMU.
    #[test]
    fn what_cannot_be_taken_on_names_the_remedy() {
        let group = credentials(None, "/no/such/stillframe/group");
        let words = take_on(&group).expect_err("no such group");
        assert!(words.contains("--without-group"), "{words}");
        let mut labelled = credentials(Some("no-such-stillframe-profile (enforce)"), "/");
        labelled.control_group = None;
        let words = take_on(&labelled).expect_err("no such profile");
        assert!(words.contains("--without-label"), "{words}");
        let pid = i32::try_from(std::process::id()).expect("pids are small");
        let plan = LaunchPlan {
            credentials: Some(labelled),
            ..LaunchPlan::default()
        };
        let ourselves = Process::open(pid).expect("ourselves");
        let error = plan.expect_label(&ourselves).expect_err("another label");
        assert!(error.to_string().contains("--without-label"), "{error}");
    }
}
