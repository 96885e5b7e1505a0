//! Disks in the checkpoint: their content is that of the pause, whatever the guest writes meanwhile.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use stillframe_harness::committing::{Committing, expect_no_copy, make_image};
use stillframe_harness::fault::with_fault;
use stillframe_harness::guest::{Kind, Setup};
use stillframe_harness::health::{children, expect_untouched, expect_whole};
use stillframe_harness::restored::Restored;
use stillframe_harness::running::{Running, signal};

/// The name of the disk.
const JOURNAL: &str = "journal";

/// Takes a checkpoint with the guest's disks; returns its id and the report on the first disk.
fn capture(it: &Committing) -> Result<(String, serde_json::Value)> {
    let pid = it.guest.pid_text();
    let line = ["checkpoint", "--pid", &pid, "--disks", "capture"];
    let report = it.stillframe.json(&line)?;
    let id = report["checkpoint"].as_str().unwrap_or_default().to_owned();
    Ok((id, report["disks"][0].clone()))
}

/// A watch that takes this number of checkpoints, with the guest's disks.
fn watch(it: &Committing, count: u32) -> Result<Command> {
    let (pid, count) = (it.guest.pid_text(), count.to_string());
    let line = [
        "watch", "--pid", &pid, "--every", "500ms", "--count", &count,
    ];
    let more = ["--disks", "capture", "--pause-limit", "60s", "--json"];
    it.stillframe.command(&[&line[..], &more].concat())
}

/// An engine that this fault has stopped (SIGSTOP).
fn stopped(it: &Committing, command: &Command, fault: &str) -> Result<Running> {
    let (command, reached) = with_fault(command, fault, it.guest.folder())?;
    let mut engine = Running::start(command)?;
    engine.wait_until("the fault", |_| Ok(reached.exists()))?;
    Ok(engine)
}

/// Writes a checkpoint's disk to a file.
fn export(it: &Committing, id: &str, to: &Path) -> Result<()> {
    let to = to.display().to_string();
    let line = ["export", id, "--disk", JOURNAL, "-o", &to];
    it.stillframe.ok(&line)?;
    Ok(())
}

#[test]
fn a_disk_is_stored_as_it_was_while_the_guest_writes_on() -> Result<()> {
    for format in ["raw", "qcow2"] {
        let it = Committing::journal(&format!("captured-{format}"), format)?;
        let before = it.guest.serial.wait_more_committed(3)?;
        let (id, disk) = capture(&it)?;
        ensure!(disk["device"] == JOURNAL, "{disk}");
        ensure!(disk["bytes"] == 64 << 20, "{disk}");
        // Holes and zeros are not read: 16 MiB are ballast.
        ensure!(disk["bytes_read"].as_u64() < Some(24 << 20), "{disk}");
        let mut monitor = it.guest.second_monitor()?;
        expect_untouched(&it.guest, &mut monitor)?;
        expect_no_copy(&mut monitor)?;
        let after = it.guest.serial.wait_more_committed(5)?;
        let image = it.guest.folder().join("out.img");
        export(&it, &id, &image)?;
        let found = it.records_of_raw(&image)?;
        ensure!((before..after).contains(&found), "{before} {found} {after}");
        // The same content again is not stored again.
        let (second, disk) = capture(&it)?;
        let pages = &disk["pages"];
        ensure!(pages["new"].as_u64() < Some(200), "{disk}");
        ensure!(
            pages["duplicate"].as_u64() > pages["new"].as_u64(),
            "{disk}"
        );
        let shown = it.stillframe.json(&["show", &second])?;
        ensure!(shown["disks"][0]["table"]["name"] == JOURNAL, "{shown}");
        // What a checkpoint needs of its disk is kept for it, and goes with it.
        it.stillframe.ok(&["forget", &id, "--prune"])?;
        expect_whole(&it.stillframe, &[second])?;
    }
    Ok(())
}

