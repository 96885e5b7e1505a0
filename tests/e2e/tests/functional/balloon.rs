//! A guest gives back memory that it does not need before a checkpoint of all memory, and has it again after that,
//! whatever becomes of the engine.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::{Stillframe, count};
use stillframe_harness::fault::with_fault;
use stillframe_harness::guest::{AgentKind, Guest, Kind, Setup};
use stillframe_harness::health::expect_untouched;
use stillframe_harness::qmp::Qmp;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::{PATIENCE, Running};

const RAM_MIB: u32 = 512;
/// Files that the guest makes and removes, of a megabyte each: what it does not need after that.
const FILES: u32 = 150;
/// Less than these pages, as a bound from below on what is given back.
const FREED: u64 = 20_000;
/// Enough for all of it on a busy machine.
const LONG: &str = "--balloon=60s";

/// A guest with a balloon that has used much memory, and does not any more.
fn idle(kind: Kind, name: &str, has_agent: bool) -> Result<Guest> {
    let words = format!("sf.churn={FILES} sf.rounds=1");
    let mut setup = Setup::small(kind, name)
        .with(&["-device", "virtio-balloon-pci,id=balloon0"])
        .with_drivers(&words);
    setup.agent = has_agent.then_some(AgentKind::Qemu);
    setup.ram_mib = RAM_MIB;
    let guest = setup.boot()?;
    guest.serial.wait_line("churned 1", PATIENCE)?;
    Ok(guest)
}

/// The pages of a checkpoint that have content.
fn content(report: &Value) -> Result<u64> {
    Ok(count(report, "pages", "captured")? - count(report, "pages", "zero")?)
}

