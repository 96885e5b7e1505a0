//! Disks that go back with their VM: `rewind` to a checkpoint that has their content.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::committing::{Committing, expect_no_copy};
use stillframe_harness::fault::with_fault;
use stillframe_harness::health::{children, expect_untouched};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::running::{Running, signal};

/// Takes a checkpoint; returns its id.
fn capture(it: &Committing) -> Result<String> {
    let pid = it.guest.pid_text();
    let report = it.stillframe.json(&["checkpoint", "--pid", &pid])?;
    Ok(report["checkpoint"].as_str().context("no id")?.to_owned())
}

fn rewind(it: &Committing, id: &str, more: &[&str]) -> Result<Value> {
    let pid = it.guest.pid_text();
    it.stillframe
        .json(&[&["rewind", id, "--pid", &pid], more].concat())
}

/// What the guest's disk holds; the guest must be paused.
fn content(it: &Committing) -> Result<Vec<u8>> {
    let raw = it.guest.folder().join("now.img");
    let mut convert = Command::new("qemu-img");
    let convert = convert.args(["convert", "-U", "-O", "raw"]);
    let converted = convert.args([&it.disk, &raw]).output()?;
    ensure!(converted.status.success(), "{converted:?}");
    Ok(fs::read(&raw)?)
}

/// What a checkpoint holds of the disk.
fn exported(it: &Committing, id: &str) -> Result<Vec<u8>> {
    let image = it.guest.folder().join(format!("{id}.img"));
    let out = image.display().to_string();
    if !image.exists() {
        let line = ["export", id, "--disk", "journal", "-o", &out];
        it.stillframe.ok(&line)?;
    }
    Ok(fs::read(&image)?)
}

/// The disk of a paused guest is that of the checkpoint, and its image is whole.
fn expect_disk_of(it: &Committing, id: &str) -> Result<()> {
    ensure!(
        content(it)? == exported(it, id)?,
        "it is not the disk of {id}"
    );
    Ok(())
}

/// Nothing of a rewind is left in QEMU, not even the mark of an image.
fn expect_nothing_left(monitor: &mut Qmp) -> Result<()> {
    expect_no_copy(monitor)?;
    ensure!(!is_marked(monitor)?, "an image is marked");
    Ok(())
}

fn is_marked(monitor: &mut Qmp) -> Result<bool> {
    let nodes = monitor.execute("query-named-block-nodes", json!({ "flat": true }))?;
    Ok(nodes.to_string().contains("half-rewound"))
}

/// The guest goes on with its journal, beyond all that it has ever said, and none of it is missing.
fn expect_goes_on(it: &mut Committing) -> Result<()> {
    let last = it.guest.serial.wait_more_committed(5)?;
    it.guest.kill()?;
    let found = it.records(&it.disk)?;
    ensure!(found >= last, "{found} records of {last}");
    Ok(())
}

/// Back, and to and fro: each time the disk is that of the checkpoint, and the guest goes on with both.
#[test]
fn a_vm_goes_back_with_its_disk() -> Result<()> {
    for mut it in [
        Committing::journal("rewound-raw", "raw")?,
        Committing::journal("rewound-qcow2", "qcow2")?,
        Committing::journal_of_nodes("rewound-nodes", "qcow2")?,
    ] {
        let mut monitor = it.guest.second_monitor()?;
        let one = capture(&it)?;
        it.guest.serial.wait_more_committed(10)?;
        let two = capture(&it)?;
        ensure!(exported(&it, &one)? != exported(&it, &two)?, "no writes");
        for id in [&one, &two, &one, &one] {
            it.guest.serial.wait_more_committed(3)?;
            let report = rewind(&it, id, &["--paused", "--verify"])?;
            let disk = &report["disks"][0];
            ensure!(disk["device"] == json!("journal"), "{report}");
            ensure!(disk["written"].as_u64() > Some(0), "{report}");
            expect_disk_of(&it, id)?;
            expect_nothing_left(&mut monitor)?;
            monitor.execute("cont", json!({}))?;
        }
        expect_untouched(&it.guest, &mut monitor)?;
        drop(monitor);
        expect_goes_on(&mut it)?;
        let checked = Command::new("qemu-img")
            .arg("check")
            .arg(&it.disk)
            .output()?;
        // A raw image has nothing to check.
        ensure!(matches!(checked.status.code(), Some(0 | 63)), "{checked:?}");
    }
    Ok(())
}

/// Whatever was not stored with the checkpoint is left alone, and must not have changed; and all of it, if the user says so.
#[test]
fn disks_are_left_alone_where_that_is_wanted() -> Result<()> {
    let mut it = Committing::journal("rewound-not", "raw")?;
    let pid = it.guest.pid_text();
    let held = capture(&it)?;
    let line = ["checkpoint", "--pid", &pid, "--disks", "reference"];
    let report = it.stillframe.json(&line)?;
    let other = report["checkpoint"].as_str().context("no id")?.to_owned();
    it.guest.serial.wait_more_committed(3)?;
    let said = it.stillframe.fails(&["rewind", &other, "--pid", &pid], 1)?;
    ensure!(said.contains("was written to"), "{said}");
    let mut monitor = it.guest.second_monitor()?;
    monitor.execute("stop", json!({}))?;
    let before = content(&it)?;
    let report = rewind(&it, &held, &["--disks-as-they-are"])?;
    ensure!(report["disks"].is_null(), "{report}");
    ensure!(content(&it)? == before, "the disk was changed");
    let report = rewind(&it, &held, &[])?;
    ensure!(report["disks"][0]["written"].as_u64() > Some(0), "{report}");
    monitor.execute("cont", json!({}))?;
    drop(monitor);
    expect_goes_on(&mut it)
}

