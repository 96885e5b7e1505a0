//! Whether a VM is the one of a checkpoint: another name, another machine or other devices are refused.

use stillframe_qemu::record::VmRecord;
use stillframe_repo::{CheckpointId, Manifest};

use super::{RewindError, RewindOptions};

/// Sections of a device state that QEMU writes or not for the same devices (migration/global_state.c).
const SOMETIMES: [&str; 1] = ["globalstate"];

/// Whether the VM has the devices that it had, by the sections of its device state: several devices may have one
/// name, such as processors.
pub(super) fn same_devices(then: &[String], now: &[String]) -> Result<(), RewindError> {
    let more = |some: &[String], others: &[String]| {
        let count = |list: &[String], name| list.iter().filter(|other| *other == name).count();
        let found = some.iter().find(|&name| {
            !SOMETIMES.contains(&name.as_str()) && count(some, name) > count(others, name)
        });
        found.cloned()
    };
    if let Some(missing) = more(then, now) {
        return Err(RewindError::OtherDevices { missing });
    }
    more(now, then).map_or(Ok(()), |added| Err(RewindError::MoreDevices { added }))
}

/// Whether the VM is the one of the checkpoint, as far as its description shows. Its blocks and devices are checked
/// besides.
pub(super) fn same_machine(
    id: &CheckpointId,
    manifest: &Manifest,
    then: &VmRecord,
    now: &VmRecord,
    options: &RewindOptions,
) -> Result<(), RewindError> {
    let expected = options.of_vm.as_ref().unwrap_or(&now.label);
    if manifest.vm != *expected {
        return Err(RewindError::OtherVm {
            checkpoint: id.to_string(),
            found: manifest.vm.clone(),
            vm: now.label.clone(),
        });
    }
    let (a, b) = (&then.identity, &now.identity);
    let words = [
        ("its QEMU", &a.qemu_version, &b.qemu_version),
        ("its machine type", &a.machine, &b.machine),
        ("its architecture", &a.architecture, &b.architecture),
    ];
    let accelerators = [a, b].map(|identity| format!("{:?}", identity.accelerator));
    let accelerator = ("its accelerator", &accelerators[0], &accelerators[1]);
    let mut all = words.into_iter().chain([accelerator]);
    match all.find(|(_, then, now)| then != now) {
        Some((what, then, now)) => Err(RewindError::OtherMachine {
            what,
            now: now.clone(),
            then: then.clone(),
        }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn difference(then: &[&str], now: &[&str]) -> Option<String> {
        let [then, now] = [then, now].map(|names| {
            names
                .iter()
                .map(|&name| name.to_owned())
                .collect::<Vec<_>>()
        });
        match same_devices(&then, &now) {
            Ok(()) => None,
            Err(RewindError::OtherDevices { missing }) => Some(format!("-{missing}")),
            Err(RewindError::MoreDevices { added }) => Some(format!("+{added}")),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn devices_are_counted_by_name() {
        let only = |only: &str| Some(only.to_owned());
        assert_eq!(
            difference(&["cpu", "cpu", "rtc"], &["rtc", "cpu", "cpu"]),
            None
        );
        assert_eq!(difference(&["cpu", "cpu"], &["cpu", "rng"]), only("-cpu"));
        assert_eq!(difference(&["cpu"], &["cpu", "cpu"]), only("+cpu"));
        assert_eq!(difference(&["cpu"], &["cpu", "rng"]), only("+rng"));
        assert_eq!(difference(&["cpu"], &["cpu", "globalstate"]), None);
        assert_eq!(difference(&["cpu", "globalstate"], &["cpu"]), None);
    }
}
