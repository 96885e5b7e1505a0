//! A QEMU that dies: while it is watched, while it is copied, while it is being restored.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use stillframe_harness::cli::{Stillframe, binary};
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::{checkpoints, expect_whole, processes_with};
use stillframe_harness::programs;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::{Ended, PATIENCE, Running, signal};

/// Nothing is locked, nothing is lost, and what the failed attempt stored can be freed.
fn expect_clean_aftermath(stillframe: &Stillframe, ids: &[String]) -> Result<()> {
    expect_whole(stillframe, ids)?;
    stillframe.ok(&["prune"])?;
    stillframe.ok(&["check", "--read-data"])?;
    let locks = fs::read_dir(stillframe.repository().join("locks"))?.count();
    ensure!(locks == 0, "{locks} locks are left");
    Ok(())
}

fn expect_one_error(ended: &Ended, code: i32) -> Result<()> {
    ensure!(ended.code == Some(code) && ended.errors() == 1, "{ended:?}");
    ensure!(!ended.err.contains("panicked"), "{ended:?}");
    Ok(())
}

/// Also where it is killed while it starts the process on which it tries the kernel's abilities.
#[test]
fn a_killed_probe_leaves_no_process() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let program = folder.path().join("stillframe");
    programs::copy(&binary()?, &program)?;
    // A busy machine makes the moment longer in which a child is on its own.
    let end = AtomicBool::new(false);
    let killed = std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                while !end.load(Ordering::Relaxed) {
                    std::hint::spin_loop()
                }
            });
        }
        let killed = (0..150).try_for_each(|round| -> Result<()> {
            let mut probe = Command::new(&program)
                .arg("probe")
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()?;
            std::thread::sleep(Duration::from_micros(800 * round));
            probe.kill()?;
            probe.wait().map(drop)?;
            Ok(())
        });
        end.store(true, Ordering::Relaxed);
        killed
    });
    killed?;
    let runs_it = |entry: fs::DirEntry| {
        let exe = fs::read_link(entry.path().join("exe"));
        exe.is_ok_and(|exe| exe == program)
    };
    let deadline = Instant::now() + PATIENCE;
    while fs::read_dir("/proc")?.flatten().any(runs_it) {
        ensure!(Instant::now() < deadline, "a process is left");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

#[test]
fn a_vm_that_dies_in_its_first_full_pass_ends_the_checkpoint_only() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    for delay_ms in [0, 120] {
        let mut guest = Setup::small(Kind::Private, "short-lived").booted()?;
        let line = ["checkpoint", "--pid", &guest.pid_text()];
        let mut engine = Running::start(stillframe.command(&line)?)?;
        engine.wait_words("attached to process")?;
        std::thread::sleep(Duration::from_millis(delay_ms));
        guest.kill()?;
        let ended = engine.end()?;
        // A machine that was faster than the delay has its checkpoint.
        match ended.code {
            Some(0) => ensure!(!ended.out.is_empty(), "{ended:?}"),
            _ => {
                expect_one_error(&ended, 1)?;
                ensure!(ended.out.is_empty(), "{ended:?}");
            }
        }
        expect_clean_aftermath(&stillframe, &[])?;
    }
    Ok(())
}

#[test]
fn a_vm_that_dies_while_watched_ends_the_watch_in_good_order() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    for (every, count) in [("1s", None), ("20ms", Some("9999"))] {
        let mut guest = Setup::small(Kind::Memfd, "watched").booted()?;
        let pid = guest.pid_text();
        let mut line = vec!["watch", "--pid", &pid, "--every", every, "--json"];
        line.extend(count.iter().flat_map(|count| ["--count", count]));
        let mut engine = Running::start(stillframe.command(&line)?)?;
        engine.wait_results(3)?;
        guest.kill()?;
        let ended = engine.end()?;
        match count {
            None => ensure!(ended.code == Some(0), "{ended:?}"),
            Some(_) => expect_one_error(&ended, 1)?,
        }
        ensure!(ended.err.contains("the VM ended"), "{ended:?}");
        let printed = ended.results()?;
        let ids = printed
            .iter()
            .map(|printed| Ok(printed["checkpoint"].as_str().context("no id")?.into()));
        let ids = ids.collect::<Result<Vec<String>>>()?;
        // Whatever was called done is there.
        expect_clean_aftermath(&stillframe, &ids)?;
    }
    Ok(())
}

