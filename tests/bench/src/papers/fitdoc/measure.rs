//! All that one guest gives: two watches of it, what changed between two checkpoints, and QEMU's own
//! saves.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::peers::{self, Saved};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::debian::{DebianSetup, DebianWorkload, READY_LIMIT};
use stillframe_harness::guest::Guest;
use stillframe_harness::memory::PAGE_BYTES;
use stillframe_harness::results::percentile;

/// QEMU's ways to save all of a guest: names, and the capabilities that are switched on.
const WAYS: [(&str, &[&str]); 2] = [("stream", &[]), ("mapped-ram", &["mapped-ram"])];

/// MiB a second that the paper's network carries, at the most.
const GIGABIT_MIB: u64 = 119;

/// How long one guest is observed.
#[derive(Debug, Clone, Copy)]
pub struct Depth {
    /// Between checkpoints.
    pub every_s: u32,
    /// Of the first watch, the full one counted in.
    pub checkpoints: u32,
    /// Checkpoints of the second watch, which stores whole pages; 0: there is none.
    pub whole_pages: u32,
    /// How often QEMU saves, each way.
    pub saves: u32,
    /// Checkpoints of a third watch, through a gigabit; 0: there is none, and no such save.
    pub gigabit: u32,
}

/// One guest, measured.
#[derive(Debug)]
pub struct Measured {
    /// Its workload.
    pub workload: DebianWorkload,
    /// Its RAM.
    pub ram_mib: u32,
    /// The report of the first checkpoint, of all memory.
    full: Value,
    /// The reports of those after it.
    increments: Vec<Value>,
    /// The same of the second watch.
    whole_pages: Vec<Value>,
    /// `stats` of the last two checkpoints of the first watch.
    pub statistics: Value,
    /// In the order of [`WAYS`].
    saves: Vec<Vec<Saved>>,
    /// Through a gigabit.
    gigabit: Option<Gigabit>,
    boot_s: f64,
}

/// QEMU's stream and increments of ours, neither written faster than the paper's network would.
#[derive(Debug)]
struct Gigabit {
    save: Saved,
    increments: Vec<Value>,
}

/// Boots a guest and measures it.
pub fn measure(workload: DebianWorkload, ram_mib: u32, depth: &Depth) -> Result<Measured> {
    let say = |what: &str| eprintln!("{}, {ram_mib} MiB: {what}", workload.name());
    let folder = tempfile::Builder::new()
        .prefix("stillframe-fitdoc-")
        .tempdir()?;
    say("booting");
    let began = Instant::now();
    let guest = DebianSetup {
        workload,
        ram_mib,
        agent: false,
        extra: Vec::new(),
    }
    .boot()?;
    let boot_s = began.elapsed().as_secs_f64();
    say("watched");
    let stillframe = Stillframe::init(&folder.path().join("repository"))?;
    let mut increments = watch(&stillframe, &guest, depth.every_s, depth.checkpoints, &[])?;
    let statistics = statistics(&stillframe, &increments)?;
    let full = increments.remove(0);
    say("saved by QEMU");
    let saves = saves(&guest, folder.path(), depth.saves)?;
    let mut whole_pages = Vec::new();
    if depth.whole_pages > 0 {
        say("watched without deltas and deduplication");
        let plain = ["--delta-cache", "0", "--no-dedup"];
        let place = folder.path().join("whole-pages");
        whole_pages = increments_into(&place, &guest, depth.every_s, depth.whole_pages, &plain)?;
    }
    let mut gigabit = None;
    if depth.gigabit > 0 {
        say("saved and watched through a gigabit");
        gigabit = Some(through_gigabit(&guest, folder.path(), depth)?);
    }
    // It works on: the measurement did not break it, and measured a working guest.
    let units = guest.serial.units()?.context("the guest is not ready")?;
    guest.serial.wait_units(units + 1, READY_LIMIT)?;
    Ok(Measured {
        workload,
        ram_mib,
        full,
        increments,
        whole_pages,
        statistics,
        saves,
        gigabit,
        boot_s,
    })
}

/// The increments of another watch, into a repository of its own: nothing is there already.
fn increments_into(
    place: &Path,
    guest: &Guest,
    every_s: u32,
    count: u32,
    more: &[&str],
) -> Result<Vec<Value>> {
    let mut reports = watch(&Stillframe::init(place)?, guest, every_s, count, more)?;
    reports.remove(0);
    Ok(reports)
}