/// The engine is stopped in the pause, and the image copied: QEMU has drained it.
#[test]
fn the_content_is_that_of_the_pause_to_the_byte() -> Result<()> {
    let it = Committing::journal("captured-moment", "raw")?;
    let folder = it.guest.folder();
    let pid = it.guest.pid_text();
    let line = [
        "checkpoint",
        "--pid",
        &pid,
        "--disks",
        "capture",
        "--pause-limit",
        "60s",
        "--json",
    ];
    let engine = stopped(
        &it,
        &it.stillframe.command(&line)?,
        "pause.before-cont:stop",
    )?;
    let copy = folder.join("copy.img");
    fs::copy(&it.disk, &copy)?;
    engine.signal("CONT")?;
    let ended = engine.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    it.guest.serial.wait_more_committed(5)?;
    let image = folder.join("out.img");
    export(&it, "latest", &image)?;
    ensure!(
        fs::read(&copy)? == fs::read(&image)?,
        "the disk is of another moment"
    );
    ensure!(
        fs::read(&it.disk)? != fs::read(&image)?,
        "the guest has written nothing"
    );
    Ok(())
}

/// Each checkpoint of a watch reads what was written since the one before, and has the whole disk of its own moment.
#[test]
fn a_watch_stores_what_was_written_between_its_checkpoints() -> Result<()> {
    for format in ["raw", "qcow2"] {
        let it = Committing::journal(&format!("watched-{format}"), format)?;
        let ended = Running::start(watch(&it, 5)?)?.end()?;
        let taken = ended.results()?;
        ensure!(ended.code == Some(0) && taken.len() == 5, "{ended:?}");
        let mut monitor = it.guest.second_monitor()?;
        expect_untouched(&it.guest, &mut monitor)?;
        expect_no_copy(&mut monitor)?;
        let mut found = Vec::new();
        for (number, report) in taken.iter().enumerate() {
            let disk = &report["disks"][0];
            let read = disk["bytes_read"].as_u64().context("no disk")?;
            match number {
                0 => ensure!(read > 16 << 20, "{disk}"),
                // A record is a page, and there are some dozens in this time.
                _ => ensure!((4096..2 << 20).contains(&read), "{disk}"),
            }
            let id = report["checkpoint"].as_str().context("no id")?;
            let image = it.guest.folder().join(format!("{number}.img"));
            export(&it, id, &image)?;
            found.push(it.records_of_raw(&image)?);
        }
        ensure!(found.is_sorted_by(|one, next| one < next), "{found:?}");
        let ids = taken.iter().filter_map(|one| one["checkpoint"].as_str());
        expect_whole(&it.stillframe, &ids.map(str::to_owned).collect::<Vec<_>>())?;
    }
    Ok(())
}

/// The engine is stopped in the pause of a watch's third checkpoint, and the image copied.
#[test]
fn an_increment_is_that_of_the_pause_to_the_byte() -> Result<()> {
    let it = Committing::journal("watched-moment", "raw")?;
    let folder = it.guest.folder();
    let engine = stopped(&it, &watch(&it, 3)?, "pause.before-cont:stop:3")?;
    let copy = folder.join("copy.img");
    fs::copy(&it.disk, &copy)?;
    engine.signal("CONT")?;
    let ended = engine.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    it.guest.serial.wait_more_committed(5)?;
    let image = folder.join("out.img");
    export(&it, "latest", &image)?;
    ensure!(
        fs::read(&copy)? == fs::read(&image)?,
        "the disk is of another moment"
    );
    Ok(())
}

