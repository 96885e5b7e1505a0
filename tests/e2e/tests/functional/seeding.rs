//! A destination that has a checkpoint of the VM begins with it: only what differs crosses the network.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::migration::{Arrived, Order};
use stillframe_harness::running::PATIENCE;

/// Nothing is left for later, where the VM would lack pages.
const AT_ONCE: [&str; 2] = ["--mode=pre-copy", "--downtime-limit=1s"];

/// Moves the VM with `--verify`, and makes sure that it is whole.
fn perform(
    stillframe: &Stillframe,
    guest: &Guest,
    name: &str,
    receive: &[&str],
    migrate: &[&str],
) -> Result<Arrived> {
    let mut order = Order::of(guest, name);
    order.migrate = vec!["--verify".to_owned()];
    order
        .migrate
        .extend(migrate.iter().map(|&word| word.to_owned()));
    let more = receive.iter().map(|&word| word.to_owned());
    order.receive.extend(more);
    let arrived = order.perform(stillframe, guest.pid())?;
    let differing = &arrived.report["verify"]["differing"];
    ensure!(*differing == 0, "{name}: {}", arrived.report);
    arrived.vm.serial.wait_ticks(3, PATIENCE)?;
    Ok(arrived)
}

fn number(report: &Value, name: &str) -> Result<u64> {
    let number = report.pointer(name).and_then(Value::as_u64);
    number.with_context(|| format!("no {name} in {report}"))
}

#[test]
fn a_vm_whose_checkpoint_is_there_comes_as_what_differs() -> Result<()> {
    for kind in [Kind::Private, Kind::Memfd] {
        let guest = Setup::small(kind, "seeded").booted()?;
        let folder = tempfile::tempdir()?;
        let stillframe = Stillframe::init(&folder.path().join("repo"))?;
        let taken = stillframe.json(&["checkpoint", "--pid", &guest.pid_text()])?;
        guest.serial.wait_more(3, PATIENCE)?;
        let seeded = perform(&stillframe, &guest, "seeded", &["--seed"], &AT_ONCE)?;
        let (sent, stored) = (
            number(&seeded.sent, "/bytes_sent")?,
            number(&taken, "/bytes_stored")?,
        );
        // The ids go the other way.
        ensure!(sent < stored / 2, "{} for {stored} bytes", seeded.sent);
        ensure!(
            number(&seeded.sent, "/pages/seeded")? > 4000,
            "{}",
            seeded.sent
        );
        let written = number(&seeded.report, "/pages")?;
        ensure!(
            written < number(&taken, "/pages/captured")? / 2,
            "{}",
            seeded.report
        );
    }
    Ok(())
}

/// One of another VM, one of other memory, and none are no seed; the VM comes whole.
#[test]
fn a_vm_without_a_checkpoint_that_fits_comes_whole() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let mut larger = Setup::small(Kind::Private, "unseeded");
    larger.ram_mib += 32;
    for other in [Setup::small(Kind::Private, "another"), larger] {
        let other = other.booted()?;
        stillframe.ok(&["checkpoint", "--pid", &other.pid_text()])?;
    }
    let guest = Setup::small(Kind::Private, "unseeded").booted()?;
    let whole = perform(&stillframe, &guest, "whole", &["--seed=latest"], &AT_ONCE)?;
    ensure!(number(&whole.report, "/pages")? > 4000, "{}", whole.report);
    ensure!(number(&whole.sent, "/pages/seeded")? == 0, "{}", whole.sent);
    Ok(())
}

/// Where the checkpoint has content and the VM has none, zeros are sent.
#[test]
fn a_checkpoint_of_an_earlier_life_of_the_vm_does_no_harm() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let mut fuller = Setup::small(Kind::Private, "reborn");
    fuller.workload.mib *= 3;
    let earlier = fuller.boot()?;
    stillframe.ok(&["checkpoint", "--pid", &earlier.pid_text()])?;
    drop(earlier);
    for mode in [&AT_ONCE[..], &["--mode=hybrid"]] {
        // One that has booted, not one that was loaded: it has never touched a part of its memory.
        let guest = Setup::small(Kind::Private, "reborn").boot()?;
        let moved = perform(&stillframe, &guest, "moved", &["--seed"], mode)?;
        ensure!(number(&moved.sent, "/pages/seeded")? > 0, "{}", moved.sent);
        ensure!(number(&moved.sent, "/pages/zero")? > 2000, "{}", moved.sent);
    }
    Ok(())
}