fn through_gigabit(guest: &Guest, folder: &Path, depth: &Depth) -> Result<Gigabit> {
    let mut qmp = guest.second_monitor()?;
    // As under Xen, the guest is paused.
    let save = peers::migrate_standing(&mut qmp, &folder.join("migration"), GIGABIT_MIB << 20)
        .context("QEMU's save through a gigabit")?;
    let place = folder.join("gigabit");
    let limit = ["--limit-write", &format!("{GIGABIT_MIB}M")];
    let increments = increments_into(&place, guest, depth.every_s, depth.gigabit, &limit)?;
    Ok(Gigabit { save, increments })
}

/// The reports of a watch, the full checkpoint's first.
fn watch(
    stillframe: &Stillframe,
    guest: &Guest,
    every_s: u32,
    count: u32,
    more: &[&str],
) -> Result<Vec<Value>> {
    let (pid, every, count_text) = (guest.pid_text(), format!("{every_s}s"), count.to_string());
    let mut arguments = vec!["watch", "--quiet", "--pid", &pid];
    arguments.extend(["--every", &every, "--count", &count_text]);
    arguments.extend(more);
    let reports = stillframe.json_lines(&arguments)?;
    // Only then is what follows the first an increment.
    let increments = reports.iter().skip(1);
    if reports.len() != count as usize || increments.clone().any(|line| line["parent"].is_null()) {
        bail!("{count} checkpoints, each upon the one before, were requested: {reports:?}");
    }
    Ok(reports)
}

fn statistics(stillframe: &Stillframe, reports: &[Value]) -> Result<Value> {
    let [.., older, newer] = reports else {
        bail!("two checkpoints are needed");
    };
    let id = |report: &Value| report["checkpoint"].as_str().map(str::to_owned);
    let (older, newer) = id(older)
        .zip(id(newer))
        .context("a checkpoint without id")?;
    stillframe.json(&["stats", &older, &newer])
}

/// In turns, so that all ways see the same machine.
fn saves(guest: &Guest, folder: &Path, times: u32) -> Result<Vec<Vec<Saved>>> {
    let file = folder.join("migration");
    let mut qmp = guest.second_monitor()?;
    let mut saves = vec![Vec::new(); WAYS.len()];
    for _ in 0..times {
        for ((name, capabilities), saves) in WAYS.iter().zip(&mut saves) {
            let saved = peers::migrate_to_file(&mut qmp, &file, capabilities);
            saves.push(saved.with_context(|| format!("QEMU's save, {name}"))?);
        }
    }
    Ok(saves)
}

impl Measured {
    /// A number of each increment, by its place in the report.
    fn numbers(lines: &[Value], place: &str) -> Result<Vec<f64>> {
        let numbers = lines.iter().map(|line| {
            let number = line.pointer(place).and_then(Value::as_f64);
            number.with_context(|| format!("a report lacks {place}"))
        });
        numbers.collect()
    }

    fn mean(lines: &[Value], place: &str) -> Result<f64> {
        Ok(super::mean(&Measured::numbers(lines, place)?))
    }

    /// How many increments there are.
    pub fn increments(&self) -> usize {
        self.increments.len()
    }

    /// Pages of all RAM blocks.
    pub fn total_pages(&self) -> Result<f64> {
        Measured::mean(std::slice::from_ref(&self.full), "/pages/total")
    }

    /// The median increment, from its begin until it is durable.
    pub fn total_ms(&self) -> Result<f64> {
        Ok(percentile(&Measured::numbers(&self.increments, "/total_us")?, 0.5) / 1e3)
    }

    /// The checkpoint of all memory.
    pub fn full_ms(&self) -> Result<f64> {
        Ok(Measured::mean(std::slice::from_ref(&self.full), "/total_us")? / 1e3)
    }

    /// The median pause of an increment.
    pub fn pause_ms(&self) -> Result<f64> {
        let pauses = Measured::numbers(&self.increments, "/downtime_us/total")?;
        Ok(percentile(&pauses, 0.5) / 1e3)
    }

    /// Finding the written pages within the pause: the median.
    pub fn scan_us(&self) -> Result<f64> {
        let scans = Measured::numbers(&self.increments, "/downtime_us/scan")?;
        Ok(percentile(&scans, 0.5))
    }