/// What was written before a checkpoint that is given up comes with the next one.
#[test]
fn a_checkpoint_that_fails_loses_no_written_block() -> Result<()> {
    let it = Committing::journal("watched-failed", "raw")?;
    let command = watch(&it, 4)?;
    let (command, reached) = with_fault(&command, "store.manifest:error:3", it.guest.folder())?;
    let ended = Running::start(command)?.end()?;
    ensure!(ended.code == Some(0) && reached.exists(), "{ended:?}");
    ensure!(ended.err.contains("no checkpoint this time"), "{ended:?}");
    for report in ended.results()? {
        let id = report["checkpoint"].as_str().context("no id")?;
        let image = it.guest.folder().join(id);
        export(&it, id, &image)?;
        let found = it.records_of_raw(&image)?;
        ensure!(found > 3, "{found}");
        let read = report["disks"][0]["bytes_read"].as_u64();
        ensure!(
            report["parent"].is_null() || read < Some(2 << 20),
            "{report}"
        );
    }
    expect_no_copy(&mut it.guest.second_monitor()?)
}

/// Memory and disk are of one moment: the restored guest goes on with its journal, and none of it is missing.
#[test]
fn a_restored_guest_goes_on_with_the_disk_of_its_checkpoint() -> Result<()> {
    let mut it = Committing::journal("captured-restored", "raw")?;
    let (id, _) = capture(&it)?;
    it.guest.serial.wait_more_committed(5)?;
    it.guest.kill()?;
    fs::remove_file(&it.disk)?;
    export(&it, &id, &it.disk)?;
    let found = it.records(&it.disk)?;
    let more = ["--disks-as-they-are"];
    let restored = Restored::start(&it.stillframe, &id, it.guest.folder(), &more)?;
    let last = restored.serial.wait_more_committed(5)?;
    ensure!(last > found && last <= found + 200, "{found} {last}");
    restored.crash()?;
    ensure!(it.records(&it.disk)? >= last, "records are missing");
    Ok(())
}

/// The guest runs on, its writes reach its disk, and the guardian takes away what was left.
#[test]
fn a_killed_engine_leaves_a_running_guest_and_its_guardian_clears_up() -> Result<()> {
    let it = Committing::journal("captured-killed", "raw")?;
    let pid = it.guest.pid_text();
    let line = ["checkpoint", "--pid", &pid, "--disks", "capture"];
    for fault in [
        "pause.stopped:kill",
        "pause.before-cont:kill",
        "store.pack:kill",
    ] {
        let (mut command, reached) =
            with_fault(&it.stillframe.command(&line)?, fault, it.guest.folder())?;
        let ended = command.output()?;
        ensure!(
            !ended.status.success() && reached.exists(),
            "{fault}: {ended:?}"
        );
        fs::remove_file(&reached)?;
        it.guest.serial.wait_more_committed(3)?;
        let mut monitor = it.guest.second_monitor()?;
        expect_no_copy(&mut monitor)?;
        let (id, _) = capture(&it)?;
        expect_untouched(&it.guest, &mut monitor)?;
        expect_no_copy(&mut monitor)?;
        let image = it.guest.folder().join(fault);
        export(&it, &id, &image)?;
        it.records_of_raw(&image)?;
    }
    Ok(())
}

/// QEMU carries out the rest of the pause by itself, and frees its monitor. The next checkpoint takes away what was left.
#[test]
fn engine_and_guardian_killed_together_leave_a_running_guest() -> Result<()> {
    let it = Committing::journal("captured-both", "raw")?;
    let pid = it.guest.pid_text();
    let line = [
        "checkpoint",
        "--pid",
        &pid,
        "--disks",
        "capture",
        "--pause-limit",
        "60s",
    ];
    let mut engine = stopped(
        &it,
        &it.stillframe.command(&line)?,
        "pause.before-cont:stop",
    )?;
    let guardians = children(engine.pid(), "stillframe")?;
    ensure!(guardians.len() == 1, "{guardians:?}");
    for process in guardians {
        signal(process as u32, "KILL")?;
    }
    engine.crash()?;
    it.guest.serial.wait_more_committed(3)?;
    capture(&it)?;
    let mut monitor = it.guest.second_monitor()?;
    expect_untouched(&it.guest, &mut monitor)?;
    expect_no_copy(&mut monitor)
}

