//! Engines that hang: stopped by a signal, asleep in their storage, without the thread that the VM waits for.
//! Whatever does not continue is ended by the guardian, and the VM runs, or can be continued.
//!
//! Tests with a fault point need a `stillframe` built with `--features fault-points`.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::fault::with_fault;
use stillframe_harness::filling::{Filling, expect_alone};
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::{children, expect_nothing_left, expect_untouched};
use stillframe_harness::programs;
use stillframe_harness::qmp::Qmp;
use stillframe_harness::running::{PATIENCE, Running};
use stillframe_harness::serial::Serial;

use crate::host::Mount;

/// A VM that waits for an engine shows it by no tick in this time.
const TICKS_LIMIT: Duration = Duration::from_secs(30);

/// A file system on which writers sleep uninterruptibly, until this is dropped.
struct Frozen<'m>(&'m Path);

impl Frozen<'_> {
    fn new(at: &Path) -> Result<Frozen<'_>> {
        let status = Command::new("fsfreeze").arg("-f").arg(at).status()?;
        ensure!(status.success(), "fsfreeze ended with {status}");
        Ok(Frozen(at))
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("-u").arg(self.0).status();
    }
}

/// The states of all threads of a process, such as `SSD`.
fn thread_states(pid: u32) -> String {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten();
    let stats = tasks
        .flatten()
        .map(|task| fs::read_to_string(task.path().join("stat")));
    stats
        .flatten()
        .filter_map(|stat| stat.rsplit_once(") ")?.1.chars().next())
        .collect()
}

