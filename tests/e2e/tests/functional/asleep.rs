//! A guest that is suspended to RAM at a checkpoint comes back suspended, whichever way, and wakes from there.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::filling::{Filling, expect_alone};
use stillframe_harness::guest::{BOOT_LIMIT, Guest, Kind, Setup};
use stillframe_harness::health::expect_untouched;
use stillframe_harness::memory::Image;
use stillframe_harness::qmp::Qmp;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::PATIENCE;
use stillframe_harness::serial::Serial;

/// The guest checks all of its memory in eight ticks.
const ALL_CHECKED: usize = 9;

/// A guest that has just gone to sleep.
fn asleep(name: &str) -> Result<(Guest, Qmp)> {
    let guest = Setup::small(Kind::Pc, name)
        .with_drivers("sf.suspend=1 no_console_suspend")
        // Not `boot`, which awaits ticks: on a slow machine it may sleep before them.
        .start()?;
    let mut monitor = guest.second_monitor()?;
    monitor.wait_event("SUSPEND", BOOT_LIMIT)?;
    Ok((guest, monitor))
}

fn checkpoint(stillframe: &Stillframe, pid: &str) -> Result<String> {
    let report = stillframe.json(&["checkpoint", "--pid", pid, "--verify"])?;
    ensure!(report["verify"]["differing"] == 0, "{report}");
    Ok(report["checkpoint"].as_str().context("no id")?.to_owned())
}

/// Its guest sleeps, so it does nothing; woken, it says so, and continues with right memory.
fn expect_wakes(monitor: &mut Qmp, serial: &Serial) -> Result<()> {
    ensure!(monitor.status()? == "suspended", "{}", monitor.status()?);
    let before = serial.text().len();
    std::thread::sleep(std::time::Duration::from_millis(500));
    ensure!(serial.text().len() == before, "it runs in its sleep");
    monitor.execute("system_wakeup", json!({}))?;
    let woken = || serial.text().get(before..).unwrap_or("").contains("woken");
    let deadline = std::time::Instant::now() + PATIENCE;
    while !woken() {
        ensure!(std::time::Instant::now() < deadline, "it does not wake");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    serial.wait_more(ALL_CHECKED, PATIENCE)?;
    ensure!(monitor.status()? == "running");
    Ok(())
}

fn clone(stillframe: &Stillframe, folder: &Path) -> Result<Restored> {
    let at = |name: &str| folder.join(name).display().to_string();
    let serial = format!("file:{}", at("clone.serial"));
    let (qmp, base) = (at("clone.qmp"), at("base"));
    let line = [
        "clone",
        "latest",
        "--qmp",
        &qmp,
        "--serial",
        &serial,
        "--template-dir",
        &base,
    ];
    let report = stillframe.json(&line)?;
    ensure!(report["running"] == false, "{report}");
    Ok(Restored {
        pid: report["pid"].as_i64().context("no pid")? as i32,
        qmp: qmp.into(),
        serial: Serial::new(&folder.join("clone.serial")),
    })
}

#[test]
fn a_guest_that_slept_sleeps_when_it_is_restored() -> Result<()> {
    let (mut guest, mut monitor) = asleep("sleeper")?;
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    checkpoint(&stillframe, &guest.pid_text())?;
    let shown = stillframe.ok(&["show", "latest"])?;
    ensure!(shown.contains("suspended"), "{shown}");
    let then = Image::take(guest.pid(), &mut monitor)?;
    drop(monitor);
    guest.kill()?;
    let wakes = |restored: &Restored, mut monitor: Qmp| -> Result<()> {
        let differing = then.differing(&Image::take(restored.pid, &mut monitor)?)?;
        ensure!(differing.is_empty(), "{differing:?}");
        expect_wakes(&mut monitor, &restored.serial)
    };
    for more in [&[][..], &["--verify"], &["--paused"]] {
        let restored = Restored::start(&stillframe, "latest", folder.path(), more)?;
        let mut monitor = restored.monitor()?;
        if more.contains(&"--paused") {
            ensure!(monitor.status()? == "paused");
            monitor.execute("cont", json!({}))?;
        }
        wakes(&restored, monitor)?;
    }
    let (restored, report) =
        Filling::start(&stillframe, "latest", folder.path(), &[])?.complete()?;
    ensure!(report["running"] == false, "{report}");
    expect_alone(&restored)?;
    wakes(&restored, restored.monitor()?)?;
    drop(restored);
    let cloned = clone(&stillframe, folder.path())?;
    wakes(&cloned, cloned.monitor()?)
}

/// From running to asleep, from asleep to asleep, from asleep to running.
#[test]
fn a_guest_goes_back_to_its_sleep_and_out_of_it() -> Result<()> {
    let (guest, mut monitor) = asleep("restless")?;
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let pid = guest.pid_text();
    let sleeping = checkpoint(&stillframe, &pid)?;
    let then = Image::take(guest.pid(), &mut monitor)?;
    expect_wakes(&mut monitor, &guest.serial)?;
    let waking = checkpoint(&stillframe, &pid)?;
    for id in [&sleeping, &sleeping] {
        let report = stillframe.json(&["rewind", id, "--pid", &pid])?;
        ensure!(report["running"] == false, "{report}");
        ensure!(monitor.status()? == "suspended", "{}", monitor.status()?);
        let differing = then.differing(&Image::take(guest.pid(), &mut monitor)?)?;
        ensure!(differing.is_empty(), "{differing:?}");
    }
    let report = stillframe.json(&["rewind", &waking, "--pid", &pid])?;
    ensure!(report["running"] == true, "{report}");
    ensure!(monitor.status()? == "running");
    guest.serial.wait_more(ALL_CHECKED, PATIENCE)?;
    stillframe.ok(&["rewind", &sleeping, "--pid", &pid, "--paused"])?;
    ensure!(monitor.status()? == "paused");
    monitor.execute("cont", json!({}))?;
    expect_wakes(&mut monitor, &guest.serial)?;
    stillframe.ok(&["rewind", &sleeping, "--pid", &pid])?;
    expect_wakes(&mut monitor, &guest.serial)?;
    monitor.take_events();
    expect_untouched(&guest, &mut monitor)
}
