//! The clock of a guest that was in a repository for a while: set by its agent, the real one.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use stillframe_harness::agent::Agent;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::filling::Filling;
use stillframe_harness::guest::{Kind, Setup};
use stillframe_harness::health::expect_nothing_left;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::PATIENCE;
use stillframe_harness::serial::Serial;

/// The guest's clock is as wrong as if it had been away for so long.
const AWAY_S: f64 = 3600.0;

fn is_right(behind_s: f64) -> bool {
    behind_s.abs() < 2.0
}

fn is_as_it_was(behind_s: f64) -> bool {
    (AWAY_S - 2.0..AWAY_S + 600.0).contains(&behind_s)
}

/// Where a restored VM has its monitor, and its serial port: the file, and QEMU's argument.
fn host_ends(folder: &Path) -> (String, PathBuf, String) {
    let serial = folder.join("serial");
    let spec = format!("file:{}", serial.display());
    (folder.join("x.qmp").display().to_string(), serial, spec)
}

/// What Stillframe says of it.
fn expect_set(report: &Value) -> Result<()> {
    let ms = |name: &str| report["clock"][name].as_f64().context("no clock");
    let [was, is] = [ms("was_behind_ms")?, ms("behind_ms")?].map(|ms| ms / 1e3);
    ensure!(is_as_it_was(was) && is_right(is), "{report}");
    ensure!(report["clock"]["not_set"].is_null(), "{report}");
    Ok(())
}

#[test]
fn a_guest_with_an_agent_gets_the_right_time() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut guest = Setup::small(Kind::Private, "late").with_agent().booted()?;
    let channel = guest.agent_path();
    Agent::connect(&channel)?.set_behind(AWAY_S)?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    guest.kill()?;
    let (qmp, serial, spec) = host_ends(folder.path());
    let restore = |more: &[&str]| -> Result<(Restored, Value)> {
        let line = ["restore", "latest", "--qmp", &qmp, "--serial", &spec];
        let report = stillframe.json(&[&line, more].concat())?;
        let restored = Restored {
            pid: report["pid"].as_i64().context("no pid")? as i32,
            qmp: (&qmp).into(),
            serial: Serial::new(&serial),
        };
        Ok((restored, report))
    };
    for way in [&[][..], &["--lazy"]] {
        let (restored, report) = restore(way)?;
        expect_set(&report)?;
        let behind_s = Agent::connect(&channel)?.behind_s()?;
        ensure!(is_right(behind_s), "{way:?}: {behind_s} s behind");
        restored.serial.wait_ticks(9, PATIENCE)?;
        expect_nothing_left(restored.pid, &mut restored.monitor()?)?;
    }
    // Another process that continues with a restore sets it too: the guest has stood still.
    let limit = ["--limit-fill", "1M"];
    let mut slow = Filling::start(&stillframe, "latest", folder.path(), &limit)?;
    slow.wait_runs()?;
    Agent::connect(&channel)?.set_behind(AWAY_S)?;
    slow.running.crash()?;
    let resumed = Filling::resume(&stillframe, &slow.qmp, &slow.serial, &[])?;
    let (restored, report) = resumed.complete()?;
    expect_set(&report)?;
    restored.serial.wait_more(2, PATIENCE)?;
    drop(restored);
    let (paused, report) = restore(&["--paused"])?;
    ensure!(report["clock"].is_null(), "{report}");
    drop(paused);
    let (restored, report) = restore(&["--keep-guest-clock"])?;
    ensure!(report["clock"].is_null(), "{report}");
    let mut agent = Agent::connect(&channel)?;
    ensure!(is_as_it_was(agent.behind_s()?), "it was set");
    agent.set_behind(0.0)?;
    // The channel serves one at a time.
    let pid = restored.pid.to_string();
    let rewind = ["rewind", "latest", "--pid", &pid];
    let said = stillframe.ok(&rewind)?;
    ensure!(said.contains("its agent does not answer"), "{said}");
    ensure!(is_as_it_was(agent.behind_s()?), "it was set");
    drop(agent);
    expect_set(&stillframe.json(&rewind)?)?;
    restored.serial.wait_more(2, PATIENCE)?;
    drop(restored);
    // A clone has a channel of its own.
    let base = format!("--template-dir={}", folder.path().join("base").display());
    let numbered = qmp.replace("x.qmp", "{}.qmp");
    let line = ["clone", "latest", "--qmp", &numbered, &base];
    let report = stillframe.json(&line)?;
    let clone = Restored {
        pid: report["pid"].as_i64().context("no pid")? as i32,
        qmp: numbered.replace("{}", "1").into(),
        serial: Serial::new(&serial),
    };
    expect_set(&report)?;
    expect_nothing_left(clone.pid, &mut clone.monitor()?)
}

