//! A disk that a guest reads by DMA, as slow as a remote one. It is a loop device with direct I/O, held back by the
//! kernel's block layer, so that each request has its pages pinned for a while.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Where the controllers of block devices are, the first version's and the second's.
const GROUPS: [(&str, &str); 2] = [
    ("/sys/fs/cgroup/blkio", "blkio.throttle.read_bps_device"),
    ("/sys/fs/cgroup", "io.max"),
];

/// The disk. It goes when dropped, after the VM that uses it.
#[derive(Debug)]
pub struct SlowDisk {
    device: PathBuf,
    group: Option<PathBuf>,
}

impl SlowDisk {
    /// A disk of `mib` MiB of noise, whose content lies in `folder`.
    pub fn new(folder: &Path, mib: usize) -> Result<SlowDisk> {
        let content = folder.join("slow-disk");
        let mut file = fs::File::create(&content)?;
        // Pages that differ, and that no compression makes small: a counter, mixed.
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        for _ in 0..mib {
            let words = (0..1 << 17).flat_map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state.to_le_bytes()
            });
            file.write_all(&words.collect::<Vec<u8>>())?;
        }
        file.sync_all()?;
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show", "--direct-io=on", "--read-only"]);
        let output = losetup.arg(&content).output()?;
        ensure!(
            output.status.success(),
            "losetup: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(SlowDisk {
            device: String::from_utf8(output.stdout)?.trim().into(),
            group: None,
        })
    }

    /// The options with which QEMU reads it by `aio`, past the host's page cache.
    pub fn drive(&self, aio: &str) -> String {
        let device = self.device.display();
        format!("file={device},if=virtio,format=raw,readonly=on,cache=none,aio={aio}")
    }

    /// From here on this process reads it no faster than this many MiB a second.
    pub fn hold_back(&mut self, pid: i32, mib_per_second: u64) -> Result<()> {
        let (root, limit) = GROUPS
            .iter()
            .find(|(root, _)| Path::new(root).join("cgroup.procs").exists())
            .context("this machine has no cgroups for block devices")?;
        let number = fs::read_to_string(
            Path::new("/sys/class/block")
                .join(self.device.file_name().unwrap_or_default())
                .join("dev"),
        )?;
        let number = number.trim();
        let group = Path::new(root).join(format!("stillframe-e2e-{pid}"));
        fs::create_dir_all(&group)?;
        let bytes = mib_per_second << 20;
        let rule = match *limit {
            "io.max" => format!("{number} rbps={bytes}"),
            _ => format!("{number} {bytes}"),
        };
        fs::write(group.join(limit), rule).with_context(|| format!("cannot set {limit}"))?;
        fs::write(group.join("cgroup.procs"), pid.to_string())?;
        self.group = Some(group);
        Ok(())
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        let _ = Command::new("losetup")
            .arg("--detach")
            .arg(&self.device)
            .status();
        if let Some(group) = &self.group {
            let _ = fs::remove_dir(group);
        }
    }
}
