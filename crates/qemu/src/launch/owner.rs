//! As whom the new QEMU runs: as the user that the VM ran as, never silently as more.

use stillframe_sys::credentials::own_uid;

use super::{LaunchError, LaunchOptions};
use crate::credentials::Credentials;
use crate::record::VmRecord;

/// What was decided, and what differs from before, in words for the user.
#[derive(Debug, Default)]
pub(super) struct Owner {
    /// What the launch helper takes on; none for the user of this process.
    pub credentials: Option<Credentials>,
    pub changes: Vec<String>,
}

impl Owner {
    /// Whether QEMU changes to another user than that of this process before it starts.
    pub(super) fn is_another(&self) -> bool {
        let uid = self.credentials.as_ref().map(|then| then.uid);
        uid.is_some_and(|uid| uid != own_uid())
    }
}

/// Only root can become somebody else. Where the caller is not root, the VM gets the caller's rights.
pub(super) fn decide(record: &VmRecord, options: &LaunchOptions) -> Result<Owner, LaunchError> {
    choose(
        record.credentials.as_ref(),
        Credentials::own().as_ref(),
        own_uid(),
        options.as_root,
    )
}

fn choose(
    then: Option<&Credentials>,
    now: Option<&Credentials>,
    caller: u32,
    as_root: bool,
) -> Result<Owner, LaunchError> {
    let mut owner = Owner::default();
    let mut note = |text: String| owner.changes.push(text);
    match (caller, then) {
        (0, None) if !as_root => return Err(LaunchError::OwnerUnknown),
        (0, Some(then)) if as_root && then.uid != 0 => note(format!(
            "it starts as root; the VM ran as user {}",
            then.uid
        )),
        (0, Some(then)) if !as_root => {
            if then.uid != 0 && then.capabilities != 0 {
                note(format!(
                    "it has no capabilities; the VM had {:#x}",
                    then.capabilities
                ));
            }
            owner.credentials = Some(then.clone());
        }
        (0, _) => {}
        _ if as_root => return Err(LaunchError::NotRoot),
        (_, None) => note(format!(
            "it runs as user {caller}; as whom the VM ran was not recorded"
        )),
        (_, Some(then)) if then.uid != caller => note(format!(
            "it runs as user {caller}; the VM ran as user {}",
            then.uid
        )),
        _ => {}
    }
    if let Some(then) = then {
        owner.changes.extend(confinement(then, now));
    }
    Ok(owner)
}

/// What held the VM back, and does not hold the new one back.
fn confinement(then: &Credentials, now: Option<&Credentials>) -> Vec<String> {
    let mut lost = Vec::new();
    if let Some(label) = &then.security_label
        && now.and_then(|now| now.security_label.as_ref()) != Some(label)
    {
        lost.push(format!(
            "it is not confined by the security label {label}, as the VM was"
        ));
    }
    // A login session's group holds nobody back.
    let meant = |group: &&String| group.len() > 1 && !group.starts_with("/user.slice");
    if let Some(group) = then.control_group.as_ref().filter(meant)
        && now.and_then(|now| now.control_group.as_ref()) != Some(group)
    {
        lost.push(format!(
            "it is not in the control group {group}, whose limits the VM had"
        ));
    }
    lost
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credentials(uid: u32) -> Credentials {
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

    #[test]
    fn root_becomes_whom_the_vm_ran_as() {
        let nobody = credentials(65534);
        let owner = choose(Some(&nobody), None, 0, false).expect("decided");
        assert_eq!(owner.credentials, Some(nobody.clone()));
        assert!(owner.changes.is_empty());
        let owner = choose(Some(&nobody), None, 0, true).expect("decided");
        assert_eq!(owner.credentials, None);
        assert_eq!(owner.changes.len(), 1);
        assert!(matches!(
            choose(None, None, 0, false),
            Err(LaunchError::OwnerUnknown)
        ));
        assert!(choose(None, None, 0, true).is_ok());
    }

    #[test]
    fn others_stay_who_they_are() {
        let owner = choose(Some(&credentials(0)), None, 7, false).expect("decided");
        assert_eq!(owner.credentials, None);
        assert!(owner.changes[0].contains("user 7"), "{:?}", owner.changes);
        let owner = choose(Some(&credentials(7)), None, 7, false).expect("decided");
        assert!(owner.changes.is_empty());
        assert!(matches!(
            choose(Some(&credentials(7)), None, 7, true),
            Err(LaunchError::NotRoot)
        ));
    }

    #[test]
    fn what_no_longer_holds_it_back_is_told() {
        let mut then = credentials(0);
        then.security_label = Some("svirt_t:c1".to_owned());
        then.control_group = Some("/machine.slice/vm.scope".to_owned());
        let lost = confinement(&then, Some(&credentials(0)));
        assert_eq!(lost.len(), 2, "{lost:?}");
        assert!(confinement(&then, Some(&then)).is_empty());
        then.security_label = None;
        then.control_group = Some("/user.slice/user-0.slice/session-1.scope".to_owned());
        assert!(confinement(&then, None).is_empty());
    }
}
