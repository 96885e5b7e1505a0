//! `cargo xtask bench restore`: the time until a VM is back, for guests of different size. The peers are QEMU
//! restoring the same VM from its own mapped-ram file, and by `loadvm`.
//!
//! QEMU's start, which both sides need, is measured by itself, and left out of the ratios of lazy restores. All data
//! that both read is in the page cache. The key is made from the password each time, except for the restores that are called
//! unlocked. Before each, nothing else works on this machine, and free memory is touched once ([`host_memory`]).

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::{host_memory, peers};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup, Workload};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::results::{self, Claim, Goal, percentile};

const COMMAND: &str = "cargo xtask bench restore";
const TURNS: usize = 7;
/// The name of the state that `savevm` makes.
const VMSTATE: &str = "bench";
/// A disk of the guest has the state of `savevm` in it, and QEMU writes its header when it ends.
const DISKS: &str = "--disks-as-they-are";
/// Time for a guest to fill its memory under TCG.
const FILL_LIMIT: Duration = Duration::from_secs(600);

/// RAM and how much of it the workload has filled, in MiB.
const SMALL: (u32, u32) = (1024, 640);
pub(super) const MIDDLE: (u32, u32) = (4096, 2560);
const LARGE: (u32, u32) = (8192, 5120);

/// Times in milliseconds, one a turn.
#[derive(Default)]
struct Measured {
    qemu_start: Vec<f64>,
    lazy: Vec<f64>,
    /// With the key in the kernel already.
    unlocked: Vec<f64>,
    eager: Vec<f64>,
    mapped_ram: Vec<f64>,
    loadvm: Vec<f64>,
    reports: Vec<Value>,
    unlocked_reports: Vec<Value>,
}

impl Measured {
    fn start(&self) -> f64 {
        percentile(&self.qemu_start, 0.5)
    }

    /// QEMU's own way, the faster of both, its start included.
    fn peer(&self) -> f64 {
        percentile(&self.mapped_ram, 0.5).min(percentile(&self.loadvm, 0.5))
    }

    /// A median without QEMU's start.
    fn without_start(&self, times: &[f64]) -> f64 {
        percentile(times, 0.5) - self.start()
    }
}

/// Runs the bench and writes `docs/results/restore/`.
pub fn run() -> Result<()> {
    let mut all = Vec::new();
    for (size, with_peer) in [(SMALL, false), (MIDDLE, true), (LARGE, false)] {
        eprintln!("{} MiB, {} MiB of it filled", size.0, size.1);
        all.push((size, measure(size, with_peer)?));
    }
    record(&all)
}

fn measure((ram_mib, mib): (u32, u32), with_peer: bool) -> Result<Measured> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-restore-")
        .tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let file = folder.path().join("mapped-ram");
    let disk = match with_peer {
        true => peers::make_disk(&folder.path().join("disk.qcow2"))?,
        false => Vec::new(),
    };
    let guest = full_guest((ram_mib, mib), (200, 2000), disk)?;
    if with_peer {
        peers::keep_in_disk(&mut guest.second_monitor()?, VMSTATE)?;
    }
    let pid = guest.pid_text();
    stillframe.ok(&[
        "watch", "--pid", &pid, "--every", "1s", "--count", "3", "--quiet",
    ])?;
    if with_peer {
        peers::save_mapped_ram(&mut guest.second_monitor()?, &file)?;
    }
    drop(guest);
    let qmp = folder.path().join("x.qmp");
    let mut measured = Measured::default();
    for turn in 1..=TURNS {
        let line = waiting_qemu(&stillframe, &qmp)?;
        host_memory::settle();
        measured.qemu_start.push(start_ms(&line, &qmp)?);
        for (options, unlocked, times) in [
            (&["--lazy"][..], false, &mut measured.lazy),
            (&["--lazy"][..], true, &mut measured.unlocked),
            (&[][..], false, &mut measured.eager),
        ] {
            let lock: &[&str] = if unlocked {
                &["--for", "10m"]
            } else {
                &["--end"]
            };
            stillframe.ok(&[&["unlock"], lock].concat())?;
            host_memory::prepare(mib);
            let report = restored(&stillframe, &qmp, options)?;
            let us = report["lazy"]["runs_after_us"].as_f64();
            let us = us.or(report["total_us"].as_f64()).context("no time")?;
            times.push(us / 1e3);
            match unlocked {
                true => measured.unlocked_reports.push(report),
                false => measured.reports.push(report),
            }
        }
        if with_peer {
            host_memory::prepare(mib);
            measured.mapped_ram.push(mapped_ram_ms(&line, &qmp, &file)?);
            host_memory::prepare(mib);
            measured.loadvm.push(loadvm_ms(&line, &qmp)?);
        }
        eprintln!("turn {turn} of {TURNS}");
    }
    Ok(measured)
}

