//! Another client stops, migrates or suspends the VM while a watch pauses it.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{BOOT_LIMIT, Kind, Setup};
use stillframe_harness::health::expect_untouched;
use stillframe_harness::running::PATIENCE;
use stillframe_stress::others::{migration, stops};

#[test]
fn a_vm_that_its_user_stops_during_a_watch_stays_stopped() -> Result<()> {
    ensure!(stops(60, 1)? == 0);
    Ok(())
}

#[test]
fn a_vm_that_is_migrated_during_a_watch_runs_once() -> Result<()> {
    for n in 0..3 {
        migration(Duration::from_millis(n * 7))?;
    }
    Ok(())
}

/// QEMU stops a guest that sleeps, to save it, and does not put it back to sleep by itself.
#[test]
fn a_guest_that_sleeps_can_be_woken_after_a_checkpoint() -> Result<()> {
    let guest = Setup::small(Kind::Pc, "asleep")
        .with_drivers("sf.suspend=1 no_console_suspend")
        // Not `boot`, which awaits ticks: on a slow machine it may sleep before them.
        .start()?;
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
