//! Disks that are written anew from a checkpoint: the restored VM runs on them, beside its original.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use stillframe_harness::committing::{Committing, expect_no_copy};
use stillframe_harness::fault::with_fault;
use stillframe_harness::health::processes_with;
use stillframe_harness::restored::Restored;

/// Takes a checkpoint with the guest's disks; returns its id.
fn capture(it: &Committing) -> Result<String> {
    let pid = it.guest.pid_text();
    let line = ["checkpoint", "--pid", &pid, "--disks", "capture"];
    let report = it.stillframe.json(&line)?;
    Ok(report["checkpoint"].as_str().context("no id")?.to_owned())
}

/// The words that have disks written into this folder.
fn new_in(folder: &Path) -> String {
    format!("--disks=new={}", folder.display())
}

/// QEMU's name for the format of an image.
fn format_of(image: &Path) -> Result<serde_json::Value> {
    let mut command = Command::new("qemu-img");
    let out = command
        .args(["info", "-U", "--output=json"])
        .arg(image)
        .output()?;
    Ok(serde_json::from_slice::<serde_json::Value>(&out.stdout)?["format"].clone())
}

/// Both VMs go on, each with a disk of its own; none of what was committed is missing on either.
#[test]
fn a_vm_is_restored_with_its_disk_beside_its_original() -> Result<()> {
    let cases = [
        (Committing::journal("anew-raw", "raw")?, "raw", "--quiet"),
        (
            Committing::journal("anew-qcow2", "qcow2")?,
            "qcow2",
            "--lazy",
        ),
        (
            Committing::journal_of_nodes("anew-nodes", "qcow2")?,
            "qcow2",
            "--verify",
        ),
    ];
    for (mut it, format, more) in cases {
        let before = it.guest.serial.wait_more_committed(3)?;
        let id = capture(&it)?;
        let after = it.guest.serial.wait_more_committed(5)?;
        let folder = it.guest.folder().join("restored");
        let words = [new_in(&folder), more.to_owned()];
        let words = words.each_ref().map(String::as_str);
        let restored = Restored::start(&it.stillframe, &id, it.guest.folder(), &words)?;
        let image = folder.join("disk.img");
        ensure!(format_of(&image)? == format, "{format}");
        // The guest has written a few of the 48 MiB beside the ballast.
        let stored = fs::metadata(&image)?.blocks() * 512;
        ensure!(stored < 32 << 20, "{format}: {stored} bytes, without holes");
        expect_no_copy(&mut restored.monitor()?)?;
        let last = restored.serial.wait_more_committed(5)?;
        ensure!(last > before, "{before} {last}");
        let original = it.guest.serial.wait_more_committed(3)?;
        ensure!(original > after, "the original stands still");
        restored.crash()?;
        let found = it.records(&image)?;
        ensure!(found >= last, "{format}: {found} records of {last}");
        it.guest.kill()?;
        ensure!(
            it.records(&it.disk)? >= original,
            "the original lost records"
        );
        // As the checkpoint has it, and not a byte more: the file was new.
        let exported = it.guest.folder().join("exported");
        let line = ["export", &id, "--disk", "journal", "-o"];
        let out = exported.display().to_string();
        it.stillframe.ok(&[&line[..], &[&out]].concat())?;
        let then = it.records_of_raw(&exported)?;
        ensure!((before..after).contains(&then), "{before} {then} {after}");
    }
    Ok(())
}

