//! `cargo xtask bench extremes`: the pause where it is hardest to keep short, against QEMU's own floor on the same
//! guest in the same run.
//!
//! - A large guest beside a small one that writes as much; QEMU allocates both as it does by default.
//! - A guest that writes nearly all of its memory in every interval.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::peers;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup, Workload};
use stillframe_harness::results::{self, Claim, Goal, percentile};

const COMMAND: &str = "cargo xtask bench extremes";
const STATE_FILE: &str = "/dev/shm/stillframe-extremes";
/// Turns of floors and 20 checkpoints.
const TURNS: usize = 3;
/// The same where the 99th percentile is promised, which of fewer would be the longest of all.
const TURNS_P99: usize = 10;
const FLOORS_A_TURN: usize = 10;
const LARGE_MIB: u32 = 8192;
const SMALL_MIB: u32 = 1024;

/// One guest: its floors and its pauses, in milliseconds, and the reports.
struct Measured {
    floors: Vec<f64>,
    pauses: Vec<f64>,
    reports: Vec<Value>,
}

impl Measured {
    /// A pause in units of the median floor.
    fn ratio(&self, share: f64) -> f64 {
        percentile(&self.pauses, share) / percentile(&self.floors, 0.5)
    }

    fn captured(&self) -> f64 {
        let captured = |report: &Value| report["pages"]["captured"].as_f64();
        percentile(
            &self.reports.iter().filter_map(captured).collect::<Vec<_>>(),
            0.5,
        )
    }

    fn row(&self, name: &str) -> String {
        format!(
            "| {name} | {:.2} ms | {:.2} ms | {:.2} ms | {:.2} x | {:.2} x | {:.0} | {} |\n",
            percentile(&self.floors, 0.5),
            percentile(&self.pauses, 0.5),
            percentile(&self.pauses, 0.99),
            self.ratio(0.5),
            self.ratio(0.99),
            self.captured(),
            self.pauses.len()
        )
    }

    fn raw(&self, name: &str) -> Vec<Value> {
        let mut raw = vec![json!({"guest": name, "floors_ms": self.floors})];
        raw.extend(
            self.reports
                .iter()
                .map(|report| json!({"guest": name, "report": report})),
        );
        raw
    }
}

/// Runs the bench and writes `docs/results/extremes/`.
pub fn run() -> Result<()> {
    let mut measured = Vec::new();
    for (name, ram_mib) in [("1 GiB in use", SMALL_MIB), ("8 GiB in use", LARGE_MIB)] {
        eprintln!("{name}");
        let guest = writer(ram_mib, 64, 4500).boot()?;
        measured.push((name, measure(&guest, "1s", "auto", TURNS)?));
    }
    let name = "512 MiB, nearly all of it written";
    eprintln!("{name}");
    // Its kernel and programs take the rest.
    let guest = writer(512, 420, 40_000).boot()?;
    measured.push((name, measure(&guest, "2s", "copy-on-write", TURNS_P99)?));
    drop(guest);
    let _ = std::fs::remove_file(STATE_FILE);
    record(&measured)
}

/// A guest of this much memory, as QEMU allocates it by default, that writes at random to some of it.
fn writer(ram_mib: u32, mib: u32, writes_per_tick: u32) -> Setup {
    let workload = Workload {
        mib,
        pattern: "random",
        tick_ms: 200,
        writes_per_tick,
        share: 64,
    };
    Setup {
        ram_mib,
        workload,
        ..Setup::new(Kind::Private)
    }
}

fn measure(guest: &Guest, every: &str, schedule: &str, turns: usize) -> Result<Measured> {
    let mut qmp = guest.second_monitor()?;
    let mut measured = Measured {
        floors: Vec::new(),
        pauses: Vec::new(),
        reports: Vec::new(),
    };
    let pid = guest.pid_text();
    for turn in 1..=turns {
        for _ in 0..FLOORS_A_TURN {
            let floor = peers::floor_ms(&mut qmp, Path::new(STATE_FILE))?;
            measured.floors.push(floor);
            std::thread::sleep(Duration::from_millis(300));
        }
        // One for each turn: all of them together would take 100 GB.
        let repository = guest.folder().join("repo");
        let stillframe = Stillframe::init(&repository)?;
        let line = [
            "watch",
            "--pid",
            &pid,
            "--every",
            every,
            "--count",
            "21",
            "--schedule",
            schedule,
            "--quiet",
        ];
        let reports = stillframe.json_lines(&line)?;
        eprintln!("turn {turn} of {turns}");
        // The first one reads all memory.
        for report in reports.into_iter().skip(1) {
            let pause = report["downtime_us"]["total"].as_f64();
            measured
                .pauses
                .push(pause.context("a report without a pause")? / 1e3);
            measured.reports.push(report);
        }
        std::fs::remove_dir_all(&repository)?;
    }
    guest.serial.wait_more(1, Duration::from_secs(60))?;
    Ok(measured)
}

fn record(measured: &[(&str, Measured)]) -> Result<()> {
    let [(_, small), (_, large), (_, all)] = measured else {
        anyhow::bail!("a guest is missing");
    };
    let mut table = "| guest | floor p50 | pause p50 | pause p99 | p50 / floor | p99 / floor p50 | pages an interval | n |\n\
                     | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        .to_owned();
    for (name, measured) in measured {
        table += &measured.row(name);
    }
    println!("{table}");
    let head = format!(
        "# Bench: extremes\n\n`{COMMAND}`, commit {}. TCG; `auto` every 1 s, and for \
         the last row `copy-on-write` every 2 s. Raw data: `raw.jsonl.zst` (zstd).\n\n",
        results::commit()
    );
    std::fs::write(
        results::folder("extremes")?.join("README.md"),
        head + &table,
    )?;
    let raw: Vec<Value> = measured
        .iter()
        .flat_map(|(name, measured)| measured.raw(name))
        .collect();
    results::write_raw("extremes", "raw.jsonl", &raw)?;
    let size = percentile(&large.pauses, 0.5) / percentile(&small.pauses, 0.5);
    let claim = |claim, most, value| Claim::new(claim, Goal::AtMost(most), value, "ratio", COMMAND);
    results::write_summary(
        "extremes",
        &[
            claim("pause-8-gib", 1.5, size),
            claim("pause-all-dirty-p99", 4.0, all.ratio(0.99)),
        ],
    )
}
