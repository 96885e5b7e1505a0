//! VMs that cannot be had: no VM at all, one that cannot be talked to, one that another process holds.

use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use anyhow::{Result, ensure};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Kind, Setup};
use stillframe_harness::health::{expect_untouched, expect_whole};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::running::{Running, signal};

use crate::host::Tracer;

/// A process that ends with the test.
struct Process(Child);

impl Process {
    fn start(program: &str, arguments: &[&str]) -> Result<Process> {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        Ok(Process(command.spawn()?))
    }

    fn pid_text(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A QEMU without a guest.
fn bare_qemu(arguments: &[&str]) -> Result<Process> {
    let mut all = vec![
        "-display",
        "none",
        "-no-user-config",
        "-nodefaults",
        "-m",
        "32",
    ];
    all.extend(arguments);
    Process::start("qemu-system-x86_64", &all)
}

#[test]
fn what_is_no_vm_is_called_so() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let says = |selector: &[&str], code: i32, words: &str| {
        for line in [vec!["checkpoint"], vec!["watch", "--every", "1s"]] {
            let line = [line, selector.to_vec()].concat();
            let said = stillframe.fails(&line, code)?;
            ensure!(said.contains(words), "{line:?}: {said}");
        }
        Ok(())
    };
    for garbage in ["abc", "", "0", "-1", "1e3", "99999999999999", "12 34"] {
        says(&[&format!("--pid={garbage}")], 2, "--pid")?;
    }
    says(&[], 2, "--pid")?;
    says(&["--pid", "1", "--vm", "x"], 2, "cannot be used with")?;
    let sleeper = Process::start("sleep", &["1000"])?;
    says(
        &["--pid", &sleeper.pid_text()],
        5,
        "is not a QEMU system emulator",
    )?;
    let gone = sleeper.pid_text();
    drop(sleeper);
    says(&["--pid", &gone], 5, "no running process")?;
    says(&["--vm", "no such name"], 5, "-name NAME")?;
    let socket = folder.path().join("socket").display().to_string();
    says(&["--qmp", &socket], 5, "no QEMU listens")?;
    std::fs::write(&socket, "no socket")?;
    says(&["--qmp", &socket], 5, "no QEMU listens")?;
    let monitorless = bare_qemu(&["-S", "-name", "monitorless"])?;
    wait_for_exec(&monitorless)?;
    says(&["--pid", &monitorless.pid_text()], 5, "-qmp unix:PATH")?;
    says(&["--vm", "monitorless"], 5, "-qmp unix:PATH")?;
    let namesake = bare_qemu(&["-S", "-name", "monitorless"])?;
    wait_for_exec(&namesake)?;
    says(&["--vm", "monitorless"], 5, "name one by its pid")?;
    expect_whole(&stillframe, &[])
}

/// Between fork and exec a child is still the test.
fn wait_for_exec(process: &Process) -> Result<()> {
    let exe = format!("/proc/{}/exe", process.pid_text());
    while !std::fs::read_link(&exe)?.ends_with("qemu-system-x86_64") {
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    Ok(())
}

#[test]
fn a_vm_without_memory_of_its_own_yet_is_refused() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let qmp = folder.path().join("qmp");
    let monitor = format!("unix:{},server=on,wait=off", qmp.display());
    let waiting = bare_qemu(&["-incoming", "defer", "-qmp", &monitor])?;
    drop(Qmp::connect(&qmp)?);
    let said = stillframe.fails(&["checkpoint", "--pid", &waiting.pid_text()], 5)?;
    ensure!(
        said.contains("inmigrate") && said.contains("try again when"),
        "{said}"
    );
    expect_whole(&stillframe, &[])
}

#[test]
fn a_busy_monitor_is_told_and_a_free_second_one_serves() -> Result<()> {
    let guest = Setup::small(Kind::Pc, "busy").booted()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let (pid, qmp) = (guest.pid_text(), guest.qmp_path().display().to_string());
    let ways = [["checkpoint", "--pid", &pid], ["checkpoint", "--qmp", &qmp]];
    // A client that never speaks holds the first monitor as well as one that does.
    let silent = UnixStream::connect(guest.qmp_path())?;
    // More than once: each attempt on a held monitor leaves a connection that waits in its queue.
    for line in ways.iter().cycle().take(6) {
        stillframe.ok(line)?;
    }
    let mut second = guest.second_monitor()?;
    for line in ways.iter().cycle().take(4) {
        let said = stillframe.fails(line, 5)?;
        ensure!(said.contains("held by another client"), "{line:?}: {said}");
    }
    drop(silent);
    stillframe.ok(&ways[0])?;
    expect_untouched(&guest, &mut second)?;
    expect_whole(&stillframe, &[])
}

#[test]
fn a_traced_or_stopped_qemu_is_refused_and_left_alone() -> Result<()> {
    let guest = Setup::small(Kind::TwoCpus, "traced").booted()?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let line = ["checkpoint", "--pid", &guest.pid_text()];
    let tracer = Tracer::of(guest.pid())?;
    let said = stillframe.fails(&line, 5)?;
    ensure!(
        said.contains("is traced by process") && said.contains("end that debugger"),
        "{said}"
    );
    guest
        .serial
        .wait_more(2, stillframe_harness::running::PATIENCE)?;
    drop(tracer);
    expect_untouched(&guest, &mut monitor)?;
    signal(guest.pid() as u32, "STOP")?;
    let said = stillframe.fails(&line, 5)?;
    // It stays stopped, as its user left it.
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", guest.pid()))?;
    signal(guest.pid() as u32, "CONT")?;
    ensure!(stat.contains(") T "), "{stat}");
    ensure!(
        said.contains("stopped") && said.contains("SIGCONT"),
        "{said}"
    );
    expect_untouched(&guest, &mut monitor)?;
    let report = stillframe.json(&["checkpoint", "--pid", &guest.pid_text(), "--verify"])?;
    ensure!(report["verify"]["differing"] == 0);
    expect_untouched(&guest, &mut monitor)
}

#[test]
fn of_two_engines_on_one_vm_the_second_is_refused_and_the_first_works_on() -> Result<()> {
    let guest = Setup::small(Kind::Sandbox, "two-engines").booted()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let pid = guest.pid_text();
    let line = [
        "watch", "--pid", &pid, "--every", "300ms", "--verify", "--json",
    ];
    let mut first = Running::start(stillframe.command(&line)?)?;
    first.wait_results(1)?;
    for _ in 0..3 {
        let said = stillframe.fails(&["checkpoint", "--pid", &pid], 5)?;
        ensure!(said.contains("userfaultfd"), "{said}");
    }
    let before = first.results()?.len();
    let results = first.wait_results(before + 3)?;
    ensure!(
        results
            .iter()
            .all(|result| result["verify"]["differing"] == 0),
        "{results:?}"
    );
    // Increments throughout: the second never made the first attach again.
    ensure!(
        results
            .iter()
            .skip(1)
            .all(|result| !result["parent"].is_null()),
        "{results:?}"
    );
    ensure!(!first.err().contains("warning"), "{}", first.err());
    first.signal("INT")?;
    let ended = first.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    stillframe.ok(&["checkpoint", "--pid", &pid])?;
    expect_untouched(&guest, &mut guest.second_monitor()?)?;
    expect_whole(&stillframe, &[])
}
