//! Disks that are copied in rounds, and the rest of them in the pause: the same moment as memory, without a filter.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::committing::{Committing, expect_no_copy};
use stillframe_harness::fault::with_fault;
use stillframe_harness::health::{children, expect_untouched, expect_whole};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::running::{Ended, Running, signal};

/// What the guest writes in a moment is a few pages; what is read when all is read is 16 MiB and more.
const INCREMENT_BYTES_MAX: u64 = 2 << 20;

/// A watch that takes this number of checkpoints, with the guest's disks in this way, and a fault.
fn watch(it: &Committing, schedule: &str, count: u32, fault: Option<&str>) -> Result<Running> {
    let (pid, count) = (it.guest.pid_text(), count.to_string());
    let line = [
        "watch", "--pid", &pid, "--every", "500ms", "--count", &count,
    ];
    let more = ["--disks", "capture", "--disk-schedule", schedule];
    let rest = ["--pause-limit", "60s", "--json"];
    let line = [&line[..], &more, &rest].concat();
    let mut command = it.stillframe.command(&line)?;
    if let Some(fault) = fault {
        let (faulty, reached) = with_fault(&command, fault, it.guest.folder())?;
        command = faulty;
        let mut engine = Running::start(command)?;
        engine.wait_until("the fault", |_| Ok(reached.exists()))?;
        fs::remove_file(reached)?;
        return Ok(engine);
    }
    Running::start(command)
}

/// A checkpoint's disk, whose records are all whole, and how many there are.
fn content(it: &Committing, id: &str) -> Result<(Vec<u8>, u64)> {
    let image = it.guest.folder().join(format!("{id}.img"));
    let to = image.display().to_string();
    it.stillframe
        .ok(&["export", id, "--disk", "journal", "-o", &to])?;
    let records = it.records_of_raw(&image)?;
    let bytes = fs::read(&image)?;
    fs::remove_file(image)?;
    Ok((bytes, records))
}

/// Writes to the disk as if the guest did.
fn write(monitor: &mut Qmp, what: &str) -> Result<()> {
    let drives = monitor.execute("query-block", json!({}))?;
    let device = drives[0]["qdev"].as_str().context("no device")?;
    let said = monitor.human(&format!("qemu-io -d {device} \"write {what}\""))?;
    ensure!(said.trim().is_empty(), "{said}");
    Ok(())
}

/// How each checkpoint was taken, and what was read for it.
fn taken(ended: &Ended) -> Result<Vec<(String, u64)>> {
    let of = |report: &Value| {
        let disk = &report["disks"][0];
        let read = disk["bytes_read"].as_u64().context("no disk")?;
        Ok((
            disk["schedule"].as_str().context("no schedule")?.to_owned(),
            read,
        ))
    };
    ended.results()?.iter().map(of).collect()
}

/// The guest runs on its image as before, and one more checkpoint has all of it.
fn expect_unharmed(it: &Committing, monitor: &mut Qmp) -> Result<()> {
    it.guest.serial.wait_more_committed(3)?;
    let ended = watch(it, "rounds", 1, None)?.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    content(it, "latest")?;
    expect_untouched(&it.guest, monitor)?;
    expect_no_copy(monitor)
}

/// The engine is stopped in the pause of a watch's third checkpoint, and the image copied.
#[test]
fn the_rest_is_that_of_the_pause_to_the_byte() -> Result<()> {
    let it = Committing::journal("rounds-moment", "raw")?;
    let engine = watch(&it, "rounds", 3, Some("pause.before-cont:stop:3"))?;
    let copy = fs::read(&it.disk)?;
    engine.signal("CONT")?;
    let ended = engine.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    it.guest.serial.wait_more_committed(5)?;
    ensure!(
        copy == content(&it, "latest")?.0,
        "the disk is of another moment"
    );
    ensure!(copy != fs::read(&it.disk)?, "the guest has written nothing");
    for (number, (schedule, read)) in taken(&ended)?.iter().enumerate() {
        ensure!(schedule == "rounds", "{ended:?}");
        ensure!(
            number == 0 || (4096..INCREMENT_BYTES_MAX).contains(read),
            "{ended:?}"
        );
    }
    expect_no_copy(&mut it.guest.second_monitor()?)
}

