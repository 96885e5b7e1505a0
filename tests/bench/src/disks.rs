//! `cargo xtask bench disks`: the pause of a checkpoint that holds the disks, against that of one that does not, in turns
//! on the same guest. Between two checkpoints 1 or 200 MiB are written to the first disk. How the disks are captured is left to
//! the engine; beside it, 1 MiB always with a filter.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use stillframe_harness::cli::Stillframe;
use stillframe_harness::committing::make_image;
use stillframe_harness::guest::{Guest, Kind, Setup, Workload};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::results::{self, Claim, Goal, percentile};
use stillframe_harness::running::{PATIENCE, Running};

const BENCH: &str = "disks";
const COMMAND: &str = "cargo xtask bench disks";
const RAM_MIB: u32 = 512;
const DISK_MIB: u32 = 512;
/// MiB that are written in an interval, and how the disks are captured.
const WAYS: [(u32, &str); 3] = [(1, "auto"), (200, "auto"), (1, "filter")];
const TURNS: usize = 4;
/// Checkpoints of each watch; the first reads everything, and does not count.
const CHECKPOINTS: usize = 8;

/// Watches of one kind.
#[derive(Default)]
struct Series {
    /// Pauses in milliseconds.
    pauses: Vec<f64>,
    reports: Vec<Value>,
}

impl Series {
    fn median(&self) -> f64 {
        percentile(&self.pauses, 0.5)
    }

    /// Checkpoints whose first disk was copied in rounds.
    fn in_rounds(&self) -> usize {
        let disks = self.reports.iter().map(|report| &report["disks"][0]);
        disks.filter(|disk| disk["schedule"] == "rounds").count()
    }
}

/// One guest: without its disks, and with them in each way.
struct Measured {
    disks: usize,
    reference: Series,
    captured: [Series; WAYS.len()],
}

/// Runs the bench and writes `docs/results/disks/`.
pub fn run() -> Result<()> {
    let measured = [measure(1)?, measure(3)?];
    record(&measured)
}

fn measure(disks: usize) -> Result<Measured> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-disks-")
        .tempdir()?;
    let mut setup = Setup::new(Kind::Private);
    for number in 0..disks {
        let path = folder.path().join(format!("{number}.img"));
        make_image(&path, "raw", DISK_MIB)?;
        fill(&path, DISK_MIB)?;
        let drive = format!("file={},format=raw,if=virtio", path.display());
        setup = setup.with(&["-drive", &drive]);
    }
    setup.ram_mib = RAM_MIB;
    setup.workload = Workload {
        mib: 64,
        pattern: "random",
        tick_ms: 200,
        writes_per_tick: 1000,
        share: 64,
    };
    let guest = setup.boot()?;
    guest.serial.wait_ticks(3, PATIENCE)?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let mut measured = Measured {
        disks,
        reference: Series::default(),
        captured: Default::default(),
    };
    for turn in 1..=TURNS {
        let all = &mut measured;
        let reference = ["--disks", "reference"];
        let (mib, _) = WAYS[0];
        watch(&stillframe, &guest, &reference, mib, &mut all.reference)?;
        for ((mib, schedule), series) in WAYS.into_iter().zip(&mut all.captured) {
            let disks = ["--disks", "capture", "--disk-schedule", schedule];
            watch(&stillframe, &guest, &disks, mib, series)?;
        }
        eprintln!("{disks} disks: turn {turn} of {TURNS}");
    }
    guest.serial.wait_more(1, PATIENCE)?;
    Ok(measured)
}

/// Gives a disk content: holes are not copied when they are overwritten.
pub(super) fn fill(path: &Path, mib: u32) -> Result<()> {
    let write = format!("write -P 90 0 {mib}M");
    let ended = Command::new("qemu-io")
        .args(["-f", "raw", "-c", &write])
        .arg(path)
        .output()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok(())
}

