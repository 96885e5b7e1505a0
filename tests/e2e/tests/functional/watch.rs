//! `checkpoint` and `watch`: paused VMs, counts, signals, and a QEMU that keeps nothing of them.

use anyhow::{Result, ensure};
use serde_json::json;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup, Workload};
use stillframe_harness::health::{expect_nothing_left, expect_untouched, expect_whole};
use stillframe_harness::restored::Restored;
use stillframe_harness::running::{PATIENCE, Running};
use stillframe_stress::exactness;

fn started(name: &str, kind: Kind) -> Result<(Guest, Stillframe)> {
    let guest = Setup::small(kind, name).booted()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    Ok((guest, stillframe))
}

#[test]
fn a_paused_vm_is_checkpointed_and_stays_paused() -> Result<()> {
    let (guest, stillframe) = started("paused", Kind::Private)?;
    let mut monitor = guest.second_monitor()?;
    monitor.execute("stop", json!({}))?;
    monitor.take_events();
    let line = [
        "watch", "--vm", "paused", "--every", "50ms", "--count", "2", "--verify",
    ];
    for report in stillframe.json_lines(&line)? {
        ensure!(report["verify"]["differing"] == 0, "{report}");
    }
    ensure!(monitor.status()? == "paused");
    let events = monitor.take_events();
    ensure!(
        events.iter().all(|event| event["event"] != "RESUME"),
        "{events:?}"
    );
    ensure!(stillframe.json(&["show", "latest"])?["vm_record"]["was_running"] == false);
    expect_nothing_left(guest.pid(), &mut monitor)?;
    // Restored, it runs, unless the option of `restore` says otherwise: that is not remembered.
    let restored = Restored::start(&stillframe, "latest", guest.folder(), &["--paused"])?;
    ensure!(restored.monitor()?.status()? == "paused");
    monitor.execute("cont", json!({}))?;
    expect_untouched(&guest, &mut monitor)
}

#[test]
fn watch_counts_and_only_the_first_is_whole() -> Result<()> {
    let (guest, stillframe) = started("counted", Kind::TwoCpus)?;
    let mut monitor = guest.second_monitor()?;
    let line = [
        "watch", "--vm", "counted", "--every", "300ms", "--count", "4",
    ];
    let reports = stillframe.json_lines(&line)?;
    ensure!(reports.len() == 4);
    for (before, report) in reports.iter().zip(&reports[1..]) {
        ensure!(report["parent"] == before["checkpoint"], "{report}");
        let (pages, whole) = (
            report["pages"]["captured"].as_u64(),
            report["pages"]["total"].as_u64(),
        );
        // A few hundred pages a tick of some thirty thousand.
        ensure!(pages < whole.map(|whole| whole / 4), "{report}");
        ensure!(report["copied"]["full_pass"] == 0, "{report}");
    }
    // Also where the full pass has copied a page that was written again.
    let pages = &reports[0]["pages"];
    ensure!(
        pages["captured"].as_u64() <= pages["total"].as_u64(),
        "{pages}"
    );
    ensure!(reports[0]["parent"].is_null() && reports[0]["copied"]["full_pass"] != 0);
    expect_untouched(&guest, &mut monitor)
}

/// Pages that are written in every interval are left open and cost the guest no fault; none of
/// what is written to them is missed.
#[test]
fn hot_pages_stay_unprotected_and_are_not_missed() -> Result<()> {
    for kind in [Kind::Private, Kind::Memfd] {
        let mut setup = Setup::small(kind, "hot");
        setup.workload = Workload {
            mib: 4,
            pattern: "random",
            tick_ms: 20,
            writes_per_tick: 600,
            share: 8,
        };
        let guest = setup.boot()?;
        let mut monitor = guest.second_monitor()?;
        let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
        let (tally, reports) =
            exactness::watch_verified(&stillframe, &guest, "1500ms", 5, &Vec::new())?;
        ensure!(tally.differing == 0 && tally.pages > 0, "{tally:?}");
        let open = reports
            .iter()
            .filter_map(|report| report["copied"]["left_unprotected"].as_u64());
        // Nearly all of its 1024 pages: it writes 45,000 times in an interval, and nearly all of them also where other
        // work leaves it a tenth of its time.
        ensure!(open.max() > Some(700), "{kind:?}: {reports:?}");
        expect_nothing_left(guest.pid(), &mut monitor)?;
        expect_untouched(&guest, &mut monitor)?;
    }
    Ok(())
}

