//! What a new user tries on the first day: a VM that comes back where it was, with its files; errors for scripts;
//! completions and man pages.

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use stillframe_harness::cli::{Stillframe, binary};
use stillframe_harness::guest::{Kind, Setup};
use stillframe_harness::health::processes_with;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::PATIENCE;
use stillframe_harness::serial::Serial;

/// The VM ends; its restore needs no option: monitor and pid file are where they were.
#[test]
fn a_vm_comes_back_with_its_monitor_and_its_pid_file() -> Result<()> {
    let pid_file = tempfile::tempdir()?;
    let pid_file = pid_file.path().join("vm.pid");
    let path = pid_file.display().to_string();
    let mut guest = Setup::small(Kind::Private, "comes-back")
        .with(&["-pidfile", &path])
        .boot()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    // The VM's name is enough.
    let taken = stillframe.json(&["checkpoint", "comes-back"])?;
    let id = taken["checkpoint"].as_str().context("no id")?.to_owned();
    let busy = stillframe.fails(&["restore", &id], 1)?;
    ensure!(busy.contains("a living process listens on"), "{busy}");
    // While the VM lives, its pid file is its own.
    let other = guest.folder().join("other.qmp").display().to_string();
    let plan = stillframe.json(&["restore", &id, "--qmp", &other, "--print-command"])?;
    ensure!(!plan["arguments"].to_string().contains(&path), "{plan}");
    guest.kill()?;
    let serial = guest.folder().join("again.serial");
    let spec = format!("file:{}", serial.display());
    let report = stillframe.json(&["restore", &id, "--serial", &spec])?;
    let again = Restored {
        pid: report["pid"].as_i64().context("no pid")? as i32,
        qmp: guest.qmp_path(),
        serial: Serial::new(&serial),
    };
    ensure!(
        report["qmp"] == guest.qmp_path().display().to_string(),
        "{report}"
    );
    again.serial.wait_ticks(3, PATIENCE)?;
    ensure!(again.monitor()?.status()? == "running");
    let written = fs::read_to_string(&pid_file)?;
    ensure!(written.trim() == again.pid.to_string(), "{written:?}");
    Ok(())
}

/// A copy of the disk takes the disk's place, if the user says that it is the disk of that time.
#[test]
fn a_vm_is_restored_beside_its_original_with_a_copy_of_its_disk() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (disk, copy) = (
        folder.path().join("disk.img"),
        folder.path().join("copy.img"),
    );
    fs::write(&disk, vec![7; 1 << 20])?;
    let drive = format!("file={},format=raw,if=virtio", disk.display());
    let guest = Setup::small(Kind::Private, "copied-disk")
        .with(&["-drive", &drive])
        .boot()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    stillframe.ok(&["checkpoint", "--vm", "copied-disk"])?;
    fs::copy(&disk, &copy)?;
    let replace = format!("--replace={}={}", disk.display(), copy.display());
    let qmp = guest.folder().join("beside.qmp").display().to_string();
    let restore = ["restore", "latest", "--qmp", &qmp, &replace];
    let refused = stillframe.fails(&restore, 1)?;
    ensure!(
        refused.contains("takes the place of") && refused.contains("--disks-as-they-are"),
        "{refused}"
    );
    ensure!(processes_with(&qmp)? == 0);
    let vm = Restored::start(
        &stillframe,
        "latest",
        guest.folder(),
        &[&replace, "--disks-as-they-are"],
    )?;
    vm.serial.wait_ticks(3, PATIENCE)?;
    let line = fs::read(format!("/proc/{}/cmdline", vm.pid))?;
    let line = String::from_utf8_lossy(&line);
    ensure!(
        line.contains("copy.img") && !line.contains("disk.img"),
        "{line}"
    );
    guest.serial.wait_more(2, PATIENCE)?;
    let restore = ["restore", "latest", "--qmp", &qmp, "--replace", "tap9=tap8"];
    let nothing = stillframe.fails(&restore, 1)?;
    ensure!(nothing.contains("tap9"), "{nothing}");
    Ok(())
}