/// Watches the guest while `mib` MiB an interval are written to its first disk.
fn watch(
    stillframe: &Stillframe,
    guest: &Guest,
    disks: &[&str],
    mib: u32,
    series: &mut Series,
) -> Result<()> {
    let (pid, count) = (guest.pid_text(), CHECKPOINTS.to_string());
    let line = ["watch", "--pid", &pid, "--every", "2s", "--count", &count];
    let more = ["--json", "--quiet"];
    let command = stillframe.command(&[&line[..], disks, &more].concat())?;
    let mut watch = Running::start(command)?;
    let mut monitor = guest.second_monitor()?;
    let device = device(&mut monitor, "virtio0")?;
    for taken in 1..CHECKPOINTS {
        watch.wait_results(taken)?;
        let (byte, at) = (taken * 16 + 1, (taken as u32 * 37) % (DISK_MIB - mib));
        let said = monitor.human(&format!(
            "qemu-io -d {device} \"write -P {byte} {at}M {mib}M\""
        ))?;
        ensure!(said.trim().is_empty(), "{said}");
    }
    let ended = watch.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    for report in ended.results()?.into_iter().skip(1) {
        let pause = report["downtime_us"]["total"].as_f64();
        series
            .pauses
            .push(pause.context("a report without a pause")? / 1e3);
        series.reports.push(report);
    }
    Ok(())
}

/// QEMU's name for the device of a drive.
pub(super) fn device(monitor: &mut Qmp, drive: &str) -> Result<String> {
    let drives = monitor.execute("query-block", json!({}))?;
    let mut drives = drives.as_array().into_iter().flatten();
    let found = drives.find(|known| known["device"] == drive);
    let device = found.and_then(|drive| drive["qdev"].as_str());
    Ok(device
        .with_context(|| format!("no drive {drive}"))?
        .to_owned())
}

fn record(measured: &[Measured; 2]) -> Result<()> {
    let mut table =
        "| disks | pause without p50 | with, 1 MiB written | with, 200 MiB written | with, 1 MiB, filter | in rounds | n |\n\
                     | --- | --- | --- | --- | --- | --- | --- |\n"
            .to_owned();
    let mut raw = Vec::new();
    for one in measured {
        let [little, much, filter] = &one.captured;
        table += &format!(
            "| {} | {:.2} ms | {:.2} ms | {:.2} ms | {:.2} ms | {}, {} | {} |\n",
            one.disks,
            one.reference.median(),
            little.median(),
            much.median(),
            filter.median(),
            little.in_rounds(),
            much.in_rounds(),
            little.pauses.len()
        );
        let [reference, little, much, filter] =
            [&one.reference, little, much, filter].map(|series| &series.reports);
        raw.push(json!({
            "disks": one.disks, "reference": reference, "little": little, "much": much, "filter": filter,
        }));
    }
    println!("{table}");
    let head = format!(
        "# Bench: disks\n\n`{COMMAND}`, commit {}. {RAM_MIB} MiB guest, TCG, that writes to its memory; disks of {DISK_MIB} MiB, raw, \
         full; `auto` every 2 s, in turns. *In rounds*: of the {} checkpoints each with 1 and with 200 MiB. The same is written to the first disk without captured disks as with 1 MiB. \
         Raw data: `raw.jsonl.zst` (zstd).\n\n",
        results::commit(),
        measured[0].captured[0].pauses.len(),
    );
    std::fs::write(results::folder(BENCH)?.join("README.md"), head + &table)?;
    results::write_raw(BENCH, "raw.jsonl", &raw)?;
    let more = |one: &Measured| one.captured[0].median() - one.reference.median();
    let [one, three] = measured;
    let flat = one.captured[1].median() / one.captured[0].median();
    results::write_summary(
        BENCH,
        &[
            Claim::new("disks-pause", Goal::AtMost(1.5), more(one), "ms", COMMAND),
            Claim::new(
                "disks-pause-three",
                Goal::AtMost(3.5),
                more(three),
                "ms",
                COMMAND,
            ),
            Claim::new(
                "disks-pause-flat",
                Goal::AtMost(1.1),
                flat,
                "ratio",
                COMMAND,
            ),
        ],
    )
}