/// A failure in the middle puts everything back, to the byte.
#[test]
fn a_rewind_that_fails_puts_the_disk_back() -> Result<()> {
    for (format, fault) in [
        ("raw", "rewind.disk-taking"),
        ("qcow2", "rewind.disk-taken"),
        ("raw", "rewind.disk-exchange"),
        ("qcow2", "rewind.disk-exchange"),
        ("raw", "rewind.disks-exchanged"),
        ("qcow2", "rewind.loaded"),
    ] {
        let mut it = Committing::journal("rewound-fails", format)?;
        let id = capture(&it)?;
        it.guest.serial.wait_more_committed(5)?;
        let mut monitor = it.guest.second_monitor()?;
        monitor.execute("stop", json!({}))?;
        let before = content(&it)?;
        let pid = it.guest.pid_text();
        let command = it.stillframe.command(&["rewind", &id, "--pid", &pid])?;
        let fault = format!("{fault}:error");
        let (mut command, reached) = with_fault(&command, &fault, it.guest.folder())?;
        let ended = command.output()?;
        ensure!(ended.status.code() == Some(1), "{fault}: {ended:?}");
        ensure!(reached.exists(), "{fault}: {ended:?}");
        ensure!(content(&it)? == before, "{fault}: the disk is another");
        expect_nothing_left(&mut monitor)?;
        monitor.execute("cont", json!({}))?;
        expect_untouched(&it.guest, &mut monitor)?;
        drop(monitor);
        expect_goes_on(&mut it)?;
    }
    Ok(())
}

/// The next rewind has to bring the disk, too, and does; the guardian gives the device its image back, or that rewind does.
#[test]
fn a_kill_leaves_a_disk_that_can_be_rewound() -> Result<()> {
    let mut it = Committing::journal("rewound-killed", "qcow2")?;
    let pid = it.guest.pid_text();
    let id = capture(&it)?;
    let line = ["checkpoint", "--pid", &pid, "--disks", "reference"];
    it.stillframe.ok(&line)?;
    let mut monitor = it.guest.second_monitor()?;
    for (fault, is_changed) in [
        ("rewind.stopped", false),
        ("rewind.disk-taking", true),
        ("rewind.disk-taken", true),
        ("rewind.disk-exchange", true),
        ("rewind.disks-exchanged", true),
        ("rewind.loaded", true),
    ] {
        for with_guardian in [false, true] {
            it.guest.serial.wait_more_committed(3)?;
            let line = ["rewind", &id, "--pid", &pid, "--pause-limit", "60s"];
            let command = it.stillframe.command(&line)?;
            let stop = format!("{fault}:stop");
            let (command, reached) = with_fault(&command, &stop, it.guest.folder())?;
            let mut engine = Running::start(command)?;
            engine.wait_until("the fault", |_| Ok(reached.exists()))?;
            if with_guardian {
                for process in children(engine.pid(), "stillframe")? {
                    signal(process as u32, "KILL")?;
                }
            }
            engine.crash()?;
            fs::remove_file(&reached)?;
            let case = format!("{fault}, guardian killed: {with_guardian}");
            let marked = is_marked(&mut monitor)?;
            ensure!(marked == is_changed, "{case}: marked: {marked}");
            if is_changed {
                let refused = monitor.execute("cont", json!({})).is_err();
                ensure!(refused, "{case}: QEMU resumes it");
                for words in [&["latest"][..], &[&id, "--disks-as-they-are"]] {
                    let line = [&["rewind", "--pid", &pid], words].concat();
                    let said = it.stillframe.fails(&line, 1)?;
                    ensure!(
                        said.contains("disk journal is partly of one"),
                        "{case}: {said}"
                    );
                }
            }
            rewind(&it, &id, &["--paused"])?;
            expect_disk_of(&it, &id).context(case)?;
            expect_nothing_left(&mut monitor)?;
            monitor.execute("cont", json!({}))?;
        }
    }
    expect_untouched(&it.guest, &mut monitor)?;
    drop(monitor);
    expect_goes_on(&mut it)
}

/// Each refusal names the disk, and the VM runs on.
#[test]
fn what_cannot_go_back_is_refused() -> Result<()> {
    let mut it = Committing::journal("rewound-refused", "raw")?;
    let pid = it.guest.pid_text();
    let id = capture(&it)?;
    let mut monitor = it.guest.second_monitor()?;
    let drives = monitor.execute("query-block", json!({}))?;
    let device = drives[0]["qdev"].as_str().context("no device")?;
    // Behind the journal, as if the guest wrote there.
    monitor.human(&format!("qemu-io -d {device} \"write -P 7 8M 40M\""))?;
    let line = ["rewind", &id, "--pid", &pid, "--copy-buffer", "32M"];
    let said = it.stillframe.fails(&line, 1)?;
    ensure!(said.contains("more with --copy-buffer"), "{said}");
    expect_nothing_left(&mut monitor)?;
    it.guest.serial.wait_more_committed(3)?;
    let resize = json!({ "device": "journal", "size": 80 << 20 });
    monitor.execute("block_resize", resize)?;
    let said = it.stillframe.fails(&["rewind", &id, "--pid", &pid], 1)?;
    ensure!(said.contains("disk journal had 67108864 bytes"), "{said}");
    expect_nothing_left(&mut monitor)?;
    expect_untouched(&it.guest, &mut monitor)?;
    it.guest.serial.wait_more_committed(3)?;
    drop(monitor);
    it.guest.kill()
}
