//! `restore --lazy`: the guest runs before its memory is there, and never on anything else.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::filling::{Filling, expect_alone, files_kept};
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::processes_with;
use stillframe_harness::memory::Image;
use stillframe_harness::qmp::Qmp;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::{PATIENCE, Running};
use stillframe_harness::serial::Serial;
use stillframe_harness::unplugged::{Unplugged, packs};

/// The guest ticks on from where the checkpoint was taken, checks all its memory, and QEMU is alone again.
fn expect_complete(restored: &Restored, ticks: usize) -> Result<()> {
    restored.serial.wait_ticks(ticks, PATIENCE)?;
    expect_alone(restored)
}

/// Whole pages, pages made of deltas, and zeros, in all kinds of memory.
#[test]
fn a_guest_of_every_kind_goes_on() -> Result<()> {
    for kind in [
        Kind::Private,
        Kind::Memfd,
        Kind::FileShared,
        Kind::Pc,
        Kind::TwoCpus,
        Kind::Console,
        Kind::Sandbox,
    ] {
        let mut guest = Setup::small(kind, "lazy").booted()?;
        let folder = tempfile::tempdir()?;
        let stillframe = Stillframe::init(&folder.path().join("repo"))?;
        let pid = guest.pid_text();
        stillframe.ok(&["watch", "--pid", &pid, "--every", "300ms", "--count", "4"])?;
        if kind == Kind::FileShared {
            // Two VMs in one file of RAM would be none.
            guest.kill()?;
        }
        let restored = Restored::start(&stillframe, "latest", folder.path(), &["--lazy"])?;
        expect_complete(&restored, 12).with_context(|| kind.name())?;
    }
    Ok(())
}

/// Every page of every block, by an oracle that knows nothing of us: the original and the restored VM
/// stand still at the same instant.
#[test]
fn complete_memory_is_that_of_the_pause() -> Result<()> {
    for kind in [Kind::Private, Kind::Memfd] {
        let guest = Setup::small(kind, "frozen").booted()?;
        let folder = tempfile::tempdir()?;
        let stillframe = Stillframe::init(&folder.path().join("repo"))?;
        let pid = guest.pid_text();
        stillframe.ok(&["watch", "--pid", &pid, "--every", "200ms", "--count", "5"])?;
        let mut monitor = guest.second_monitor()?;
        monitor.execute("stop", json!({}))?;
        stillframe.ok(&["checkpoint", "--pid", &pid])?;
        let original = Image::take(guest.pid(), &mut monitor)?;
        // Once so that there is a working set, then with what is read of it while QEMU starts: on a busy
        // machine QEMU may be there before anything is.
        let running = Filling::start(&stillframe, "latest", folder.path(), &[])?;
        drop(running.complete()?);
        let mut prefetched = 0;
        for _ in 0..5 {
            let options = ["--paused", "--verify"];
            let filling = Filling::start(&stillframe, "latest", folder.path(), &options)?;
            let (restored, report) = filling.complete()?;
            let image = Image::take(restored.pid, &mut restored.monitor()?)?;
            let differing = original.differing(&image)?;
            ensure!(differing.is_empty(), "{}: {differing:?}", kind.name());
            prefetched += report["lazy"]["prefetched"].as_u64().context("no count")?;
            if prefetched > 0 {
                break;
            }
        }
        ensure!(prefetched > 0, "nothing was read while QEMU started");
    }
    Ok(())
}

/// A lazy restore that fills next to nothing by itself: the guest gets what it asks for.
fn start_slowly(stillframe: &Stillframe, folder: &Path) -> Result<Filling> {
    let options = ["--limit-fill", "256K"];
    let mut slow = Filling::start(stillframe, "latest", folder, &options)?;
    slow.wait_runs()?;
    Ok(slow)
}

fn checkpointed(kind: Kind, name: &str, folder: &Path) -> Result<(Guest, Stillframe)> {
    let guest = Setup::small(kind, name).booted()?;
    let stillframe = Stillframe::init(&folder.join("repo"))?;
    let pid = guest.pid_text();
    stillframe.ok(&["watch", "--pid", &pid, "--every", "300ms", "--count", "3"])?;
    Ok((guest, stillframe))
}

