//! `cargo xtask bench checkpoint`: the pause against QEMU's own floor, beside QEMU's own ways to save.
//!
//! 1 GiB guest, 64 MiB random writer; checkpoints every 2 s. They alternate with the floor (stop, device state,
//! cont, with no engine attached), so that both see the same machine.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::peers::{self, Saved};
use super::slowdown;
use crate::chart::{self, Labels};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup, Workload};
use stillframe_harness::health;
use stillframe_harness::results::{self, Claim, Goal, percentile};

/// The median pauses, drawn.
const PICTURE: &str = "pauses.svg";
const COMMAND: &str = "cargo xtask bench checkpoint";
/// In turns: this many floors, then one attach with this many increments.
const FLOORS_A_TURN: usize = 10;
const INCREMENTS_A_TURN: usize = 10;
const MIB: f64 = (1 << 20) as f64;
/// Allowed whatever the guest writes.
const FIXED_BYTES: f64 = 256.0 * MIB;

/// One attach: its reports, and the engine's peak memory.
struct Watched {
    reports: Vec<Value>,
    peak_bytes: u64,
}

/// Runs the bench and writes `docs/results/checkpoint/`.
pub fn run(turns: usize) -> Result<()> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-bench-")
        .tempdir()?;
    let disk = folder.path().join("disk.qcow2");
    // 45k random words in 2 s touch 15 to 16 thousand of its 16384 pages.
    let workload = Workload {
        mib: 64,
        pattern: "random",
        tick_ms: 200,
        writes_per_tick: 4500,
        share: 32,
    };
    let mut setup = Setup {
        ram_mib: 1024,
        workload,
        ..Setup::new(Kind::Private)
    };
    setup.extra = peers::make_disk(&disk)?;
    let guest = setup.boot()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let mut qmp = guest.second_monitor()?;
    let mut floors = Vec::new();
    let mut watched = Vec::new();
    for turn in 0..turns {
        for _ in 0..FLOORS_A_TURN {
            floors.push(peers::floor_ms(
                &mut qmp,
                Path::new("/dev/shm/stillframe-floor"),
            )?);
            std::thread::sleep(Duration::from_millis(700));
        }
        watched.push(watch(&stillframe, &guest, folder.path())?);
        eprintln!("turn {} of {turns}", turn + 1);
    }
    let _ = fs::remove_file("/dev/shm/stillframe-floor");
    let peers = saves(&mut qmp, &disk, folder.path())?;
    guest.serial.wait_more(1, Duration::from_secs(60))?;
    drop(guest);
    let slowdown = slowdown::measure(6)?;
    report(&floors, &watched, &peers, &slowdown)
}

fn watch(stillframe: &Stillframe, guest: &Guest, folder: &Path) -> Result<Watched> {
    let out = folder.join("watch.jsonl");
    let (pid, count) = (guest.pid_text(), (INCREMENTS_A_TURN + 1).to_string());
    let mut engine = stillframe
        .command(&[
            "watch", "--pid", &pid, "--every", "2s", "--count", &count, "--json", "--quiet",
        ])?
        .stdout(File::create(&out)?)
        .spawn()?;
    let mut peak_bytes = 0;
    let begin = Instant::now();
    let status = loop {
        if let Some(status) = engine.try_wait()? {
            break status;
        }
        let peak_kib = health::memory_kib(engine.id(), "VmHWM").unwrap_or_default();
        peak_bytes = peak_bytes.max(peak_kib * 1024);
        if begin.elapsed() > Duration::from_secs(300) {
            engine.kill()?;
            bail!("watch did not end");
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    if !status.success() {
        bail!("watch ended with {status}");
    }
    let reports = fs::read_to_string(&out)?
        .lines()
        .map(|line| Ok(serde_json::from_str(line)?))
        .collect::<Result<Vec<Value>>>()?;
    Ok(Watched {
        reports,
        peak_bytes,
    })
}

/// QEMU's own ways, three times each: median by pause.
fn saves(
    qmp: &mut stillframe_harness::qmp::Qmp,
    disk: &Path,
    folder: &Path,
) -> Result<Vec<(&'static str, Vec<Saved>)>> {
    let file = folder.join("migration");
    let mut all = Vec::new();
    let mut savevm = Vec::new();
    let mut mapped = Vec::new();
    let mut background = Vec::new();
    for _ in 0..3 {
        savevm.push(peers::savevm(qmp, disk)?);
        mapped.push(peers::migrate_to_file(qmp, &file, &["mapped-ram"])?);
        background.push(peers::migrate_to_file(
            qmp,
            &file,
            &["background-snapshot"],
        )?);
    }
    all.push(("savevm", savevm));
    all.push(("migrate file: mapped-ram", mapped));
    all.push(("background-snapshot", background));
    Ok(all)
}

/// Everything measured.
struct Measured<'a> {
    floors: &'a [f64],
    increments: Vec<&'a Value>,
    peers: &'a [(&'static str, Vec<Saved>)],
    slowdown: &'a slowdown::Slowdown,
    peak_bytes: f64,
}

