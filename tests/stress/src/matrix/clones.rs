//! The matrix' clones: whatever happens to the process, each clone is gone before it ran, or runs; and the next
//! one is exact.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use stillframe_harness::cli::Stillframe;
use stillframe_harness::health::pids_with;
use stillframe_harness::qmp::Qmp;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::PATIENCE;
use stillframe_harness::serial::Serial;

/// Clones of the command that is struck.
const COUNT: u32 = 2;
/// The guest checks all of its memory in eight ticks.
const ALL_CHECKED: usize = 9;

/// The command that is struck.
pub fn command(stillframe: &Stillframe, folder: &Path) -> Result<Command> {
    line(stillframe, folder, COUNT, 1)
}

/// Clones of the latest checkpoint, from number `first` on.
fn line(stillframe: &Stillframe, folder: &Path, count: u32, first: u32) -> Result<Command> {
    let at = |name: &str| folder.join(name).display().to_string();
    let serial = format!("file:{}", at("clone-{}.serial"));
    let (count, first) = (count.to_string(), first.to_string());
    stillframe.command(&[
        "clone",
        "latest",
        "--json",
        "--verify",
        "--qmp",
        &at("clone-{}.qmp"),
        "--serial",
        &serial,
        "--template-dir",
        &at("base"),
        "-n",
        &count,
        "--first",
        &first,
    ])
}

/// Waits for what becomes of each clone, has one more made, and ends them all.
pub fn outlived(stillframe: &Stillframe, folder: &Path) -> Result<()> {
    let mut clones = Vec::new();
    for number in 1..=COUNT {
        clones.extend(left(folder, number)?);
    }
    let next = line(stillframe, folder, 1, COUNT + 1)?.output()?;
    ensure!(next.status.success(), "the next clone: {next:?}");
    let next = left(folder, COUNT + 1)?.context("the next clone is gone")?;
    clones.push(next);
    for clone in &clones {
        clone.serial.wait_ticks(ALL_CHECKED, PATIENCE)?;
    }
    Ok(())
}

/// The clone of this number, which runs; nothing if it is gone.
fn left(folder: &Path, number: u32) -> Result<Option<Restored>> {
    let qmp = folder.join(format!("clone-{number}.qmp"));
    let word = qmp.display().to_string();
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        let &[pid] = &pids_with(&word)?[..] else {
            return Ok(None);
        };
        // One that is about to be ended may not answer any more.
        let status = Qmp::status_within(&qmp, Duration::from_secs(1));
        if status.ok().flatten().as_deref() == Some("running") {
            let serial = Serial::new(&folder.join(format!("clone-{number}.serial")));
            return Ok(Some(Restored { pid, qmp, serial }));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    bail!("clone {number} neither runs nor is it gone")
}