/// A guest in which no agent answers runs, and this is reported.
#[test]
fn a_guest_whose_agent_is_silent_runs() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let channel = folder.path().join("agent").display().to_string();
    let backend = format!("socket,id=agent,path={channel},server=on,wait=off");
    let mut guest = Setup::small(Kind::Private, "silent")
        .with(&["-chardev", &backend, "-device", "virtio-serial-pci"])
        .with(&[
            "-device",
            "virtserialport,chardev=agent,name=org.qemu.guest_agent.0",
        ])
        .boot()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    guest.kill()?;
    let (qmp, serial, spec) = host_ends(folder.path());
    let line = ["restore", "latest", "--qmp", &qmp, "--serial", &spec];
    let said = stillframe.ok(&line)?;
    let printed = "the guest's clock is not set: its agent does not answer";
    ensure!(said.contains(printed), "{said}");
    let pid = said.split("process ").nth(1).context("no process")?;
    let pid: i32 = pid.split(',').next().unwrap_or_default().parse()?;
    let restored = Restored {
        pid,
        qmp: qmp.into(),
        serial: Serial::new(&serial),
    };
    restored.serial.wait_ticks(5, PATIENCE)?;
    expect_nothing_left(restored.pid, &mut restored.monitor()?)
}

/// A guest's clock stands still in each pause; its agent gives it back what many pauses have taken.
#[test]
fn a_guest_that_is_watched_keeps_the_time() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let guest = Setup::small(Kind::Private, "on-time")
        .with_agent()
        .booted()?;
    let channel = guest.agent_path();
    Agent::connect(&channel)?.set_behind(0.0)?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    // Comparing all of memory makes pauses long.
    let watch = |more: &[&str]| -> Result<Vec<Value>> {
        let pid = guest.pid_text();
        let line = [
            "watch", "--pid", &pid, "--every", "200ms", "--count", "20", "--verify",
        ];
        stillframe.json_lines(&[&line, more].concat())
    };
    let paused_s = |reports: &[Value]| -> f64 {
        let pauses = reports.iter().map(|report| &report["downtime_us"]["total"]);
        pauses.filter_map(Value::as_f64).sum::<f64>() / 1e6
    };
    let kept = watch(&["--keep-guest-clock"])?;
    let taken = kept.last().and_then(|last| last["clock_taken_us"].as_f64());
    ensure!(taken.is_some_and(|taken| taken > 5e5), "{taken:?}");
    let behind_s = Agent::connect(&channel)?.behind_s()?;
    ensure!(behind_s > paused_s(&kept) / 2.0, "{behind_s} s behind");
    let mut all_s = paused_s(&kept);
    // On a busy machine the agent may answer when the watch has nearly ended. Without it, each watch adds its pauses.
    for _ in 0..5 {
        let reports = watch(&[])?;
        all_s += paused_s(&reports);
        let is_set = |report: &Value| report["clock"]["behind_ms"].is_number();
        let left_s = Agent::connect(&channel)?.behind_s()?;
        if reports.iter().any(is_set) && left_s < all_s / 2.0 {
            return Ok(());
        }
        eprintln!("{left_s} of {all_s} s behind: {reports:?}");
    }
    bail!("the guest's clock was not kept");
}
