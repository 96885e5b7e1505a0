//! VMs that change under a watch: they reboot, or get more memory.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{BOOT_LIMIT, Kind, Setup};
use stillframe_harness::health::{checkpoints, expect_untouched, expect_whole};
use stillframe_harness::running::Running;

fn watched<'a>(name: &'a str, schedule: &'a str) -> [&'a str; 9] {
    [
        "watch",
        "--vm",
        name,
        "--every",
        "200ms",
        "--verify",
        "--json",
        "--schedule",
        schedule,
    ]
}

fn exact(results: &[Value]) -> bool {
    let exact = |result: &Value| result["verify"]["differing"] == 0;
    results.iter().all(exact)
}

/// How often a guest is reset under a watch.
const RESETS: u64 = 25;

/// The firmware writes its tables anew, QEMU with its own hands and while the VM is paused, too, and the
/// kernel all of memory: every checkpoint before, during and after is exact, or none.
#[test]
fn a_guest_that_reboots_is_watched_on() -> Result<()> {
    for schedule in ["auto", "copy-on-write"] {
        let guest = Setup::small(Kind::Private, "rebooted").booted()?;
        let mut monitor = guest.second_monitor()?;
        let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
        let mut watch = Running::start(stillframe.command(&watched("rebooted", schedule))?)?;
        let before = watch.wait_results(2)?.len();
        let ticks = guest.serial.ticks()?.len();
        // Enough that some meet a pause.
        for n in 0..RESETS {
            monitor.execute("system_reset", json!({}))?;
            std::thread::sleep(Duration::from_millis(70 + n * 7));
        }
        watch.wait_results(before + 4)?;
        // It comes up again under the watch.
        guest.serial.wait_ticks(ticks + 3, BOOT_LIMIT)?;
        let booted = watch.results()?.len();
        let results = watch.wait_results(booted + 2)?;
        ensure!(exact(&results), "{results:?}");
        watch.signal("TERM")?;
        let ended = watch.end()?;
        ensure!(ended.code == Some(0), "{ended:?}");
        monitor.take_events();
        expect_untouched(&guest, &mut monitor)?;
        stillframe.ok(&["check", "--read-data"])?;
    }
    Ok(())
}

/// Plugged memory is a RAM block that was not tracked: the watch attaches anew, and continues exactly.
#[test]
fn memory_plugged_in_during_a_watch_is_captured() -> Result<()> {
    let mut setup = Setup::small(Kind::Private, "plugged");
    setup = setup.with(&["-m", "192M,slots=2,maxmem=512M"]);
    let guest = setup.boot()?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let mut watch = Running::start(stillframe.command(&watched("plugged", "auto"))?)?;
    watch.wait_results(2)?;
    monitor.execute(
        "object-add",
        json!({"qom-type": "memory-backend-ram", "id": "more", "size": 128 << 20}),
    )?;
    monitor.execute(
        "device_add",
        json!({"driver": "pc-dimm", "id": "dimm", "memdev": "more"}),
    )?;
    watch.wait_words("RAM blocks changed")?;
    let pages = |results: &[Value]| {
        results
            .last()
            .and_then(|last| last["pages"]["total"].as_u64())
    };
    let before = watch.results()?;
    let results = watch.wait_results(before.len() + 2)?;
    ensure!(pages(&results) > pages(&before), "{results:?}");
    watch.signal("TERM")?;
    let ended = watch.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    ensure!(exact(&ended.results()?), "{:?}", ended.results()?);
    let ids = checkpoints(&stillframe)?;
    monitor.take_events();
    expect_untouched(&guest, &mut monitor)?;
    expect_whole(&stillframe, &ids)
}
