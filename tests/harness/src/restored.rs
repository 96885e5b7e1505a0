//! VMs that `stillframe restore` started. One ends when dropped.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::cli::Stillframe;
use crate::health;
use crate::qmp::Qmp;
use crate::running::{PATIENCE, signal};
use crate::serial::Serial;

/// A VM that `stillframe restore` started. It is no child of this process, so it ends by its monitor.
#[derive(Debug)]
pub struct Restored {
    /// QEMU's process id.
    pub pid: i32,
    /// Its monitor.
    pub qmp: PathBuf,
    /// Its serial port.
    pub serial: Serial,
}

impl Restored {
    /// Restores `checkpoint` with monitor and serial port in `folder`.
    pub fn start(
        stillframe: &Stillframe,
        checkpoint: &str,
        folder: &Path,
        more: &[&str],
    ) -> Result<Restored> {
        let (qmp, serial) = (folder.join("restored.qmp"), folder.join("restored.serial"));
        let spec = format!("file:{}", serial.display());
        let qmp_text = qmp.display().to_string();
        let mut arguments = vec!["restore", checkpoint, "--qmp", &qmp_text, "--serial", &spec];
        arguments.extend(more);
        let report = stillframe.json(&arguments)?;
        let pid = report["pid"].as_i64().context("restore printed no pid")? as i32;
        Ok(Restored {
            pid,
            qmp,
            serial: Serial::new(&serial),
        })
    }

    /// Ends it as a crash of its host would.
    pub fn crash(&self) -> Result<()> {
        signal(self.pid as u32, "KILL")?;
        self.await_end()
    }

    /// Ends it as its manager would: what QEMU has of its images is written. A QEMU that is killed may leave a cluster that
    /// nothing uses.
    pub fn end(&self) -> Result<()> {
        self.monitor()?.execute("quit", json!({}))?;
        self.await_end()
    }

    /// Its files are locked until then.
    fn await_end(&self) -> Result<()> {
        let process = PathBuf::from(format!("/proc/{}", self.pid));
        let deadline = Instant::now() + PATIENCE;
        while process.exists() {
            ensure!(
                Instant::now() < deadline,
                "process {} does not end",
                self.pid
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Its monitor.
    pub fn monitor(&self) -> Result<Qmp> {
        Qmp::connect(&self.qmp)
    }
}

impl Drop for Restored {
    fn drop(&mut self) {
        if !health::is_alive(self.pid) {
            return;
        }
        if let Ok(mut qmp) = Qmp::connect(&self.qmp) {
            let _ = qmp.execute("quit", json!({}));
        }
        // The next restore in this folder uses the same socket: wait until this one is gone.
        for _ in 0..3000 {
            if !health::is_alive(self.pid) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
