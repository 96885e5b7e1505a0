//! `restore --lazy --disks lazy=DIR`: the guest runs before its disks are there, and nothing of them is lost, whatever ends.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::committing::{Committing, expect_no_copy};
use stillframe_harness::filling::{Filling, expect_alone, files_kept};
use stillframe_harness::health::{pids_with, processes_with};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::restored::Restored;
use stillframe_harness::unplugged::Unplugged;

/// A rate at which a disk is not complete before the test has looked.
const SLOWLY: &str = "--limit-fill=12M";

/// A guest with a disk, and a checkpoint of both.
struct Captured {
    it: Committing,
    id: String,
    /// Where the restored VM has its image.
    folder: PathBuf,
    image: PathBuf,
}

impl Captured {
    fn new(it: Committing, name: &str) -> Result<Captured> {
        let pid = it.guest.pid_text();
        let line = ["checkpoint", "--pid", &pid, "--disks", "capture"];
        let report = it.stillframe.json(&line)?;
        let folder = it.guest.folder().join("lazy");
        Ok(Captured {
            id: report["checkpoint"].as_str().context("no id")?.to_owned(),
            image: folder.join(name),
            folder,
            it,
        })
    }

    fn raw(name: &str) -> Result<Captured> {
        Captured::new(Committing::journal(name, "raw")?, "disk.img.qcow2")
    }

    fn words(&self) -> String {
        format!("--disks=lazy={}", self.folder.display())
    }

    fn start(&self, more: &str) -> Result<Filling> {
        let (stillframe, folder) = (&self.it.stillframe, self.it.guest.folder());
        let mut filling = Filling::start(stillframe, &self.id, folder, &[&self.words(), more])?;
        filling.wait_runs()?;
        Ok(filling)
    }

    fn resume(&self, filling: &Filling, more: &[&str]) -> Result<Filling> {
        Filling::resume(&self.it.stillframe, &filling.qmp, &filling.serial, more)
    }

    /// What `qemu-img` says of the image.
    fn info(&self) -> Result<Value> {
        let mut command = Command::new("qemu-img");
        let words = ["info", "-U", "--output=json"];
        let out = command.args(words).arg(&self.image).output()?;
        Ok(serde_json::from_slice(&out.stdout)?)
    }

    fn expect_incomplete(&self) -> Result<()> {
        let info = self.info()?;
        ensure!(
            info["full-backing-filename"].is_string(),
            "complete: {info}"
        );
        Ok(())
    }

    /// The image needs nothing else, is sound, and has at least this number of records.
    fn expect_complete(&self, records: u64) -> Result<()> {
        let info = self.info()?;
        let whole = info["format"] == "qcow2" && info["full-backing-filename"].is_null();
        ensure!(whole, "{info}");
        let check = Command::new("qemu-img")
            .arg("check")
            .arg(&self.image)
            .output()?;
        ensure!(check.status.success(), "{check:?}");
        let found = self.it.records_as(&self.image, "qcow2")?;
        ensure!(found >= records, "{found} records of {records}");
        ensure!(self.others()?.is_empty(), "{:?} are left", self.others()?);
        Ok(())
    }

    /// Other files beside the image.
    fn others(&self) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(&self.folder)?.flatten();
        let paths = entries.map(|entry| entry.path());
        Ok(paths.filter(|path| *path != self.image).collect())
    }
}

/// The process of its QEMU.
fn pid_of(filling: &Filling) -> Result<i32> {
    let qmp = filling.qmp.display().to_string();
    let is_qemu = |pid: &i32| {
        let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        program.to_string_lossy().contains("qemu")
    };
    pids_with(&qmp)?
        .into_iter()
        .find(is_qemu)
        .context("no QEMU")
}

/// The guest commits before its disk is there; in the end nothing of us is left.
#[test]
fn a_guest_runs_before_its_disk_is_there() -> Result<()> {
    let cases = [
        Captured::raw("lazy-raw")?,
        Captured::new(Committing::journal("lazy-qcow2", "qcow2")?, "disk.img")?,
        Captured::new(
            Committing::journal_of_nodes("lazy-nodes", "raw")?,
            "disk.img.qcow2",
        )?,
    ];
    for captured in cases {
        let mut filling = captured.start(SLOWLY)?;
        let early = filling.serial.wait_more_committed(3)?;
        captured.expect_incomplete()?;
        ensure!(filling.runs() && !filling.running.has_ended()?);
        // What is not there yet is nothing to capture; it says so.
        filling.running.wait_words("filling its disks")?;
        let pid = pid_of(&filling)?.to_string();
        let line = ["checkpoint", "--pid", &pid, "--disks", "capture"];
        let said = captured.it.stillframe.fails(&line, 1)?;
        ensure!(said.contains("still being restored"), "{said}");
        let (restored, report) = filling.complete()?;
        let disk = &report["disks"][0];
        ensure!(disk["device"] == "journal", "{report}");
        ensure!(
            disk["pages"].as_u64() >= Some(16 << 8),
            "less than the ballast: {disk}"
        );
        expect_alone(&restored)?;
        expect_no_copy(&mut restored.monitor()?)?;
        let last = restored.serial.wait_more_committed(3)?;
        ensure!(last > early);
        // Now it is a disk like any other.
        let report = captured.it.stillframe.json(&line)?;
        ensure!(report["disks"][0]["device"] == "journal", "{report}");
        restored.end()?;
        captured.expect_complete(last)?;
    }
    Ok(())
}