impl Measured<'_> {
    fn numbers(&self, pick: impl Fn(&Value) -> Option<f64>) -> Result<Vec<f64>> {
        let picked = self.increments.iter().map(|line| pick(line));
        picked
            .map(|number| number.context("a report lacks a number"))
            .collect()
    }

    fn pauses_ms(&self) -> Result<Vec<f64>> {
        self.numbers(|line| line["downtime_us"]["total"].as_f64().map(|us| us / 1e3))
    }

    fn captured_pages(&self) -> Result<Vec<f64>> {
        self.numbers(|line| line["pages"]["captured"].as_f64())
    }

    fn largest_dirty_bytes(&self) -> Result<f64> {
        Ok(self.captured_pages()?.into_iter().fold(0.0, f64::max) * 4096.0)
    }

    /// In the order of the promises in [`summarise`].
    fn values(&self) -> Result<[f64; 4]> {
        let floor = percentile(self.floors, 0.5);
        let pauses = self.pauses_ms()?;
        Ok([
            percentile(&pauses, 0.5) / floor,
            percentile(&pauses, 0.99) / floor,
            self.slowdown.percent(),
            (self.peak_bytes - FIXED_BYTES).max(0.0) / self.largest_dirty_bytes()?,
        ])
    }

    fn table(&self) -> Result<String> {
        let mut table = format!(
            "| way | pause p50 | pause p99 | total p50 | bytes p50 | n |\n| --- | --- | --- | --- | --- | --- |\n\
             | QEMU's floor: stop, device state, cont | {:.2} ms | {:.2} ms | - | - | {} |\n",
            percentile(self.floors, 0.5),
            percentile(self.floors, 0.99),
            self.floors.len()
        );
        table += &row(
            "stillframe, increment every 2 s",
            &self.pauses_ms()?,
            &self.numbers(|line| line["total_us"].as_f64().map(|us| us / 1e3))?,
            &self.numbers(|line| line["bytes_stored"].as_f64())?,
        );
        for (name, saved) in self.peers {
            let column = |pick: fn(&Saved) -> f64| saved.iter().map(pick).collect::<Vec<f64>>();
            table += &row(
                &format!("QEMU {name}"),
                &column(|saved| saved.pause_ms),
                &column(|saved| saved.total_ms),
                &column(|saved| saved.bytes as f64),
            );
        }
        Ok(table + &self.words()?)
    }

    /// The median pause of each way, beside each other.
    fn draw(&self, path: &Path) -> Result<()> {
        let ours = percentile(&self.pauses_ms()?, 0.5);
        let mut ways = vec![("Stillframe, every 2 s".to_owned(), ours)];
        for (name, saved) in self.peers {
            let pauses: Vec<f64> = saved.iter().map(|saved| saved.pause_ms).collect();
            ways.push((format!("QEMU {name}"), percentile(&pauses, 0.5)));
        }
        let (names, pauses): (Vec<String>, Vec<f64>) = ways.into_iter().unzip();
        let labels = Labels {
            title: "How long a VM of 1 GiB is stopped to be saved (median)",
            x: "",
            y: "ms",
        };
        chart::bars(path, labels, &names, &[("pause", pauses)])
    }

    fn words(&self) -> Result<String> {
        let [p50, p99, slowdown, _] = self.values()?;
        Ok(format!(
            "\nPause over the floor's median: p50 {p50:.2} x, p99 {p99:.2} x (p99 over p99: {:.2} x).\n\
             Pages captured an increment: median {:.0}. Guest slowdown while watched at 2 s: {slowdown:.2} %.\n\
             Engine memory: peak {:.0} MiB, largest dirty set {:.0} MiB.\n",
            percentile(&self.pauses_ms()?, 0.99) / percentile(self.floors, 0.99),
            percentile(&self.captured_pages()?, 0.5),
            self.peak_bytes / MIB,
            self.largest_dirty_bytes()? / MIB
        ))
    }
}