/// With copy-on-write a writing guest waits for the engine, now and then. When the engine hangs, here
/// stopped by a signal, its guardian ends it, and the guest continues.
#[test]
fn a_guest_does_not_wait_for_an_engine_that_hangs() -> Result<()> {
    let guest = Setup::small(Kind::Private, "hanging").booted()?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let line = [
        "watch",
        "--vm",
        "hanging",
        "--every",
        "200ms",
        "--schedule",
        "copy-on-write",
        "--json",
    ];
    let mut watch = Running::start(stillframe.command(&line)?)?;
    watch.wait_results(2)?;
    watch.signal("STOP")?;
    // It cannot end by itself: nothing ever wakes it.
    let ended = watch.end()?;
    ensure!(ended.code.is_none(), "{ended:?}");
    guest.serial.wait_more(5, PATIENCE)?;
    // The next engine takes back what this one had lent QEMU.
    let after = stillframe.json(&["checkpoint", "--vm", "hanging", "--verify"])?;
    ensure!(after["verify"]["differing"] == 0, "{after}");
    expect_nothing_left(guest.pid(), &mut monitor)?;
    expect_untouched(&guest, &mut monitor)
}

/// An idle guest's second full checkpoint finds nearly all in the repository.
#[test]
fn what_is_there_already_is_not_stored_again() -> Result<()> {
    let mut setup = Setup::small(Kind::Private, "idle");
    setup.workload.pattern = "idle";
    let guest = setup.boot()?;
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let line = ["checkpoint", "--pid", &guest.pid_text()];
    let reports = [stillframe.json(&line)?, stillframe.json(&line)?];
    let [first, second] = reports
        .each_ref()
        .map(|report| report["bytes_stored"].as_u64());
    ensure!(
        reports[1]["parent"].is_null(),
        "the second was to be a full one: {}",
        reports[1]
    );
    ensure!(second < first.map(|first| first / 10), "{reports:?}");
    // One of another guest with the same kernel finds what both have in common.
    drop(guest);
    let other = setup.boot()?;
    let third = stillframe.json(&["checkpoint", "--pid", &other.pid_text()])?;
    ensure!(
        third["bytes_stored"].as_u64() < first.map(|first| first / 2),
        "{third} {reports:?}"
    );
    Ok(())
}

/// Whatever ends a watch, QEMU keeps nothing of it and the next engine attaches at once.
#[test]
fn signals_end_a_watch_cleanly() -> Result<()> {
    let (guest, stillframe) = started("signalled", Kind::Memfd)?;
    let line = ["watch", "--vm", "signalled", "--every", "200ms", "--json"];
    for signal in ["INT", "TERM", "HUP"] {
        let mut watch = Running::start(stillframe.command(&line)?)?;
        watch.wait_results(2)?;
        watch.signal(signal)?;
        let ended = watch.end()?;
        ensure!(
            ended.code == Some(0) && ended.errors() == 0,
            "SIG{signal}: {ended:?}"
        );
        ensure!(
            ended.err.contains("detached from process"),
            "SIG{signal}: {ended:?}"
        );
        for report in ended.results()? {
            stillframe.ok(&["show", report["checkpoint"].as_str().unwrap_or_default()])?;
        }
        stillframe.ok(&["checkpoint", "--vm", "signalled"])?;
        let mut monitor = guest.second_monitor()?;
        expect_untouched(&guest, &mut monitor)?;
    }
    expect_whole(&stillframe, &[])
}

/// A long interval is left at once, and a count that was not reached is no success.
#[test]
fn a_waiting_watch_hears_a_signal() -> Result<()> {
    let (guest, stillframe) = started("waiting", Kind::Private)?;
    let line = [
        "watch", "--vm", "waiting", "--every", "10h", "--count", "2", "--json",
    ];
    let mut watch = Running::start(stillframe.command(&line)?)?;
    watch.wait_results(1)?;
    watch.signal("INT")?;
    let ended = watch.end()?;
    ensure!(ended.code == Some(1) && ended.errors() == 1, "{ended:?}");
    ensure!(ended.err.contains("1 of 2 checkpoints"), "{ended:?}");
    expect_untouched(&guest, &mut guest.second_monitor()?)
}

/// Ctrl-C in the full pass of a single checkpoint gives it up.
#[test]
fn an_interrupted_checkpoint_leaves_nothing() -> Result<()> {
    let (guest, stillframe) = started("given-up", Kind::Sandbox)?;
    let mut engine = Running::start(stillframe.command(&["checkpoint", "--vm", "given-up"])?)?;
    engine.wait_words("attached to process")?;
    engine.signal("INT")?;
    let ended = engine.end()?;
    // A machine may be done before the signal comes.
    if ended.code != Some(0) {
        ensure!(ended.code == Some(1) && ended.errors() == 1, "{ended:?}");
        ensure!(
            ended.err.contains("interrupted") && ended.out.is_empty(),
            "{ended:?}"
        );
        ensure!(stillframe.json(&["list"])? == json!([]));
    }
    stillframe.ok(&["checkpoint", "--vm", "given-up"])?;
    guest.serial.wait_more(1, PATIENCE)?;
    expect_untouched(&guest, &mut guest.second_monitor()?)?;
    expect_whole(&stillframe, &[])
}
