//! Whether a VM and a repository are as they were before Stillframe touched them.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::{Value, json};

use crate::cli::Stillframe;
use crate::guest::Guest;
use crate::qmp::Qmp;
use crate::running::PATIENCE;

/// Time for the kernel to close the open files of an engine that just ended.
const CLOSING_LIMIT: Duration = Duration::from_secs(5);

/// The guest runs, ticks on, and nothing of Stillframe is left in its QEMU.
pub fn expect_untouched(guest: &Guest, monitor: &mut Qmp) -> Result<()> {
    let status = monitor.status()?;
    if status != "running" {
        bail!("the VM is {status}");
    }
    guest.serial.wait_more(2, PATIENCE)?;
    expect_nothing_left(guest.pid(), monitor)
}

/// No userfaultfd, no lent descriptor and no tracer is left in QEMU `pid`.
pub fn expect_nothing_left(pid: i32, monitor: &mut Qmp) -> Result<()> {
    let deadline = Instant::now() + CLOSING_LIMIT;
    while let Err(error) = nothing_left(pid, monitor) {
        if Instant::now() > deadline {
            return Err(error);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Whether a process has a userfaultfd open; a QEMU has one while its memory is being filled.
pub fn has_userfaultfd(pid: i32) -> Result<bool> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        // A descriptor that was closed since the folder was listed is none.
        let file = fs::read_link(entry?.path()).unwrap_or_default();
        if file.to_string_lossy().contains("userfaultfd") {
            return Ok(true);
        }
    }
    Ok(false)
}

fn nothing_left(pid: i32, monitor: &mut Qmp) -> Result<()> {
    if has_userfaultfd(pid)? {
        bail!("QEMU has a userfaultfd open");
    }
    let lent = monitor.execute("query-fdsets", json!({}))?;
    if lent != json!([]) {
        bail!("QEMU still has descriptors it was lent: {lent}");
    }
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    match status.lines().any(|line| line == "TracerPid:\t0") {
        true => Ok(()),
        false => bail!("QEMU is traced"),
    }
}

/// The ids of all checkpoints, oldest first.
pub fn checkpoints(stillframe: &Stillframe) -> Result<Vec<String>> {
    let listed = stillframe.json(&["list"])?;
    let listed = listed.as_array().into_iter().flatten();
    let ids = listed.filter_map(|one| one["checkpoint"].as_str());
    Ok(ids.map(str::to_owned).collect())
}

/// All of `ids` are still listed, and the repository holds together.
pub fn expect_whole(stillframe: &Stillframe, ids: &[String]) -> Result<()> {
    let listed = checkpoints(stillframe)?;
    if let Some(lost) = ids.iter().find(|id| !listed.contains(id)) {
        bail!("checkpoint {lost} is no longer listed");
    }
    let report = stillframe.json(&["check"])?;
    match report["clean"] == Value::Bool(true) {
        true => Ok(()),
        false => bail!("check found {}", report["problems"]),
    }
}

/// How many processes have `word` on their command line: QEMUs that were to be none.
pub fn processes_with(word: &str) -> Result<usize> {
    Ok(pids_with(word)?.len())
}

/// The QEMUs that have `word` on their command line.
pub fn pids_with(word: &str) -> Result<Vec<i32>> {
    let mut pids = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        // A process that has ended meanwhile has no command line.
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line);
        if line.contains("qemu-system") && line.contains(word) {
            pids.extend(entry.file_name().to_string_lossy().parse::<i32>());
        }
    }
    Ok(pids)
}

/// Whether a process has not ended. A process that was not waited for has ended.
pub fn is_alive(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

/// The children of a process that have this name.
pub fn children(parent: u32, name: &str) -> Result<Vec<i32>> {
    let (name, parent) = (format!("({name}) "), parent.to_string());
    let mut pids = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // pid (name) state parent
        let behind = stat.split_once(&name).map_or("", |(_, behind)| behind);
        if behind.split_whitespace().nth(1) == Some(&parent) {
            pids.extend(entry.file_name().to_string_lossy().parse::<i32>());
        }
    }
    Ok(pids)
}

/// A field of `/proc/PID/status` in KiB, such as `VmRSS`; none when the process has ended.
pub fn memory_kib(pid: u32, field: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let mut lines = status.lines();
    let value = lines.find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    value.split_whitespace().next()?.parse().ok()
}