/// A guest whose program and kernel are copies that can be taken away.
fn guest_of_copies(folder: &Path) -> Result<Guest> {
    let program = folder.join("qemu-system-x86_64");
    programs::copy(Path::new("/usr/bin/qemu-system-x86_64"), &program)?;
    let kernel = folder.join("vmlinuz");
    fs::copy(
        stillframe_harness::guest::guests()?.join("vmlinuz"),
        &kernel,
    )?;
    let mut setup = Setup::small(Kind::Private, "copies");
    setup.program = program;
    // The last of several -kernel options counts.
    setup
        .with(&["-kernel", &kernel.display().to_string()])
        .boot()
}

#[test]
fn a_restore_whose_program_or_kernel_is_gone_says_so() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut guest = guest_of_copies(folder.path())?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    stillframe.ok(&["checkpoint", "--vm", "copies"])?;
    let ids = checkpoints(&stillframe)?;
    guest.kill()?;
    let qmp = folder.path().join("again.qmp").display().to_string();
    let line = ["restore", "latest", "--qmp", &qmp];
    let away = |name: &str| folder.path().join(format!("{name}.away"));
    for (name, words) in [
        ("qemu-system-x86_64", "is missing; install QEMU"),
        ("vmlinuz", "could not open kernel file"),
    ] {
        let path = folder.path().join(name);
        fs::rename(&path, away(name))?;
        let said = stillframe.fails(&line, 1)?;
        ensure!(said.contains(words) && said.contains(name), "{said}");
        ensure!(processes_with(&qmp)? == 0, "a QEMU is left");
        fs::rename(away(name), &path)?;
    }
    // Another version in its place.
    let program = folder.path().join("qemu-system-x86_64");
    fs::rename(&program, away("qemu"))?;
    programs::script(&program, "#!/bin/sh\necho QEMU emulator version 4.2.0\n")?;
    let said = stillframe.fails(&line, 1)?;
    ensure!(said.contains("is now QEMU 4.2.0"), "{said}");
    fs::rename(away("qemu"), &program)?;
    expect_clean_aftermath(&stillframe, &ids)?;
    let restored = Restored::start(&stillframe, "latest", folder.path(), &[])?;
    restored.serial.wait_ticks(2, PATIENCE)?;
    Ok(())
}

/// The QEMU whose command line holds `word`, as soon as there is one.
fn wait_for_qemu(word: &str) -> Result<u32> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        for entry in fs::read_dir("/proc")? {
            let entry = entry?;
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line);
            if line.starts_with("/usr/bin/qemu-system") && line.contains(word) {
                return Ok(entry.file_name().to_string_lossy().parse()?);
            }
        }
    }
    bail!("no QEMU with {word} was started")
}

#[test]
fn a_restore_whose_qemu_is_killed_says_so_and_the_next_one_succeeds() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let guest = Setup::small(Kind::Private, "killed-twice").booted()?;
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    let ids = checkpoints(&stillframe)?;
    let qmp = folder.path().join("killed.qmp").display().to_string();
    for delay_ms in [0, 40, 120] {
        let line = ["restore", "latest", "--qmp", &qmp, "--verify"];
        let engine = Running::start(stillframe.command(&line)?)?;
        let pid = wait_for_qemu(&qmp)?;
        std::thread::sleep(Duration::from_millis(delay_ms));
        signal(pid, "KILL")?;
        let ended = engine.end()?;
        // A machine that was faster than the delay had its VM restored before it was killed.
        match ended.code {
            Some(0) => ensure!(!ended.out.is_empty(), "{ended:?}"),
            _ => expect_one_error(&ended, 1)?,
        }
        ensure!(processes_with(&qmp)? == 0, "a QEMU is left");
        expect_clean_aftermath(&stillframe, &ids)?;
    }
    let restored = Restored::start(&stillframe, "latest", folder.path(), &["--verify"])?;
    restored.serial.wait_ticks(2, PATIENCE)?;
    Ok(())
}

/// The engine that is given up in the middle of a restore leaves no half VM behind.
#[test]
fn a_restore_that_is_interrupted_leaves_no_qemu() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let guest = Setup::small(Kind::Private, "given-up").booted()?;
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    let qmp = folder.path().join("given-up.qmp").display().to_string();
    let line = ["restore", "latest", "--qmp", &qmp, "--paused"];
    let engine = Running::start(stillframe.command(&line)?)?;
    let pid = wait_for_qemu(&qmp)?;
    engine.signal("INT")?;
    let ended = engine.end()?;
    match ended.code {
        // It was done before the signal came.
        Some(0) => signal(pid, "KILL")?,
        _ => {
            expect_one_error(&ended, 1)?;
            ensure!(ended.err.contains("interrupted"), "{ended:?}");
            ensure!(processes_with(&qmp)? == 0, "a QEMU is left");
        }
    }
    expect_clean_aftermath(&stillframe, &[])
}
