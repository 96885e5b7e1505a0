//! Migrations that are tried out before the VM is stopped for them.

use anyhow::{Result, ensure};
use serde_json::json;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{self, Guest, Kind, Setup};
use stillframe_harness::health::processes_with;
use stillframe_harness::migration::Order;
use stillframe_harness::running::{Ended, PATIENCE, Running};
use stillframe_harness::serial::Serial;

/// Migrates with `--rehearse`; the source's and the destination's end.
fn rehearse(guest: &Guest, order: &Order, receive: &[&str]) -> Result<(Ended, Ended)> {
    migrate(guest, order, receive, &["--rehearse", "--verify"])
}

/// The same with these arguments.
fn migrate(
    guest: &Guest,
    order: &Order,
    receive: &[&str],
    words: &[&str],
) -> Result<(Ended, Ended)> {
    let stillframe = Stillframe::at(&guest.folder().join("repo"));
    let mut more = order.new_vm();
    more.extend(receive.iter().map(|&word| word.to_owned()));
    let more: Vec<&str> = more.iter().map(String::as_str).collect();
    let (destination, at) = order.listen(order.receiver(&stillframe, "127.0.0.1:0", &more)?)?;
    let migrator = order.migrator(&stillframe, guest.pid(), at, words)?;
    Ok((Running::start(migrator)?.end()?, destination.end()?))
}

/// A guest with a device whose state looks into memory when it is loaded.
fn boot(kind: Kind, name: &str) -> Result<Guest> {
    let setup = Setup::small(kind, name).with_drivers("");
    setup.with(&["-device", "virtio-rng-pci,id=random"]).boot()
}

#[test]
fn a_vm_moves_after_its_rehearsal() -> Result<()> {
    for kind in [Kind::Private, Kind::Memfd] {
        let guest = boot(kind, "rehearsed")?;
        let order = Order::of(&guest, "there");
        let (sent, received) = rehearse(&guest, &order, &[])?;
        ensure!(
            sent.code == Some(0) && received.code == Some(0),
            "{sent:?} {received:?}"
        );
        ensure!(sent.err.contains("rehearsed"), "{sent:?}");
        ensure!(received.err.contains("rehearsed"), "{received:?}");
        let report = received.results()?.pop().unwrap_or_default();
        ensure!(
            report["running"] == true && report["verify"]["differing"] == 0,
            "{report}"
        );
        let mut monitor = stillframe_harness::qmp::Qmp::connect(&order.files().0)?;
        ensure!(monitor.status()? == "running");
        monitor.execute("quit", json!({}))?;
    }
    Ok(())
}

/// Its device is another one there, which QEMU notices when it loads the state.
#[test]
fn what_would_fail_at_the_hand_over_fails_before_any_page_is_sent() -> Result<()> {
    let guest = boot(Kind::Private, "refused")?;
    let order = Order::of(&guest, "not");
    let mut monitor = guest.second_monitor()?;
    monitor.forget_events()?;
    let (sent, received) = rehearse(&guest, &order, &["--replace=virtio-rng-pci=pvpanic-pci"])?;
    for ended in [&sent, &received] {
        ensure!(ended.code == Some(1) && ended.errors() == 1, "{ended:?}");
        ensure!(ended.err.contains("0000:00:"), "QEMU's words: {ended:?}");
    }
    ensure!(!sent.err.contains("reading all memory"), "{sent:?}");
    // For the early device state only.
    monitor.status()?;
    let events = monitor.take_events();
    let stops = events.iter().filter(|event| event["event"] == "STOP");
    ensure!(stops.count() == 1, "{events:?}");
    let qmp = order.files().0.display().to_string();
    ensure!(processes_with(&qmp)? == 0, "a QEMU is left");
    guest.serial.wait_more(2, PATIENCE)?;
    Ok(())
}

/// Of another release, with its own libraries.
#[test]
fn a_newer_qemu_takes_a_vm_that_was_rehearsed_in_it() -> Result<()> {
    let newer = guest::guests()?.join("newer-qemu/usr/bin/qemu-system-x86_64");
    let program = format!("--qemu={}", newer.display());
    // It looks for the boot program of a network card elsewhere than this machine's QEMU.
    let setup = Setup::small(Kind::Private, "renewed").with(&["-nic", "none"]);
    let guest = setup.boot()?;
    let order = Order::of(&guest, "newer");
    for (receive, words, why) in [
        (&[][..], &["--rehearse"][..], "but the VM ran under"),
        (&["--newer-qemu"], &[], "only after a rehearsal"),
    ] {
        let receive = [&[program.as_str()], receive].concat();
        let (sent, received) = migrate(&guest, &order, &receive, words)?;
        for ended in [&sent, &received] {
            ensure!(ended.code == Some(1) && ended.errors() == 1, "{ended:?}");
            ensure!(ended.err.contains(why), "{ended:?}");
        }
        guest.serial.wait_more(2, PATIENCE)?;
    }
    let (sent, received) = rehearse(&guest, &order, &[&program, "--newer-qemu"])?;
    ensure!(
        sent.code == Some(0) && received.code == Some(0),
        "{sent:?} {received:?}"
    );
    let report = received.results()?.pop().unwrap_or_default();
    ensure!(report["verify"]["differing"] == 0, "{report}");
    let pid = report["pid"].as_i64().unwrap_or_default();
    let runs = std::fs::read_link(format!("/proc/{pid}/exe"))?;
    ensure!(runs == newer.canonicalize()?, "{} runs", runs.display());
    Serial::new(&order.files().1).wait_ticks(3, PATIENCE)?;
    let mut monitor = stillframe_harness::qmp::Qmp::connect(&order.files().0)?;
    monitor.execute("quit", json!({}))?;
    Ok(())
}
