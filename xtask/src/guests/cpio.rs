//! Writes a "newc" cpio archive, the format of an initramfs (kernel documentation:
//! driver-api/early-userspace/buffer-format). cpio(1) would need root to add a device node.

use anyhow::{Context, Result};

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const CHARACTER_DEVICE: u32 = 0o020_600;
const TRAILER: &str = "TRAILER!!!";

/// The number of a device; all zero for other entries.
#[derive(Default)]
struct DeviceNumber {
    major: u32,
    minor: u32,
}

/// An archive under construction. The same entries give the same bytes.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    /// Adds an empty folder. A folder comes before its content.
    pub fn folder(&mut self, name: &str) {
        self.header(name, FOLDER, 0, DeviceNumber::default());
    }

    /// Adds a device node.
    pub fn character_device(&mut self, name: &str, major: u32, minor: u32) {
        self.header(name, CHARACTER_DEVICE, 0, DeviceNumber { major, minor });
    }

    /// Adds an executable file. The format limits a file to 4 GiB.
    pub fn program(&mut self, name: &str, content: &[u8]) -> Result<()> {
        let bytes = u32::try_from(content.len()).with_context(|| format!("{name} is too large"))?;
        self.header(name, PROGRAM, bytes, DeviceNumber::default());
        self.bytes.extend_from_slice(content);
        self.pad();
        Ok(())
    }

    /// Closes the archive.
    pub fn finish(mut self) -> Vec<u8> {
        self.header(TRAILER, 0, 0, DeviceNumber::default());
        self.bytes
    }

    fn header(&mut self, name: &str, mode: u32, bytes: u32, device: DeviceNumber) {
        self.entries += 1;
        let name_bytes = name.len() as u32 + 1;
        let (inode, links) = (self.entries, 1);
        // inode, mode, user, group, links, time, bytes, device of the file system (2), device of the node (2),
        // length of the name with its final zero, checksum (unused)
        let fields = [
            inode,
            mode,
            0,
            0,
            links,
            0,
            bytes,
            0,
            0,
            device.major,
            device.minor,
            name_bytes,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    fn sample() -> Vec<u8> {
        let mut archive = Archive::default();
        archive.folder("dev");
        archive.character_device("dev/console", 5, 1);
        archive.program("init", b"#!x\n+").unwrap();
        archive.finish()
    }

    #[test]
    fn entries_are_aligned_and_have_their_bytes() {
        let bytes = sample();
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8_lossy(&bytes);
        assert_eq!(text.matches("070701").count(), 4);
        assert!(text.contains("init\0\0#!x\n+\0\0\x00070701"), "{text:?}");
    }

    /// `setup` installs busybox.
    #[test]
    fn busybox_reads_the_archive() {
        let mut busybox = Command::new(crate::setup::static_busybox().unwrap())
            .args(["cpio", "-tv"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        busybox.stdin.take().unwrap().write_all(&sample()).unwrap();
        let listed = busybox.wait_with_output().unwrap();
        let listed = String::from_utf8(listed.stdout).unwrap();
        let lines: Vec<_> = listed.lines().collect();
        assert!(
            lines[0].starts_with("drwxr-xr-x") && lines[0].ends_with("dev"),
            "{listed}"
        );
        assert!(
            lines[1].starts_with("crw-------") && lines[1].ends_with("dev/console"),
            "{listed}"
        );
        assert!(
            lines[2].starts_with("-rwxr-xr-x") && lines[2].contains(" 5 "),
            "{listed}"
        );
    }
}