/// The first checkpoint, of all, is read behind a filter; the others have little to read.
#[test]
fn a_watch_chooses_rounds_where_little_was_written() -> Result<()> {
    for format in ["raw", "qcow2"] {
        let it = Committing::journal(&format!("rounds-{format}"), format)?;
        let ended = watch(&it, "auto", 5, None)?.end()?;
        let ways = taken(&ended)?;
        ensure!(ended.code == Some(0) && ways.len() == 5, "{ended:?}");
        let expected = ["filter", "rounds", "rounds", "rounds", "rounds"];
        ensure!(
            ways.iter().map(|(way, _)| way).eq(expected.iter()),
            "{ways:?}"
        );
        ensure!(
            ways[1..]
                .iter()
                .all(|(_, read)| *read < INCREMENT_BYTES_MAX),
            "{ways:?}"
        );
        let mut monitor = it.guest.second_monitor()?;
        expect_untouched(&it.guest, &mut monitor)?;
        expect_no_copy(&mut monitor)?;
        let ids = ended.results()?;
        let ids = ids.iter().filter_map(|one| one["checkpoint"].as_str());
        let ids: Vec<String> = ids.map(str::to_owned).collect();
        for id in &ids {
            content(&it, id)?;
        }
        expect_whole(&it.stillframe, &ids)?;
    }
    Ok(())
}

/// What was written before a checkpoint that is given up comes with the next one.
#[test]
fn a_checkpoint_in_rounds_that_fails_loses_no_written_block() -> Result<()> {
    let it = Committing::journal("rounds-failed", "raw")?;
    let engine = watch(&it, "rounds", 4, Some("store.manifest:error:3"))?;
    let ended = engine.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    ensure!(ended.err.contains("no checkpoint this time"), "{ended:?}");
    let mut lengths = Vec::new();
    for report in ended.results()? {
        let id = report["checkpoint"].as_str().context("no id")?;
        lengths.push(content(&it, id)?.1);
    }
    ensure!(lengths.is_sorted_by(|one, next| one < next), "{lengths:?}");
    expect_no_copy(&mut it.guest.second_monitor()?)
}

/// While QEMU is held it carries out no command of another client; afterwards it does.
#[test]
fn no_command_falls_into_the_pause() -> Result<()> {
    let it = Committing::journal("rounds-held", "raw")?;
    let engine = watch(&it, "rounds", 2, Some("pause.held:stop:2"))?;
    let copy = fs::read(&it.disk)?;
    let monitor = it.guest.folder().join("qmp2");
    let within = Duration::from_secs(2);
    ensure!(
        Qmp::status_within(&monitor, within)?.is_none(),
        "QEMU answers while it is held"
    );
    ensure!(copy == fs::read(&it.disk)?, "the guest writes");
    engine.signal("CONT")?;
    let ended = engine.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    ensure!(
        copy == content(&it, "latest")?.0,
        "the disk is of another moment"
    );
    Ok(())
}

/// The guardian lets QEMU go, or QEMU goes on by itself.
#[test]
fn an_engine_that_dies_while_qemu_is_held_leaves_a_running_guest() -> Result<()> {
    let it = Committing::journal("rounds-killed", "raw")?;
    for with_guardian in [false, true] {
        let mut engine = watch(&it, "rounds", 2, Some("pause.held:stop:2"))?;
        if with_guardian {
            for process in children(engine.pid(), "stillframe")? {
                signal(process as u32, "KILL")?;
            }
        }
        engine.crash()?;
        let mut monitor = it.guest.second_monitor()?;
        it.guest.serial.wait_more_committed(3)?;
        if !with_guardian {
            expect_no_copy(&mut monitor)?;
        }
        expect_unharmed(&it, &mut monitor)?;
    }
    Ok(())
}