/// As [`checkpointed`], with a guest that continues asking for pages for half a minute: it has 24,000, and
/// touches few in each tick.
fn checkpointed_asking(kind: Kind, name: &str, folder: &Path) -> Result<(Guest, Stillframe)> {
    let mut setup = Setup::small(kind, name);
    setup.ram_mib = 192;
    setup.workload.mib = 96;
    setup.workload.writes_per_tick = 2;
    setup.workload.share = 512;
    let guest = setup.boot()?;
    let stillframe = Stillframe::init(&folder.join("repo"))?;
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    Ok((guest, stillframe))
}

fn resume(stillframe: &Stillframe, qmp: &Path, serial: &Serial) -> Result<Restored> {
    Ok(Filling::resume(stillframe, qmp, serial, &[])?.complete()?.0)
}

#[test]
fn the_guest_runs_long_before_its_memory_is_there() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (_guest, stillframe) = checkpointed(Kind::Private, "early", folder.path())?;
    let mut slow = start_slowly(&stillframe, folder.path())?;
    slow.serial.wait_ticks(10, PATIENCE)?;
    ensure!(files_kept(&slow.qmp)? == 2, "it is complete already");
    // Its monitor is the user's.
    let mut monitor = Qmp::connect(&slow.qmp)?;
    monitor.execute("stop", json!({}))?;
    ensure!(monitor.status()? == "paused");
    monitor.execute("cont", json!({}))?;
    drop(monitor);
    slow.serial.wait_more(2, PATIENCE)?;
    // Nobody else may fill it meanwhile, nor begin again at this monitor.
    let qmp = slow.qmp.display().to_string();
    let said = stillframe.fails(&["restore", "--resume", "--qmp", &qmp], 1)?;
    ensure!(said.contains("by another process"), "{said}");
    // The first signal to end makes it say what that means; after the second it leaves a paused VM that continues.
    slow.running.signal("INT")?;
    slow.running.wait_words("interrupt again")?;
    slow.serial.wait_more(2, PATIENCE)?;
    slow.running.signal("INT")?;
    let Filling {
        running,
        qmp,
        serial,
    } = slow;
    let ended = running.end()?;
    ensure!(ended.code == Some(1), "{ended:?}");
    ensure!(Qmp::connect(&qmp)?.status()? == "paused");
    let restored = resume(&stillframe, &qmp, &serial)?;
    restored.serial.wait_more(10, PATIENCE)?;
    expect_complete(&restored, 10)
}

#[test]
fn another_process_goes_on_after_a_kill() -> Result<()> {
    for kind in [Kind::Private, Kind::Memfd] {
        let folder = tempfile::tempdir()?;
        let (_guest, stillframe) = checkpointed(kind, "killed", folder.path())?;
        let mut slow = start_slowly(&stillframe, folder.path())?;
        slow.serial.wait_ticks(3, PATIENCE)?;
        slow.running.crash()?;
        let restored = resume(&stillframe, &slow.qmp, &slow.serial)?;
        restored.serial.wait_more(10, PATIENCE)?;
        expect_complete(&restored, 10)?;
        // Once is enough.
        let qmp = slow.qmp.display().to_string();
        let said = stillframe.fails(&["restore", "--resume", "--qmp", &qmp], 1)?;
        ensure!(said.contains("no lazy restore is in progress"), "{said}");
    }
    Ok(())
}

/// The VM waits for its repository, and continues with it; also with another process, which must wake the threads
/// that wait for the one that was killed.
#[test]
fn a_repository_that_is_gone_for_a_while() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (_guest, stillframe) = checkpointed_asking(Kind::Private, "unplugged", folder.path())?;
    let mut slow = start_slowly(&stillframe, folder.path())?;
    slow.serial.wait_ticks(2, PATIENCE)?;
    let unplugged = Unplugged::new(&folder.path().join("repo"))?;
    slow.running.wait_words("the VM is paused: a page")?;
    unplugged.plug()?;
    slow.running.wait_words("the VM is resumed")?;
    slow.serial.wait_more(5, PATIENCE)?;
    let unplugged = Unplugged::new(&folder.path().join("repo"))?;
    slow.running.wait_words_again("the VM is paused: a page")?;
    slow.running.crash()?;
    unplugged.plug()?;
    let options = ["--limit-fill", "256K"];
    let mut again = Filling::resume(&stillframe, &slow.qmp, &slow.serial, &options)?;
    again.serial.wait_more(5, PATIENCE)?;
    again.running.crash()?;
    let restored = resume(&stillframe, &slow.qmp, &slow.serial)?;
    restored.serial.wait_more(10, PATIENCE)?;
    expect_complete(&restored, 10)
}