fn row(name: &str, pauses_ms: &[f64], totals_ms: &[f64], bytes: &[f64]) -> String {
    format!(
        "| {name} | {:.2} ms | {:.2} ms | {:.0} ms | {:.1} MiB | {} |\n",
        percentile(pauses_ms, 0.5),
        percentile(pauses_ms, 0.99),
        percentile(totals_ms, 0.5),
        percentile(bytes, 0.5) / MIB,
        pauses_ms.len()
    )
}

fn report(
    floors: &[f64],
    watched: &[Watched],
    peers: &[(&'static str, Vec<Saved>)],
    slowdown: &slowdown::Slowdown,
) -> Result<()> {
    // The first report of an attach is its full pass.
    let increments = watched
        .iter()
        .flat_map(|attach| attach.reports.iter().skip(1))
        .collect();
    let peak_bytes = watched
        .iter()
        .map(|attach| attach.peak_bytes)
        .max()
        .unwrap_or(0) as f64;
    let measured = Measured {
        floors,
        increments,
        peers,
        slowdown,
        peak_bytes,
    };
    let table = measured.table()?;
    println!("{table}");
    let head = format!(
        "# Bench: checkpoint\n\n`{COMMAND}`, commit {}. 1 GiB guest, 64 MiB random writer, TCG.\n\
         Raw data: `floors.jsonl`, `increments.jsonl`, `peers.jsonl`, `slowdown.jsonl`.\n\n![pauses]({PICTURE})\n\n",
        results::commit()
    );
    let folder = results::folder("checkpoint")?;
    fs::write(folder.join("README.md"), head + &table)?;
    measured.draw(&folder.join(PICTURE))?;
    let raw: Vec<Value> = measured
        .increments
        .iter()
        .map(|&line| line.clone())
        .collect();
    results::write_raw("checkpoint", "increments.jsonl", &raw)?;
    results::write_raw("checkpoint", "floors.jsonl", &[json!({"floor_ms": floors})])?;
    results::write_raw("checkpoint", "slowdown.jsonl", &[slowdown.raw()])?;
    let peers: Vec<Value> = peers
        .iter()
        .map(|(name, saved)| peer_raw(name, saved))
        .collect();
    results::write_raw("checkpoint", "peers.jsonl", &peers)?;
    summarise(measured.values()?)
}

fn peer_raw(name: &str, saved: &[Saved]) -> Value {
    let runs: Vec<Value> = saved
        .iter()
        .map(|run| json!({"pause_ms": run.pause_ms, "total_ms": run.total_ms, "bytes": run.bytes}))
        .collect();
    json!({"way": name, "runs": runs})
}

fn summarise(values: [f64; 4]) -> Result<()> {
    let promises = [
        ("pause-p50-ratio", 1.3, "ratio"),
        ("pause-p99-ratio", 2.5, "ratio"),
        ("guest-slowdown-2s", 2.0, "percent"),
        ("engine-memory-ratio", 1.2, "ratio"),
    ];
    let claims: Vec<Claim> = promises
        .into_iter()
        .zip(values)
        .map(|((claim, most, unit), value)| {
            Claim::new(claim, Goal::AtMost(most), value, unit, COMMAND)
        })
        .collect();
    results::write_summary("checkpoint", &claims)
}
