//! The matrix' lazy restores: each fault hits the process that fills a VM's memory. Afterwards the VM is gone
//! before it ran, or can be continued. It never runs on missing memory.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use stillframe_harness::cli::Stillframe;
use stillframe_harness::filling::{Filling, expect_alone, runtime_file};
use stillframe_harness::health::{has_userfaultfd, pids_with};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::PATIENCE;

/// Filled a second, so that leases and locks are held for a while.
pub const LIMIT_FILL: [&str; 3] = ["--lazy", "--limit-fill", "32M"];

/// The remains of a restore.
enum Left {
    /// No VM.
    Nothing,
    /// A VM whose memory is complete.
    Complete(i32),
    /// A VM to continue with.
    Unfinished,
}

/// The command that is struck.
pub fn command(stillframe: &Stillframe, folder: &Path) -> Result<Command> {
    Filling::command(stillframe, "latest", folder, &LIMIT_FILL)
}

/// Waits for the outcome for the VM of a restore that was struck and has ended. Resumes the VM if it does not run,
/// and ends it.
pub fn outlived(stillframe: &Stillframe, folder: &Path, filling: Filling) -> Result<()> {
    let restored = match left(&filling)? {
        Left::Nothing => {
            drop(filling);
            Filling::start(stillframe, "latest", folder, &[])?
                .complete()?
                .0
        }
        Left::Unfinished => {
            let Filling { qmp, serial, .. } = &filling;
            Filling::resume(stillframe, qmp, serial, &[])?.complete()?.0
        }
        Left::Complete(pid) => Restored {
            pid,
            qmp: filling.qmp.clone(),
            serial: filling.serial.clone(),
        },
    };
    expect_alone(&restored)?;
    let mut monitor = restored.monitor()?;
    ensure!(monitor.status()? == "running", "it does not run");
    restored.serial.wait_more(2, PATIENCE).map(drop)
}

fn left(filling: &Filling) -> Result<Left> {
    let begin = Instant::now();
    let qmp = filling.qmp.display().to_string();
    while begin.elapsed() < PATIENCE {
        let &[pid] = &pids_with(&qmp)?[..] else {
            ensure!(!filling.runs(), "a VM that has run was ended");
            return Ok(Left::Nothing);
        };
        let recorded = runtime_file(&filling.qmp, ".filling")?.exists();
        let missing = has_userfaultfd(pid)?;
        if !recorded && !missing && filling.runs() {
            return Ok(Left::Complete(pid));
        }
        let runs = || -> Result<bool> {
            let status = Qmp::status_within(&filling.qmp, Duration::from_secs(1))?;
            Ok(status.as_deref() == Some("running"))
        };
        if recorded && (!missing || !runs()?) {
            return Ok(Left::Unfinished);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    bail!("the VM runs on without its memory, or was left before it ran")
}