/// A damaged page is not for the guest: it waits until the page is whole.
#[test]
fn damage_that_is_met_on_demand() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (_guest, stillframe) = checkpointed_asking(Kind::Memfd, "damaged", folder.path())?;
    let mut slow = start_slowly(&stillframe, folder.path())?;
    slow.serial.wait_ticks(2, PATIENCE)?;
    let whole = packs(stillframe.repository())?;
    for (path, bytes) in &whole {
        let mut damaged = bytes.clone();
        damaged.iter_mut().step_by(512).for_each(|byte| *byte ^= 1);
        std::fs::write(path, damaged)?;
    }
    slow.running.wait_words("the VM is paused: a page")?;
    let said = slow.running.err();
    ensure!(said.contains("packs/"), "the pack is not named: {said}");
    let ticks = slow.serial.ticks()?.len();
    std::thread::sleep(std::time::Duration::from_millis(500));
    ensure!(slow.serial.ticks()?.len() <= ticks + 1, "the guest runs on");
    for (path, bytes) in &whole {
        std::fs::write(path, bytes)?;
    }
    slow.running.wait_words("the VM is resumed")?;
    slow.serial.wait_more(10, PATIENCE)?;
    slow.running.crash()?;
    expect_complete(&resume(&stillframe, &slow.qmp, &slow.serial)?, 10)
}

/// What a VM asks for first is recorded, shown, used the next time, and goes with its checkpoint.
#[test]
fn a_working_set_is_recorded_and_grows() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (guest, stillframe) = checkpointed(Kind::Private, "habits", folder.path())?;
    let pid = guest.pid_text();
    let restore = || -> Result<serde_json::Value> {
        let qmp = folder.path().join("x.qmp").display().to_string();
        let report = stillframe.json(&["restore", "latest", "--lazy", "--qmp", &qmp])?;
        let restored = Restored {
            pid: report["pid"].as_i64().context("no pid")? as i32,
            qmp: qmp.into(),
            serial: Serial::new(&folder.path().join("none")),
        };
        drop(restored);
        Ok(report["lazy"].clone())
    };
    let first = restore()?;
    let mut recorded = first["recorded"].as_u64().context("no record")?;
    ensure!(recorded > 0 && first["working_set"].is_null(), "{first}");
    for _ in 0..3 {
        let next = restore()?;
        ensure!(next["working_set"] == recorded, "{recorded}: {next}");
        // A guest that accessed no page gives nothing to record; a page that came too late only moves.
        if next["faults"] == 0 {
            ensure!(next["recorded"].is_null(), "{next}");
        }
        let learned = next["recorded"].as_u64().unwrap_or(recorded);
        ensure!(learned >= recorded, "{recorded}: {next}");
        recorded = learned;
    }
    let shown = stillframe.json(&["show", "latest"])?;
    ensure!(shown["working_set_pages"] == recorded, "{shown}");
    ensure!(stillframe.json(&["check"])?["clean"] == true);
    let sets = || std::fs::read_dir(stillframe.repository().join("working-sets"));
    ensure!(sets()?.count() == 1);
    stillframe.ok(&["checkpoint", "--pid", &pid])?;
    stillframe.ok(&["forget", "--keep-last", "1"])?;
    ensure!(sets()?.count() == 0, "it outlives its checkpoint");
    Ok(())
}

/// Killed before the guest has run, a restore leaves nothing behind.
#[test]
fn a_restore_that_dies_early_takes_its_qemu_along() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (_guest, stillframe) = checkpointed(Kind::Private, "early-death", folder.path())?;
    let qmp = folder.path().join("x.qmp");
    let qmp_text = qmp.display().to_string();
    for lazily in [true, false] {
        let mut line = vec!["restore", "latest", "--qmp", &qmp_text];
        line.extend(lazily.then_some("--lazy"));
        let mut engine = Running::start(stillframe.command(&line)?)?;
        let begin = std::time::Instant::now();
        while processes_with(&qmp_text)? == 0 {
            let ended = engine.has_ended()?;
            ensure!(!ended, "no QEMU was started: {}", engine.err());
        }
        engine.crash()?;
        while processes_with(&qmp_text)? > 0 {
            ensure!(begin.elapsed() < PATIENCE, "a QEMU is left behind");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
    Ok(())
}