fn wait_until(what: &str, is_so: impl Fn() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !is_so()? {
        ensure!(Instant::now() < deadline, "{what} did not come");
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn watch(stillframe: &Stillframe, guest: &Guest, more: &[&str]) -> Result<Command> {
    let pid = guest.pid_text();
    let line = [&["watch", "--pid", &pid, "--json"], more].concat();
    stillframe.command(&line)
}

/// Storage hangs under an engine that writers of the VM wait for, and the engine is killed: one of its threads
/// cannot end, and keeps all its descriptors open.
#[test]
fn a_vm_does_not_wait_for_an_engine_that_cannot_die() -> Result<()> {
    let guest = Setup::small(Kind::Private, "undead").booted()?;
    let mut monitor = guest.second_monitor()?;
    let folder = tempfile::tempdir()?;
    let at = folder.path().join("storage");
    let _mount = Mount::image(&at, 400)?;
    let stillframe = Stillframe::init(&at.join("repo"))?;
    let line = ["--every", "100ms", "--schedule", "copy-on-write"];
    let mut engine = Running::start(watch(&stillframe, &guest, &line)?)?;
    engine.wait_results(2)?;
    let frozen = Frozen::new(&at)?;
    // For some time: threads that wait for a disk are in that state too.
    wait_until("a thread that sleeps in its storage", || {
        std::thread::sleep(Duration::from_millis(300));
        Ok(thread_states(engine.pid()).contains('D'))
    })?;
    engine.signal("KILL")?;
    guest.serial.wait_more(20, TICKS_LIMIT)?;
    ensure!(
        thread_states(engine.pid()).contains('D'),
        "the engine could die: nothing was tested"
    );
    ensure!(monitor.status()? == "running");
    // The first monitor is free again, though the engine still has its connection.
    let limit = Duration::from_secs(20);
    let status = Qmp::status_within(&guest.qmp_path(), limit)?;
    ensure!(status.as_deref() == Some("running"), "{status:?}");
    drop(frozen);
    engine.end()?;
    let after = stillframe.json(&["checkpoint", "--pid", &guest.pid_text(), "--verify"])?;
    ensure!(after["verify"]["differing"] == 0, "{after}");
    expect_untouched(&guest, &mut monitor)
}

/// The thread that writers of the VM wait for ends, by an error or with all of its process.
#[test]
fn a_vm_does_not_wait_for_a_handler_that_ended() -> Result<()> {
    let guest = Setup::small(Kind::Private, "unserved").booted()?;
    let mut monitor = guest.second_monitor()?;
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    for action in ["error", "kill"] {
        let line = ["--every", "1s", "--schedule", "copy-on-write", "--verify"];
        let command = watch(&stillframe, &guest, &line)?;
        let fault = format!("copy-on-write.fault:{action}:20");
        let (command, reached) = with_fault(&command, &fault, folder.path())?;
        let mut engine = Running::start(command)?;
        wait_until("the fault (a binary with fault points?)", || {
            Ok(reached.exists())
        })?;
        guest.serial.wait_more(10, TICKS_LIMIT)?;
        fs::remove_file(&reached)?;
        if action != "error" {
            let ended = engine.end()?;
            ensure!(ended.code.is_none(), "{action}: {ended:?}");
            continue;
        }
        // This engine lives, notices, and attaches anew.
        engine.wait_words("has ended; the VM runs on")?;
        let before = engine.results()?.len();
        let printed = engine.wait_results(before + 2)?;
        ensure!(
            printed
                .iter()
                .all(|printed| printed["verify"]["differing"] == 0),
            "{printed:?}"
        );
        engine.signal("INT")?;
        engine.end()?;
    }
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    expect_nothing_left(guest.pid(), &mut monitor)?;
    expect_untouched(&guest, &mut monitor)
}

/// The same between two checkpoints, where nothing else of the engine notices it: the thread itself lets the VM
/// go, and the guardian has no reason to end the engine.
#[test]
fn a_handler_that_fails_lets_the_vm_go_by_itself() -> Result<()> {
    let guest = Setup::small(Kind::Private, "let-go").booted()?;
    let mut monitor = guest.second_monitor()?;
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let line = ["--every", "1h", "--schedule", "copy-on-write"];
    let command = watch(&stillframe, &guest, &line)?;
    // More faults than there are before the first checkpoint; the guest touches all its memory after it.
    let (command, reached) = with_fault(&command, "copy-on-write.fault:error:150", folder.path())?;
    let mut engine = Running::start(command)?;
    wait_until("the fault (a binary with fault points?)", || {
        Ok(reached.exists())
    })?;
    // The thread ends; then nothing of this engine runs, without heartbeats.
    std::thread::sleep(Duration::from_millis(500));
    engine.signal("STOP")?;
    // For more than three seconds.
    guest.serial.wait_more(30, TICKS_LIMIT)?;
    ensure!(!engine.has_ended()?, "the guardian ended it");
    engine.signal("CONT")?;
    engine.signal("INT")?;
    engine.end()?;
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    expect_untouched(&guest, &mut monitor)
}

/// The engine is too late with its `stop`, and is killed when it has come after all.
#[test]
fn a_pause_that_began_after_its_limit_ends_with_the_engine() -> Result<()> {
    let guest = Setup::small(Kind::Private, "late").booted()?;
    let mut monitor = guest.second_monitor()?;
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let line = ["--every", "1s", "--pause-limit", "1s", "--verify"];
    let command = watch(&stillframe, &guest, &line)?;
    // Five seconds between telling the guardian and `stop`.
    let (command, reached) = with_fault(&command, "pause.before-stop:hang", folder.path())?;
    let mut engine = Running::start(command)?;
    wait_until("the fault (a binary with fault points?)", || {
        Ok(reached.exists())
    })?;
    monitor.forget_events()?;
    monitor.wait_event("STOP", PATIENCE)?;
    engine.kill()?;
    wait_running(&mut monitor)?;
    // The next engine takes back what this one had lent QEMU.
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    expect_untouched(&guest, &mut monitor)
}

/// The engine hangs in the pause, for ever: the VM is resumed while the engine still lives.
#[test]
fn a_pause_with_an_engine_that_hangs_ends_at_its_limit() -> Result<()> {
    let guest = Setup::small(Kind::Private, "stuck").booted()?;
    let mut monitor = guest.second_monitor()?;
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let line = ["--every", "1s", "--pause-limit", "1s"];
    let command = watch(&stillframe, &guest, &line)?;
    let (command, reached) = with_fault(&command, "pause.stopped:stop", folder.path())?;
    let mut engine = Running::start(command)?;
    wait_until("the fault (a binary with fault points?)", || {
        Ok(reached.exists())
    })?;
    wait_running(&mut monitor)?;
    ensure!(!engine.has_ended()?, "it was to live");
    // It finds what was answered meanwhile, discards that checkpoint, and takes the next ones.
    engine.signal("CONT")?;
    engine.wait_words("overran its limit")?;
    engine.wait_results(1)?;
    engine.signal("INT")?;
    ensure!(engine.end()?.code == Some(0));
    expect_untouched(&guest, &mut monitor)
}

fn wait_running(monitor: &mut Qmp) -> Result<()> {
    let deadline = Instant::now() + TICKS_LIMIT;
    loop {
        match monitor.status()?.as_str() {
            "running" => return Ok(()),
            status if Instant::now() > deadline => bail!("it is {status}"),
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// A lazy restore that is stopped by a signal: its VM is paused, and another process continues with it.
#[test]
fn a_lazy_restore_that_hangs_can_be_gone_on_with() -> Result<()> {
    let guest = Setup::small(Kind::Private, "half-there").booted()?;
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    drop(guest);
    let slow = ["--limit-fill", "256K"];
    let mut filling = Filling::start(&stillframe, "latest", folder.path(), &slow)?;
    filling.wait_runs()?;
    filling.serial.wait_more(2, PATIENCE)?;
    filling.running.signal("STOP")?;
    let (qmp, serial) = (filling.qmp.clone(), filling.serial.clone());
    let ended = filling.running.end()?;
    ensure!(ended.code.is_none(), "{ended:?}");
    let resumed = Filling::resume(&stillframe, &qmp, &serial, &[])?;
    let (restored, _) = resumed.complete()?;
    restored.serial.wait_more(5, PATIENCE)?;
    expect_alone(&restored)
}

/// Storage that hangs under a lazy restore: the VM is paused when it waits for a page for too long, and continues
/// with the storage.
#[test]
fn a_vm_is_paused_while_the_storage_hangs() -> Result<()> {
    let guest = Setup::small(Kind::Private, "waiting").booted()?;
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    drop(guest);
    let (qmp, serial) = (folder.path().join("qmp"), folder.path().join("serial"));
    let (qmp_text, spec) = (
        qmp.display().to_string(),
        format!("file:{}", serial.display()),
    );
    let line = [
        "restore",
        "latest",
        "--lazy",
        "--json",
        "--limit-fill",
        "4M",
    ];
    let line = [&line[..], &["--qmp", &qmp_text, "--serial", &spec]].concat();
    // For five seconds.
    let command = stillframe.command(&line)?;
    let (command, reached) = with_fault(&command, "lazy.fault:hang:40", folder.path())?;
    let mut filling = Filling {
        running: Running::start(command)?,
        qmp,
        serial: Serial::new(&serial),
    };
    wait_until("the fault (a binary with fault points?)", || {
        Ok(reached.exists())
    })?;
    filling
        .running
        .wait_words("the repository does not answer")?;
    let (restored, _) = filling.complete()?;
    restored.serial.wait_more(5, PATIENCE)?;
    expect_alone(&restored)
}

/// No password is in the guardian's environment, and it leaves no core file; it is the same program though the
/// file was replaced since.
#[test]
fn the_guardian_keeps_to_itself() -> Result<()> {
    let guest = Setup::small(Kind::Private, "guarded").booted()?;
    let mut monitor = guest.second_monitor()?;
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let program = folder.path().join("stillframe");
    programs::copy(&stillframe_harness::cli::binary()?, &program)?;
    let original = stillframe.command(&[])?;
    let mut command = Command::new(&program);
    for (name, value) in original.get_envs() {
        if let Some(value) = value {
            command.env(name, value);
        }
    }
    let pid = guest.pid_text();
    command.args(["watch", "--pid", &pid, "--every", "200ms", "--json"]);
    command.args(["--schedule", "copy-on-write"]);
    let mut engine = Running::start(command)?;
    let exe = format!("/proc/{}/exe", engine.pid());
    wait_until("the engine", || Ok(fs::read_link(&exe)? == program))?;
    // While it derives the key, before it starts a guardian.
    fs::remove_file(&program)?;
    fs::write(&program, "#!/bin/sh\nexit 1\n")?;
    engine.wait_results(2)?;
    let guardians = children(engine.pid(), "stillframe")?;
    let &[guardian] = guardians.as_slice() else {
        bail!("guardians: {guardians:?}");
    };
    let environment = fs::read(format!("/proc/{guardian}/environ"))?;
    let environment = String::from_utf8_lossy(&environment);
    ensure!(environment.contains("PATH="), "it cannot be read");
    ensure!(!environment.contains("STILLFRAME_"), "it has passwords");
    let limits = fs::read_to_string(format!("/proc/{guardian}/limits"))?;
    let core = limits.lines().find(|line| line.contains("core file"));
    let core = core.context("no limit of core files")?;
    ensure!(core.split_whitespace().nth(4) == Some("0"), "{core}");
    engine.signal("INT")?;
    ensure!(engine.end()?.code == Some(0));
    expect_nothing_left(guest.pid(), &mut monitor)?;
    expect_untouched(&guest, &mut monitor)
}
