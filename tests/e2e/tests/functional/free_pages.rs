//! Pages that a guest calls free are zeros in a checkpoint, if it did not write them since; all others are exact.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use stillframe_harness::cli::{Stillframe, count};
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::expect_untouched;
use stillframe_harness::migration::Order;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::{PATIENCE, Running};

/// Rounds of allocating and freeing before the first checkpoint: free memory has content then.
const ROUNDS: &str = "churned 2";
/// Pages of the files that a guest frees in a round, as a bound from below.
const FREED: u64 = 3000;

/// A guest with an agent that allocates and frees memory, `copies` files at a time, with more words for its kernel.
fn churning(kind: Kind, name: &str, copies: u32, words: &str) -> Result<Guest> {
    let mut setup = Setup::small(kind, name).with_agent();
    setup.ram_mib = 256;
    setup.drivers = Some(format!("sf.churn={copies} {words}"));
    let guest = setup.boot()?;
    guest.serial.wait_line(ROUNDS, PATIENCE)?;
    Ok(guest)
}

#[test]
fn free_pages_are_left_out_and_the_guest_misses_none() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let guest = churning(Kind::Private, "frees", 16, "")?;
    let with = Stillframe::init(&folder.path().join("with"))?;
    let without = Stillframe::init(&folder.path().join("without"))?;
    let all = without.json(&["checkpoint", "frees", "--verify"])?;
    ensure!(all["free_pages"].is_null(), "{all}");
    let report = with.json(&["checkpoint", "frees", "--free-pages", "--verify"])?;
    ensure!(report["verify"]["differing"] == 0, "{report}");
    let free = count(&report, "free_pages", "left_out")?;
    ensure!(free > FREED, "{report}");
    ensure!(count(&report, "pages", "free")? == free, "{report}");
    ensure!(count(&report, "verify", "free")? > 0, "{report}");
    let content = |report: &Value| -> Result<u64> {
        Ok(count(report, "pages", "captured")? - count(report, "pages", "zero")?)
    };
    let (content, before) = (content(&report)?, content(&all)?);
    ensure!(content + FREED < before, "{content} of {before} pages");
    let id = report["checkpoint"].as_str().context("no id")?;
    let shown = with.ok(&["show", id])?;
    ensure!(
        shown.contains(&format!("{free} left out as free")),
        "{shown}"
    );
    let contents = with.json(&["show", id, "--contents"])?;
    ensure!(contents["contents"]["free"] == free, "{contents}");
    let restored = Restored::start(&with, id, guest.folder(), &["--verify"])?;
    restored.serial.wait_for("churned", PATIENCE)?;
    restored.serial.wait_more(5, PATIENCE)?;
    restored.crash()?;
    expect_untouched(&guest, &mut guest.second_monitor()?)
}

/// With every schedule: what is written after the question is in the checkpoint.
#[test]
fn a_guest_that_frees_and_allocates_is_exact_in_every_checkpoint() -> Result<()> {
    let mut in_increments = 0;
    for (kind, schedules) in [
        (Kind::Private, &["stop-copy", "copy-on-write"][..]),
        (Kind::Memfd, &["pre-copy"]),
    ] {
        let guest = churning(kind, "churns", 5, "")?;
        for schedule in schedules {
            let folder = tempfile::tempdir()?;
            let stillframe = Stillframe::init(&folder.path().join("repo"))?;
            let pid = guest.pid_text();
            let reports = stillframe.json_lines(&[
                "watch",
                "--pid",
                &pid,
                "--every",
                "1500ms",
                "--count",
                "6",
                "--free-pages",
                "--verify",
                "--schedule",
                schedule,
            ])?;
            ensure!(reports.len() == 6, "{reports:?}");
            let mut left_out = Vec::new();
            for report in &reports {
                ensure!(report["verify"]["differing"] == 0, "{report}");

                ensure!(report["free_pages"]["not_known"].is_null(), "{report}");
                left_out.push(count(report, "free_pages", "left_out")?);
            }
            ensure!(left_out[0] > FREED / 4, "{schedule}: {left_out:?}");
            in_increments += left_out.iter().skip(1).sum::<u64>();
            let last = reports
                .last()
                .and_then(|report| report["checkpoint"].as_str());
            let id = last.context("no id")?;
            let restored = Restored::start(&stillframe, id, guest.folder(), &["--verify"])?;
            restored.serial.wait_for("churned", PATIENCE)?;
            restored.serial.wait_more(2, PATIENCE)?;
            restored.crash()?;
        }
        expect_untouched(&guest, &mut guest.second_monitor()?)?;
    }
    // How many there are depends on what the guest does just then.
    ensure!(in_increments > 0, "none in any increment");
    Ok(())
}

