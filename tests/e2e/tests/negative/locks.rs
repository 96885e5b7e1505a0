//! A repository that another process holds.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::filling::{Filling, expect_alone};
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::{checkpoints, expect_untouched, expect_whole};
use stillframe_harness::running::{PATIENCE, Running};

fn locks(stillframe: &Stillframe) -> Result<usize> {
    let entries = fs::read_dir(stillframe.repository().join("locks"))?.flatten();
    Ok(entries
        .filter(|entry| entry.path().extension().is_some_and(|end| end == "lock"))
        .count())
}

fn wait_locks(stillframe: &Stillframe, count: usize) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while locks(stillframe)? != count {
        if Instant::now() > deadline {
            bail!("{} locks instead of {count}", locks(stillframe)?);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// An engine that was halted in the middle of its first checkpoint.
fn halted(stillframe: &Stillframe, guest: &Guest) -> Result<Running> {
    let line = ["checkpoint", "--pid", &guest.pid_text(), "--json"];
    let engine = Running::start(stillframe.command(&line)?)?;
    wait_locks(stillframe, 1)?;
    engine.signal("STOP")?;
    Ok(engine)
}

#[test]
fn who_holds_the_repository_is_named_and_waited_for() -> Result<()> {
    let guest = Setup::small(Kind::Private, "holder").booted()?;
    let other = Setup::small(Kind::Memfd, "waiter").booted()?;
    let mut monitors = [guest.second_monitor()?, other.second_monitor()?];
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let other_pid = other.pid_text();
    stillframe.ok(&["checkpoint", "--pid", &other_pid])?;
    let ids = checkpoints(&stillframe)?;
    let mut holder = halted(&stillframe, &guest)?;
    // One that adds keeps nobody from adding and reading, only from removing.
    stillframe.ok(&["checkpoint", "--pid", &other_pid, "--lock-wait", "0s"])?;
    stillframe.ok(&["check"])?;
    let prune = Running::start(stillframe.command(&["prune", "--json"])?)?;
    wait_locks(&stillframe, 2)?;
    // One that waits to remove comes before all who come later.
    let qmp = guest.folder().join("locked.qmp").display().to_string();
    let lines: [&[&str]; 3] = [
        &["checkpoint", "--pid", &other_pid, "--lock-wait", "0s"],
        &["checkpoint", "--pid", &other_pid, "--lock-wait", "200ms"],
        &[
            "restore",
            "latest",
            "--vm",
            "waiter",
            "--qmp",
            &qmp,
            "--lock-wait",
            "0s",
        ],
    ];
    for line in lines {
        let said = stillframe.fails(line, 6)?;
        ensure!(
            said.contains("locked by") && said.contains(&prune.pid().to_string()),
            "{said}"
        );
    }
    stillframe.ok(&["list"])?;
    expect_untouched(&other, &mut monitors[1])?;
    // A halted engine halts no VM.
    ensure!(monitors[0].status()? == "running");
    holder.signal("CONT")?;
    let done = holder.wait_results(1)?;
    ensure!(holder.end()?.code == Some(0) && prune.end()?.code == Some(0));
    let all = [
        ids,
        vec![
            done[0]["checkpoint"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
        ],
    ]
    .concat();
    expect_whole(&stillframe, &all)?;
    expect_untouched(&guest, &mut monitors[0])
}

/// A lock outlives its holder, but does not count.
#[test]
fn the_lock_of_a_dead_process_is_removed() -> Result<()> {
    let guest = Setup::small(Kind::Private, "dead-holder").booted()?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    // Dropped, it is killed with -9.
    drop(halted(&stillframe, &guest)?);
    ensure!(
        locks(&stillframe)? == 1,
        "a killed process removed its lock"
    );
    stillframe.ok(&["prune"])?;
    ensure!(locks(&stillframe)? == 0);
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    ensure!(monitor.status()? == "running");
    stillframe.ok(&["check", "--read-data"])?;
    Ok(())
}

/// The process of a lazy restore was killed, and its VM waits for another one to continue: what that will read
/// stays, also while `forget` and `prune` run; and is nobody's any more when it was read.
#[test]
fn what_a_waiting_vm_needs_is_not_removed() -> Result<()> {
    let guest = Setup::small(Kind::Private, "leased").booted()?;
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let pid = guest.pid_text();
    stillframe.ok(&["watch", "--pid", &pid, "--every", "300ms", "--count", "2"])?;
    let older = stillframe.json(&["show", "latest~1"])?;
    let older = older["checkpoint"].as_str().context("no id")?;
    let mut slow = Filling::start(&stillframe, older, folder.path(), &["--limit-fill", "256K"])?;
    slow.wait_runs()?;
    slow.running.crash()?;
    let said = stillframe.fails(&["forget", older], 6)?;
    ensure!(said.contains("does not have all its memory yet"), "{said}");
    let done = stillframe.json(&["forget", "--keep-last", "1", "--prune"])?;
    ensure!(done["leased"][0]["checkpoint"] == older, "{done}");
    ensure!(done["forgotten"] == json!([]), "{done}");
    let again = Filling::resume(&stillframe, &slow.qmp, &slow.serial, &[])?;
    let (restored, _) = again.complete()?;
    restored.serial.wait_more(10, PATIENCE)?;
    expect_alone(&restored)?;
    // The VM still runs, and needs nothing of it any more.
    stillframe.ok(&["forget", older, "--prune"])?;
    Ok(())
}
