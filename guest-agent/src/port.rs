//! The port of virtio-serial, and the host at its other end.
//!
//! While no process of the host is connected, reads return at once with nothing, and no event tells that one has come (Linux
//! `drivers/char/virtio_console.c`, `port_fops_read`).

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use thiserror::Error;

use crate::lines::Lines;

/// The name that QEMU gives the port.
const NAME: &str = "org.stillframe.agent.0";
/// The kernel's list of ports.
const PORTS: &str = "/sys/class/virtio-ports";
/// Time between two looks for a host.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Bytes that are read at once.
const READ_BYTES: usize = 4 << 10;

/// Why the host cannot be heard.
#[derive(Debug, Error)]
pub enum PortError {
    /// The machine has no such port.
    #[error(
        "this machine has no port of the name {NAME}: give QEMU `-device virtio-serial` and `-device virtserialport,chardev=...,name={NAME}`"
    )]
    None,
    /// It cannot be opened.
    #[error("cannot open {path}: {source}; it takes root, and one agent at a time")]
    Open {
        /// The port.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// It failed.
    #[error("the port failed: {0}; it was unplugged, if this machine runs on")]
    Io(#[from] io::Error),
}

/// A port.
#[derive(Debug)]
pub struct Port {
    file: File,
    lines: Lines,
    /// Received, and not given out.
    ready: VecDeque<Vec<u8>>,
}

impl Port {
    /// Opens the port of [`NAME`].
    pub fn named() -> Result<Port, PortError> {
        let device = device_of(Path::new(PORTS)).ok_or(PortError::None)?;
        Port::open(&Path::new("/dev").join(device))
    }

    /// Opens a port.
    pub fn open(path: &Path) -> Result<Port, PortError> {
        let file = File::options().read(true).write(true).open(path);
        let file = file.map_err(|source| PortError::Open {
            path: path.to_owned(),
            source,
        })?;
        Ok(Port {
            file,
            lines: Lines::default(),
            ready: VecDeque::new(),
        })
    }

    /// Waits for a line of the host.
    pub fn line(&mut self) -> io::Result<Vec<u8>> {
        let mut bytes = [0; READ_BYTES];
        loop {
            if let Some(line) = self.ready.pop_front() {
                return Ok(line);
            }
            match self.file.read(&mut bytes) {
                Ok(0) => {
                    self.lines.clear();
                    thread::sleep(LOOK_EVERY);
                }
                Ok(read) => {
                    let lines = &mut self.lines;
                    let whole = bytes[..read].iter().filter_map(|&byte| lines.push(byte));
                    self.ready.extend(whole);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends bytes to the host. What one that has gone away does not take is lost.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }
}

/// The device of the port of [`NAME`], by the names in the kernel's list.
fn device_of(ports: &Path) -> Option<PathBuf> {
    let mut ports = fs::read_dir(ports).ok()?.flatten();
    let has_name = |port: &fs::DirEntry| {
        let name = fs::read_to_string(port.path().join("name"));
        name.is_ok_and(|name| name.trim_end() == NAME)
    };
    Some(ports.find(has_name)?.file_name().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_found_by_its_name() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(device_of(&folder.path().join("none")), None);
        for (device, name) in [
            ("vport1p1", "org.qemu.guest_agent.0\n"),
            ("vport1p2", "org.stillframe.agent.0\n"),
        ] {
            assert_eq!(device_of(folder.path()), None);
            fs::create_dir(folder.path().join(device)).unwrap();
            fs::write(folder.path().join(device).join("name"), name).unwrap();
        }
        assert_eq!(device_of(folder.path()), Some("vport1p2".into()));
    }
}
