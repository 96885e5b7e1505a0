//! `cargo xtask bench direct-io`: a guest that reads a disk past the host's page cache (`cache=none`, native AIO)
//! as fast as it can, watched every 2 s. The pause is compared with QEMU's own floor on the same guest. The guest's
//! reading rate is compared with its rate when it is not watched, in turns.
//!
//! It runs once with the disk at full speed, and once with a slow disk, whose requests stay in progress for long.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::peers;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup, Workload};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::results::{self, Claim, Goal, percentile};
use stillframe_harness::running::{PATIENCE, Running};
use stillframe_harness::slow_disk::SlowDisk;

const COMMAND: &str = "cargo xtask bench direct-io";
const STATE_FILE: &str = "/dev/shm/stillframe-direct-io";
const RAM_MIB: u32 = 1024;
const DISK_MIB: usize = 512;
const SLOW_MIB_PER_SECOND: u64 = 40;
const TURNS: usize = 6;
const FLOORS_A_TURN: usize = 8;
/// Length of one measurement of the guest's read rate.
const WINDOW: Duration = Duration::from_secs(20);

/// One disk: floors and pauses in milliseconds, MiB a second in turns.
#[derive(Default)]
struct Measured {
    floors: Vec<f64>,
    pauses: Vec<f64>,
    alone: Vec<f64>,
    watched: Vec<f64>,
    reports: Vec<Value>,
}

impl Measured {
    fn pause_ratio(&self) -> f64 {
        percentile(&self.pauses, 0.5) / percentile(&self.floors, 0.5)
    }

    fn read_ratio(&self) -> f64 {
        self.watched.iter().sum::<f64>() / self.alone.iter().sum::<f64>()
    }

    fn row(&self, name: &str) -> String {
        format!(
            "| {name} | {:.2} ms | {:.2} ms | {:.2} x | {:.1} MiB/s | {:.1} MiB/s | {:.3} x | {} |\n",
            percentile(&self.floors, 0.5),
            percentile(&self.pauses, 0.5),
            self.pause_ratio(),
            percentile(&self.alone, 0.5),
            percentile(&self.watched, 0.5),
            self.read_ratio(),
            self.pauses.len()
        )
    }

    fn raw(&self, name: &str) -> Vec<Value> {
        let head = json!({
            "disk": name, "floors_ms": self.floors,
            "mib_per_s_alone": self.alone, "mib_per_s_watched": self.watched,
        });
        let reports = self.reports.iter();
        let reports = reports.map(|report| json!({"disk": name, "report": report}));
        std::iter::once(head).chain(reports).collect()
    }
}

/// Runs the bench and writes `docs/results/direct-io/`.
pub fn run() -> Result<()> {
    let mut measured = Vec::new();
    for (name, limit) in [("fast", None), ("slow", Some(SLOW_MIB_PER_SECOND))] {
        eprintln!("{name} disk");
        measured.push((name, measure(limit)?));
    }
    let _ = std::fs::remove_file(STATE_FILE);
    record(&measured)
}

fn measure(limit: Option<u64>) -> Result<Measured> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-direct-io-")
        .tempdir()?;
    let mut disk = SlowDisk::new(folder.path(), DISK_MIB)?;
    let mut setup = Setup::new(Kind::Private)
        .with_drivers("sf.disk=vda")
        .with(&["-drive", &disk.drive("native")]);
    setup.ram_mib = RAM_MIB;
    setup.workload = Workload {
        mib: 64,
        pattern: "random",
        tick_ms: 200,
        writes_per_tick: 1000,
        share: 64,
    };
    let guest = setup.boot()?;
    guest.serial.wait_line("disk read 1", PATIENCE)?;
    if let Some(limit) = limit {
        disk.hold_back(guest.pid(), limit)?;
    }
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let mut monitor = guest.second_monitor()?;
    let mut measured = Measured::default();
    for turn in 1..=TURNS {
        for _ in 0..FLOORS_A_TURN {
            let floor = peers::floor_ms(&mut monitor, Path::new(STATE_FILE))?;
            measured.floors.push(floor);
            thread::sleep(Duration::from_millis(500));
        }
        measured.alone.push(rate(&mut monitor)?);
        watched(&stillframe, &guest, &mut monitor, &mut measured)?;
        eprintln!("turn {turn} of {TURNS}");
    }
    guest.serial.wait_more(1, PATIENCE)?;
    Ok(measured)
}

