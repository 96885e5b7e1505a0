//! Exactness: every page of every RAM block, against an image taken in the same pause.
//!
//! Two oracles:
//! - `watch --verify`: Stillframe's own, for every checkpoint of a working guest. It reads all
//!   memory once more, in the pause, by a slow way, and compares with the page tables stored;
//! - the twin: the test pauses the VM itself, reads all memory through `/proc/PID/mem`, has the paused
//!   VM checkpointed, restores that, and compares the restored VM's memory byte by byte.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::cli::Stillframe;
use crate::guest::{Guest, Kind, Restored, Setup};
use crate::memory::{Difference, Image};
use crate::results::{self, Claim};

/// What was compared.
#[derive(Debug, Default, Clone, Copy)]
pub struct Tally {
    /// Checkpoints taken and compared.
    pub checkpoints: u64,
    /// Pages compared.
    pub pages: u64,
    /// Pages that differed.
    pub differing: u64,
}

/// `count` checkpoints of a working guest, each verified in its pause.
pub fn watch_verified(
    stillframe: &Stillframe,
    guest: &Guest,
    every: &str,
    count: u64,
) -> Result<(Tally, Vec<Value>)> {
    let (pid, count_text) = (guest.pid_text(), count.to_string());
    let lines = stillframe.json_lines(&[
        "watch",
        "--pid",
        &pid,
        "--every",
        every,
        "--count",
        &count_text,
        "--verify",
    ])?;
    let mut tally = Tally::default();
    for line in &lines {
        let verify = line.get("verify").context("no verify in the report")?;
        tally.checkpoints += 1;
        tally.pages += verify["pages"].as_u64().context("pages")?;
        tally.differing += verify["differing"].as_u64().context("differing")?;
    }
    if tally.checkpoints != count {
        bail!("{} checkpoints instead of {count}", tally.checkpoints);
    }
    Ok((tally, lines))
}

/// Pauses the guest, checkpoints it, restores the checkpoint and compares both memories byte by
/// byte; then lets both go on, and expects both to find their memory whole.
pub fn twin(stillframe: &Stillframe, guest: &Guest, ticks: usize) -> Result<Tally> {
    let mut monitor = guest.second_monitor()?;
    monitor.execute("stop", json!({}))?;
    let original = Image::take(guest.pid(), &mut monitor)?;
    let report = stillframe.json(&["checkpoint", "--pid", &guest.pid_text()])?;
    if monitor.status()? != "paused" {
        bail!("a paused VM did not stay paused");
    }
    let checkpoint = report["checkpoint"]
        .as_str()
        .context("no checkpoint id")?
        .to_owned();
    let mut more = vec!["--paused", "--verify"];
    if guest.kind == Kind::KvmBootSector {
        more.push("--disks-as-they-are");
    }
    if guest.kind == Kind::FileShared {
        // The original's RAM file would be shared with it: it must end first.
        monitor.execute("quit", json!({})).ok();
        wait_gone(guest.pid())?;
    }
    let restored = Restored::start(stillframe, &checkpoint, guest.folder(), &more)?;
    let mut copy = restored.monitor()?;
    let twin = Image::take(restored.pid, &mut copy)?;
    let mut differing = original.differing(&twin)?;
    if guest.kind == Kind::KvmBootSector
        && let Some(clock) = differing.iter().position(Difference::may_be_kvm_clock)
    {
        // Its one vCPU has one clock, which the firmware asked for.
        differing.remove(clock);
    }
    if !differing.is_empty() {
        eprintln!("differing: {:?}", &differing[..differing.len().min(8)]);
    }
    copy.execute("cont", json!({}))?;
    drop(copy);
    restored
        .serial
        .wait_ticks(ticks, Duration::from_secs(120))?;
    if guest.kind != Kind::FileShared {
        monitor.execute("cont", json!({}))?;
        guest.serial.wait_more(2, Duration::from_secs(60))?;
    }
    Ok(Tally {
        checkpoints: 1,
        pages: original.pages(),
        differing: differing.len() as u64,
    })
}

fn wait_gone(pid: i32) -> Result<()> {
    for _ in 0..500 {
        // A zombie is gone enough: its memory and files are closed.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        if stat.is_empty() || stat.contains(") Z ") {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    bail!("QEMU {pid} did not end");
}

/// The whole campaign over all kinds of guest, or `only` one; the whole one writes
/// `docs/results/exactness/`.
pub fn run(checkpoints_per_guest: u64, only: Option<&str>) -> Result<()> {
    let mut total = Tally::default();
    let mut raw = Vec::new();
    let wanted = |kind: &Kind| only.is_none_or(|name| name == kind.name());
    for kind in Kind::ALL.into_iter().filter(wanted) {
        if kind == Kind::KvmBootSector && !Path::new("/dev/kvm").exists() {
            eprintln!("{:16} left out: this machine has no /dev/kvm", kind.name());
            continue;
        }
        let tally = one_guest(kind, checkpoints_per_guest, &mut raw)?;
        eprintln!(
            "{:16} {:4} checkpoints  {:9} pages compared  {} differing",
            kind.name(),
            tally.checkpoints,
            tally.pages,
            tally.differing
        );
        total.checkpoints += tally.checkpoints;
        total.pages += tally.pages;
        total.differing += tally.differing;
    }
    println!(
        "{} checkpoints, {} pages compared, {} differing",
        total.checkpoints, total.pages, total.differing
    );
    if only.is_some() {
        return no_difference(&total);
    }
    results::write_raw("exactness", "checkpoints.jsonl", &raw)?;
    results::write_summary(
        "exactness",
        &[Claim {
            claim: "exact-pages",
            goal: "= 0",
            value: total.differing as f64,
            unit: "pages",
            holds: total.differing == 0 && total.checkpoints >= 200,
            command: "cargo xtask bench exactness",
            commit: results::commit(),
        }],
    )?;
    no_difference(&total)
}

fn no_difference(total: &Tally) -> Result<()> {
    match total.differing {
        0 => Ok(()),
        differing => bail!("{differing} pages differ"),
    }
}

fn one_guest(kind: Kind, checkpoints: u64, raw: &mut Vec<Value>) -> Result<Tally> {
    let repository = tempfile::Builder::new()
        .prefix("stillframe-repo-")
        .tempdir()?;
    let stillframe = Stillframe::init(&repository.path().join("repo"))?;
    let guest = Setup::new(kind).boot()?;
    let count = if kind == Kind::FiveGib {
        checkpoints.div_ceil(3)
    } else {
        checkpoints
    };
    let (mut tally, lines) = watch_verified(&stillframe, &guest, "300ms", count)?;
    for mut line in lines {
        line["guest"] = json!(kind.name());
        raw.push(line);
    }
    guest.serial.wait_more(2, Duration::from_secs(60))?;
    let twin = twin(&stillframe, &guest, 4)?;
    raw.push(json!({"guest": kind.name(), "twin": true, "pages": twin.pages, "differing": twin.differing}));
    tally.checkpoints += twin.checkpoints;
    tally.pages += twin.pages;
    tally.differing += twin.differing;
    stillframe.ok(&["check", "--read-data"])?;
    Ok(tally)
}
