//! `cargo xtask bench clones`: the time until a clone runs, against QEMU loading its own mapped-ram file of the
//! same VM. It also measures the memory that ten clones take that have little to do.
//!
//! QEMU's start, which both sides need, is measured by itself, and left out of the ratio. The memory that clones
//! share is made once; the time for it is reported.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::restore::{MIDDLE, full_guest, mapped_ram_ms, start_ms, waiting_qemu};
use super::{host_memory, peers};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::restored::Restored;
use stillframe_harness::results::{self, Claim, Goal, percentile};
use stillframe_harness::serial::Serial;

const COMMAND: &str = "cargo xtask bench clones";
const TURNS: usize = 5;
/// Clones whose memory is inspected.
const MANY: u32 = 10;
/// Time with little to do before the measurement.
const IDLE: Duration = Duration::from_secs(20);

/// Runs the bench and writes `docs/results/clones/`.
pub fn run() -> Result<()> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-clones-")
        .tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let file = folder.path().join("mapped-ram");
    let (ram_mib, mib) = MIDDLE;
    let guest = full_guest((ram_mib, mib), (1000, 1), Vec::new())?;
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    peers::save_mapped_ram(&mut guest.second_monitor()?, &file)?;
    drop(guest);
    let base = Base::new()?;
    let made_ms = {
        let made = clones(&stillframe, folder.path(), &base.0, 1)?;
        made[0].1["template_us"].as_f64().context("no time")? / 1e3
    };
    let (mut starts, mut ours, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    let qmp = folder.path().join("x.qmp");
    for turn in 1..=TURNS {
        let line = waiting_qemu(&stillframe, &qmp)?;
        host_memory::settle();
        starts.push(start_ms(&line, &qmp)?);
        host_memory::prepare(mib);
        let clone = clones(&stillframe, folder.path(), &base.0, 1)?;
        ours.push(clone[0].1["total_us"].as_f64().context("no time")? / 1e3);
        drop(clone);
        host_memory::prepare(mib);
        theirs.push(mapped_ram_ms(&line, &qmp, &file)?);
        eprintln!("turn {turn} of {TURNS}");
    }
    let one = memory_mib(&stillframe, folder.path(), &base.0, 1)?;
    let many = memory_mib(&stillframe, folder.path(), &base.0, MANY)?;
    let raw = json!({
        "ram_mib": ram_mib, "filled_mib": mib, "qemu_start_ms": starts, "clone_ms": ours,
        "mapped_ram_ms": theirs, "base_made_ms": made_ms, "one_mib": one, "many_mib": many,
    });
    record(&raw, [&starts, &ours, &theirs], made_ms, (one, many))
}

/// Where bases are, in memory; gone in the end.
struct Base(tempfile::TempDir);

impl Base {
    fn new() -> Result<Base> {
        let mut builder = tempfile::Builder::new();
        Ok(Base(
            builder
                .prefix("stillframe-clones-")
                .permissions(fs::Permissions::from_mode(0o700))
                .tempdir_in("/dev/shm")?,
        ))
    }
}

/// Starts clones, which end when dropped.
fn clones(
    stillframe: &Stillframe,
    folder: &Path,
    base: &tempfile::TempDir,
    count: u32,
) -> Result<Vec<(Restored, Value)>> {
    let qmp = folder.join("{}.qmp").display().to_string();
    let base = base.path().display().to_string();
    let count = count.to_string();
    let line = [
        "clone",
        "latest",
        "--qmp",
        &qmp,
        "--template-dir",
        &base,
        "-n",
        &count,
    ];
    let reports = stillframe.json_lines(&line)?;
    let clone = |report: Value| -> Result<(Restored, Value)> {
        let restored = Restored {
            pid: report["pid"].as_i64().context("no pid")? as i32,
            qmp: report["qmp"].as_str().context("no monitor")?.into(),
            serial: Serial::new(Path::new("/dev/null")),
        };
        Ok((restored, report))
    };
    reports.into_iter().map(clone).collect()
}

/// The memory of this many clones, with the memory that they share, in MiB.
fn memory_mib(
    stillframe: &Stillframe,
    folder: &Path,
    base: &tempfile::TempDir,
    count: u32,
) -> Result<f64> {
    let clones = clones(stillframe, folder, base, count)?;
    std::thread::sleep(IDLE);
    let mut kib = 0;
    for (clone, _) in &clones {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", clone.pid))?;
        let line = text.lines().find(|line| line.starts_with("Anonymous:"));
        let number = line.and_then(|line| line.split_whitespace().nth(1));
        kib += number.context("no such field")?.parse::<u64>()?;
    }
    for entry in std::fs::read_dir(base.path())? {
        let folder = entry?.path();
        if folder.is_dir() {
            for file in std::fs::read_dir(folder)? {
                use std::os::unix::fs::MetadataExt;
                kib += file?.metadata()?.blocks() / 2;
            }
        }
    }
    Ok(kib as f64 / 1024.0)
}

fn record(
    raw: &Value,
    [starts, ours, theirs]: [&[f64]; 3],
    made_ms: f64,
    (one, many): (f64, f64),
) -> Result<()> {
    let median = |times: &[f64]| percentile(times, 0.5);
    let without = |times: &[f64]| median(times) - median(starts);
    let (ram_mib, mib) = MIDDLE;
    let page = format!(
        "# Bench: clones\n\n`{COMMAND}`, commit {}. Medians of {TURNS} turns; TCG; {ram_mib} MiB, {mib} MiB of it filled; \
         everything in the page cache, nothing else running, and free memory touched before.\n\n\
         | | with QEMU's start | without |\n| --- | --- | --- |\n\
         | QEMU's start alone | {:.0} ms | - |\n\
         | clone, from the command to the running guest | {:.0} ms | {:.0} ms |\n\
         | QEMU loading a mapped-ram file | {:.0} ms | {:.0} ms |\n\n\
         Making the memory that all clones share, once: {made_ms:.0} ms. One clone with it takes {one:.0} MiB, {MANY} take \
         {many:.0} MiB, after {} s with little to do.\n",
        results::commit(),
        median(starts),
        median(ours),
        without(ours),
        median(theirs),
        without(theirs),
        IDLE.as_secs(),
    );
    println!("{page}");
    std::fs::write(results::folder("clones")?.join("README.md"), page)?;
    results::write_raw("clones", "raw.jsonl", std::slice::from_ref(raw))?;
    let claim = |id, goal, value| Claim::new(id, goal, value, "ratio", COMMAND);
    results::write_summary(
        "clones",
        &[
            claim(
                "clone-speed",
                Goal::AtMost(0.1),
                without(ours) / without(theirs),
            ),
            claim("clone-memory", Goal::AtMost(2.0), many / one),
        ],
    )
}
