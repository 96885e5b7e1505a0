//! `cargo xtask bench disk-work`: what a guest's work with its disk loses when the disk is in its checkpoints, every 2 s, against
//! checkpoints of memory alone, in turns on the same guest; and what such checkpoints store of the disk of a guest that compiles.

mod latency;

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::committing::make_image;
use stillframe_harness::debian::{DebianSetup, DebianWorkload, READY_LIMIT};
use stillframe_harness::guest::Guest;
use stillframe_harness::images;
use stillframe_harness::qmp::Qmp;
use stillframe_harness::results::{self, Claim, Goal, percentile};
use stillframe_harness::running::Running;

use super::disks::{device, fill};
use super::host_memory;

const BENCH: &str = "disk-work";
const COMMAND: &str = "cargo xtask bench disk-work";
const RAM_MIB: u32 = 1024;
const PAGE: u64 = 4096;
/// QEMU's name of the disk that is worked on: the Debian's is the first.
const DRIVE: &str = "virtio1";
const TURNS: usize = 5;
const WINDOW: Duration = Duration::from_secs(20);
/// Checkpoints before the window: the first reads everything.
const BEFORE: usize = 3;
/// Checkpoints of the guest that compiles for three minutes.
const WHILE_COMPILING: &str = "75";

/// A guest that works with its disk.
#[derive(Clone, Copy)]
struct Work {
    workload: DebianWorkload,
    claim: &'static str,
    words: &'static str,
    disk_mib: u32,
}

const WORK: [Work; 2] = [
    Work {
        workload: DebianWorkload::Fio,
        claim: "disk-work-fio",
        words: "fio, random writes of 4 KiB",
        disk_mib: 512,
    },
    Work {
        workload: DebianWorkload::Pgbench,
        claim: "disk-work-postgresql",
        words: "PostgreSQL, pgbench",
        disk_mib: 1024,
    },
];

/// Checkpoints of memory alone, and with the disk.
const MODES: [&str; 2] = ["none", "capture"];

/// What the guest did in a window.
#[derive(Clone, Copy)]
struct Window {
    /// Writes, or units of transactions, a second.
    rate: f64,
    /// 99th percentile of the time that QEMU takes for a write, in milliseconds.
    p99_ms: f64,
}

/// The windows of a guest, by mode.
struct Measured {
    work: Work,
    windows: [Vec<Window>; MODES.len()],
    reports: Vec<Value>,
}

impl Measured {
    /// The median over the turns.
    fn median(&self, mode: usize, of: fn(&Window) -> f64) -> f64 {
        let values: Vec<f64> = self.windows[mode].iter().map(of).collect();
        percentile(&values, 0.5)
    }

    fn ratio(&self) -> f64 {
        let rate = |window: &Window| window.rate;
        self.median(1, rate) / self.median(0, rate)
    }
}

/// What increments have of a disk, summed.
#[derive(Default)]
struct Content {
    checkpoints: usize,
    /// Bytes of blocks that were written, as QEMU's bitmap has them.
    dirty: u64,
    /// Bytes of pages that neither memory nor the disk had before.
    new: u64,
    /// Bytes that were stored for it.
    stored: u64,
}

impl Content {
    fn share(&self) -> f64 {
        self.stored as f64 / self.dirty as f64
    }
}

/// Runs the bench and writes `docs/results/disk-work/`.
pub fn run() -> Result<()> {
    let mut measured = Vec::new();
    for work in WORK {
        measured.push(measure(work).with_context(|| work.words)?);
    }
    let content = compile()?;
    record(&measured, &content)
}

fn boot(workload: DebianWorkload, disk: &Path) -> Result<Guest> {
    let drive = format!("file={},if=virtio,format=raw", disk.display());
    let setup = DebianSetup {
        workload,
        ram_mib: RAM_MIB,
        agent: false,
        extra: ["-drive", &drive].map(str::to_owned).into(),
    };
    setup.boot()
}

fn measure(work: Work) -> Result<Measured> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-disk-work-")
        .tempdir()?;
    let disk = folder.path().join("disk.img");
    match work.workload {
        DebianWorkload::Fio => {
            make_image(&disk, "raw", work.disk_mib)?;
            fill(&disk, work.disk_mib)?;
        }
        _ => images::make_file_system(&disk, work.disk_mib)?,
    }
    let guest = boot(work.workload, &disk)?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let mut measured = Measured {
        work,
        windows: Default::default(),
        reports: Vec::new(),
    };
    for turn in 1..=TURNS {
        for (mode, windows) in MODES.into_iter().zip(&mut measured.windows) {
            let (window, reports) = watched(&stillframe, &guest, mode, work.workload)?;
            eprintln!("{mode}: {:.1} a second", window.rate);
            windows.push(window);
            measured.reports.push(json!({
                "disks": mode, "rate": window.rate, "p99_ms": window.p99_ms, "reports": reports,
            }));
        }
        eprintln!("{}: turn {turn} of {TURNS}", work.words);
    }
    Ok(measured)
}

