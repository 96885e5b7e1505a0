//! Whether exact checkpoints of a VM are possible at all. An unsuitable VM is refused with its cause, before
//! anything is done to it.

use std::io;

use serde_json::Value;
use stillframe_sys::probe;

use crate::arguments::CommandLine;
use crate::devices::{self, FollowError, HotPlug};
use crate::monitor::{BALLOON, BlockNode, Monitor, MonitorError, Peripheral};
use crate::target::Target;

mod cautions;

pub use cautions::{Caution, cautions};

/// Why a VM is refused.
#[derive(Debug, thiserror::Error)]
pub enum Unsuitable {
    /// A device of the host writes guest memory by itself, unseen.
    #[error(
        "device {device} is host hardware that writes guest memory by itself (VFIO or vDPA), so \
         changed pages cannot be detected; detach it first"
    )]
    Vfio {
        /// The device.
        device: String,
    },
    /// Another process writes guest memory, unseen.
    #[error(
        "device {device} lets another process write guest memory (vhost-user or shared memory), \
         so changed pages cannot be detected; use a device that QEMU serves itself"
    )]
    VhostUser {
        /// The device.
        device: String,
    },
    /// QEMU itself says that its state cannot be carried over.
    #[error("QEMU cannot save the state of this VM: {}", reasons.join("; "))]
    MigrationBlocked {
        /// QEMU's own words.
        reasons: Vec<String>,
    },
    /// The VM is just being migrated.
    #[error("a migration of this VM is in progress ({status}); wait for its end or cancel it")]
    MigrationRunning {
        /// QEMU's word for its state.
        status: String,
    },
    /// The VM is in a state that has no meaning of its own.
    #[error(
        "the VM is in state {status:?}, in which its memory is not its own; try again when it runs \
         or is paused"
    )]
    RunState {
        /// QEMU's word for it.
        status: String,
    },
    /// The kernel does not report what a device gives back of the guest's memory.
    #[error(
        "device {device} gives memory back in pieces of 2 MiB, which this kernel loses track of (see \
         `stillframe probe`), so changed pages cannot be detected; use a kernel with the fix, or a VM without \
         the device"
    )]
    LostDiscards {
        /// The device.
        device: String,
    },
    /// A page of shared memory that is discarded and touched again looks as if it had never been gone.
    #[error(
        "the VM's memory is shared (memfd, or a file), and device {device} gives parts of it back to the host: \
         with copy-on-write, pages could be saved after they were given back; choose another schedule"
    )]
    DiscardsShared {
        /// The device.
        device: String,
    },
    /// The guest is not x86_64.
    #[error("the guest is {architecture}; only x86_64 guests are supported")]
    OtherArchitecture {
        /// Its architecture.
        architecture: String,
    },
    /// The devices are no longer those of the command line, and cannot be described either.
    #[error(transparent)]
    Devices(#[from] FollowError),
    /// QEMU's descriptors cannot be listed.
    #[error("cannot list the files that QEMU (process {pid}) has open")]
    OpenFiles {
        /// Its process.
        pid: i32,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The VM could not be queried.
    #[error("cannot find out whether the VM can be checkpointed")]
    Monitor(#[from] MonitorError),
}

/// Says whether the VM can be checkpointed, and if not, why. Returns how its devices differ from those of
/// its command line.
pub fn check(target: &Target, monitor: &mut Monitor) -> Result<HotPlug, Unsuitable> {
    let architecture = monitor.architecture()?;
    if architecture != "x86_64" {
        return Err(Unsuitable::OtherArchitecture { architecture });
    }
    check_run_state(monitor.run_state()?.status)?;
    // Devices before QEMU's own objections: they name the device, not the feature.
    let peripherals = monitor.peripherals()?;
    check_devices(&peripherals)?;
    if !probe::reports_large_discards() {
        check_discards(monitor, &peripherals)?;
    }
    check_network(&monitor.human("info network")?)?;
    check_block_drivers(&monitor.block_nodes()?)?;
    let migration = monitor.migration()?;
    check_migration(migration.status, migration.blocked_reasons)?;
    let line = CommandLine::parse(&target.arguments);
    Ok(devices::follow(&line, monitor)?)
}

fn check_run_state(status: String) -> Result<(), Unsuitable> {
    match status.as_str() {
        "inmigrate" | "postmigrate" | "finish-migrate" | "restore-vm" | "save-vm" | "preconfig"
        | "colo" => Err(Unsuitable::RunState { status }),
        _ => Ok(()),
    }
}

fn check_migration(status: Option<String>, blocked_reasons: Vec<String>) -> Result<(), Unsuitable> {
    match status.as_deref() {
        None | Some("none" | "completed" | "failed" | "cancelled") => {}
        Some(status) => {
            return Err(Unsuitable::MigrationRunning {
                status: status.to_owned(),
            });
        }
    }
    if blocked_reasons.is_empty() {
        Ok(())
    } else {
        Err(Unsuitable::MigrationBlocked {
            reasons: blocked_reasons,
        })
    }
}

fn check_devices(peripherals: &[Peripheral]) -> Result<(), Unsuitable> {
    for peripheral in peripherals {
        let driver = peripheral.driver.as_str();
        let device = described(peripheral);
        if driver.starts_with("vfio-") || driver.contains("vdpa") {
            return Err(Unsuitable::Vfio { device });
        }
        let foreign_writer = driver.contains("vhost-user")
            || driver.starts_with("ivshmem")
            || driver == "x-pci-proxy-dev";
        if foreign_writer {
            return Err(Unsuitable::VhostUser { device });
        }
    }
    Ok(())
}

/// Devices that discard guest memory in pieces as large as a page table: virtio-mem, and a balloon with free
/// page reporting. A balloon alone discards single pages.
fn check_discards(monitor: &mut Monitor, peripherals: &[Peripheral]) -> Result<(), Unsuitable> {
    for peripheral in peripherals {
        let large = match peripheral.driver.starts_with(BALLOON) {
            true => {
                let values = monitor.properties(&peripheral.path(), &["free-page-reporting"])?;
                values.first() == Some(&Some(Value::Bool(true)))
            }
            false => discards(peripheral),
        };
        if large {
            let device = described(peripheral);
            return Err(Unsuitable::LostDiscards { device });
        }
    }
    Ok(())
}

/// Refuses what makes copy-on-write of shared memory inexact.
pub fn check_shared_copy_on_write(monitor: &mut Monitor) -> Result<(), Unsuitable> {
    match monitor.peripherals()?.iter().find(|one| discards(one)) {
        Some(device) => Err(Unsuitable::DiscardsShared {
            device: described(device),
        }),
        None => Ok(()),
    }
}

/// Whether a device gives guest memory back to the host.
fn discards(peripheral: &Peripheral) -> bool {
    [BALLOON, "virtio-mem"]
        .iter()
        .any(|driver| peripheral.driver.starts_with(driver))
}

fn described(peripheral: &Peripheral) -> String {
    format!("{} ({})", peripheral.id, peripheral.driver)
}

/// The network card looks the same with any backend; `info network` shows the backend.
pub(crate) fn check_network(table: &str) -> Result<(), Unsuitable> {
    for line in table.lines() {
        let device = line
            .trim_matches(|c: char| c.is_whitespace() || c == '\\')
            .to_owned();
        if line.contains("type=vhost-user") {
            return Err(Unsuitable::VhostUser { device });
        }
        if line.contains("type=vhost-vdpa") {
            return Err(Unsuitable::Vfio { device });
        }
    }
    Ok(())
}

/// Block drivers that have hardware, or another process, read into guest memory.
fn check_block_drivers(nodes: &[BlockNode]) -> Result<(), Unsuitable> {
    for node in nodes {
        let device = format!("disk node {} ({})", node.name, node.driver);
        match node.driver.as_str() {
            "nvme" | "virtio-blk-vfio-pci" | "virtio-blk-vhost-vdpa" => {
                return Err(Unsuitable::Vfio { device });
            }
            "virtio-blk-vhost-user" => return Err(Unsuitable::VhostUser { device }),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peripheral(id: &str, driver: &str) -> Peripheral {
        Peripheral {
            id: id.into(),
            driver: driver.into(),
            anonymous: false,
        }
    }

    #[test]
    fn devices() {
        assert!(check_devices(&[peripheral("net0", "virtio-net-pci")]).is_ok());
        for driver in ["vfio-pci", "vfio-pci-nohotplug", "vhost-vdpa-device-pci"] {
            assert!(matches!(
                check_devices(&[peripheral("d", driver)]),
                Err(Unsuitable::Vfio { .. })
            ));
        }
        for driver in ["vhost-user-blk-pci", "ivshmem-plain", "x-pci-proxy-dev"] {
            assert!(matches!(
                check_devices(&[peripheral("d", driver)]),
                Err(Unsuitable::VhostUser { .. })
            ));
        }
        assert!(discards(&peripheral("b", "virtio-balloon-pci")));
        assert!(discards(&peripheral("m", "virtio-mem-pci")));
        assert!(!discards(&peripheral("d", "virtio-blk-pci")));
        let vhost_net = "hub 0\r\n \\ hub0port1: #net151: index=0,type=user,net=10.0.2.0\r\n";
        assert!(check_network(vhost_net).is_ok());
        assert!(matches!(
            check_network("net0: index=0,type=nic\r\n \\ vu0: index=0,type=vhost-user\r\n"),
            Err(Unsuitable::VhostUser { device }) if device.starts_with("vu0")
        ));
    }

    #[test]
    fn states() {
        for status in [
            "running",
            "paused",
            "prelaunch",
            "guest-panicked",
            "shutdown",
        ] {
            assert!(check_run_state(status.into()).is_ok(), "{status}");
        }
        for status in ["inmigrate", "postmigrate"] {
            assert!(check_run_state(status.into()).is_err(), "{status}");
        }
        for status in [None, Some("completed"), Some("cancelled"), Some("failed")] {
            assert!(check_migration(status.map(str::to_owned), vec![]).is_ok());
        }
        for status in ["setup", "active", "postcopy-active", "cancelling"] {
            assert!(matches!(
                check_migration(Some(status.into()), vec![]),
                Err(Unsuitable::MigrationRunning { .. })
            ));
        }
        assert!(matches!(
            check_migration(None, vec!["because".into()]),
            Err(Unsuitable::MigrationBlocked { .. })
        ));
    }

    #[test]
    fn block_drivers() {
        let node = |driver: &str| BlockNode {
            name: "n".into(),
            driver: driver.into(),
        };
        assert!(check_block_drivers(&[node("file"), node("qcow2")]).is_ok());
        for driver in ["nvme", "virtio-blk-vhost-vdpa"] {
            let checked = check_block_drivers(&[node("raw"), node(driver)]);
            assert!(matches!(checked, Err(Unsuitable::Vfio { .. })), "{driver}");
        }
        let checked = check_block_drivers(&[node("virtio-blk-vhost-user")]);
        assert!(matches!(checked, Err(Unsuitable::VhostUser { .. })));
    }
}
