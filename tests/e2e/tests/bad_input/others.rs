//! Somebody else stops, migrates or suspends the VM while a watch pauses it.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::json;
use stillframe_e2e::cli::Stillframe;
use stillframe_e2e::guest::{BOOT_LIMIT, Guest, Kind, Setup};
use stillframe_e2e::health::{expect_nothing_left, expect_untouched};
use stillframe_e2e::qmp::Qmp;
use stillframe_e2e::running::{PATIENCE, Running};

/// How often a VM is stopped, at moments that meet every part of a pause.
const STOPS: u64 = 60;
/// How often one is migrated.
const MIGRATIONS: u64 = 3;

fn watch(stillframe: &Stillframe, name: &str) -> Result<Running> {
    let line = ["watch", "--vm", name, "--every", "10ms", "--json"];
    let mut watch = Running::start(stillframe.command(&line)?)?;
    watch.wait_results(2)?;
    Ok(watch)
}

/// QEMU tells nobody of a `stop` that it gets for a VM that stands still already.
#[test]
fn a_vm_that_its_user_stops_during_a_watch_stays_stopped() -> Result<()> {
    let guest = Setup::small(Kind::Pc, "stopped").boot()?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let mut watch = watch(&stillframe, "stopped")?;
    for n in 0..STOPS {
        thread::sleep(Duration::from_micros(n * 701 % 30_000));
        monitor.execute("stop", json!({}))?;
        let taken = watch.results()?.len();
        // The watch goes on with the VM stopped.
        watch.wait_results(taken + 2)?;
        let status = monitor.status()?;
        ensure!(status == "paused", "after stop {n} the VM is {status}");
        monitor.execute("cont", json!({}))?;
    }
    watch.signal("TERM")?;
    ensure!(watch.end()?.code == Some(0));
    monitor.take_events();
    expect_untouched(&guest, &mut monitor)
}

fn waits_for(address: &str) -> Result<Guest> {
    Setup::small(Kind::Pc, "destination")
        .with(&["-incoming", address])
        .start()
}

fn wait_migrated(source: &mut Qmp) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let status = source.execute("query-migrate", json!({}))?["status"].clone();
        match status.as_str() {
            Some("completed") => return Ok(()),
            Some("failed" | "cancelled") => anyhow::bail!("the migration {status}"),
            _ => ensure!(Instant::now() < deadline, "the migration is {status}"),
        }
        thread::sleep(Duration::from_millis(3));
    }
}

/// A migration that ends while the watch pauses the VM: the source is never resumed, the destination
/// does not take the pause for the VM's own, and no checkpoint is taken of what is left.
#[test]
fn a_vm_that_is_migrated_during_a_watch_runs_once() -> Result<()> {
    for n in 0..MIGRATIONS {
        let source = Setup::small(Kind::Pc, "migrated").boot()?;
        let address = format!("unix:{}", source.folder().join("migration").display());
        let destination = waits_for(&address)?;
        let (mut from, mut to) = (source.second_monitor()?, destination.second_monitor()?);
        let stillframe = Stillframe::init(&source.folder().join("repo"))?;
        let watch = watch(&stillframe, "migrated")?;
        thread::sleep(Duration::from_millis(n * 7));
        from.execute("migrate", json!({ "uri": address }))?;
        wait_migrated(&mut from)?;
        // It ends by itself, and well.
        let ended = watch.end()?;
        ensure!(ended.code == Some(0), "{ended:?}");
        ensure!(ended.err.contains("migrated away"), "{}", ended.err);
        for _ in 0..10 {
            let (source, destination) = (from.status()?, to.status()?);
            ensure!(source == "postmigrate", "the source is {source}");
            ensure!(destination == "running", "the destination is {destination}");
            thread::sleep(Duration::from_millis(10));
        }
        let said = stillframe.fails(&["checkpoint", "--pid", &source.pid_text()], 5)?;
        ensure!(said.contains("postmigrate"), "{said}");
        expect_nothing_left(source.pid(), &mut from)?;
    }
    Ok(())
}

/// QEMU stops a guest that sleeps, to save it, and does not put it back to sleep by itself.
#[test]
fn a_guest_that_sleeps_can_be_woken_after_a_checkpoint() -> Result<()> {
    let guest = Setup::small(Kind::Pc, "asleep")
        .with_drivers("sf.suspend=1 no_console_suspend")
        .boot()?;
    let mut monitor = guest.second_monitor()?;
    monitor.wait_event("SUSPEND", BOOT_LIMIT)?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let line = [
        "watch", "--vm", "asleep", "--every", "50ms", "--count", "3", "--verify",
    ];
    for report in stillframe.json_lines(&line)? {
        ensure!(report["verify"]["differing"] == 0, "{report}");
        ensure!(monitor.status()? == "suspended");
    }
    monitor.execute("system_wakeup", json!({}))?;
    guest.serial.wait_line("woken", PATIENCE)?;
    monitor.take_events();
    expect_untouched(&guest, &mut monitor)
}
