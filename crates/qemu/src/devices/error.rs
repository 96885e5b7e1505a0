//! Why a VM cannot be described as it is now.

use crate::monitor::{MonitorError, Peripheral};

/// Why a VM cannot be described as it is now.
#[derive(Debug, thiserror::Error)]
pub enum FollowError {
    /// Something of a plugged device cannot be had back.
    #[error(
        "device {device} was plugged in after the start of the VM and could not be made again at a \
         restore: {why}; unplug it, or start the VM with it"
    )]
    Lost {
        /// The device, and its type.
        device: String,
        /// The unknown property.
        why: String,
    },
    /// Without the unplugged device, another would take its place.
    #[error(
        "device {device} was unplugged after the start of the VM; started without it, `{other}` would \
         get another place on its bus: give that device an id, or say addr= of it, at the VM's next \
         start"
    )]
    WouldMove {
        /// The device that is gone.
        device: String,
        /// The option of one that is there.
        other: String,
    },
    /// A device without an id is gone, and QEMU does not show which one.
    #[error(
        "a device without an id was unplugged after the start of the VM, and QEMU does not report which; \
         give devices that are unplugged an id at the VM's next start"
    )]
    Unnamed,
    /// QEMU could not be queried.
    #[error("cannot find out which devices the VM has")]
    Monitor(#[from] MonitorError),
}

/// A device that cannot be described again.
#[derive(Debug)]
pub(super) struct Lost(String);

impl Lost {
    pub(super) fn new(why: String) -> Lost {
        Lost(why)
    }

    pub(super) fn of(self, device: &Peripheral) -> FollowError {
        FollowError::Lost {
            device: format!("{} ({})", device.id, device.driver),
            why: self.0,
        }
    }
}
