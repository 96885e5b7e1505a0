//! Many checkpoints in quick succession of a guest that checks itself; then some of them restored.
//!
//! A restored guest must never find its memory changed. Measured beside it: whether the interval was kept, how long
//! the pauses were, and whether the engine's memory grows.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health;
use stillframe_harness::random::Random;
use stillframe_harness::restored::Restored;
use stillframe_harness::results::{self, Claim, Goal, percentile};
use stillframe_harness::running::Running;

/// How often the engine's memory is measured.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Restored checkpoints that must be correct.
const RESTORES: u64 = 20;

/// `count` checkpoints, one every `every_ms`; writes `docs/results/soak/`.
pub fn run(count: u64, every_ms: u64, seed: u64) -> Result<()> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-soak-")
        .tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let guest = guest()?;
    let (reports, memory_kib) = watch(&stillframe, &guest, count, every_ms)?;
    guest.serial.wait_more(2, Duration::from_secs(60))?;
    drop(guest);
    let mut random = Random::new(seed);
    let mut wrong = 0;
    for number in 0..RESTORES {
        let report = &reports[random.below(reports.len() as u64) as usize];
        let id = report["checkpoint"].as_str().context("checkpoint")?;
        let restored = Restored::start(&stillframe, id, folder.path(), &["--verify"]);
        // A corrupt tick is an error of the serial port's reader.
        let ticked =
            restored.and_then(|restored| restored.serial.wait_ticks(4, Duration::from_secs(120)));
        if let Err(error) = ticked {
            wrong += 1;
            eprintln!("restore {number} ({id}): {error:#}");
        }
    }
    stillframe.ok(&["check"])?;
    record(&reports, &memory_kib, every_ms, wrong)
}

fn guest() -> Result<Guest> {
    let mut setup = Setup::new(Kind::Private);
    setup.ram_mib = 256;
    setup.workload.mib = 16;
    setup.workload.tick_ms = 50;
    setup.workload.writes_per_tick = 100;
    setup.boot()
}

/// The reports, and the engine's resident memory over time.
pub fn watch(
    stillframe: &Stillframe,
    guest: &Guest,
    count: u64,
    every_ms: u64,
) -> Result<(Vec<Value>, Vec<u64>)> {
    let (pid, every, counted) = (guest.pid_text(), format!("{every_ms}ms"), count.to_string());
    let line = [
        "watch", "--pid", &pid, "--every", &every, "--count", &counted, "--json", "--quiet",
    ];
    let watch = Running::start(stillframe.command(&line)?)?;
    let begin = Instant::now();
    // Twice the time it should take.
    let limit = Duration::from_millis(2 * count * every_ms) + Duration::from_secs(60);
    let mut memory_kib = Vec::new();
    while let Some(kib) = health::memory_kib(watch.pid(), "VmRSS") {
        memory_kib.push(kib);
        if memory_kib.len() % 12 == 0 {
            eprintln!(
                "{:5} s: engine {} MiB",
                begin.elapsed().as_secs(),
                kib >> 10
            );
        }
        if begin.elapsed() > limit {
            bail!("it takes more than {limit:?}");
        }
        std::thread::sleep(LOOK_EVERY);
    }
    let ended = watch.end()?;
    let reports = ended.results()?;
    ensure!(
        reports.len() as u64 == count,
        "{} reports: {}",
        reports.len(),
        ended.err
    );
    Ok((reports, memory_kib))
}

fn record(reports: &[Value], memory_kib: &[u64], every_ms: u64, wrong: u64) -> Result<()> {
    let growth = describe(reports, memory_kib, every_ms, wrong)?;
    let slim: Vec<Value> = reports
        .iter()
        .map(|report| {
            json!({
                "time": report["time"], "downtime_us": report["downtime_us"]["total"],
                "total_us": report["total_us"], "captured": report["pages"]["captured"],
                "delta": report["pages"]["delta"], "bytes_stored": report["bytes_stored"],
            })
        })
        .collect();
    results::write_raw("soak", "checkpoints.jsonl", &slim)?;
    results::write_raw("soak", "memory_kib.jsonl", &[json!(memory_kib)])?;
    let enough = reports.len() >= 10_000;
    let claim = |claim, goal, value, unit| {
        Claim::new(claim, goal, value, unit, "cargo xtask bench soak").if_enough(enough)
    };
    let restores = claim("soak-restores", Goal::Zero, wrong as f64, "wrong restores");
    let memory = claim("soak-memory", Goal::AtMost(1.25), growth, "end / a fifth");
    results::write_summary("soak", &[restores, memory])?;
    match wrong {
        0 => Ok(()),
        wrong => bail!("{wrong} restored guests were wrong"),
    }
}

/// Prints what was measured; how much the engine's memory has grown since a fifth of the way, which
/// fills what is bounded: stages, delta cache.
fn describe(reports: &[Value], memory_kib: &[u64], every_ms: u64, wrong: u64) -> Result<f64> {
    let pauses: Vec<f64> = reports
        .iter()
        .filter_map(|report| Some(report["downtime_us"]["total"].as_f64()? / 1e3))
        .collect();
    let starts = starts_ms(reports)?;
    // From the second on: the first checkpoint reads all memory.
    let pairs = starts.windows(2).skip(1);
    let gaps: Vec<f64> = pairs.map(|pair| pair[1] - pair[0]).collect();
    let late = gaps.iter().filter(|&&gap| gap > 1.5 * every_ms as f64);
    let early = memory_kib.get(memory_kib.len() / 5).copied();
    let early = early.unwrap_or_default() as f64;
    let last = memory_kib.iter().rev().take(3).max().copied();
    let last = last.unwrap_or_default() as f64;
    println!(
        "{} checkpoints every {every_ms} ms: pause p50 {:.2} p99 {:.2} ms, interval p50 {:.1} p99 {:.1} ms, {} late; {RESTORES} restored, {wrong} wrong; engine {:.0} MiB at a fifth, {:.0} MiB at the end",
        reports.len(),
        percentile(&pauses, 0.5),
        percentile(&pauses, 0.99),
        percentile(&gaps, 0.5),
        percentile(&gaps, 0.99),
        late.count(),
        early / 1024.0,
        last / 1024.0,
    );
    Ok(last / early.max(1.0))
}

/// When the guest stood still, in milliseconds.
pub fn starts_ms(reports: &[Value]) -> Result<Vec<f64>> {
    let start = |report: &Value| -> Result<f64> {
        let time = report["time"].as_str().context("time")?;
        Ok(time.parse::<jiff::Timestamp>()?.as_microsecond() as f64 / 1e3)
    };
    reports.iter().map(start).collect()
}