    /// Comparing, making deltas and handing over, as a share of all increments' time in percent.
    pub fn compression_percent(&self) -> Result<f64> {
        let sum = |place: &str| -> Result<f64> {
            Ok(Measured::numbers(&self.increments, place)?.iter().sum())
        };
        let compression = sum("/phases_us/encode")? + sum("/phases_us/write")?;
        Ok(compression / sum("/total_us")? * 100.0)
    }

    /// The bytes of an increment in the repository.
    pub fn stored_bytes(&self) -> Result<f64> {
        Measured::mean(&self.increments, "/bytes_stored")
    }

    /// The bytes of an increment page by page: all pages that were written.
    pub fn captured_bytes(&self) -> Result<f64> {
        Ok(Measured::mean(&self.increments, "/pages/captured")? * PAGE_BYTES as f64)
    }

    /// The same of those pages only whose content was not found to be the parent's.
    pub fn changed_bytes(&self) -> Result<f64> {
        let unchanged = Measured::mean(&self.increments, "/pages/unchanged")? * PAGE_BYTES as f64;
        Ok(self.captured_bytes()? - unchanged)
    }

    /// The bytes of an increment of the second watch in the repository, and page by page.
    pub fn whole_pages_bytes(&self) -> Result<(f64, f64)> {
        let stored = Measured::mean(&self.whole_pages, "/bytes_stored")?;
        let captured = Measured::mean(&self.whole_pages, "/pages/captured")? * PAGE_BYTES as f64;
        Ok((stored, captured))
    }

    /// The median time of each of QEMU's ways.
    pub fn save_ms(&self) -> [f64; WAYS.len()] {
        self.of_saves(|saved| saved.total_ms)
    }

    /// The median size of what each of QEMU's ways writes.
    pub fn save_bytes(&self) -> [f64; WAYS.len()] {
        self.of_saves(|saved| saved.bytes as f64)
    }

    /// The median pause of each of QEMU's ways.
    pub fn save_pause_ms(&self) -> [f64; WAYS.len()] {
        self.of_saves(|saved| saved.pause_ms)
    }

    /// The faster of QEMU's ways, as the baseline.
    pub fn best_save_ms(&self) -> f64 {
        self.save_ms().into_iter().fold(f64::INFINITY, f64::min)
    }

    /// The smaller of what QEMU writes.
    pub fn best_save_bytes(&self) -> f64 {
        self.save_bytes().into_iter().fold(f64::INFINITY, f64::min)
    }

    fn of_saves(&self, pick: impl Fn(&Saved) -> f64) -> [f64; WAYS.len()] {
        std::array::from_fn(|way| {
            let picked: Vec<f64> = self.saves[way].iter().map(&pick).collect();
            percentile(&picked, 0.5)
        })
    }

    /// The times of QEMU's stream and of the median increment through a gigabit.
    pub fn gigabit_ms(&self) -> Result<(f64, f64)> {
        let gigabit = self.gigabit.as_ref().context("not measured")?;
        let totals = Measured::numbers(&gigabit.increments, "/total_us")?;
        Ok((gigabit.save.total_ms, percentile(&totals, 0.5) / 1e3))
    }

    /// A number that `stats` gave.
    pub fn statistic(&self, place: &str) -> Result<f64> {
        let number = self.statistics.pointer(place).and_then(Value::as_f64);
        number.with_context(|| format!("stats gave no {place}"))
    }

    /// Everything, as raw data.
    pub fn raw(&self) -> Value {
        let saves: Vec<Value> = WAYS
            .iter()
            .zip(&self.saves)
            .map(|((name, _), saves)| {
                let runs: Vec<Value> = saves.iter().map(raw_save).collect();
                json!({"way": name, "runs": runs})
            })
            .collect();
        let gigabit = self.gigabit.as_ref().map(
            |gigabit| json!({"save": raw_save(&gigabit.save), "increments": gigabit.increments}),
        );
        json!({
            "ram_mib": self.ram_mib,
            "boot_s": self.boot_s,
            "full": self.full,
            "increments": self.increments,
            "whole_pages": self.whole_pages,
            "stats": self.statistics,
            "saves": saves,
            "gigabit": gigabit,
        })
    }
}

fn raw_save(run: &Saved) -> Value {
    json!({"pause_ms": run.pause_ms, "total_ms": run.total_ms, "bytes": run.bytes})
}