#[test]
fn scripts_read_errors_as_json() -> Result<()> {
    let cases: [(&[&str], i64); 4] = [
        (&["list"], 2),
        (&["nonsense"], 2),
        (&["checkpoint", "--pid", "none"], 2),
        (&["-r", "/nonexistent", "checkpoint", "no-such-vm"], 1),
    ];
    for (arguments, code) in cases {
        let mut command = Command::new(binary()?);
        command.args(arguments).arg("--json").stdin(Stdio::null());
        command.env_remove("STILLFRAME_REPOSITORY");
        command.env("STILLFRAME_PASSWORD", "x");
        let output = command.output()?;
        let said = String::from_utf8(output.stderr)?;
        let lines: Vec<Value> = said
            .lines()
            .map(serde_json::from_str)
            .collect::<Result<_, _>>()
            .with_context(|| said.clone())?;
        let [error] = &lines[..] else {
            anyhow::bail!("{arguments:?}: {said}");
        };
        let words = error["error"].as_str().context("no words")?;
        ensure!(!words.is_empty() && !words.starts_with("error"), "{said}");
        ensure!(error["exit_code"] == code, "{arguments:?}: {said}");
        ensure!(output.status.code().map(i64::from) == Some(code), "{said}");
        ensure!(output.stdout.is_empty());
    }
    Ok(())
}

#[test]
fn shells_and_man_know_every_command() -> Result<()> {
    let run = |arguments: &[&str]| {
        Command::new(binary()?)
            .args(arguments)
            .output()
            .map_err(anyhow::Error::from)
    };
    for shell in ["bash", "zsh", "fish"] {
        let script = String::from_utf8(run(&["completions", shell])?.stdout)?;
        ensure!(
            script.contains("rewind") && script.contains("lazy"),
            "{shell}"
        );
    }
    let folder = tempfile::tempdir()?;
    let into = folder.path().display().to_string();
    ensure!(run(&["man", &into])?.status.success());
    let page = fs::read_to_string(folder.path().join("stillframe-restore.1"))?;
    ensure!(
        page.contains("replace") && page.contains("Exit codes"),
        "{page}"
    );
    ensure!(!folder.path().join("stillframe-transfer.1").exists());
    ensure!(run(&["completions", "tcsh"])?.status.code() == Some(2));
    Ok(())
}

/// `-daemonize` changes QEMU's working directory, which its relative paths do not refer to.
#[test]
fn a_daemon_with_relative_paths_comes_back() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);
    fs::write(at("disk.img"), [0; 1 << 20])?;
    let started = Command::new("qemu-system-x86_64")
        .args(["-name", "daemon", "-machine", "q35", "-accel", "tcg"])
        .args(["-m", "64", "-display", "none", "-nic", "none"])
        .args(["-drive", "file=disk.img,if=virtio,format=raw"])
        .args(["-qmp", "unix:qmp,server=on,wait=off"])
        .args(["-daemonize", "-pidfile", "pid"])
        .current_dir(folder.path())
        .stderr(Stdio::null())
        .status()?;
    ensure!(started.success());
    let pid = || -> Result<i32> { Ok(fs::read_to_string(at("pid"))?.trim().parse()?) };
    let first = pid()?;
    let stillframe = Stillframe::init(&at("repo"))?;
    let taken = stillframe.json(&["checkpoint", "daemon"])?;
    ensure!(taken["obstacles"].is_null(), "{taken}");
    end(first)?;
    let report = stillframe.json(&["restore", "latest"])?;
    ensure!(report["qmp"] == at("qmp").display().to_string(), "{report}");
    let again = pid()?;
    ensure!(report["pid"] == again, "{report}");
    end(again)
}

/// Ends a QEMU that is no child of this process.
fn end(pid: i32) -> Result<()> {
    let status = Command::new("kill").arg(pid.to_string()).status()?;
    ensure!(status.success());
    let process = format!("/proc/{pid}");
    let deadline = std::time::Instant::now() + PATIENCE;
    while fs::exists(&process)? {
        ensure!(std::time::Instant::now() < deadline, "QEMU does not end");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    Ok(())
}

/// A disk that is not where its path says cannot be restored, and the checkpoint says so.
#[test]
fn a_checkpoint_reports_a_disk_that_is_gone() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let disk = folder.path().join("disk.img");
    fs::write(&disk, [0; 1 << 20])?;
    let drive = format!("file={},if=virtio,format=raw", disk.display());
    let guest = Setup::small(Kind::Private, "no-disk")
        .with(&["-drive", &drive])
        .booted()?;
    fs::remove_file(&disk)?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let taken = stillframe.json(&["checkpoint", "no-disk"])?;
    let obstacles = taken["obstacles"].to_string();
    ensure!(obstacles.contains("disk.img is missing"), "{taken}");
    Ok(())
}
