//! `cargo xtask bench restore-disks`: the time until a VM is back whose checkpoint holds a disk of 20 GB, of which 2 GiB have
//! content.
//!
//! Lazily: against the same restore of the same checkpoint without its disk (`--disks as-they-are`), in turns. Eagerly: the time
//! that the disk takes, against `qemu-img convert` of the same disk to the same place, with the cache mode that is faster. The VM
//! does not run before our image is flushed; `qemu-img` flushes with one mode only. All that is read is in the page cache.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Kind, Setup, Workload};
use stillframe_harness::random::Random;
use stillframe_harness::results::{self, Claim, Goal, percentile};
use stillframe_harness::running::PATIENCE;

use super::host_memory;
use super::restore::restored_with;

const BENCH: &str = "restore-disks";
const COMMAND: &str = "cargo xtask bench restore-disks";
const TURNS: usize = 7;
const RAM_MIB: u32 = 1024;
const FILLED_MIB: u32 = 640;
const DISK_BYTES: u64 = 20_000_000_000 / 4096 * 4096;
/// Pieces of 1 MiB with content, at random places.
const PIECES: u64 = 2048;
const MIB: usize = 1 << 20;
/// The modes in which `qemu-img convert` writes: its default, which leaves the content to the host's cache, and one that flushes.
const MODES: [&str; 2] = ["unsafe", "writeback"];

/// Times in milliseconds, one a turn.
#[derive(Default)]
struct Measured {
    without_disk: Vec<f64>,
    lazy: Vec<f64>,
    /// Until the image is complete.
    complete: Vec<f64>,
    eager: Vec<f64>,
    convert: [Vec<f64>; 2],
    reports: Vec<Value>,
}

/// Runs the bench and writes `docs/results/restore-disks/`.
pub fn run() -> Result<()> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-restore-disks-")
        .tempdir()?;
    let disk = folder.path().join("disk.img");
    make_disk(&disk)?;
    let drive = format!("file={},format=raw,if=virtio", disk.display());
    let mut setup = Setup::new(Kind::Private).with(&["-drive", &drive]);
    setup.ram_mib = RAM_MIB;
    setup.workload = Workload {
        mib: FILLED_MIB,
        pattern: "random",
        tick_ms: 200,
        writes_per_tick: 1000,
        share: 64,
    };
    let guest = setup.boot()?;
    guest.serial.wait_ticks(3, PATIENCE)?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let pid = guest.pid_text();
    let line = ["checkpoint", "--pid", &pid, "--disks", "capture"];
    let checkpoint = stillframe.json(&line)?;
    ensure!(checkpoint["disks"][0].is_object(), "{checkpoint}");
    drop(guest);
    let mut measured = Measured::default();
    for turn in 1..=TURNS {
        measure(&stillframe, (folder.path(), &disk), &mut measured)?;
        eprintln!("turn {turn} of {TURNS}");
    }
    record(&measured)
}

/// Content that compresses to about a half, of which no two pages are equal.
fn make_disk(path: &Path) -> Result<()> {
    use std::os::unix::fs::FileExt;
    let file = fs::File::create(path)?;
    file.set_len(DISK_BYTES)?;
    let mut random = Random::new(20);
    let mut piece = vec![0u8; MIB];
    for _ in 0..PIECES {
        for words in piece.chunks_exact_mut(16) {
            let word = random.below(u64::MAX).to_le_bytes();
            words[..8].copy_from_slice(&word);
            words[8..].fill(0x5a);
        }
        let at = random.below(DISK_BYTES / MIB as u64) * MIB as u64;
        file.write_all_at(&piece, at)?;
    }
    file.sync_all()?;
    Ok(())
}