/// The guest's writes end, whatever is left of the memory for what they overwrite; the checkpoint is given up.
#[test]
fn a_guest_that_overwrites_too_much_is_not_held_up() -> Result<()> {
    let it = Committing::journal("captured-limit", "raw")?;
    let pid = it.guest.pid_text();
    let line = [
        "checkpoint",
        "--pid",
        &pid,
        "--disks",
        "capture",
        "--copy-buffer",
        "32M",
    ];
    let engine = stopped(&it, &it.stillframe.command(&line)?, "pause.after-cont:stop")?;
    let mut monitor = it.guest.second_monitor()?;
    let drives = monitor.execute("query-block", json!({}))?;
    let device = drives[0]["qdev"].as_str().context("no device")?;
    // Behind the journal, as if the guest wrote there.
    let said = monitor.human(&format!("qemu-io -d {device} \"write -P 7 8M 40M\""))?;
    ensure!(said.trim().is_empty(), "{said}");
    let content = fs::read(&it.disk)?;
    let written = &content[8 << 20..48 << 20];
    ensure!(written.iter().all(|&byte| byte == 7), "the write failed");
    engine.signal("CONT")?;
    let ended = engine.end()?;
    ensure!(ended.code == Some(1) && ended.errors() == 1, "{ended:?}");
    ensure!(
        ended
            .err
            .contains("overwrote more than 32 MiB of disk journal"),
        "{ended:?}"
    );
    it.guest.serial.wait_more_committed(3)?;
    expect_no_copy(&mut monitor)?;
    capture(&it)?;
    expect_untouched(&it.guest, &mut monitor)
}

#[test]
fn what_cannot_be_captured_is_refused() -> Result<()> {
    let it = Committing::journal("captured-not", "raw")?;
    let pid = it.guest.pid_text();
    let capture = ["checkpoint", "--pid", &pid, "--disks", "capture"];
    let mut monitor = it.guest.second_monitor()?;
    let path = it.guest.folder().join("nbd").display().to_string();
    let address = json!({ "type": "unix", "data": { "path": path } });
    monitor.execute("nbd-server-start", json!({ "addr": address }))?;
    let said = it.stillframe.fails(&capture, 1)?;
    ensure!(said.contains("NBD server"), "{said}");
    expect_no_copy(&mut monitor)?;
    // Unless it has to be captured it is left out, and that is said.
    let report = it.stillframe.json(&["checkpoint", "--pid", &pid])?;
    let left = &report["disks_left_out"][0];
    let because = left["because"].as_str().unwrap_or_default();
    ensure!(
        left["device"] == JOURNAL && because.contains("has only one"),
        "{report}"
    );
    // The other client's server still runs.
    monitor.execute("nbd-server-stop", json!({}))?;
    let reference = ["checkpoint", "--pid", &pid, "--disks", "reference"];
    it.stillframe.ok(&reference)?;
    let image = it.guest.folder().join("x").display().to_string();
    let said = it
        .stillframe
        .fails(&["export", "latest", "--disk", JOURNAL, "-o", &image], 1)?;
    ensure!(said.contains("without their content"), "{said}");
    // Not in the folder of the guest, whose name looks as if it were a node of ours.
    let long = it.copy.with_file_name("long.img");
    make_image(&long, "raw", 3 << 20)?;
    let drive = format!("file={},format=raw,if=none,id=long", long.display());
    let drive = ["-drive", &drive, "-device", "virtio-blk-pci,drive=long"];
    let guest = Setup::small(Kind::Private, "captured-long")
        .with(&drive)
        .boot()?;
    let pid = guest.pid_text();
    let mut line = ["checkpoint", "--pid", &pid, "--disks", "capture"];
    let said = it.stillframe.fails(&line, 1)?;
    ensure!(said.contains("disk long has more than 2 TiB"), "{said}");
    line[4] = "lang=none";
    let said = it.stillframe.fails(&line, 2)?;
    ensure!(said.contains("no disk lang; it has: long"), "{said}");
    expect_no_copy(&mut guest.second_monitor()?)?;
    drop(guest);
    let guest = Setup::small(Kind::Private, "captured-none").boot()?;
    let pid = guest.pid_text();
    let line = ["checkpoint", "--pid", &pid, "--disks", "capture"];
    let said = it.stillframe.fails(&line, 1)?;
    ensure!(said.contains("no disk that it can write to"), "{said}");
    expect_untouched(&guest, &mut guest.second_monitor()?)?;
    Ok(())
}

