//! Exactness: every page of every RAM block, against an image taken in the same pause.
//!
//! Two oracles:
//! - `watch --verify`: Stillframe's own, for every checkpoint of a working guest. It reads all memory once more, in
//!   the pause, by a slow way, and compares it with the stored page tables.
//! - the byte comparison: the test pauses the VM itself and reads all memory through `/proc/PID/mem`. It has the
//!   paused VM checkpointed, restores the checkpoint, and compares the restored VM's memory byte by byte.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health;
use stillframe_harness::memory::{Difference, Image};
use stillframe_harness::restored::Restored;
use stillframe_harness::results::{self, Claim, Goal};

/// How checkpoints are taken: arguments of `watch` and `checkpoint`.
pub type Mode = Vec<&'static str>;

/// Every schedule, with and without deltas, with and without deduplication.
pub fn modes() -> Vec<Mode> {
    let mut modes = Vec::new();
    for schedule in ["stop-copy", "pre-copy", "copy-on-write"] {
        for delta_cache in ["256M", "0"] {
            for dedup in [None, Some("--no-dedup")] {
                let mut mode = vec!["--schedule", schedule, "--delta-cache", delta_cache];
                mode.extend(dedup);
                modes.push(mode);
            }
        }
    }
    modes
}

/// The totals of a comparison.
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
    mode: &Mode,
) -> Result<(Tally, Vec<Value>)> {
    let (pid, count_text) = (guest.pid_text(), count.to_string());
    let mut watch = vec!["watch", "--pid", &pid, "--every", every];
    watch.extend(["--count", &count_text, "--verify"]);
    watch.extend(mode);
    let lines = stillframe.json_lines(&watch)?;
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

/// Pauses the guest, checkpoints it, restores the checkpoint and compares both memories byte by byte. Then it
/// resumes both, and expects both to find their memory whole.
pub fn compare_with_restored(
    stillframe: &Stillframe,
    guest: &Guest,
    ticks: usize,
    mode: &Mode,
) -> Result<Tally> {
    let mut monitor = guest.second_monitor()?;
    monitor.execute("stop", json!({}))?;
    let original = Image::take(guest.pid(), &mut monitor)?;
    let pid = guest.pid_text();
    let mut checkpoint = vec!["checkpoint", "--pid", &pid];
    checkpoint.extend(mode);
    let report = stillframe.json(&checkpoint)?;
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
    let restored_image = Image::take(restored.pid, &mut copy)?;
    let mut differing = original.differing(&restored_image)?;
    if guest.kind == Kind::KvmBootSector
        && let Some(clock) = differing.iter().position(Difference::may_be_kvm_clock)
    {
        // Its one vCPU has one clock, which the firmware requested.
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

/// Waits until a process has ended.
pub(super) fn wait_gone(pid: i32) -> Result<()> {
    for _ in 0..500 {
        if !health::is_alive(pid) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    bail!("QEMU {pid} did not end");
}

/// The whole stress run over all kinds of guest and all modes, or `only` one kind; the whole one writes
/// `docs/results/exactness/`.
pub fn run(checkpoints_per_guest: u64, per_mode: u64, only: Option<&str>) -> Result<()> {
    let mut total = Tally::default();
    let mut raw = Vec::new();
    let wanted = |kind: &Kind| only.is_none_or(|name| name == kind.name());
    for kind in Kind::ALL.into_iter().filter(wanted) {
        if kind == Kind::KvmBootSector && !Path::new("/dev/kvm").exists() {
            eprintln!("{:16} left out: this machine has no /dev/kvm", kind.name());
            continue;
        }
        let count = match kind {
            Kind::FiveGib => checkpoints_per_guest.div_ceil(3),
            _ => checkpoints_per_guest,
        };
        let guest = Setup::new(kind).boot()?;
        total.add(
            kind.name(),
            one_guest(&guest, count, &Mode::new(), &mut raw)?,
        );
    }
    if only.is_some() {
        println!("{total}");
        return no_difference(&total);
    }
    for mode in modes() {
        let guest = writing_all_the_time().boot()?;
        total.add(
            &mode.join(" "),
            one_guest(&guest, per_mode, &mode, &mut raw)?,
        );
    }
    println!("{total}");
    results::write_raw("exactness", "checkpoints.jsonl", &raw)?;
    results::write_summary(
        "exactness",
        &[Claim::new(
            "exact-pages",
            Goal::Zero,
            total.differing as f64,
            "pages",
            "cargo xtask bench exactness",
        )
        .if_enough(total.checkpoints >= 200 && per_mode >= 100)],
    )?;
    no_difference(&total)
}

impl Tally {
    /// Adds what was compared of `what`, and reports it.
    pub(super) fn add(&mut self, what: &str, more: Tally) {
        eprintln!("{what:60} {more}");
        self.checkpoints += more.checkpoints;
        self.pages += more.pages;
        self.differing += more.differing;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:4} checkpoints, {:9} pages compared, {} differing",
            self.checkpoints, self.pages, self.differing
        )
    }
}

/// A guest that writes in every phase of a checkpoint: before the pause, around it, and while pages
/// are copied.
pub fn writing_all_the_time() -> Setup {
    let mut setup = Setup::new(Kind::Private);
    setup.workload.tick_ms = 10;
    setup.workload.writes_per_tick = 1000;
    setup
}

fn no_difference(total: &Tally) -> Result<()> {
    match total.differing {
        0 => Ok(()),
        differing => bail!("{differing} pages differ"),
    }
}

fn one_guest(guest: &Guest, count: u64, mode: &Mode, raw: &mut Vec<Value>) -> Result<Tally> {
    let repository = tempfile::Builder::new()
        .prefix("stillframe-repo-")
        .tempdir()?;
    let stillframe = Stillframe::init(&repository.path().join("repo"))?;
    let every = if mode.is_empty() { "300ms" } else { "50ms" };
    let (mut tally, lines) = watch_verified(&stillframe, guest, every, count, mode)?;
    let (name, words) = (guest.kind.name(), mode.join(" "));
    for mut line in lines {
        line["guest"] = json!(name);
        line["mode"] = json!(words);
        raw.push(line);
    }
    guest.serial.wait_more(2, Duration::from_secs(60))?;
    let restored = compare_with_restored(&stillframe, guest, 4, mode)?;
    raw.push(json!({"guest": name, "mode": words, "restored": true, "pages": restored.pages, "differing": restored.differing}));
    tally.checkpoints += restored.checkpoints;
    tally.pages += restored.pages;
    tally.differing += restored.differing;
    stillframe.ok(&["check", "--read-data"])?;
    Ok(tally)
}
