//! `cargo xtask demo`: the main job, on a real guest, in front of the user's eyes.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Kind, Setup, Workload};
use stillframe_harness::restored::Restored;
use stillframe_harness::results::{self, Claim, Goal};

const INCREMENTS: usize = 10;

/// Boots, checkpoints, kills, restores. `began` is when the whole demo did, build included.
pub fn run(began: Option<Duration>) -> Result<()> {
    let start = Instant::now();
    let folder = tempfile::Builder::new()
        .prefix("stillframe-demo-")
        .tempdir()?;
    println!("A repository for checkpoints, encrypted from the first byte:");
    println!("  $ stillframe init");
    let stillframe = Stillframe::init(&folder.path().join("repository"))?;
    println!("\nA QEMU with no special flags boots a Linux guest that checks its own memory ...");
    let workload = Workload {
        mib: 64,
        pattern: "mixed",
        tick_ms: 200,
        writes_per_tick: 400,
        share: 8,
    };
    let setup = Setup {
        ram_mib: 512,
        workload,
        ..Setup::new(Kind::Private)
    };
    let mut guest = setup.boot()?;
    let pid = guest.pid_text();
    println!(
        "  pid {pid}, and it says: {}",
        last_line(&guest.serial.text())
    );

    let count = (INCREMENTS + 1).to_string();
    println!("\n  $ stillframe watch --pid {pid} --every 2s --count {count}");
    let checkpoints =
        stillframe.json_lines(&["watch", "--pid", &pid, "--every", "2s", "--count", &count])?;
    print_table(&checkpoints)?;
    guest.serial.wait_more(2, Duration::from_secs(60))?;
    println!(
        "\nThe guest did not notice: {}",
        last_line(&guest.serial.text())
    );
    guest.kill()?;
    println!("Now QEMU is killed. Three of its checkpoints come back to life, each in a new QEMU:");

    for at in [0, checkpoints.len() / 2, checkpoints.len() - 1] {
        let id = text(&checkpoints[at], "checkpoint")?;
        println!(
            "\n  $ stillframe restore {} --qmp ... --serial file:...",
            short(id)
        );
        let restored = Restored::start(&stillframe, id, folder.path(), &[])?;
        let ticks = restored.serial.wait_ticks(20, Duration::from_secs(120))?;
        let (first, last) = (&ticks[0], &ticks[ticks.len() - 1]);
        println!(
            "  pid {}: ticks {} to {} with a correct self-check",
            restored.pid, first.number, last.number
        );
    }
    stillframe.ok(&["check", "--read-data"])?;
    println!(
        "\n  $ stillframe check --read-data\n  every byte of the repository is as it was written."
    );
    let took = began.unwrap_or_default() + start.elapsed();
    println!("\nDone in {:.0} s.", took.as_secs_f64());
    record(took, &checkpoints)
}

fn record(took: Duration, checkpoints: &[Value]) -> Result<()> {
    let minutes = took.as_secs_f64() / 60.0;
    results::write_raw("demo", "checkpoints.jsonl", checkpoints)?;
    results::write_summary(
        "demo",
        &[Claim::new(
            "demo-minutes",
            Goal::AtMost(10.0),
            minutes,
            "minutes",
            "cargo xtask demo",
        )],
    )
}

fn print_table(checkpoints: &[Value]) -> Result<()> {
    println!(
        "\n  {:10} {:>10} {:>9} {:>9} {:>9} {:>10} {:>11}",
        "checkpoint", "pause", "captured", "new", "duplicate", "zero", "stored"
    );
    for line in checkpoints {
        let pages = |name: &str| line["pages"][name].as_u64().unwrap_or(0);
        let pause_us = line["downtime_us"]["total"].as_u64().context("no pause")?;
        let stored = line["bytes_stored"].as_u64().context("no size")?;
        println!(
            "  {:10} {:>7.2} ms {:>9} {:>9} {:>9} {:>10} {:>7.2} MiB",
            short(text(line, "checkpoint")?),
            pause_us as f64 / 1000.0,
            pages("captured"),
            pages("new"),
            pages("duplicate"),
            pages("zero"),
            stored as f64 / f64::from(1 << 20)
        );
    }
    if checkpoints.len() <= INCREMENTS {
        bail!("{} checkpoints are too few", checkpoints.len());
    }
    Ok(())
}

fn text<'v>(value: &'v Value, name: &str) -> Result<&'v str> {
    value[name]
        .as_str()
        .with_context(|| format!("no {name} in {value}"))
}

fn short(id: &str) -> &str {
    id.get(..8).unwrap_or(id)
}

fn last_line(text: &str) -> &str {
    text.trim_end().lines().last().unwrap_or_default().trim()
}