/// A guest with these arguments whose workload has filled `mib` MiB of its memory, and makes `writes_per_tick` writes
/// every `tick_ms` ms.
pub(super) fn full_guest(
    (ram_mib, mib): (u32, u32),
    (tick_ms, writes_per_tick): (u32, u32),
    extra: Vec<String>,
) -> Result<Guest> {
    let workload = Workload {
        mib,
        pattern: "random",
        tick_ms,
        writes_per_tick,
        share: 512,
    };
    let setup = Setup {
        ram_mib,
        workload,
        extra,
        ..Setup::new(Kind::Private)
    };
    let guest = setup.start()?;
    guest.serial.wait_ticks(2, FILL_LIMIT)?;
    Ok(guest)
}

/// The command that starts a QEMU which waits for the checkpoint's state.
pub(super) fn waiting_qemu(stillframe: &Stillframe, qmp: &Path) -> Result<String> {
    let qmp = qmp.display().to_string();
    let line = stillframe.ok(&["restore", "latest", DISKS, "--qmp", &qmp, "--print-command"])?;
    Ok(line.trim().replacen("&& ", "&& exec ", 1))
}

fn spawn(line: &str) -> Result<Child> {
    let mut shell = Command::new("sh");
    shell.args(["-c", line]).stdin(Stdio::null());
    Ok(shell.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?)
}

/// Starts that QEMU, hands it over with the time that it took to answer, and ends it.
fn with_qemu<T>(
    line: &str,
    qmp: &Path,
    work: impl FnOnce(&mut Qmp, Duration) -> Result<T>,
) -> Result<T> {
    let _ = std::fs::remove_file(qmp);
    let begin = Instant::now();
    let mut qemu = spawn(line)?;
    let done = Qmp::connect(qmp).and_then(|mut monitor| {
        let done = work(&mut monitor, begin.elapsed());
        let _ = monitor.execute("quit", json!({}));
        done
    });
    if done.is_err() {
        let _ = qemu.kill();
    }
    qemu.wait()?;
    done
}

pub(super) fn start_ms(line: &str, qmp: &Path) -> Result<f64> {
    with_qemu(line, qmp, |_, took| Ok(took.as_secs_f64() * 1e3))
}

/// QEMU's own way, its start included.
pub(super) fn mapped_ram_ms(line: &str, qmp: &Path, file: &Path) -> Result<f64> {
    with_qemu(line, qmp, |monitor, started| {
        let begin = Instant::now();
        peers::load_mapped_ram(monitor, file)?;
        monitor.execute("cont", json!({}))?;
        Ok((started + begin.elapsed()).as_secs_f64() * 1e3)
    })
}

/// QEMU's other way, its start included.
fn loadvm_ms(line: &str, qmp: &Path) -> Result<f64> {
    let (before, behind) = line
        .split_once("-incoming defer")
        .context("QEMU does not wait for a state")?;
    with_qemu(&[before, behind].concat(), qmp, |monitor, started| {
        let begin = Instant::now();
        peers::load_from_disk(monitor, VMSTATE)?;
        monitor.execute("cont", json!({}))?;
        Ok((started + begin.elapsed()).as_secs_f64() * 1e3)
    })
}

