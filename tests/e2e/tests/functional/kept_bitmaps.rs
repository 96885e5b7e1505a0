//! `--keep-bitmaps`: an engine that comes back reads only what was written to the disks since the last checkpoint, whatever
//! became of the engine before.

use std::fs;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::committing::{Committing, expect_no_copy};
use stillframe_harness::fault::with_fault;
use stillframe_harness::health::{children, expect_untouched};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::running::{Running, signal};

/// Bytes of the disk that is always read when nothing is known of it: the ballast behind the journal.
const BALLAST_BYTES: u64 = 16 << 20;

fn checkpoint(it: &Committing, more: &[&str]) -> Result<Value> {
    let pid = it.guest.pid_text();
    let line = [&["checkpoint", "--pid", &pid], more].concat();
    it.stillframe.json(&line)
}

fn kept(it: &Committing) -> Result<Value> {
    checkpoint(it, &["--keep-bitmaps"])
}

/// Bytes that a checkpoint read of the disk.
fn bytes_read(report: &Value) -> Result<u64> {
    let read = report["disks"][0]["bytes_read"].as_u64();
    read.context("no disk was read")
}

/// The bitmaps that record what is written after a checkpoint.
fn bitmaps(monitor: &mut Qmp) -> Result<usize> {
    let nodes = monitor.execute("query-named-block-nodes", json!({ "flat": true }))?;
    Ok(nodes.to_string().matches("\"stillframe-since-").count())
}

/// The bytes of the disk in the checkpoint of this report.
fn exported(it: &Committing, report: &Value) -> Result<Vec<u8>> {
    let id = report["checkpoint"].as_str().context("no id")?;
    let out = it.guest.folder().join("exported.img");
    let out_text = out.display().to_string();
    let line = ["export", id, "--disk", "journal", "-o", &out_text];
    it.stillframe.ok(&line)?;
    let content = fs::read(&out)?;
    fs::remove_file(&out)?;
    Ok(content)
}

/// One more checkpoint has the disk to the byte, of a VM that stands still.
fn expect_exact_disk(it: &Committing, monitor: &mut Qmp) -> Result<()> {
    monitor.execute("stop", json!({}))?;
    let last = kept(it)?;
    let same = exported(it, &last)? == fs::read(&it.disk)?;
    ensure!(same, "the disk is another: {last}");
    monitor.execute("cont", json!({}))?;
    Ok(())
}

/// The same, and the checkpoint of this report has the disk of its own moment.
fn expect_whole_disk(it: &Committing, report: &Value, monitor: &mut Qmp) -> Result<()> {
    expect_exact_disk(it, monitor)?;
    let of_report = it.guest.folder().join("of-report.img");
    fs::write(&of_report, exported(it, report)?)?;
    it.records_of_raw(&of_report)?;
    Ok(())
}

/// Each command is an engine of its own.
#[test]
fn a_checkpoint_reads_what_was_written_since_the_one_before() -> Result<()> {
    let it = Committing::journal("kept", "raw")?;
    let mut monitor = it.guest.second_monitor()?;
    let first = kept(&it)?;
    ensure!(bytes_read(&first)? >= BALLAST_BYTES, "{first}");
    for _ in 0..3 {
        it.guest.serial.wait_more_committed(5)?;
        let report = kept(&it)?;
        let read = bytes_read(&report)?;
        ensure!(read > 0 && read < BALLAST_BYTES / 2, "{report}");
        ensure!(bitmaps(&mut monitor)? == 1, "not one bitmap");
        expect_whole_disk(&it, &report, &mut monitor)?;
    }
    // A watch goes on, and so does what follows it. A rewind loses nothing: what it writes is recorded.
    let pid = it.guest.pid_text();
    let line = ["watch", "--pid", &pid, "--every", "200ms", "--count", "2"];
    let line = [&line[..], &["--keep-bitmaps", "--json"]].concat();
    let out = it.stillframe.command(&line)?.output()?;
    let text = String::from_utf8(out.stdout)?;
    let report: Value = serde_json::from_str(text.lines().next().context("no report")?)?;
    ensure!(bytes_read(&report)? < BALLAST_BYTES / 2, "{report}");
    let first = first["checkpoint"].as_str().context("no id")?;
    it.stillframe.ok(&["rewind", first, "--pid", &pid])?;
    let report = kept(&it)?;
    ensure!(bytes_read(&report)? < BALLAST_BYTES / 2, "{report}");
    expect_whole_disk(&it, &report, &mut monitor)?;
    // Without the option nothing stays; the bitmap that is there is used.
    let report = checkpoint(&it, &[])?;
    ensure!(bytes_read(&report)? < BALLAST_BYTES / 2, "{report}");
    expect_no_copy(&mut monitor)?;
    let report = kept(&it)?;
    ensure!(bytes_read(&report)? >= BALLAST_BYTES, "{report}");
    expect_untouched(&it.guest, &mut monitor)
}