/// Its disks are as long as they were, and empty. The checkpoint need not hold them.
#[test]
fn a_vm_is_restored_without_its_disks() -> Result<()> {
    let table = [
        (Committing::journal("without-raw", "raw")?, "none"),
        (Committing::journal("without-qcow2", "qcow2")?, "capture"),
        (
            Committing::journal_of_nodes("without-nodes", "qcow2")?,
            "none",
        ),
    ];
    for (it, held) in table {
        let pid = it.guest.pid_text();
        let line = ["checkpoint", "--pid", &pid, "--disks", held];
        let report = it.stillframe.json(&line)?;
        let id = report["checkpoint"].as_str().context("no id")?;
        let before = it.guest.serial.wait_more_committed(2)?;
        let print = ["restore", id, "--disks", "none", "--print-command"];
        it.stillframe.fails(&print, 1)?;
        let words = ["--disks=none", "--verify"];
        let restored = Restored::start(&it.stillframe, id, it.guest.folder(), &words)?;
        // It writes its next records, where nothing was before them.
        restored.serial.wait_more_committed(3)?;
        let mut monitor = restored.monitor()?;
        let blocks = monitor.execute("query-block", json!({}))?;
        let blocks = blocks.as_array().context("no disks")?;
        let mut inserted = blocks.iter().map(|block| &block["inserted"]);
        let disk = inserted.find(|one| one["image"]["virtual-size"] == 64 << 20);
        let disk = disk.context("no disk of its length")?;
        let image = disk["image"]["filename"].as_str().context("no file")?;
        ensure!(
            !Path::new(image).exists() && image.contains("stillframe-empty-"),
            "{image}"
        );
        // Of 16 MiB of ballast there is nothing: only what it has written since.
        let mut bytes = 0;
        for file in fs::read_dir(format!("/proc/{}/fd", restored.pid))? {
            let file = file?.path();
            let is_it = fs::read_link(&file)
                .is_ok_and(|path| path.starts_with(format!("{image} (deleted)")));
            if is_it {
                bytes = fs::metadata(&file)?.blocks() * 512;
            }
        }
        ensure!((1..4 << 20).contains(&bytes), "{bytes} bytes");
        restored.crash()?;
        let original = it.guest.serial.wait_more_committed(3)?;
        ensure!(original > before, "the original stands still");
    }
    Ok(())
}

/// A VM that ends before it has written anything leaves a whole disk: nothing of it was in its QEMU's memory only.
#[test]
fn a_disk_is_whole_before_its_vm_runs() -> Result<()> {
    let it = Committing::journal("anew-whole", "qcow2")?;
    let id = capture(&it)?;
    let folder = it.guest.folder().join("anew");
    let words = [new_in(&folder), "--paused".to_owned()];
    let words = words.each_ref().map(String::as_str);
    Restored::start(&it.stillframe, &id, it.guest.folder(), &words)?.crash()?;
    let exported = it.guest.folder().join("exported");
    let out = exported.display().to_string();
    let line = ["export", &id, "--disk", "journal", "-o", &out];
    it.stillframe.ok(&line)?;
    let image = folder.join("disk.img");
    let mut compare = Command::new("qemu-img");
    let compared = compare
        .args(["compare", "-f", "qcow2", "-F", "raw"])
        .args([&image, &exported])
        .output()?;
    ensure!(compared.status.success(), "{compared:?}");
    let checked = Command::new("qemu-img").arg("check").arg(&image).output()?;
    ensure!(checked.status.success(), "{checked:?}");
    Ok(())
}

/// Each refusal names the disk, or the checkpoint; no file is left, or touched.
#[test]
fn what_cannot_be_written_anew_is_refused_before_qemu_starts() -> Result<()> {
    let it = Committing::journal("not-anew", "raw")?;
    let id = capture(&it)?;
    let pid = it.guest.pid_text();
    let line = ["checkpoint", "--pid", &pid, "--disks", "reference"];
    let without = it.stillframe.json(&line)?;
    let without = without["checkpoint"].as_str().context("no id")?;
    let qmp = it.guest.folder().join("refused.qmp").display().to_string();
    let refused = |id: &str, folder: &Path, words: &str| -> Result<()> {
        let line = ["restore", id, "--qmp", &qmp, &new_in(folder)];
        let said = it.stillframe.fails(&line, 1)?;
        ensure!(said.contains(words), "no {words:?}: {said}");
        ensure!(processes_with(&qmp)? == 0, "a QEMU is left");
        Ok(())
    };
    let folder = it.guest.folder().join("anew");
    refused(without, &folder, "the content of the VM's disks")?;
    ensure!(!folder.exists(), "a folder was made");
    refused(
        &id,
        &folder.join("no").join("such"),
        "Name another directory",
    )?;
    fs::create_dir(&folder)?;
    let taken = folder.join("disk.img");
    fs::write(&taken, "precious")?;
    refused(&id, &folder, "which exists")?;
    ensure!(fs::read(&taken)? == b"precious", "a file was overwritten");
    // The recorded disk was written to since, and the checkpoint holds it.
    let line = ["restore", &id, "--qmp", &qmp];
    let said = it.stillframe.fails(&line, 1)?;
    ensure!(said.contains("--disks new=DIR"), "{said}");
    let line = ["restore", &id, "--qmp", &qmp, "--disks", "old"];
    let said = it.stillframe.fails(&line, 2)?;
    ensure!(
        said.contains("new=DIR, lazy=DIR, as-they-are or none"),
        "{said}"
    );
    it.guest.serial.wait_more_committed(3)?;
    Ok(())
}