/// Restores with the disks as they are, and ends the VM.
fn restored(stillframe: &Stillframe, qmp: &Path, options: &[&str]) -> Result<Value> {
    restored_with(stillframe, qmp, &[&[DISKS], options].concat())
}

/// Restores, and ends the VM.
pub(super) fn restored_with(
    stillframe: &Stillframe,
    qmp: &Path,
    options: &[&str],
) -> Result<Value> {
    let _ = std::fs::remove_file(qmp);
    let text = qmp.display().to_string();
    let line = [&["restore", "latest", "--qmp", &text], options].concat();
    let report = stillframe.json(&line)?;
    let pid = report["pid"].as_i64().context("no pid")?;
    Qmp::connect(qmp)?.execute("quit", json!({}))?;
    let deadline = Instant::now() + Duration::from_secs(20);
    while Path::new(&format!("/proc/{pid}")).exists() {
        if Instant::now() > deadline {
            bail!("QEMU does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(report)
}

fn table(all: &[((u32, u32), Measured)]) -> String {
    let mut table = "| guest | QEMU's start | lazy: guest runs | lazy, unlocked | eager | QEMU, mapped-ram | QEMU, loadvm | lazy, start left out | lazy, unlocked, start left out | eager, start left out | QEMU, start left out |\n\
                     | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        .to_owned();
    for ((ram_mib, mib), measured) in all {
        let ms = |value: f64| match value.is_finite() {
            true => format!("{value:.0} ms"),
            false => "-".to_owned(),
        };
        table += &format!(
            "| {ram_mib} MiB, {mib} MiB filled | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |\n",
            ms(measured.start()),
            ms(percentile(&measured.lazy, 0.5)),
            ms(percentile(&measured.unlocked, 0.5)),
            ms(percentile(&measured.eager, 0.5)),
            ms(percentile(&measured.mapped_ram, 0.5)),
            ms(percentile(&measured.loadvm, 0.5)),
            ms(measured.without_start(&measured.lazy)),
            ms(measured.without_start(&measured.unlocked)),
            ms(measured.without_start(&measured.eager)),
            ms(measured.without_start(&measured.mapped_ram)),
        );
    }
    table
}

fn record(all: &[((u32, u32), Measured)]) -> Result<()> {
    let [(_, small), (_, middle), (_, large)] = all else {
        bail!("a guest is missing");
    };
    let table = table(all);
    println!("{table}");
    let head = format!(
        "# Bench: restore\n\n`{COMMAND}`, commit {}. Medians of {TURNS} turns; TCG; everything in the page cache, nothing else running, and free memory touched before.\n\n",
        results::commit()
    );
    std::fs::write(results::folder("restore")?.join("README.md"), head + &table)?;
    let raw: Vec<Value> = all
        .iter()
        .map(|((ram_mib, mib), measured)| {
            json!({
                "ram_mib": ram_mib, "filled_mib": mib, "qemu_start_ms": measured.qemu_start,
                "lazy_ms": measured.lazy, "unlocked_ms": measured.unlocked, "eager_ms": measured.eager,
                "mapped_ram_ms": measured.mapped_ram, "loadvm_ms": measured.loadvm, "reports": measured.reports,
                "unlocked_reports": measured.unlocked_reports,
            })
        })
        .collect();
    results::write_raw("restore", "raw.jsonl", &raw)?;
    let peer = middle.without_start(&middle.mapped_ram);
    let claim = |id, goal, value| Claim::new(id, goal, value, "ratio", COMMAND);
    results::write_summary(
        "restore",
        &[
            claim(
                "resume-speedup",
                Goal::AtLeast(20.0),
                peer / middle.without_start(&middle.lazy),
            ),
            claim(
                "resume-speedup-unlocked",
                Goal::AtLeast(20.0),
                peer / middle.without_start(&middle.unlocked),
            ),
            claim(
                "resume-flat",
                Goal::AtMost(1.3),
                large.without_start(&large.lazy) / small.without_start(&small.lazy),
            ),
            claim(
                "eager-speedup",
                Goal::AtLeast(1.0),
                middle.peer() / percentile(&middle.eager, 0.5),
            ),
        ],
    )
}
