//! The user that the new QEMU runs as: the user that the VM ran as, never silently a user with more rights.

use stillframe_sys::credentials::own_uid;

use super::confinement::{self, Host, Without};
use super::{LaunchError, LaunchOptions};
use crate::credentials::Credentials;
use crate::record::VmRecord;

/// The decision, and the differences from before, in words for the user.
#[derive(Debug, Default)]
pub(super) struct Owner {
    /// The credentials that the launch helper takes on; none for the user of this process.
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

/// Only root can become another user. If the caller is not root, the VM gets the caller's rights.
pub(super) fn decide(record: &VmRecord, options: &LaunchOptions) -> Result<Owner, LaunchError> {
    choose(
        record.credentials.as_ref(),
        Credentials::own().as_ref(),
        own_uid(),
        options.as_root,
        Without::of(options),
        &Host::this(),
    )
}

fn choose(
    then: Option<&Credentials>,
    now: Option<&Credentials>,
    caller: u32,
    as_root: bool,
    without: Without,
    host: &Host,
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
            let mut given = then.clone();
            let changes = confinement::limit(&mut given, now, without, host)?;
            owner.credentials = Some(given);
            owner.changes.extend(changes);
            return Ok(owner);
        }
        (0, _) => {}
        _ if as_root => return Err(LaunchError::NotRoot),
        (_, None) => note(format!(
            "it runs as user {caller}; the VM's own user was not recorded"
        )),
        (_, Some(then)) if then.uid != caller => note(format!(
            "it runs as user {caller}; the VM ran as user {}",
            then.uid
        )),
        _ => {}
    }
    if let Some(then) = then {
        owner.changes.extend(confinement::lost(then, now));
    }
    Ok(owner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(
        then: Option<&Credentials>,
        now: Option<&Credentials>,
        caller: u32,
        as_root: bool,
    ) -> Result<Owner, LaunchError> {
        let host = Host {
            module: None,
            group: |_| Ok(()),
        };
        super::choose(then, now, caller, as_root, Without::default(), &host)
    }

    #[test]
    fn root_becomes_the_user_that_the_vm_ran_as() {
        let user = Credentials::of_user(65534);
        let owner = choose(Some(&user), None, 0, false).expect("decided");
        assert_eq!(owner.credentials, Some(user.clone()));
        assert!(owner.changes.is_empty());
        let owner = choose(Some(&user), None, 0, true).expect("decided");
        assert_eq!(owner.credentials, None);
        assert_eq!(owner.changes.len(), 1);
        assert!(matches!(
            choose(None, None, 0, false),
            Err(LaunchError::OwnerUnknown)
        ));
        assert!(choose(None, None, 0, true).is_ok());
    }

    /// Only root gives back what confined the VM, and only to the user that it had.
    #[test]
    fn confinement_comes_with_the_user() {
        let mut then = Credentials::of_user(7);
        then.control_group = Some("/vms".to_owned());
        let owner = choose(Some(&then), None, 0, false).expect("decided");
        assert_eq!(owner.credentials, Some(then.clone()));
        assert!(owner.changes.is_empty(), "{:?}", owner.changes);
        let owner = choose(Some(&then), None, 7, false).expect("decided");
        assert_eq!(owner.changes.len(), 1, "{:?}", owner.changes);
        then.security_label = Some("vm (enforce)".to_owned());
        let refused = choose(Some(&then), None, 0, false);
        assert!(matches!(refused, Err(LaunchError::LabelNotGiven { .. })));
        let owner = choose(Some(&then), None, 0, true).expect("decided");
        // Another user, no label, another group.
        assert_eq!(owner.changes.len(), 3, "{:?}", owner.changes);
        let owner = choose(Some(&then), None, 7, false).expect("decided");
        assert_eq!(owner.changes.len(), 2, "{:?}", owner.changes);
    }

    #[test]
    fn others_stay_who_they_are() {
        let owner = choose(Some(&Credentials::of_user(0)), None, 7, false).expect("decided");
        assert_eq!(owner.credentials, None);
        assert!(owner.changes[0].contains("user 7"), "{:?}", owner.changes);
        let owner = choose(Some(&Credentials::of_user(7)), None, 7, false).expect("decided");
        assert!(owner.changes.is_empty());
        assert!(matches!(
            choose(Some(&Credentials::of_user(7)), None, 7, true),
            Err(LaunchError::NotRoot)
        ));
    }
}