/// The guest's work while it is watched, and the reports.
fn watched(
    stillframe: &Stillframe,
    guest: &Guest,
    disks: &str,
    workload: DebianWorkload,
) -> Result<(Window, Vec<Value>)> {
    let pid = guest.pid_text();
    let line = [
        "watch", "--pid", &pid, "--every", "2s", "--disks", disks, "--json", "--quiet",
    ];
    let mut watch = Running::start(stillframe.command(&line)?)?;
    watch.wait_results(BEFORE)?;
    let window = window(guest, workload)?;
    watch.signal("INT")?;
    let ended = watch.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    let reports = ended.results()?;
    let captures = |report: &Value| report["disks"][0].is_object() == (disks == "capture");
    ensure!(reports.iter().all(captures), "{reports:?}");
    Ok((window, reports))
}

fn window(guest: &Guest, workload: DebianWorkload) -> Result<Window> {
    let mut monitor = guest.second_monitor()?;
    let device = device(&mut monitor, DRIVE)?;
    let done = |monitor: &mut Qmp| -> Result<f64> {
        match workload {
            DebianWorkload::Fio => Ok(latency::writes(monitor, DRIVE)? as f64),
            // From the end of a unit to the end of another.
            _ => Ok(guest.serial.wait_more_units(1, READY_LIMIT)? as f64),
        }
    };
    let (first, begin) = (done(&mut monitor)?, Instant::now());
    latency::begin(&mut monitor, &device)?;
    thread::sleep(WINDOW);
    let (last, took) = (done(&mut monitor)?, begin.elapsed());
    Ok(Window {
        rate: (last - first) / took.as_secs_f64(),
        p99_ms: latency::percentile_ms(&mut monitor, DRIVE, 0.99)?,
    })
}

/// What a watch stores of the disk of a guest that compiles.
fn compile() -> Result<Content> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-disk-work-")
        .tempdir()?;
    let disk = folder.path().join("disk.img");
    images::make_file_system(&disk, 3072)?;
    let guest = boot(DebianWorkload::Make, &disk)?;
    host_memory::settle();
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let pid = guest.pid_text();
    let line = ["watch", "--pid", &pid, "--every", "2s", "--count"];
    let more = [WHILE_COMPILING, "--disks", "capture", "--quiet"];
    let mut content = Content::default();
    for report in stillframe
        .json_lines(&[&line[..], &more].concat())?
        .iter()
        .skip(1)
    {
        let disk = &report["disks"][0];
        content.checkpoints += 1;
        content.dirty += number(&disk["bytes_read"])?;
        content.stored += number(&disk["bytes_stored"])?;
        content.new += number(&disk["pages"]["new"])? * PAGE;
    }
    Ok(content)
}

fn number(of: &Value) -> Result<u64> {
    of.as_u64().context("a report without the disk")
}

fn record(measured: &[Measured], content: &Content) -> Result<()> {
    let mut table = "| guest | a second, memory alone | with the disk | ratio | p99 of a write, memory alone | with the disk |\n\
                     | --- | --- | --- | --- | --- | --- |\n"
        .to_owned();
    for one in measured {
        let [alone, with] = [0, 1].map(|mode| one.median(mode, |window| window.rate));
        let [fast, slow] = [0, 1].map(|mode| one.median(mode, |window| window.p99_ms));
        table += &format!(
            "| {} | {alone:.1} | {with:.1} | {:.3} | {fast:.2} ms | {slow:.2} ms |\n",
            one.work.words,
            one.ratio()
        );
    }
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    table += &format!(
        "\n| compile: increments | written blocks of the disk | found neither in memory nor on the disk | stored |\n\
         | --- | --- | --- | --- |\n| {} | {:.1} MiB | {:.1} MiB | {:.1} MiB |\n",
        content.checkpoints,
        mib(content.dirty),
        mib(content.new),
        mib(content.stored)
    );
    println!("{table}");
    let head = format!(
        "# Bench: disk-work\n\n`{COMMAND}`, commit {}. Debian guests of {RAM_MIB} MiB, one vCPU, TCG, with a raw disk; `watch --every 2s`. fio writes \
         a disk of {} MiB, full; a unit of PostgreSQL is 100 transactions. Medians of {TURNS} windows of {} s, in turns, after the first {BEFORE} \
         checkpoints; the time of a write is QEMU's account at the device. The compiling guest makes a kernel on its disk for three minutes; \
         QEMU's bitmap has blocks of 4 KiB. Raw data: `raw.jsonl.zst` (zstd).\n\n",
        results::commit(),
        WORK[0].disk_mib,
        WINDOW.as_secs()
    );
    fs::write(results::folder(BENCH)?.join("README.md"), head + &table)?;
    let mut raw: Vec<Value> = measured
        .iter()
        .map(|one| json!({ "guest": one.work.words, "windows": one.reports }))
        .collect();
    raw.push(json!({
        "guest": "compile", "increments": content.checkpoints, "dirty_bytes": content.dirty, "new_bytes": content.new,
        "stored_bytes": content.stored,
    }));
    results::write_raw(BENCH, "raw.jsonl", &raw)?;
    let claim = |id, goal, value| Claim::new(id, goal, value, "ratio", COMMAND);
    let mut claims: Vec<Claim> = measured
        .iter()
        .map(|one| claim(one.work.claim, Goal::AtLeast(0.9), one.ratio()))
        .collect();
    claims.push(claim("disk-content", Goal::AtMost(0.25), content.share()));
    results::write_summary(BENCH, &claims)
}