/// The bitmap of a checkpoint that the repository does not have is of no use.
#[test]
fn a_bitmap_is_of_its_checkpoint_alone() -> Result<()> {
    let it = Committing::journal("kept-alone", "qcow2")?;
    let report = kept(&it)?;
    let id = report["checkpoint"].as_str().context("no id")?;
    let folder = tempfile::tempdir()?;
    let other = Stillframe::init(&folder.path().join("repo"))?;
    let pid = it.guest.pid_text();
    let line = ["checkpoint", "--pid", &pid, "--keep-bitmaps"];
    // The first repository's bitmap is gone with this one.
    let elsewhere = other.json(&line)?;
    ensure!(bytes_read(&elsewhere)? >= BALLAST_BYTES, "{elsewhere}");
    let report = kept(&it)?;
    ensure!(bytes_read(&report)? >= BALLAST_BYTES, "{report}");
    ensure!(report["checkpoint"] != id, "{report}");
    let forgotten = report["checkpoint"].as_str().context("no id")?;
    it.stillframe.ok(&["forget", forgotten])?;
    let report = kept(&it)?;
    ensure!(bytes_read(&report)? >= BALLAST_BYTES, "{report}");
    // A disk that has another length since.
    let mut monitor = it.guest.second_monitor()?;
    let resize = json!({ "device": "journal", "size": 80 << 20 });
    monitor.execute("block_resize", resize)?;
    let report = kept(&it)?;
    ensure!(bytes_read(&report)? >= BALLAST_BYTES, "{report}");
    expect_untouched(&it.guest, &mut monitor)
}

/// A point at which the bitmap of the last checkpoint is frozen, if there is a filter.
const FROZEN: &str = "store.pack";

/// The guardian takes back what the checkpoint had begun. Without one there is a bitmap that has all until it is frozen; in rounds
/// it never is.
#[test]
fn a_killed_engine_leaves_a_bitmap_with_all_writes() -> Result<()> {
    for schedule in ["filter", "rounds"] {
        killed(schedule).context(schedule)?;
    }
    Ok(())
}

fn killed(schedule: &str) -> Result<()> {
    let it = Committing::journal(&format!("kept-killed-{schedule}"), "raw")?;
    let pid = it.guest.pid_text();
    let mut monitor = it.guest.second_monitor()?;
    kept(&it)?;
    for fault in [
        "pause.stopped",
        "pause.before-cont",
        "pause.after-cont",
        FROZEN,
    ] {
        for with_guardian in [false, true] {
            it.guest.serial.wait_more_committed(3)?;
            let line = ["checkpoint", "--pid", &pid, "--keep-bitmaps"];
            let more = ["--pause-limit", "60s", "--disk-schedule", schedule];
            let line = [&line[..], &more].concat();
            let command = it.stillframe.command(&line)?;
            let stop = format!("{fault}:stop");
            let (command, reached) = with_fault(&command, &stop, it.guest.folder())?;
            let mut engine = Running::start(command)?;
            engine.wait_until("the fault", |_| Ok(reached.exists()))?;
            fs::remove_file(&reached)?;
            if with_guardian {
                for process in children(engine.pid(), "stillframe")? {
                    signal(process as u32, "KILL")?;
                }
            }
            engine.crash()?;
            // Written after the kill.
            it.guest.serial.wait_more_committed(3)?;
            let report = kept(&it)?;
            let read = bytes_read(&report)?;
            let is_increment = read < BALLAST_BYTES / 2;
            ensure!(
                is_increment == (schedule == "rounds" || fault != FROZEN || !with_guardian),
                "{fault}, guardian killed: {with_guardian}: {report}"
            );
            expect_whole_disk(&it, &report, &mut monitor)?;
        }
    }
    ensure!(bitmaps(&mut monitor)? == 1, "not one bitmap");
    checkpoint(&it, &[])?;
    expect_no_copy(&mut monitor)?;
    expect_untouched(&it.guest, &mut monitor)
}