/// Each process goes on where the one before was killed, in memory or in the disk; no write of the guest fails.
#[test]
fn another_process_goes_on_with_the_disk() -> Result<()> {
    let captured = Captured::raw("lazy-killed")?;
    let mut filling = captured.start(SLOWLY)?;
    filling.serial.wait_more_committed(2)?;
    for _ in 0..3 {
        filling.running.crash()?;
        captured.expect_incomplete()?;
        filling = captured.resume(&filling, &[SLOWLY])?;
        filling.serial.wait_more_committed(3)?;
    }
    // Its memory is there for long: only the disk is left.
    filling.running.wait_words("filling its disks")?;
    filling.running.crash()?;
    let (restored, _) = captured.resume(&filling, &[])?.complete()?;
    let last = restored.serial.wait_more_committed(3)?;
    expect_alone(&restored)?;
    expect_no_copy(&mut restored.monitor()?)?;
    restored.end()?;
    captured.expect_complete(last)
}

/// A VM that is shut down before its disk is there leaves a whole disk, with all that it has written.
#[test]
fn a_vm_that_ends_leaves_a_whole_disk() -> Result<()> {
    let captured = Captured::raw("lazy-ended")?;
    let filling = captured.start(SLOWLY)?;
    let last = filling.serial.wait_more_committed(3)?;
    Qmp::connect(&filling.qmp)?.execute("quit", json!({}))?;
    let ended = filling.running.end()?;
    ensure!(ended.code == Some(1), "{ended:?}");
    ensure!(ended.err.contains("disks are complete now"), "{ended:?}");
    ensure!(files_kept(&filling.qmp)? == 0);
    captured.expect_complete(last)
}

/// The same if both die, the VM and the process that restores it.
#[test]
fn the_disk_of_two_that_died_is_completed_later() -> Result<()> {
    let captured = Captured::raw("lazy-both")?;
    let mut filling = captured.start(SLOWLY)?;
    let last = filling.serial.wait_more_committed(3)?;
    let pid = pid_of(&filling)?;
    filling.running.crash()?;
    let vm = Restored {
        pid,
        qmp: filling.qmp.clone(),
        serial: filling.serial.clone(),
    };
    vm.crash()?;
    captured.expect_incomplete()?;
    // What the guest has written is not forgotten: another restore there is refused, and others leave the record alone.
    let (stillframe, folder) = (&captured.it.stillframe, captured.it.guest.folder());
    let qmp = filling.qmp.display().to_string();
    let line = ["restore", &captured.id, "--qmp", &qmp, "--lazy", "--disks"];
    let other = format!("lazy={}", folder.join("other").display());
    let said = stillframe.fails(&[&line[..], &[&other]].concat(), 1)?;
    ensure!(said.contains("is not complete"), "{said}");
    ensure!(files_kept(&filling.qmp)? > 0);
    let ended = captured.resume(&filling, &[])?.running.end()?;
    ensure!(ended.err.contains("disks are complete now"), "{ended:?}");
    ensure!(files_kept(&filling.qmp)? == 0);
    captured.expect_complete(last)
}

/// A block that cannot be read is no I/O error: the VM is paused until it can be.
#[test]
fn a_guest_waits_for_a_block_that_cannot_be_read() -> Result<()> {
    let captured = Captured::raw("lazy-unplugged")?;
    let mut filling = captured.start(SLOWLY)?;
    filling.running.wait_words("filling its disks")?;
    let unplugged = Unplugged::new(captured.it.stillframe.repository())?;
    filling
        .running
        .wait_words("the VM is paused: a page or a block")?;
    let before = filling.serial.committed();
    std::thread::sleep(std::time::Duration::from_millis(500));
    ensure!(filling.serial.committed() == before, "the guest runs on");
    unplugged.plug()?;
    filling.running.wait_words("the VM is resumed")?;
    filling.serial.wait_more_committed(3)?;
    let (restored, _) = filling.complete()?;
    let last = restored.serial.wait_more_committed(1)?;
    restored.end()?;
    captured.expect_complete(last)
}

/// Each refusal says what to do, and leaves no QEMU and no file.
#[test]
fn what_cannot_be_restored_lazily_is_refused() -> Result<()> {
    let captured = Captured::raw("not-lazy")?;
    let (stillframe, guests) = (&captured.it.stillframe, captured.it.guest.folder());
    let qmp = guests.join("refused.qmp").display().to_string();
    let refused = |folder: &Path, more: &str, words: &str| -> Result<()> {
        let disks = format!("lazy={}", folder.display());
        let line = [
            "restore",
            &captured.id,
            "--qmp",
            &qmp,
            "--disks",
            &disks,
            more,
        ];
        let said = stillframe.fails(&line, 1)?;
        ensure!(said.contains(words), "no {words:?}: {said}");
        ensure!(processes_with(&qmp)? == 0, "a QEMU is left");
        Ok(())
    };
    refused(&captured.folder, "--quiet", "add --lazy")?;
    let long = guests.join("d".repeat(120));
    refused(&long, "--lazy", "a shorter path")?;
    ensure!(fs::read_dir(&long)?.count() == 0, "files are left");
    fs::create_dir(&captured.folder)?;
    fs::write(&captured.image, "precious")?;
    refused(&captured.folder, "--lazy", "which exists")?;
    ensure!(fs::read(&captured.image)? == b"precious");
    let line = [
        "clone",
        &captured.id,
        "--qmp",
        "{}.qmp",
        "--disks",
        "lazy=/tmp",
    ];
    let said = stillframe.fails(&line, 1)?;
    ensure!(said.contains("--disks new=DIR"), "{said}");
    Ok(())
}