/// Waits until the guest has all of its memory.
fn expect_all_memory(monitor: &mut Qmp) -> Result<()> {
    let begin = Instant::now();
    loop {
        let said = monitor.execute("query-balloon", json!({}))?;
        if said["actual"] == u64::from(RAM_MIB) << 20 {
            monitor.take_events();
            return Ok(());
        }
        if begin.elapsed() > PATIENCE {
            bail!("the guest has {said}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn memory_that_a_guest_does_not_need_is_not_stored() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let guest = idle(Kind::Private, "idle", true)?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let whole = stillframe.json(&["checkpoint", "idle"])?;
    ensure!(whole["balloon"].is_null(), "{whole}");
    let report = stillframe.json(&["checkpoint", "idle", LONG, "--verify"])?;
    ensure!(report["verify"]["differing"] == 0, "{report}");
    ensure!(report["balloon"]["not_taken"].is_null(), "{report}");
    let ram = u64::from(RAM_MIB) << 20;
    ensure!(
        count(&report, "balloon", "original_bytes")? == ram,
        "{report}"
    );
    ensure!(count(&report, "balloon", "missing_bytes")? == 0, "{report}");
    let (before, after) = (content(&whole)?, content(&report)?);
    ensure!(after + FREED < before, "{after} of {before} pages");
    expect_all_memory(&mut guest.second_monitor()?)?;
    let id = report["checkpoint"].as_str().context("no id")?;
    let restored = Restored::start(&stillframe, id, guest.folder(), &["--verify"])?;
    restored.serial.wait_more(3, PATIENCE)?;
    expect_all_memory(&mut restored.monitor()?)?;
    restored.crash()?;
    expect_untouched(&guest, &mut guest.second_monitor()?)
}

/// With every schedule, and in the increments after it: what the balloon takes and gives back is exact.
#[test]
fn a_watch_whose_guest_gives_memory_back_is_exact() -> Result<()> {
    for (kind, schedules) in [
        (Kind::Private, &["stop-copy", "copy-on-write"][..]),
        (Kind::Memfd, &["pre-copy"]),
    ] {
        let guest = idle(kind, "gives", true)?;
        let pid = guest.pid_text();
        for schedule in schedules {
            let folder = tempfile::tempdir()?;
            let stillframe = Stillframe::init(&folder.path().join("repo"))?;
            let line = ["watch", "--pid", &pid, "--every", "500ms", "--count", "3"];
            let more = ["--balloon", "--verify", "--schedule", schedule];
            let reports = stillframe.json_lines(&[&line[..], &more].concat())?;
            for report in &reports {
                ensure!(report["verify"]["differing"] == 0, "{report}");
            }
            // Only the first is of all memory.
            ensure!(!reports[0]["balloon"].is_null(), "{}", reports[0]);
            ensure!(reports[1]["balloon"].is_null(), "{}", reports[1]);
            expect_all_memory(&mut guest.second_monitor()?)?;
        }
        expect_untouched(&guest, &mut guest.second_monitor()?)?;
    }
    Ok(())
}

#[test]
fn without_an_agent_the_balloons_statistics_say_what_is_needed() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let guest = idle(Kind::Private, "counts", false)?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let report = stillframe.json(&["checkpoint", "counts", LONG, "--verify"])?;
    ensure!(report["verify"]["differing"] == 0, "{report}");
    let taken = count(&report, "balloon", "taken_bytes")?;
    ensure!(taken > FREED * 4096, "{report}");
    let mut monitor = guest.second_monitor()?;
    expect_all_memory(&mut monitor)?;
    // QEMU does not poll for them any more.
    let interval = json!({
        "path": "/machine/peripheral/balloon0", "property": "guest-stats-polling-interval",
    });
    let interval = monitor.execute("qom-get", interval)?;
    ensure!(interval == 0, "QEMU polls every {interval} s");
    expect_untouched(&guest, &mut monitor)
}

/// The engine fails, is killed or hangs while the balloon is inflated.
#[test]
fn the_guest_has_its_memory_again_whatever_becomes_of_the_engine() -> Result<()> {
    for fault in ["error", "kill", "hang"] {
        let folder = tempfile::tempdir()?;
        // Each time one that has something to give back.
        let guest = idle(Kind::Private, "keeps", true)?;
        let mut monitor = guest.second_monitor()?;
        let stillframe = Stillframe::init(&folder.path().join("repo"))?;
        let command = stillframe.command(&["checkpoint", "keeps", "--balloon=2s"])?;
        let spec = format!("balloon.inflated:{fault}");
        let (command, reached) = with_fault(&command, &spec, folder.path())?;
        let mut engine = Running::start(command)?;
        let begin = Instant::now();
        while !reached.exists() {
            ensure!(begin.elapsed() < PATIENCE, "{fault}: {}", engine.err());
            std::thread::sleep(Duration::from_millis(1));
        }
        if fault == "hang" {
            // The balloon has it until the guardian acts.
            let said = monitor.execute("query-balloon", json!({}))?;
            ensure!(said["actual"] != u64::from(RAM_MIB) << 20, "{said}");
        }
        expect_all_memory(&mut monitor).context(fault)?;
        engine.crash()?;
        expect_untouched(&guest, &mut monitor).context(fault)?;
        let report = stillframe.json(&["checkpoint", "keeps", "--balloon", "--verify"])?;
        ensure!(report["verify"]["differing"] == 0, "{fault}: {report}");
    }
    Ok(())
}

#[test]
fn where_no_memory_can_be_taken_the_checkpoint_is_whole_and_says_why() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let guest = Setup::small(Kind::Private, "flat").boot()?;
    let mut without_driver = Setup::small(Kind::Private, "no-driver");
    without_driver = without_driver.with(&["-device", "virtio-balloon-pci"]);
    let without_driver = without_driver.boot()?;
    let paused = Setup::small(Kind::Private, "paused").with_agent();
    let paused = paused.with(&["-device", "virtio-balloon-pci"]).boot()?;
    paused.second_monitor()?.execute("stop", json!({}))?;
    for (name, why) in [
        ("flat", "the VM has no balloon (virtio-balloon)"),
        (
            "no-driver",
            "the VM has no guest agent, and the balloon's driver sends no statistics",
        ),
        ("paused", "the guest does not run"),
    ] {
        let output = stillframe.run(&["checkpoint", name, "--balloon", "--verify"])?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{said}");
        let expected = format!("the balloon took no memory: {why}");
        ensure!(said.contains(&expected), "{said}");
    }
    expect_untouched(&guest, &mut guest.second_monitor()?)?;
    expect_untouched(&without_driver, &mut without_driver.second_monitor()?)
}
