//! `cargo xtask bench frequency`: an interval of 10 ms, from the start of a checkpoint to the start of the
//! next, for 10 minutes. (The copy-on-write thesis came down to 16 ms.)

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::peers;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::results::{self, Claim, Goal, percentile};
use stillframe_stress::soak;

const COMMAND: &str = "cargo xtask bench frequency";
const EVERY_MS: u64 = 10;
/// An interval that is longer by more than this was not kept, in milliseconds.
const LATE_MS: f64 = 1.0;
const CHECKPOINTS: u64 = 60_000;
const STATE_FILE: &str = "/dev/shm/stillframe-frequency";
/// Time for which the guest's pace alone is measured.
const ALONE: Duration = Duration::from_secs(30);

/// Runs the bench and writes `docs/results/frequency/`.
pub fn run() -> Result<()> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-frequency-")
        .tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let mut setup = Setup::new(Kind::Private);
    setup.ram_mib = 256;
    setup.workload.mib = 16;
    // It works as fast as it can, so that its loss shows.
    setup.workload.tick_ms = 0;
    setup.workload.writes_per_tick = 100;
    let guest = setup.boot()?;
    let mut qmp = guest.second_monitor()?;
    let floors: Vec<f64> = (0..40)
        .map(|_| peers::floor_ms(&mut qmp, Path::new(STATE_FILE)))
        .collect::<Result<_>>()?;
    let _ = std::fs::remove_file(STATE_FILE);
    let alone = pace(&guest, || std::thread::sleep(ALONE))?;
    let mut watched = None;
    let beside = pace(&guest, || {
        watched = Some(soak::watch(&stillframe, &guest, CHECKPOINTS, EVERY_MS));
    })?;
    let (reports, memory_kib) = watched.context("nothing was watched")??;
    record(&reports, &memory_kib, &floors, (alone, beside))
}

/// Ticks a second while something continues.
fn pace(guest: &Guest, meanwhile: impl FnOnce()) -> Result<f64> {
    let begin = Instant::now();
    let first = guest.serial.ticks()?.len();
    meanwhile();
    let last = guest.serial.ticks()?.len();
    Ok((last - first) as f64 / begin.elapsed().as_secs_f64())
}

fn record(
    reports: &[Value],
    memory_kib: &[u64],
    floors: &[f64],
    (alone, beside): (f64, f64),
) -> Result<()> {
    // The first one reads all memory, and the watch counts from its end.
    let starts = soak::starts_ms(&reports[1..])?;
    ensure!(starts.len() > 1, "too few checkpoints");
    let gaps: Vec<f64> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let mean = (starts[starts.len() - 1] - starts[0]) / gaps.len() as f64;
    let late = gaps
        .iter()
        .filter(|&&gap| gap > 1.5 * EVERY_MS as f64)
        .count();
    let pauses: Vec<f64> = reports[1..]
        .iter()
        .filter_map(|report| Some(report["downtime_us"]["total"].as_f64()? / 1e3))
        .collect();
    let floor = percentile(floors, 0.5);
    let words = format!(
        "{} checkpoints, start to start: mean {mean:.2}, p50 {:.1}, p99 {:.1}, longest {:.0} ms; {late} longer than 15 ms.\n\
         Pause p50 {:.2}, p99 {:.2} ms; QEMU's own floor {floor:.2} ms, {:.0} % of the interval.\n\
         Guest: {alone:.1} ticks a second alone, {beside:.1} watched: {:.1} % lost.\n\
         Engine: {:.0} MiB after a tenth, {:.0} MiB at the end.\n",
        reports.len(),
        percentile(&gaps, 0.5),
        percentile(&gaps, 0.99),
        percentile(&gaps, 1.0),
        percentile(&pauses, 0.5),
        percentile(&pauses, 0.99),
        floor / EVERY_MS as f64 * 100.0,
        (1.0 - beside / alone) * 100.0,
        memory_kib
            .get(memory_kib.len() / 10)
            .copied()
            .unwrap_or_default() as f64
            / 1024.0,
        memory_kib.last().copied().unwrap_or_default() as f64 / 1024.0,
    );
    println!("{words}");
    let head = format!(
        "# Bench: frequency\n\n`{COMMAND}`, commit {}. 256 MiB guest that writes to 100 words and checks 2 MiB, as often \
         as it can; TCG. Raw data: `gaps_us.jsonl.zst` (zstd), `memory_kib.jsonl`.\n\n",
        results::commit()
    );
    std::fs::write(
        results::folder("frequency")?.join("README.md"),
        head + &words,
    )?;
    let gaps_us: Vec<u64> = gaps.iter().map(|gap| (gap * 1e3).round() as u64).collect();
    results::write_raw("frequency", "gaps_us.jsonl", &[json!(gaps_us)])?;
    results::write_raw("frequency", "memory_kib.jsonl", &[json!(memory_kib)])?;
    let kept = |gap: &&f64| **gap <= EVERY_MS as f64 + LATE_MS;
    let not_kept = (gaps.len() - gaps.iter().filter(kept).count()) as f64;
    let claim = Claim::new("interval-10ms", Goal::Zero, not_kept, "intervals", COMMAND);
    let enough = reports.len() >= 60_000;
    results::write_summary("frequency", &[claim.if_enough(enough)])
}