/// Each way once.
fn measure(
    stillframe: &Stillframe,
    (folder, disk): (&Path, &Path),
    measured: &mut Measured,
) -> Result<()> {
    let (qmp, new) = (folder.join("x.qmp"), folder.join("new"));
    let runs_ms = |report: &Value| -> Result<f64> {
        let us = report["lazy"]["runs_after_us"].as_f64();
        Ok(us.context("no time")? / 1e3)
    };
    host_memory::prepare(FILLED_MIB);
    let report = restored_with(stillframe, &qmp, &["--lazy", "--disks", "as-they-are"])?;
    measured.without_disk.push(runs_ms(&report)?);
    measured.reports.push(report);
    let lazy = format!("lazy={}", new.display());
    host_memory::prepare(FILLED_MIB);
    let report = restored_with(stillframe, &qmp, &["--lazy", "--disks", &lazy])?;
    measured.lazy.push(runs_ms(&report)?);
    let complete = report["total_us"].as_f64().context("no time")?;
    measured.complete.push(complete / 1e3);
    measured.reports.push(report);
    fs::remove_dir_all(&new)?;
    let eager = format!("new={}", new.display());
    host_memory::prepare(FILLED_MIB);
    let report = restored_with(stillframe, &qmp, &["--disks", &eager])?;
    let us = report["phases_us"]["disks"].as_f64().context("no time")?;
    measured.eager.push(us / 1e3);
    measured.reports.push(report);
    fs::remove_dir_all(&new)?;
    for (mode, times) in MODES.iter().zip(&mut measured.convert) {
        fs::create_dir(&new)?;
        host_memory::settle();
        let begin = Instant::now();
        let mut command = Command::new("qemu-img");
        command.args(["convert", "-f", "raw", "-O", "raw", "-t", mode]);
        let ended = command.args([disk, &new.join("disk.img")]).output()?;
        times.push(begin.elapsed().as_secs_f64() * 1e3);
        ensure!(ended.status.success(), "{ended:?}");
        fs::remove_dir_all(&new)?;
    }
    Ok(())
}

fn record(measured: &Measured) -> Result<()> {
    let median = |times: &[f64]| percentile(times, 0.5);
    let converts = measured.convert.each_ref().map(|times| median(times));
    let convert = converts[0].min(converts[1]);
    let ms = |times: &[f64]| format!("{:.0} ms", median(times));
    let table = format!(
        "| lazy, without the disk: guest runs | lazy, with it: guest runs | its image is complete | eager: the disk | qemu-img convert | the same, flushed |\n\
         | --- | --- | --- | --- | --- | --- |\n\
         | {} | {} | {} | {} | {} | {} |\n",
        ms(&measured.without_disk),
        ms(&measured.lazy),
        ms(&measured.complete),
        ms(&measured.eager),
        ms(&measured.convert[0]),
        ms(&measured.convert[1]),
    );
    println!("{table}");
    let head = format!(
        "# Bench: restore-disks\n\n`{COMMAND}`, commit {}. A disk of 20 GB, {PIECES} MiB of it with content; a guest of {RAM_MIB} MiB with \
         {FILLED_MIB} MiB filled. Medians of {TURNS} turns; TCG; everything in the page cache, nothing else running.\n\n",
        results::commit()
    );
    fs::write(results::folder(BENCH)?.join("README.md"), head + &table)?;
    let raw = json!({
        "without_disk_ms": measured.without_disk, "lazy_ms": measured.lazy, "complete_ms": measured.complete,
        "eager_disk_ms": measured.eager, "convert_ms": measured.convert, "reports": measured.reports,
    });
    results::write_raw(BENCH, "raw.jsonl", &[raw])?;
    let claim = |id, goal, value| Claim::new(id, goal, value, "ratio", COMMAND);
    let lazy = median(&measured.lazy) / median(&measured.without_disk);
    let eager = median(&measured.eager) / convert;
    results::write_summary(
        BENCH,
        &[
            claim("lazy-disk", Goal::AtMost(1.3), lazy),
            claim("eager-disk", Goal::AtMost(1.2), eager),
        ],
    )
}