/// A restore that fails before its VM runs leaves no QEMU and no image.
#[test]
fn a_restore_that_fails_takes_its_images_away() -> Result<()> {
    let it = Committing::journal("anew-failed", "qcow2")?;
    let id = capture(&it)?;
    let folder = it.guest.folder().join("anew");
    let qmp = it.guest.folder().join("failed.qmp").display().to_string();
    for more in ["--quiet", "--lazy"] {
        let line = ["restore", &id, "--qmp", &qmp, &new_in(&folder), more];
        let command = it.stillframe.command(&line)?;
        let (mut command, reached) =
            with_fault(&command, "restore.loaded:error", it.guest.folder())?;
        let ended = command.output()?;
        ensure!(!ended.status.success() && reached.exists(), "{ended:?}");
        fs::remove_file(reached)?;
        ensure!(processes_with(&qmp)? == 0, "a QEMU is left");
        ensure!(
            !folder.join("disk.img").exists(),
            "{more}: an image is left"
        );
    }
    let mut monitor = it.guest.second_monitor()?;
    let status = monitor.execute("query-status", json!({}))?;
    ensure!(status["running"] == true, "{status}");
    Ok(())
}

/// `qemu-img` finds the same content in each image; what fails leaves nothing, and takes nothing away.
#[test]
fn a_disk_is_exported_in_other_formats() -> Result<()> {
    let it = Committing::journal("formats", "raw")?;
    let id = capture(&it)?;
    let folder = it.guest.folder();
    let export = |format: &str, name: &str| {
        let out = folder.join(name).display().to_string();
        let line = ["export", &id, "--disk", "journal", "--disk-format", format];
        it.stillframe
            .command(&[&line[..], &["-o", &out, "--json"]].concat())
    };
    let raw = export("raw", "a.img")?.output()?;
    ensure!(raw.status.success(), "{raw:?}");
    for format in ["qcow2", "vmdk"] {
        let name = format!("a.{format}");
        let done = export(format, &name)?.output()?;
        ensure!(done.status.success(), "{done:?}");
        let report: serde_json::Value = serde_json::from_slice(&done.stdout)?;
        ensure!(report["format"] == format, "{report}");
        let image = folder.join(&name);
        ensure!(format_of(&image)? == format, "{format}");
        let mut compare = Command::new("qemu-img");
        let compared = compare
            .args(["compare", "-f", "raw", "-F", format])
            .args([&folder.join("a.img"), &image])
            .output()?;
        ensure!(compared.status.success(), "{compared:?}");
        // The guest has written a few of the 48 MiB beside the ballast.
        let stored = fs::metadata(&image)?.blocks() * 512;
        ensure!(stored < 32 << 20, "{format}: {stored} bytes, without holes");
        let before = fs::read(&image)?;
        let again = export(format, &name)?.output()?;
        ensure!(again.status.code() == Some(1), "{again:?}");
        ensure!(fs::read(&image)? == before, "{format}: it was replaced");
    }
    let files = || Ok::<usize, std::io::Error>(fs::read_dir(folder)?.count());
    let before = files()?;
    let refused = export("no-such-format", "b.img")?.output()?;
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(refused.status.code() == Some(1), "{refused:?}");
    ensure!(said.contains("no-such-format"), "{said}");
    ensure!(files()? == before, "a file is left");
    Ok(())
}
