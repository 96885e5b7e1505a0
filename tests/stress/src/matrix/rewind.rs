//! The matrix' rewinds. After each fault in the process, the VM runs, as before or as in the checkpoint. Otherwise
//! it is stopped, and `cont` is refused until another rewind is done.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::json;

use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::Guest;
use stillframe_harness::qmp::Qmp;
use stillframe_harness::running::PATIENCE;

/// Time for the guardian of a process that was killed to resume the VM.
const GUARDIAN_LIMIT: Duration = Duration::from_secs(5);
/// The guest checks all of its memory in eight ticks.
const ALL_CHECKED: usize = 9;

/// Whether the VM stands, a while after the process has ended. Then `cont` and `checkpoint` are refused, and
/// another rewind makes an end of that.
pub fn outlived(stillframe: &Stillframe, guest: &Guest, monitor: &mut Qmp) -> Result<bool> {
    let pid = guest.pid_text();
    let rewind = ["rewind", "latest", "--pid", &pid, "--verify"];
    let stands = stands(monitor)?;
    if stands {
        let resumed = monitor.execute("cont", json!({}));
        ensure!(
            resumed.is_err(),
            "the VM stands, and any client can resume it"
        );
        let said = stillframe.fails(&["checkpoint", "--pid", &pid], 5)?;
        ensure!(said.contains("rewind it again"), "{said}");
        stillframe.ok(&rewind)?;
        ensure!(monitor.status()? == "paused", "it was resumed");
        monitor.execute("cont", json!({}))?;
    }
    guest.serial.wait_more(ALL_CHECKED, PATIENCE)?;
    stillframe.ok(&rewind)?;
    ensure!(monitor.status()? == "running");
    guest.serial.wait_more(ALL_CHECKED, PATIENCE)?;
    Ok(stands)
}

fn stands(monitor: &mut Qmp) -> Result<bool> {
    let begin = Instant::now();
    while monitor.status()? != "running" {
        if begin.elapsed() > GUARDIAN_LIMIT {
            return Ok(true);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(false)
}
