//! Adds QEMU's guest agent, with its libraries, and ours to a Linux guest.

use super::cpio::Archive;
use super::{package, program};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

const PACKAGE: &str = "qemu-guest-agent";
/// Its path in the package, and its name in the folder of the guests.
const PROGRAM: &str = "usr/sbin/qemu-ga";
const KEPT: &str = "qemu-ga";
/// The package and the program of ours.
pub const OWN: &str = "stillframe-guest-agent";
/// Modules for the agent's channel.
pub const MODULES: &[&str] = &["virtio_pci", "virtio_console"];

/// Fetches `qemu-ga` into the folder, once.
pub fn fetch(folder: &Path) -> Result<PathBuf> {
    let kept = folder.join(KEPT);
    if !kept.is_file() {
        let unpacked = package::unpack(folder, PACKAGE)?;
        fs::rename(unpacked.root.join(PROGRAM), &kept)
            .with_context(|| format!("cannot install {}", kept.display()))?;
    }
    Ok(kept)
}

/// Adds both to an initramfs; QEMU's with its libraries from this machine.
pub fn add(archive: &mut Archive, of_qemu: &Path, own: &[u8]) -> Result<()> {
    program::add(archive, of_qemu, KEPT)?;
    archive.program(OWN, own)
}