/// Another client's NBD server is left alone, also where it has no exports yet.
#[test]
fn rounds_leave_the_nbd_server_of_another_client() -> Result<()> {
    let it = Committing::journal("rounds-served", "raw")?;
    let pid = it.guest.pid_text();
    let mut monitor = it.guest.second_monitor()?;
    let path = it.guest.folder().join("nbd").display().to_string();
    let address = json!({ "type": "unix", "data": { "path": path } });
    monitor.execute("nbd-server-start", json!({ "addr": address }))?;
    let line = ["checkpoint", "--pid", &pid, "--disks", "capture"];
    let line = [&line[..], &["--disk-schedule", "rounds"]].concat();
    let said = it.stillframe.fails(&line, 1)?;
    ensure!(said.contains("NBD server"), "{said}");
    expect_no_copy(&mut monitor)?;
    // It still runs.
    monitor.execute("nbd-server-stop", json!({}))?;
    expect_unharmed(&it, &mut monitor)
}

/// An error costs that checkpoint; a host that is slow costs time.
#[test]
fn a_fault_while_qemu_is_held_costs_only_that() -> Result<()> {
    let it = Committing::journal("rounds-faults", "raw")?;
    for (fault, gives_up) in [
        ("disks.round:error:2", true),
        ("pause.held:error:2", true),
        ("pause.held:slow:2", false),
    ] {
        let ended = watch(&it, "rounds", 3, Some(fault))?.end()?;
        ensure!(ended.code == Some(0), "{ended:?}");
        let gave_up = ended.err.contains("no checkpoint this time");
        ensure!(gave_up == gives_up, "{fault}: {ended:?}");
        expect_unharmed(&it, &mut it.guest.second_monitor()?)?;
    }
    Ok(())
}

/// Written while the first round copies: a second one follows. The engine is stopped when the first has begun, and has its disk.
#[test]
fn what_is_written_in_a_round_is_copied_by_the_next() -> Result<()> {
    let it = Committing::journal("rounds-more", "qcow2")?;
    let engine = watch(&it, "rounds", 3, Some("disks.round:stop:2"))?;
    let mut monitor = it.guest.second_monitor()?;
    // What is there already.
    write(&mut monitor, "-P 0x5a 50M 8M")?;
    engine.signal("CONT")?;
    let ended = engine.end()?;
    let ways = taken(&ended)?;
    ensure!(ended.code == Some(0) && ways.len() == 3, "{ended:?}");
    ensure!(ways.iter().all(|(way, _)| way == "rounds"), "{ended:?}");
    ensure!(ways[1].1 >= 8 << 20, "{ways:?}");
    for report in ended.results()? {
        content(&it, report["checkpoint"].as_str().context("no id")?)?;
    }
    expect_no_copy(&mut monitor)
}

/// An engine that hangs in the pause loses it at its limit, and gives the checkpoint up.
#[test]
fn the_guardian_lets_qemu_go_at_the_limit() -> Result<()> {
    let it = Committing::journal("rounds-hung", "raw")?;
    let pid = it.guest.pid_text();
    let line = ["checkpoint", "--pid", &pid, "--disks", "capture"];
    let more = ["--disk-schedule", "rounds", "--pause-limit", "1s", "--json"];
    let command = it.stillframe.command(&[&line[..], &more].concat())?;
    let (command, reached) = with_fault(&command, "pause.held:stop", it.guest.folder())?;
    let mut engine = Running::start(command)?;
    engine.wait_until("the fault", |_| Ok(reached.exists()))?;
    it.guest.serial.wait_more_committed(3)?;
    engine.signal("CONT")?;
    let ended = engine.end()?;
    ensure!(ended.code == Some(1) && ended.errors() == 1, "{ended:?}");
    expect_unharmed(&it, &mut it.guest.second_monitor()?)
}