/// An engine that this fault has stopped (SIGSTOP) in a checkpoint.
fn stopped(it: &Committing, schedule: &str, fault: &str) -> Result<Running> {
    let pid = it.guest.pid_text();
    let line = ["checkpoint", "--pid", &pid, "--keep-bitmaps"];
    let line = [&line[..], &["--disk-schedule", schedule]].concat();
    let command = it.stillframe.command(&line)?;
    let (command, reached) = with_fault(&command, fault, it.guest.folder())?;
    let mut engine = Running::start(command)?;
    engine.wait_until("the fault", |_| Ok(reached.exists()))?;
    fs::remove_file(reached)?;
    Ok(engine)
}

/// Makes the disk shorter by a part of its ballast, and as long as it was.
fn cut_off(monitor: &mut Qmp) -> Result<()> {
    for mib in [56_u64, 64] {
        let size = json!({ "device": "journal", "size": mib << 20 });
        monitor.execute("block_resize", size)?;
    }
    Ok(())
}

/// What is cut off is in no bitmap of QEMU, and reads as zeros from then on.
#[test]
fn a_disk_that_was_shortened_for_a_while_is_read_anew() -> Result<()> {
    let it = Committing::journal("cut-off", "raw")?;
    let mut monitor = it.guest.second_monitor()?;
    kept(&it)?;
    cut_off(&mut monitor)?;
    let report = kept(&it)?;
    ensure!(bytes_read(&report)? >= BALLAST_BYTES / 2, "{report}");
    expect_exact_disk(&it, &mut monitor)?;

    // The same between two checkpoints of an engine.
    let (pid, every) = (it.guest.pid_text(), ["--every", "2s", "--count", "2"]);
    let line = ["watch", "--pid", &pid, "--keep-bitmaps", "--json"];
    let watch = it.stillframe.command(&[&line[..], &every].concat())?;
    let mut watch = Running::start(watch)?;
    watch.wait_results(1)?;
    cut_off(&mut monitor)?;
    let taken = watch.end()?.results()?;
    let last = taken.last().context("no checkpoint")?;
    ensure!(bytes_read(last)? >= BALLAST_BYTES / 2, "{last}");
    expect_exact_disk(&it, &mut monitor)
}

/// QEMU 10.0.2 ends if an image is resized while its bitmap is exported.
#[test]
fn a_disk_that_is_being_read_is_not_resized() -> Result<()> {
    let it = Committing::journal("resized", "raw")?;
    let mut monitor = it.guest.second_monitor()?;
    kept(&it)?;
    let mut resize = |mib: u64| {
        let size = json!({ "device": "journal", "size": mib << 20 });
        monitor.execute("block_resize", size)
    };
    for (schedule, fault) in [
        ("filter", "store.pack:stop"),
        ("rounds", "pause.before-stop:stop"),
    ] {
        let engine = stopped(&it, schedule, fault)?;
        for mib in [96, 56] {
            let Err(refused) = resize(mib) else {
                bail!("{schedule}: resized to {mib} MiB");
            };
            let refused = refused.to_string();
            ensure!(refused.contains("resize"), "{refused}");
        }
        engine.signal("CONT")?;
        let ended = engine.end()?;
        ensure!(ended.code == Some(0), "{ended:?}");
    }
    // Nothing is in its way then, and the next one has the longer disk.
    resize(96)?;
    expect_exact_disk(&it, &mut monitor)?;
    it.guest.serial.wait_more_committed(3)?;
    Ok(())
}

/// What is cut off while the filters are there is copied nowhere.
#[test]
fn a_disk_that_is_shortened_in_its_checkpoint_costs_only_that() -> Result<()> {
    let it = Committing::journal("shortened", "raw")?;
    let mut monitor = it.guest.second_monitor()?;
    kept(&it)?;
    let engine = stopped(&it, "filter", "pause.after-cont:stop")?;
    cut_off(&mut monitor)?;
    engine.signal("CONT")?;
    let ended = engine.end()?;
    ensure!(ended.code == Some(1) && ended.errors() == 1, "{ended:?}");
    ensure!(
        ended.err.contains("disk journal was made shorter"),
        "{ended:?}"
    );
    it.guest.serial.wait_more_committed(3)?;
    expect_no_copy(&mut monitor)?;
    let report = kept(&it)?;
    ensure!(bytes_read(&report)? >= BALLAST_BYTES / 2, "{report}");
    expect_exact_disk(&it, &mut monitor)
}