/// A guest that calls every page free loses its own, and no more: those are zeros that it has not written since.
#[test]
fn a_guest_that_lies_runs_on_and_gets_zeros() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let guest = churning(Kind::Private, "lies", 16, "sf.liar=1")?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let reports = stillframe.json_lines(&[
        "watch",
        "--pid",
        &guest.pid_text(),
        "--every",
        "200ms",
        "--count",
        "5",
        "--free-pages",
        "--verify",
    ])?;
    for report in &reports {
        ensure!(report["verify"]["differing"] == 0, "{report}");
        ensure!(count(report, "verify", "free")? > FREED, "{report}");
    }
    guest.serial.wait_for("churned", PATIENCE)?;
    expect_untouched(&guest, &mut guest.second_monitor()?)
}

/// The test guest's kernel has no `page_poison`; its free pages hold the same byte as with it.
#[test]
fn free_pages_that_hold_poison_are_kept() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let guest = churning(Kind::Private, "poisons", 16, "sf.poison=1")?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let report = stillframe.json(&["checkpoint", "poisons", "--free-pages", "--verify"])?;
    ensure!(report["verify"]["differing"] == 0, "{report}");
    ensure!(count(&report, "verify", "free")? == 0, "{report}");
    ensure!(count(&report, "free_pages", "left_out")? == 0, "{report}");
    let why = report["free_pages"]["not_known"]
        .as_str()
        .unwrap_or_default();
    ensure!(why.contains("page_poison"), "{report}");
    let id = report["checkpoint"].as_str().context("no id")?;
    let restored = Restored::start(&stillframe, id, guest.folder(), &["--verify"])?;
    restored.serial.wait_for("churned", PATIENCE)?;
    restored.crash()
}

#[test]
fn without_an_agent_the_checkpoint_is_whole_and_says_why() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let guest = Setup::small(Kind::Private, "mute").boot()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let output = stillframe.run(&["checkpoint", "mute", "--free-pages", "--verify"])?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{said}");
    ensure!(said.contains("free pages are not left out"), "{said}");
    ensure!(said.contains("has no channel to a guest agent"), "{said}");
    expect_untouched(&guest, &mut guest.second_monitor()?)
}

/// A watch that migrates its VM sends what its checkpoints leave out, too: all pages are as they were.
#[test]
fn a_watched_guest_with_free_pages_moves_whole() -> Result<()> {
    let guest = churning(Kind::Private, "frees-and-moves", 16, "")?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let pid = guest.pid_text();
    let line = [
        "watch",
        "--json",
        "--pid",
        &pid,
        "--every",
        "300ms",
        "--free-pages",
    ];
    let mut watch = Running::start(stillframe.command(&line)?)?;
    let first = watch.wait_results(2)?;
    ensure!(
        count(&first[0], "free_pages", "left_out")? > FREED,
        "{first:?}"
    );
    let mut order = Order::of(&guest, "moves");
    order.migrate.push("--verify".to_owned());
    order.receive.push("--seed".to_owned());
    let arrived = order.perform(&stillframe, guest.pid())?;
    ensure!(!arrived.sent["base"].is_null(), "{}", arrived.sent);
    let received = &arrived.report;
    ensure!(received["verify"]["differing"] == 0, "{received}");
    arrived.vm.serial.wait_for("churned", PATIENCE)?;
    arrived.vm.serial.wait_more(3, PATIENCE)?;
    watch.end()?;
    arrived.vm.crash()
}
