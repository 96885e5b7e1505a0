//! `cargo xtask bench workloads`: the guests with real software, each alone and watched. Shows that each
//! works, that Stillframe has every page of it, and the pace at which it does its units.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use stillframe_harness::cli::Stillframe;
use stillframe_harness::debian::{DebianSetup, DebianWorkload, READY_LIMIT};
use stillframe_harness::guest::Guest;
use stillframe_harness::results;

const RAM_MIB: u32 = 1024;
/// Number of checkpoints of each, each compared page by page.
const CHECKPOINTS: &str = "5";

/// Runs the bench over all workloads or one, and writes `docs/results/workloads/` if over all.
pub fn run(seconds: u64, only: Option<&str>) -> Result<()> {
    let window = Duration::from_secs(seconds);
    let workloads: Vec<DebianWorkload> = DebianWorkload::ALL
        .into_iter()
        .filter(|workload| only.is_none_or(|only| workload.name() == only))
        .collect();
    if workloads.is_empty() {
        bail!("no workload is named {}", only.unwrap_or_default());
    }
    let mut lines = Vec::new();
    for workload in workloads {
        let line = measure(workload, window).with_context(|| workload.name())?;
        println!("{line}");
        lines.push(line);
    }
    if only.is_none() {
        results::write_raw("workloads", "workloads.jsonl", &lines)?;
    }
    Ok(())
}

fn measure(workload: DebianWorkload, window: Duration) -> Result<Value> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-workloads-")
        .tempdir()?;
    let began = Instant::now();
    let guest = DebianSetup {
        workload,
        ram_mib: RAM_MIB,
        agent: false,
        extra: Vec::new(),
    }
    .boot()?;
    let ready = began.elapsed();
    let alone = rate(&guest, window)?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let before = units(&guest)?;
    let began = Instant::now();
    let pid = guest.pid_text();
    let watch = [
        "watch",
        "--pid",
        &pid,
        "--every",
        "2s",
        "--count",
        CHECKPOINTS,
        "--verify",
    ];
    let checkpoints = stillframe.json_lines(&watch)?;
    let watched = began.elapsed();
    let after = units(&guest)?;
    let differing: Option<u64> = checkpoints
        .iter()
        .map(|checkpoint| checkpoint["verify"]["differing"].as_u64())
        .sum();
    // It works on: nothing that was done to it broke it.
    guest.serial.wait_units(after + 1, READY_LIMIT)?;
    Ok(json!({
        "work": workload.name(),
        "commit": results::commit(),
        "ram_mib": RAM_MIB,
        "ready_s": ready.as_secs_f64(),
        "units_per_s_alone": alone,
        "units_while_verified": after - before,
        "verified_s": watched.as_secs_f64(),
        "checkpoints": checkpoints.len(),
        "pages_differing": differing.context("a checkpoint was not verified")?,
    }))
}

/// Units a second.
fn rate(guest: &Guest, window: Duration) -> Result<f64> {
    let began = Instant::now();
    let first = units(guest)?;
    std::thread::sleep(window);
    let last = units(guest)?;
    Ok((last - first) as f64 / began.elapsed().as_secs_f64())
}

fn units(guest: &Guest) -> Result<u64> {
    guest.serial.units()?.context("the guest is not ready")
}
