//! Guests that lie: agents that send without end, stop in the middle, or say what is not so.

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::agent::{Lie, LyingAgent};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::{expect_untouched, memory_kib};
use stillframe_harness::running::{PATIENCE, Running};

/// What a lying agent may cost the engine, in MiB.
const COST_MIB: u64 = 64;

/// Rewinds, and returns the report with the engine's largest memory in MiB.
fn rewind(stillframe: &Stillframe, pid: &str, more: &[&str]) -> Result<(Value, u64)> {
    let line = ["rewind", "latest", "--pid", pid, "--json"];
    let mut running = Running::start(stillframe.command(&[&line, more].concat())?)?;
    let mut peak_kib = 0;
    while !running.has_ended()? {
        peak_kib = memory_kib(running.pid(), "VmHWM").unwrap_or(peak_kib);
        thread::sleep(Duration::from_millis(5));
    }
    let ended = running.end()?;
    ensure!(ended.code == Some(0), "{:?}: {}", ended.code, ended.err);
    let report = ended.results()?.pop().context("no report")?;
    Ok((report, peak_kib >> 10))
}

/// A guest with a channel to an agent at `channel`, and none that answers.
fn with_channel(channel: &Path) -> Result<Guest> {
    setup_with_channel(channel).boot()
}

fn setup_with_channel(channel: &Path) -> Setup {
    let backend = format!(
        "socket,id=agent,path={},server=on,wait=off",
        channel.display()
    );
    let port = "virtserialport,chardev=agent,name=org.qemu.guest_agent.0";
    Setup::small(Kind::Private, "liar")
        .with(&["-chardev", &backend, "-device", "virtio-serial-pci"])
        .with(&["-device", port])
}

/// Seen before: 5 GiB in 22 s, and an engine that was aborted.
#[test]
fn an_agent_that_sends_without_end_takes_no_memory_of_the_host() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let channel = folder.path().join("agent");
    let guest = with_channel(&channel)?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let pid = guest.pid_text();
    stillframe.ok(&["checkpoint", "--pid", &pid])?;
    let (report, usual_mib) = rewind(&stillframe, &pid, &["--keep-guest-clock"])?;
    ensure!(report["clock"].is_null(), "{report}");

    let liar = LyingAgent::in_place_of(&channel, Lie::Events)?;
    let (report, peak_mib) = rewind(&stillframe, &pid, &[])?;
    ensure!(
        peak_mib < usual_mib + COST_MIB,
        "{peak_mib} MiB instead of {usual_mib}"
    );
    let why = report["clock"]["not_set"].as_str().unwrap_or_default();
    ensure!(why.contains("bytes and no answer"), "{report}");
    let taken = liar.end()?;
    ensure!(taken < 8 << 20, "{taken} bytes were taken from it");
    expect_untouched(&guest, &mut guest.second_monitor()?)
}

/// Whatever an agent says of free pages, the checkpoint is made, and has all that the guest wrote since.
#[test]
fn an_agent_that_lies_about_free_pages_delays_a_checkpoint_and_spoils_none() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let channel = folder.path().join("agent");
    let guest = with_channel(&channel)?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let pid = guest.pid_text();
    let silent = stillframe.json(&["checkpoint", "--pid", &pid, "--free-pages", "--verify"])?;
    let why = |report: &Value| report["free_pages"]["not_known"].to_string();
    ensure!(why(&silent).contains("does not answer"), "{silent}");
    for (lie, said, frees) in [
        (Lie::Events, "sent more than", false),
        (Lie::HalfAnAnswer, "does not answer", false),
        (Lie::Length, "answer to guest-file-read is none", false),
        (Lie::AllFree, "null", true),
    ] {
        let liar = LyingAgent::in_place_of(&channel, lie)?;
        let report = stillframe.json(&["checkpoint", "--pid", &pid, "--free-pages", "--verify"])?;
        ensure!(why(&report).contains(said), "{lie:?}: {report}");
        ensure!(report["verify"]["differing"] == 0, "{lie:?}: {report}");
        let left_out = report["free_pages"]["left_out"].as_u64().context("none")?;
        ensure!((left_out > 0) == frees, "{lie:?}: {report}");
        let taken = liar.end()?;
        ensure!(taken < 8 << 20, "{taken} bytes were taken from it");
    }
    expect_untouched(&guest, &mut guest.second_monitor()?)
}

/// Whatever an agent says of memory, the checkpoint is made, and the guest has all of its memory after it.
#[test]
fn an_agent_that_lies_about_memory_spoils_no_checkpoint() -> Result<()> {
    const RAM_MIB: u32 = 512;
    let folder = tempfile::tempdir()?;
    let channel = folder.path().join("agent");
    let mut setup = setup_with_channel(&channel)
        .with(&["-device", "virtio-balloon-pci"])
        .with_drivers("sf.churn=150 sf.rounds=1");
    setup.ram_mib = RAM_MIB;
    let guest = setup.boot()?;
    guest.serial.wait_line("churned 1", PATIENCE)?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let pid = guest.pid_text();
    let mut monitor = guest.second_monitor()?;
    for (lie, said) in [
        (Lie::Pressure, "the guest ran out of memory"),
        (Lie::Swaps, "the guest began to swap"),
        // The balloon's statistics say it then.
        (Lie::Events, "null"),
        (Lie::HalfAnAnswer, "null"),
        (Lie::Length, "null"),
        (Lie::AllFree, "null"),
    ] {
        let liar = LyingAgent::in_place_of(&channel, lie)?;
        let report =
            stillframe.json(&["checkpoint", "--pid", &pid, "--balloon=60s", "--verify"])?;
        ensure!(report["verify"]["differing"] == 0, "{lie:?}: {report}");
        let why = report["balloon"]["not_taken"].to_string();
        ensure!(why.contains(said), "{lie:?}: {report}");
        ensure!(report["balloon"]["missing_bytes"] == 0, "{lie:?}: {report}");
        let has = monitor.execute("query-balloon", json!({}))?;
        ensure!(has["actual"] == u64::from(RAM_MIB) << 20, "{lie:?}: {has}");
        monitor.take_events();
        let taken = liar.end()?;
        ensure!(taken < 8 << 20, "{taken} bytes were taken from it");
    }
    expect_untouched(&guest, &mut monitor)
}

/// The guest has no driver for its balloon, and its agent says that it needs nothing.
#[test]
fn a_balloon_that_never_gets_there_is_given_up() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let channel = folder.path().join("agent");
    let mut setup = setup_with_channel(&channel).with(&["-device", "virtio-balloon-pci"]);
    setup.workload.mib = 64;
    let guest = setup.boot()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let liar = LyingAgent::in_place_of(&channel, Lie::Plenty)?;
    let pid = guest.pid_text();
    let report = stillframe.json(&["checkpoint", "--pid", &pid, "--balloon=60s", "--verify"])?;
    ensure!(report["verify"]["differing"] == 0, "{report}");
    ensure!(
        report["balloon"]["not_taken"] == "the guest gives no more",
        "{report}"
    );
    ensure!(report["balloon"]["taken_bytes"] == 0, "{report}");
    liar.end()?;
    expect_untouched(&guest, &mut guest.second_monitor()?)
}
