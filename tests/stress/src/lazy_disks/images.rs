//! The images of a VM that was restored lazily, and what they must be.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use stillframe_harness::running::{PATIENCE, signal};

use crate::disks::{Machine, Scene, execute};
use crate::restore_kill::wait_gone;

/// The socket through which QEMU reads what images lack ends so.
const SOCKET: &str = "nbd";

/// The images, in a folder of their own, and the disks of the checkpoint.
pub struct Images {
    /// The folder; it may not be there.
    pub folder: PathBuf,
    /// The disks of the checkpoint, raw, in the order of the images.
    exported: Vec<PathBuf>,
    machine: Machine,
}

impl Images {
    /// Of a VM that is restored from this checkpoint, with these disks (of a report).
    pub fn new(scene: &Scene, id: &str, disks: &Value) -> Result<Images> {
        let mut exported = Vec::new();
        for disk in disks.as_array().context("no disks")? {
            let device = disk["device"].as_str().context("no device")?;
            let raw = scene.path(&format!("exported-{}", exported.len()));
            let out = raw.display().to_string();
            let line = ["export", id, "--disk", device, "-o", &out];
            scene.stillframe.ok(&line)?;
            exported.push(raw);
        }
        Ok(Images {
            folder: scene.path("lazy"),
            exported,
            machine: scene.machine,
        })
    }

    /// The images, in the order of the disks.
    pub fn all(&self) -> Result<Vec<PathBuf>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            all.extend((path.extension() != Some(SOCKET.as_ref())).then_some(path));
        }
        all.sort();
        Ok(all)
    }

    /// They are those of the checkpoint.
    pub fn expect_as_captured(&self) -> Result<()> {
        for (image, raw) in self.all()?.iter().zip(&self.exported) {
            same(raw, "raw", image)?;
        }
        Ok(())
    }

    /// Copies of what they hold now, above the disks of the checkpoint; no process has them open.
    pub fn keep(&self) -> Result<Vec<PathBuf>> {
        let mut kept = Vec::new();
        for (image, raw) in self.all()?.iter().zip(&self.exported) {
            let copy = raw.with_extension("kept");
            fs::copy(image, &copy)?;
            if needs_backing(&copy)? {
                let mut command = Command::new("qemu-img");
                command.args(["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b"]);
                execute(command.args([raw, &copy]))?;
            }
            kept.push(copy);
        }
        Ok(kept)
    }

    /// They have the content of these copies.
    pub fn expect_as_kept(&self, kept: &[PathBuf]) -> Result<()> {
        for (image, copy) in self.all()?.iter().zip(kept) {
            same(copy, "qcow2", image).context("what the VM had written is lost")?;
        }
        Ok(())
    }

    /// Whether no image needs a backing file.
    pub fn are_complete(&self) -> Result<bool> {
        let images = self.all()?;
        let needs = images.iter().rev().map(|image| needs_backing(image));
        for needs in needs {
            if needs? {
                return Ok(false);
            }
        }
        Ok(!images.is_empty())
    }

    /// Each image needs nothing else, is sound and has what the guest never writes; no other file or process is left. These exit codes of `qemu-img check`
    /// are good.
    pub fn expect_complete(&self, codes: &[i32]) -> Result<()> {
        let left = self.processes()?;
        ensure!(left.is_empty(), "processes are left: {left:?}");
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            files.push(entry?.path());
        }
        let images = self.all()?;
        let count = self.exported.len();
        ensure!(images.len() == count && files.len() == count, "{files:?}");
        for image in &images {
            ensure!(!needs_backing(image)?, "{} lacks content", image.display());
            let mut command = Command::new("qemu-img");
            let check = command.arg("check").arg(image).output()?;
            let code = check.status.code().unwrap_or(-1);
            ensure!(codes.contains(&code), "{check:?}");
            // It fails where there is another byte.
            let mut command = Command::new("qemu-io");
            let read = self.machine.ballast("read");
            execute(command.args(["-r", "-f", "qcow2", "-c", &read]).arg(image))?;
        }
        Ok(())
    }

    /// Processes with the images on their command line: the restored QEMU, or a program that completes one.
    fn processes(&self) -> Result<Vec<(i32, String)>> {
        let word = self.folder.display().to_string();
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc")? {
            let entry = entry?;
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            let pid = entry.file_name().to_string_lossy().parse::<i32>();
            if let (true, Ok(pid)) = (line.contains(&word), pid) {
                found.push((pid, line.chars().take(80).collect()));
            }
        }
        Ok(found)
    }

    /// Ends all of them.
    pub fn end_all(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = self.processes()?;
            if left.is_empty() {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "they do not end: {left:?}");
            let pids: Vec<i32> = left.into_iter().map(|(pid, _)| pid).collect();
            for &pid in &pids {
                // One that has ended meanwhile needs no signal.
                let _ = signal(pid as u32, "KILL");
            }
            wait_gone(&pids)?;
        }
    }
}

/// Whether an image has a backing file. A QEMU may have it open.
fn needs_backing(image: &Path) -> Result<bool> {
    let mut command = Command::new("qemu-img");
    let words = ["info", "-U", "--output=json"];
    let out = command.args(words).arg(image).output()?;
    ensure!(out.status.success(), "{out:?}");
    let info: Value = serde_json::from_slice(&out.stdout)?;
    ensure!(info["format"] == "qcow2", "{info}");
    Ok(info["backing-filename"].is_string())
}

/// Two images have the same content.
fn same(one: &Path, format: &str, image: &Path) -> Result<()> {
    let mut command = Command::new("qemu-img");
    let words = ["compare", "-q", "-U", "-f", format, "-F", "qcow2"];
    execute(command.args(words).args([one, image]))
}
