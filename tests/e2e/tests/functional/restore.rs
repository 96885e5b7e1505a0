//! `restore`: any checkpoint continues exactly where its guest stood.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup, Workload};
use stillframe_harness::health::{
    checkpoints, expect_nothing_left, expect_untouched, processes_with,
};
use stillframe_harness::programs;
use stillframe_harness::qmp::Qmp;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::PATIENCE;
use stillframe_harness::serial::{Serial, Tick};

/// Ticks by number: the sums follow from the workload's arguments and the number alone.
fn by_number(ticks: &[Tick]) -> BTreeMap<u64, &str> {
    ticks
        .iter()
        .map(|tick| (tick.number, tick.sum.as_str()))
        .collect()
}

fn last_number(serial: &Serial) -> Result<u64> {
    Ok(serial.ticks()?.last().context("no tick")?.number)
}

/// A checkpoint and the last tick before and after it was taken.
struct Taken {
    id: String,
    before: u64,
    after: u64,
}

fn take(stillframe: &Stillframe, guest: &Guest) -> Result<Taken> {
    let before = last_number(&guest.serial)?;
    let report = stillframe.json(&["checkpoint", "--pid", &guest.pid_text()])?;
    Ok(Taken {
        id: report["checkpoint"].as_str().context("no id")?.to_owned(),
        before,
        after: last_number(&guest.serial)?,
    })
}

/// The restored guest's ticks follow on each other and on the checkpoint, with the original's sums.
fn expect_continued(original: &Guest, taken: &Taken, restored: &Restored) -> Result<()> {
    let ticks = restored.serial.wait_ticks(5, PATIENCE)?;
    let first = ticks[0].number;
    // One line may be under way through the serial port when the guest stands still.
    let range = taken.before..=taken.after + 2;
    ensure!(
        range.contains(&first),
        "begins with tick {first}, not in {range:?}"
    );
    for (tick, number) in ticks.iter().zip(first..) {
        ensure!(tick.number == number, "{ticks:?}");
    }
    let theirs = original.serial.ticks()?;
    let theirs = by_number(&theirs);
    for (number, sum) in by_number(&ticks) {
        if let Some(original) = theirs.get(&number) {
            ensure!(
                *original == sum,
                "tick {number}: {sum} instead of {original}"
            );
        }
    }
    Ok(())
}

#[test]
fn first_middle_and_last_go_on_where_they_stood() -> Result<()> {
    let guest = Setup::small(Kind::Private, "history").booted()?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let mut history = Vec::new();
    for _ in 0..5 {
        history.push(take(&stillframe, &guest)?);
        guest.serial.wait_more(2, PATIENCE)?;
    }
    for taken in [&history[0], &history[2], &history[4]] {
        // Beside the running original, which must not notice.
        let restored = Restored::start(&stillframe, &taken.id, guest.folder(), &["--verify"])?;
        expect_continued(&guest, taken, &restored)?;
        expect_untouched(&guest, &mut monitor)?;
        expect_nothing_left(restored.pid, &mut restored.monitor()?)?;
    }
    Ok(())
}

/// The copies are complete before the VM is resumed. `--verify` cannot tell: with it, `cont` is sent
/// later. A guest that went on while it was copied finds its own memory torn.
#[test]
fn a_guest_that_never_rests_is_captured_at_one_instant() -> Result<()> {
    let mut setup = Setup::small(Kind::Private, "restless");
    setup.workload = Workload {
        mib: 48,
        pattern: "random",
        tick_ms: 20,
        writes_per_tick: 3000,
        share: 8,
    };
    for schedule in ["stop-copy", "pre-copy", "copy-on-write"] {
        let guest = setup.boot()?;
        let folder = tempfile::tempdir()?;
        let stillframe = Stillframe::init(&folder.path().join("repo"))?;
        let line = [
            "watch",
            "--every",
            "500ms",
            "--count",
            "6",
            "--schedule",
            schedule,
        ];
        stillframe.ok(&[line.as_slice(), &["--pid", &guest.pid_text()]].concat())?;
        // Not beside the restored ones: they are to have the time to look at all their memory.
        drop(guest);
        for id in checkpoints(&stillframe)?.iter().skip(3) {
            let folder = tempfile::tempdir()?;
            let restored = Restored::start(&stillframe, id, folder.path(), &[])?;
            restored.serial.wait_ticks(12, PATIENCE)?;
        }
    }
    Ok(())
}

#[test]
fn a_restored_vm_is_a_vm_like_any_other() -> Result<()> {
    let guest = Setup::small(Kind::Memfd, "generations").booted()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let taken = take(&stillframe, &guest)?;
    let folders = [tempfile::tempdir()?, tempfile::tempdir()?];
    let second = Restored::start(&stillframe, &taken.id, folders[0].path(), &["--paused"])?;
    let mut monitor = second.monitor()?;
    ensure!(monitor.status()? == "paused" && second.serial.ticks()?.is_empty());
    monitor.execute("cont", json!({}))?;
    expect_continued(&guest, &taken, &second)?;
    // Its only monitor is ours no longer, so that the engine can have it.
    drop(monitor);
    let pid = second.pid.to_string();
    let before = last_number(&second.serial)?;
    let line = [
        "watch", "--pid", &pid, "--every", "200ms", "--count", "3", "--verify",
    ];
    let reports = stillframe.json_lines(&line)?;
    for report in &reports {
        ensure!(
            report["verify"]["differing"] == 0 && report["vm"] == "generations",
            "{report}"
        );
    }
    let after = last_number(&second.serial)?;
    let third = Restored::start(&stillframe, "latest", folders[1].path(), &["--verify"])?;
    let ticks = third.serial.wait_ticks(3, PATIENCE)?;
    let range = before..=after + 2;
    ensure!(
        range.contains(&ticks[0].number),
        "begins with {:?}, not in {range:?}",
        ticks[0]
    );
    // Three generations, one history.
    let original = guest.serial.ticks()?;
    let original = by_number(&original);
    for (number, sum) in by_number(&ticks) {
        ensure!(
            original.get(&number).is_none_or(|theirs| *theirs == sum),
            "tick {number}"
        );
    }
    expect_nothing_left(second.pid, &mut second.monitor()?)
}