/// A disk with threads of its own is left out, unless it has to be captured.
#[test]
fn a_disk_with_threads_of_its_own_is_left_out() -> Result<()> {
    let it = Committing::journal("captured-threads", "raw")?;
    let image = it.copy.with_file_name("threads.img");
    make_image(&image, "raw", 8)?;
    let drive = format!("file={},format=raw,if=none,id=own", image.display());
    let device = "virtio-blk-pci,drive=own,iothread=thread";
    let words = [
        "-object",
        "iothread,id=thread",
        "-drive",
        &drive,
        "-device",
        device,
    ];
    let guest = Setup::small(Kind::Private, "captured-threads-own")
        .with(&words)
        .boot()?;
    let pid = guest.pid_text();
    let said = it
        .stillframe
        .fails(&["checkpoint", "--pid", &pid, "--disks", "own=capture"], 1)?;
    ensure!(said.contains("I/O threads"), "{said}");
    let report = it.stillframe.json(&["checkpoint", "--pid", &pid])?;
    ensure!(report["disks"].is_null(), "{report}");
    ensure!(report["disks_left_out"][0]["device"] == "own", "{report}");
    expect_untouched(&guest, &mut guest.second_monitor()?)
}

/// Of three disks one is captured, one may not change, and one may.
#[test]
fn each_disk_is_as_it_was_chosen() -> Result<()> {
    let it = Committing::journal("captured-each", "raw")?;
    let names = ["kept", "named", "scratch"];
    let image = |name: &str| it.copy.with_file_name(format!("{name}.img"));
    let mut words = Vec::new();
    for name in names {
        make_image(&image(name), "raw", 8)?;
        let file = image(name).display().to_string();
        words.push("-drive".to_owned());
        words.push(format!("file={file},format=raw,if=none,id={name}"));
        words.extend(["-device".to_owned(), format!("virtio-blk-pci,drive={name}")]);
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut guest = Setup::small(Kind::Private, "captured-each-own")
        .with(&words)
        .boot()?;
    let pid = guest.pid_text();
    let choice = "--disks=named=reference,scratch=none";
    let report = it.stillframe.json(&["checkpoint", "--pid", &pid, choice])?;
    let captured = report["disks"].as_array().context("no disks")?;
    ensure!(
        captured.len() == 1 && captured[0]["device"] == "kept",
        "{report}"
    );
    ensure!(report["disks_left_out"].is_null(), "{report}");
    let id = report["checkpoint"].as_str().context("no id")?;
    guest.kill()?;
    let start = |more: &[&str]| Restored::start(&it.stillframe, id, guest.folder(), more);
    make_image(&image("scratch"), "raw", 8)?;
    start(&[])?.crash()?;
    make_image(&image("kept"), "raw", 8)?;
    let new = format!("--disks=new={}", guest.folder().join("new").display());
    let qmp = guest.folder().join("refused.qmp").display().to_string();
    let said = it.stillframe.fails(&["restore", id, "--qmp", &qmp], 1)?;
    ensure!(said.contains("disk kept"), "{said}");
    start(&[&new])?.crash()?;
    make_image(&image("named"), "raw", 8)?;
    let said = it
        .stillframe
        .fails(&["restore", id, "--qmp", &qmp, &new], 1)?;
    ensure!(said.contains("disk named"), "{said}");
    Ok(())
}
