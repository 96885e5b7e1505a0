//! Devices that QEMU makes because the command line does not mention their kind (`system/vl.c`). An option that is
//! added for a plugged device must not remove them. Nor may an option that is left out bring them back.

use crate::arguments::{CommandLine, Properties};

/// Options, any of which takes away the default network card.
const NETWORK_OPTIONS: &[&str] = &["net", "netdev", "nic"];
/// Devices, any of which takes away the default CD drive.
const CD_DRIVERS: &[&str] = &["ide-cd", "ide-hd", "scsi-cd", "scsi-hd"];

/// Gives `after` the default devices that `before` has, and no other ones.
pub(super) fn keep(before: &CommandLine, after: &mut CommandLine) {
    if before.has("nodefaults") {
        return;
    }
    let has_network = |line: &CommandLine| NETWORK_OPTIONS.iter().any(|name| line.has(name));
    match (has_network(before), has_network(after)) {
        (false, true) => {
            after.push("net", "nic");
            after.push("net", "user");
        }
        (true, false) => after.push("nic", "none"),
        _ => {}
    }
    match (has_cd_driver(before), has_cd_driver(after)) {
        (None, Some(_)) if !has_cd(before) => after.push("drive", "index=2,media=cdrom"),
        // Any mention of a kind of device, even of its own default, counts as a device of that kind.
        (Some(driver), None) => {
            let value = format!("driver={driver},property=share-rw,value=off");
            after.push("global", &value);
        }
        _ => {}
    }
}

fn has_cd_driver(line: &CommandLine) -> Option<&'static str> {
    let drivers = line.values("device").filter_map(|value| {
        let properties = Properties::parse(value, "driver");
        let driver = properties.get("driver")?;
        CD_DRIVERS.iter().find(|known| **known == driver).copied()
    });
    drivers.last()
}

/// Whether something is in the place of the default CD drive.
fn has_cd(line: &CommandLine) -> bool {
    let there = |value| Properties::parse(value, "").get("index") == Some("2");
    line.has("cdrom") || line.has("hdc") || line.values("drive").any(there)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_devices_stay_as_they_are() {
        let line = |words: &str| {
            let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
            CommandLine::parse(&words)
        };
        let table = [
            ("q", "q -netdev user,id=n", "-net nic -net user"),
            ("q -nic user", "q -nic user -netdev user,id=n", ""),
            ("q -netdev user,id=n", "q", "-nic none"),
            ("q -nodefaults", "q -nodefaults -netdev user,id=n", ""),
            ("q", "q -device scsi-hd", "-drive index=2,media=cdrom"),
            ("q -cdrom a", "q -cdrom a -device scsi-hd", ""),
            (
                "q -device scsi-hd,id=a",
                "q",
                "-global driver=scsi-hd,property=share-rw,value=off",
            ),
            ("q -device virtio-rng-pci", "q", ""),
        ];
        for (before, after, added) in table {
            let mut kept = line(after);
            keep(&line(before), &mut kept);
            let expected = format!("{after} {added}");
            assert_eq!(kept.to_argv().join(" "), expected.trim_end(), "{before}");
        }
    }
}
