//! Properties that may make checkpoints of a VM inexact and do not show from outside, or were never tested. The
//! user is warned of them at the attach.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

use super::{Unsuitable, described};
use crate::monitor::cpu;
use crate::monitor::{Monitor, MonitorError, Peripheral};
use crate::target::Target;

/// The start of the names of the devices of the kernel's virtio workers.
const VHOST: &str = "/dev/vhost-";

/// A reason to be careful with a VM.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Caution {
    /// KVM maps pages of the guest for the guests that it runs itself (linux: arch/x86/kvm/vmx/nested.c,
    /// `nested_get_vmcs12_pages`), and hardware writes them without a fault.
    #[error(
        "the guest may run VMs of its own (its processor has VMX or SVM): while it does, some pages of their \
         interrupt controllers are written unseen, and checkpoints may be wrong there. Without such VMs they \
         are exact; -cpu …,-vmx or -svm rules it out"
    )]
    NestedGuests,
    /// Disks that the guest sends SCSI commands to by way of `SG_IO`, whose data arrives by DMA.
    #[error(
        "{} hands SCSI commands to the hardware, which writes the guest's memory by DMA. Checkpoints wait for such \
         requests by design, but this was never tested: compare checkpoints with --verify, or use scsi-hd",
        devices.join(", ")
    )]
    ScsiPassthrough {
        /// The devices.
        devices: Vec<String>,
    },
    /// Kernel threads write guest memory on QEMU's behalf (linux: drivers/vhost). They use QEMU's page tables
    /// (`kthread_use_mm`), so their writes fault as QEMU's own do; no machine of the project has them.
    #[error(
        "QEMU has {} open: kernel threads (vhost) write the guest's memory. Their writes are tracked by design, but \
         this was never tested: compare checkpoints with --verify, or use vhost=off", devices.join(", ")
    )]
    VhostWorkers {
        /// The devices' paths.
        devices: Vec<String>,
    },
}

/// The cautions about this VM.
pub fn cautions(target: &Target, monitor: &mut Monitor) -> Result<Vec<Caution>, Unsuitable> {
    let mut cautions = Vec::new();
    if runs_guests(monitor)? {
        cautions.push(Caution::NestedGuests);
    }
    let devices = scsi_passthrough(&monitor.peripherals()?);
    if !devices.is_empty() {
        cautions.push(Caution::ScsiPassthrough { devices });
    }
    let pid = target.process.pid();
    let devices = vhost_devices(Path::new(&format!("/proc/{pid}/fd")))
        .map_err(|source| Unsuitable::OpenFiles { pid, source })?;
    if !devices.is_empty() {
        cautions.push(Caution::VhostWorkers { devices });
    }
    Ok(cautions)
}

fn runs_guests(monitor: &mut Monitor) -> Result<bool, MonitorError> {
    Ok(monitor.uses_kvm()? && cpu::runs_guests(&monitor.cpu_features()?))
}

fn scsi_passthrough(peripherals: &[Peripheral]) -> Vec<String> {
    let passes = |peripheral: &&Peripheral| {
        matches!(peripheral.driver.as_str(), "scsi-block" | "scsi-generic")
    };
    let devices = peripherals.iter().filter(passes);
    devices.map(described).collect()
}

/// The vhost devices among the links of `descriptors`, a process' `/proc/PID/fd`. QEMU opens them itself or is
/// handed them (`vhostfd=`); the link is the same.
fn vhost_devices(descriptors: &Path) -> io::Result<Vec<String>> {
    let mut found = BTreeSet::new();
    for descriptor in fs::read_dir(descriptors)? {
        match fs::read_link(descriptor?.path()) {
            Ok(file) if file.to_string_lossy().starts_with(VHOST) => {
                found.insert(file.to_string_lossy().into_owned());
            }
            // Closed since the folder was listed.
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(found.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// The descriptors of a process that has these files open.
    fn descriptors(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("temporary directory");
        for (number, file) in files.iter().enumerate() {
            symlink(file, folder.path().join(number.to_string())).expect("link");
        }
        folder
    }

    #[test]
    fn scsi_devices_that_pass_commands_on() {
        let peripheral = |id: &str, driver: &str| Peripheral {
            id: id.into(),
            driver: driver.into(),
            anonymous: false,
        };
        let all = [
            peripheral("a", "scsi-hd"),
            peripheral("b", "scsi-block"),
            peripheral("c", "virtio-scsi-pci"),
            peripheral("d", "scsi-generic"),
        ];
        assert_eq!(
            scsi_passthrough(&all),
            ["b (scsi-block)", "d (scsi-generic)"]
        );
        assert!(scsi_passthrough(&all[..1]).is_empty());
    }

    #[test]
    fn vhost_devices_among_descriptors() {
        let none = descriptors(&[
            "/dev/kvm",
            "socket:[4711]",
            "anon_inode:[eventfd]",
            "/dev/net/tun",
            "/srv/dev/vhost-net",
        ]);
        assert!(vhost_devices(none.path()).expect("listed").is_empty());
        let some = descriptors(&[
            "/dev/vhost-vsock",
            "/dev/vhost-net",
            "/dev/null",
            "/dev/vhost-net",
        ]);
        assert_eq!(
            vhost_devices(some.path()).expect("listed"),
            ["/dev/vhost-net", "/dev/vhost-vsock"]
        );
        let missing = some.path().join("missing");
        assert!(vhost_devices(&missing).is_err());
    }
}