fn watched(
    stillframe: &Stillframe,
    guest: &Guest,
    monitor: &mut Qmp,
    measured: &mut Measured,
) -> Result<()> {
    let pid = guest.pid_text();
    let line = ["watch", "--pid", &pid, "--every", "2s", "--json", "--quiet"];
    let mut watch = Running::start(stillframe.command(&line)?)?;
    // The first one reads all memory; only the steady state counts here.
    watch.wait_results(2)?;
    measured.watched.push(rate(monitor)?);
    watch.signal("TERM")?;
    let ended = watch.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    for report in ended.results()?.into_iter().skip(1) {
        let pause = report["downtime_us"]["total"].as_f64();
        let pause = pause.context("a report without a pause")?;
        measured.pauses.push(pause / 1e3);
        measured.reports.push(report);
    }
    Ok(())
}

/// The guest's read rate in MiB/s.
fn rate(monitor: &mut Qmp) -> Result<f64> {
    let begin = Instant::now();
    let first = read_bytes(monitor)?;
    thread::sleep(WINDOW);
    let last = read_bytes(monitor)?;
    Ok((last - first) / begin.elapsed().as_secs_f64() / f64::from(1 << 20))
}

fn read_bytes(monitor: &mut Qmp) -> Result<f64> {
    let all = monitor.execute("query-blockstats", json!({}))?;
    let drives = all.as_array().context("no list of drives")?;
    let read = drives
        .iter()
        .filter_map(|drive| drive["stats"]["rd_bytes"].as_f64());
    Ok(read.sum())
}

fn record(measured: &[(&str, Measured)]) -> Result<()> {
    let mut table = "| disk | floor p50 | pause p50 | pause / floor | reads alone | reads watched | watched / alone | n |\n\
                     | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        .to_owned();
    for (name, measured) in measured {
        table += &measured.row(name);
    }
    println!("{table}");
    let head = format!(
        "# Bench: direct-io\n\n`{COMMAND}`, commit {}. 1 GiB guest, TCG, a disk of {DISK_MIB} MiB read without end, \
         `cache=none,aio=native`; `auto` every 2 s. The slow disk gives {SLOW_MIB_PER_SECOND} MiB a second. \
         Raw data: `raw.jsonl.zst` (zstd).\n\n",
        results::commit()
    );
    std::fs::write(
        results::folder("direct-io")?.join("README.md"),
        head + &table,
    )?;
    let raw: Vec<Value> = measured
        .iter()
        .flat_map(|(name, measured)| measured.raw(name))
        .collect();
    results::write_raw("direct-io", "raw.jsonl", &raw)?;
    let worst = |ratio: fn(&Measured) -> f64, pick: fn(f64, f64) -> f64| {
        measured
            .iter()
            .map(|(_, measured)| ratio(measured))
            .reduce(pick)
            .unwrap_or(f64::NAN)
    };
    let pause = worst(Measured::pause_ratio, f64::max);
    let reads = worst(Measured::read_ratio, f64::min);
    results::write_summary(
        "direct-io",
        &[
            Claim::new(
                "direct-io-pause",
                Goal::AtMost(1.5),
                pause,
                "ratio",
                COMMAND,
            ),
            Claim::new(
                "direct-io-reads",
                Goal::AtLeast(0.95),
                reads,
                "ratio",
                COMMAND,
            ),
        ],
    )
}