/// The printed command is the one that would be run: QEMU takes it as it is.
#[test]
fn the_printed_command_starts_a_qemu_that_waits_for_its_state() -> Result<()> {
    let guest = Setup::small(Kind::Pc, "it's \"printed\"").booted()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    let qmp = guest.folder().join("printed.qmp");
    let qmp_text = qmp.display().to_string();
    let line = ["restore", "latest", "--qmp", &qmp_text, "--print-command"];
    let command = stillframe.ok(&line)?;
    ensure!(command.lines().count() == 1 && !qmp.exists(), "{command}");
    ensure!(processes_with(&qmp_text)? == 0, "something was started");
    // The shell becomes QEMU, so that it can be ended.
    let script = command.trim().replacen("&& ", "&& exec ", 1);
    let mut qemu = Command::new("sh")
        .args(["-c", &script])
        .stdin(Stdio::null())
        .spawn()?;
    let answer = Qmp::connect(&qmp).and_then(|mut monitor| {
        let status = monitor.status()?;
        monitor.execute("quit", json!({}))?;
        Ok(status)
    });
    if answer.is_err() {
        let _ = qemu.kill();
    }
    qemu.wait()?;
    ensure!(answer? == "inmigrate");
    Ok(())
}

/// Where the new VM's ends go: monitor, log and serial port, named from where the user is.
#[test]
fn paths_are_taken_from_where_the_user_is() -> Result<()> {
    let guest = Setup::small(Kind::Private, "elsewhere").booted()?;
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    stillframe.ok(&["checkpoint", "--vm", "elsewhere"])?;
    let line = [
        "restore",
        "latest",
        "--qmp",
        "here.qmp",
        "--serial",
        "file:here.serial",
        "--log",
        "here.log",
        "--json",
    ];
    let output = stillframe
        .command(&line)?
        .current_dir(folder.path())
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{said}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let path = |name: &str| folder.path().join(name);
    let restored = Restored {
        pid: report["pid"].as_i64().context("no pid")? as i32,
        qmp: path("here.qmp"),
        serial: Serial::new(&path("here.serial")),
    };
    restored.serial.wait_ticks(2, PATIENCE)?;
    ensure!(
        path("here.log").exists() && said.contains("changed: "),
        "{said}"
    );
    // A second one cannot have the same monitor, nor a serial port the machine lacks.
    let taken = path("here.qmp").display().to_string();
    let said = stillframe.fails(&["restore", "latest", "--qmp", &taken], 1)?;
    ensure!(said.contains("choose another path"), "{said}");
    let free = path("free.qmp").display().to_string();
    let said = stillframe.fails(
        &["restore", "latest", "--qmp", &free, "--serial", "stdio"],
        1,
    )?;
    ensure!(
        said.contains("--serial") || said.contains("serial port"),
        "{said}"
    );
    ensure!(checkpoints(&stillframe)?.len() == 1 && !Path::new(&free).exists());
    guest.serial.wait_more(1, PATIENCE)?;
    Ok(())
}

/// The guest relies on what its processors could do; where that is missing, nothing is loaded.
#[test]
fn processors_that_lack_something_are_refused() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let program = folder.path().join("qemu-system-x86_64");
    programs::copy(&which("qemu-system-x86_64")?, &program)?;
    let mut setup = Setup::small(Kind::Private, "able");
    setup = setup.with(&["-L", "/usr/share/qemu", "-L", "/usr/share/seabios"]);
    setup.program = program.clone();
    let mut guest = setup.boot()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    guest.kill()?;
    // The same QEMU on a host of other processors.
    std::fs::remove_file(&program)?;
    let script = "#!/bin/sh\nexec qemu-system-x86_64 \"$@\" -cpu qemu64,-sse3,-popcnt\n";
    programs::script(&program, script)?;
    let qmp = folder.path().join("new.qmp").display().to_string();
    for more in [&[][..], &["--lazy"]] {
        let line = [&["restore", "latest", "--qmp", &qmp], more].concat();
        let said = stillframe.fails(&line, 1)?;
        ensure!(said.contains("lack") && said.contains("sse3"), "{said}");
        ensure!(processes_with(&qmp)? == 0, "a QEMU is left");
    }
    Ok(())
}

fn which(program: &str) -> Result<std::path::PathBuf> {
    let path = std::env::var_os("PATH").context("no PATH")?;
    let mut places = std::env::split_paths(&path).map(|folder| folder.join(program));
    places.find(|place| place.is_file()).context("not there")
}