/// Written after the last round, and before the pause: it is read in the pause, of raw and of qcow2.
#[test]
fn what_is_written_after_the_last_round_is_read_in_the_pause() -> Result<()> {
    const AT: usize = 50 << 20;
    const BYTES: usize = 1 << 20;
    for format in ["raw", "qcow2"] {
        let it = Committing::journal(&format!("rounds-rest-{format}"), format)?;
        let engine = watch(&it, "rounds", 2, Some("pause.before-stop:stop:2"))?;
        let mut monitor = it.guest.second_monitor()?;
        write(&mut monitor, &format!("-P 3 {AT} {BYTES}"))?;
        engine.signal("CONT")?;
        let ended = engine.end()?;
        let ways = taken(&ended)?;
        ensure!(ended.code == Some(0) && ways.len() == 2, "{ended:?}");
        ensure!(
            ways[1].0 == "rounds" && ways[1].1 >= BYTES as u64,
            "{ways:?}"
        );
        let image = it.guest.folder().join("rest.img");
        let to = image.display().to_string();
        let line = ["export", "latest", "--disk", "journal", "-o", &to];
        it.stillframe.ok(&line)?;
        let found = fs::read(&image)?;
        let is_there = found[AT..AT + BYTES].iter().all(|&byte| byte == 3);
        ensure!(
            is_there,
            "{format}: what was written is not in the checkpoint"
        );
        expect_no_copy(&mut monitor)?;
    }
    Ok(())
}

/// Written after the last round, and before the pause: too much to be read in it. A filter takes over, and nothing is lost.
#[test]
fn a_burst_before_the_pause_is_left_to_a_filter() -> Result<()> {
    for (schedule, taken_with) in [("auto", "filter"), ("rounds", "")] {
        let it = Committing::journal(&format!("rounds-burst-{schedule}"), "raw")?;
        let engine = watch(&it, schedule, 2, Some("pause.before-stop:stop:2"))?;
        let mut monitor = it.guest.second_monitor()?;
        // What is there already.
        write(&mut monitor, "-P 0x5a 50M 8M")?;
        engine.signal("CONT")?;
        let ended = engine.end()?;
        let ways = taken(&ended)?;
        ensure!(ended.code == Some(0) && ways.len() == 2, "{ended:?}");
        let gave_up = ended.err.contains("no checkpoint this time");
        match taken_with {
            "filter" => ensure!(ways[1].0 == "filter" && !gave_up, "{ended:?}"),
            _ => ensure!(
                gave_up && ended.err.contains("--disk-schedule"),
                "{ended:?}"
            ),
        }
        content(&it, "latest")?;
        ensure!(ways[1].1 >= 8 << 20, "{ways:?}");
        expect_no_copy(&mut monitor)?;
    }
    Ok(())
}

/// A manager puts an overlay over the image after the last round: what is written to that is in no bitmap. The checkpoint is
/// given up, and the next one has all.
#[test]
fn an_overlay_of_another_client_costs_only_that_checkpoint() -> Result<()> {
    let it = Committing::journal("rounds-overlay", "raw")?;
    let engine = watch(&it, "rounds", 2, Some("pause.before-stop:stop:2"))?;
    let mut monitor = it.guest.second_monitor()?;
    let overlay = it.guest.folder().join("overlay.qcow2");
    let overlay = json!({ "device": "journal", "snapshot-file": overlay, "format": "qcow2" });
    monitor.execute("blockdev-snapshot-sync", overlay)?;
    write(&mut monitor, "-P 0x5a 50M 1M")?;
    engine.signal("CONT")?;
    let ended = engine.end()?;
    let ways = taken(&ended)?;
    ensure!(ended.code == Some(0) && ways.len() == 2, "{ended:?}");
    ensure!(ended.err.contains("got another image"), "{ended:?}");
    ensure!(ways[1].1 >= 16 << 20, "{ways:?}");
    content(&it, "latest")?;
    expect_no_copy(&mut monitor)
}
