//! Disks that the destination does not reach: QEMU copies them into new images there while the VM runs.
//!
//! ```text
//!   source                                                       destination
//!     disk ── mirror job ── NBD client ─┐                     ┌─ NBD server ── new image
//!     └────────── QEMU ────────────────┘└ relay ═══════ relay ┘└──────── QEMU ─────────┘
//! ```
//!
//! The two QEMUs speak NBD over the connections of the migration ([`relay`]), and listen nowhere. At first the job copies
//! behind the guest's back ([`mirrors`]). When it has caught up, each write of the guest waits until it is at both sides,
//! so that nothing is left to copy when the VM is stopped.

pub(super) mod exports;
pub(super) mod mirrors;
mod relay;

use serde::{Deserialize, Serialize};
use stillframe_qemu::monitor::{Disk, MonitorError};
use thiserror::Error;

use crate::connection::ConnectionError;
use crate::disks::images::{Advice, ImageError};
use crate::guardian::GuardianError;

/// Copied disks of one VM, at most.
pub(super) const DISKS_MAX: usize = 64;

/// Connections of one disk: one for each direction.
pub(super) const CONNECTIONS_A_DISK: usize = 2;

/// The disks to copy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CopyDisks {
    /// None: the destination reaches all of them.
    #[default]
    No,
    /// All that the guest can write to.
    All,
    /// Those of these devices.
    These(Vec<String>),
}

/// Why disks are not copied.
#[derive(Debug, Error)]
pub enum DiskError {
    /// There is no such disk.
    #[error("no disk of the VM is called {device:?}; it has {there}")]
    NoSuchDisk {
        /// The name that was given.
        device: String,
        /// Those that there are.
        there: String,
    },
    /// It cannot be copied.
    #[error("disk {device} cannot be copied: {why}")]
    NotCopied {
        /// The disk.
        device: String,
        /// Why not.
        why: &'static str,
    },
    /// There are very many.
    #[error("the VM has {count} disks to copy, and at most {DISKS_MAX} are copied")]
    TooMany {
        /// Their number.
        count: usize,
    },
    /// A connection failed.
    #[error("the connection for disks failed")]
    Connection(#[from] ConnectionError),
    /// There is one connection, and not the others.
    #[error("cannot open a connection for a disk: {why}")]
    NotOpened {
        /// Why not.
        why: String,
    },
    /// No socket.
    #[error("cannot prepare a connection for a disk")]
    Socket(#[source] std::io::Error),
    /// No thread.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// QEMU cannot be given a socket.
    #[error("cannot give QEMU a connection for a disk")]
    Guardian(#[from] GuardianError),
    /// QEMU refused something.
    #[error("QEMU does not copy disk {device}")]
    Refused {
        /// The disk.
        device: String,
        /// QEMU's words.
        #[source]
        source: MonitorError,
    },
    /// QEMU has stopped copying.
    #[error("disk {device} was not copied to the end: {why}")]
    Failed {
        /// The disk.
        device: String,
        /// QEMU's words, or what became of the connection.
        why: String,
    },
}

/// Why a destination takes no copies of disks.
#[derive(Debug, Error)]
pub enum DestinationError {
    /// There is no image for it.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The copies cannot be taken.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// What a destination can do about an image.
pub(super) const ADVICE: Advice = Advice {
    exists: "If it is not needed, remove it or use --overwrite-disks; another place is given by --map OLD=NEW. If both hosts \
             use the same file, migrate without --copy-disks",
    place: "Make its directory, or give it another place with --map OLD=NEW",
    device: "a device that is not here; name one with --map, and use --overwrite-disks",
    format: "Make it yourself, and use --overwrite-disks",
};

/// The names of the devices whose disks are to be copied.
///
/// # Errors
/// There is no such disk, or it cannot be copied.
pub(super) fn chosen(disks: &[Disk], choice: &CopyDisks) -> Result<Vec<String>, DiskError> {
    let images: Vec<&Disk> = disks.iter().filter(|disk| disk.is_image()).collect();
    let chosen: Vec<&Disk> = match choice {
        CopyDisks::No => Vec::new(),
        CopyDisks::All => {
            let written = images.iter().filter(|disk| !disk.read_only);
            written.copied().collect()
        }
        CopyDisks::These(names) => {
            let find = |name: &String| {
                let found = images.iter().find(|disk| disk.device == *name);
                found.copied().ok_or_else(|| DiskError::NoSuchDisk {
                    device: name.clone(),
                    there: names_of(&images),
                })
            };
            names.iter().map(find).collect::<Result<_, _>>()?
        }
    };
    let mut names: Vec<String> = Vec::new();
    for disk in chosen {
        if let Some(why) = why_not(disk) {
            let device = disk.device.clone();
            return Err(DiskError::NotCopied { device, why });
        }
        if !names.contains(&disk.device) {
            names.push(disk.device.clone());
        }
    }
    match names.len() {
        count if count > DISKS_MAX => Err(DiskError::TooMany { count }),
        _ => Ok(names),
    }
}

fn why_not(disk: &Disk) -> Option<&'static str> {
    if disk.read_only {
        Some("the guest cannot write to it; have it at both hosts")
    } else if disk.temporary {
        Some("it is a throw-away file (snapshot=on), which ends with this QEMU")
    } else if !disk.path.is_absolute() {
        Some("it is no file of this host; have both hosts reach it")
    } else {
        None
    }
}

fn names_of(disks: &[&Disk]) -> String {
    let names: Vec<&str> = disks.iter().map(|disk| &*disk.device).collect();
    match names.is_empty() {
        true => "none".to_owned(),
        false => names.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(device: &str, node: &str) -> Disk {
        Disk {
            device: device.to_owned(),
            node: node.to_owned(),
            path: format!("/images/{device}").into(),
            format: "raw".to_owned(),
            read_only: false,
            temporary: false,
            flash: false,
            unchecked: false,
            bytes: 1 << 20,
            identity: None,
        }
    }

    #[test]
    fn all_means_what_the_guest_can_write_to() {
        let cd = Disk {
            read_only: true,
            ..disk("cd0", "n1")
        };
        let disks = [disk("d0", "n0"), disk("d0", ""), cd, disk("", "n2")];
        let choose = |choice| chosen(&disks, &choice).map_err(|error| error.to_string());
        assert_eq!(choose(CopyDisks::No), Ok(Vec::new()));
        assert_eq!(choose(CopyDisks::All), Ok(vec!["d0".to_owned()]));
        let named = |name: &str| CopyDisks::These(vec![name.to_owned(), name.to_owned()]);
        assert_eq!(choose(named("d0")), Ok(vec!["d0".to_owned()]));
        assert!(choose(named("cd0")).is_err_and(|why| why.contains("cannot write to it")));
        assert!(choose(named("d7")).is_err_and(|why| why.contains("it has d0, cd0")));
    }

    #[test]
    fn disks_that_cannot_be_copied_are_refused_and_not_left_out() {
        let temporary = Disk {
            temporary: true,
            ..disk("d0", "n0")
        };
        let network = Disk {
            path: "nbd://host/x".into(),
            ..disk("d0", "n0")
        };
        for disk in [temporary, network] {
            let refused = chosen(&[disk], &CopyDisks::All);
            assert!(matches!(refused, Err(DiskError::NotCopied { .. })));
        }
        let many: Vec<Disk> = (0..=DISKS_MAX)
            .map(|number| disk(&format!("d{number}"), "n"))
            .collect();
        let refused = chosen(&many, &CopyDisks::All);
        assert!(matches!(refused, Err(DiskError::TooMany { count: 65 })));
    }
}
