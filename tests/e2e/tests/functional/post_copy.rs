//! Migrations whose VM runs at the destination before all its memory is there.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::filling::runtime_file;
use stillframe_harness::guest::{Guest, Kind, Setup, Workload};
use stillframe_harness::health;
use stillframe_harness::migration::{Arrived, Order};
use stillframe_harness::running::PATIENCE;

/// A guest that writes all the time, and checks what it has written.
fn busy(kind: Kind, name: &str) -> Result<Guest> {
    writer(kind, name, 4000)
}

/// The same with another number of writes in 20 ms, each in another place.
fn writer(kind: Kind, name: &str, writes_per_tick: u32) -> Result<Guest> {
    let setup = Setup {
        workload: Workload {
            mib: 48,
            pattern: "random",
            tick_ms: 20,
            writes_per_tick,
            share: 4,
        },
        ..Setup::small(kind, name)
    };
    let guest = setup.boot()?;
    guest.serial.wait_ticks(3, PATIENCE)?;
    Ok(guest)
}

fn number(report: &Value, name: &str) -> Result<u64> {
    let number = report.pointer(name).and_then(Value::as_u64);
    number.with_context(|| format!("no {name} in {report}"))
}

/// All memory is here, nothing of the engine is left, and the guest goes on.
fn expect_complete(arrived: &Arrived) -> Result<()> {
    arrived.vm.serial.wait_ticks(5, PATIENCE)?;
    ensure!(!health::has_userfaultfd(arrived.vm.pid)?, "it is left");
    for end in [".received", ".received-pages"] {
        let record = runtime_file(&arrived.vm.qmp, end)?;
        ensure!(!record.exists(), "{} is left", record.display());
    }
    Ok(())
}

#[test]
fn the_rest_of_memory_comes_while_the_vm_runs() -> Result<()> {
    for kind in [Kind::Private, Kind::Memfd] {
        for mode in ["hybrid", "post-copy"] {
            let guest = busy(kind, mode)?;
            let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
            let mut order = Order::of(&guest, mode);
            order.migrate = vec![format!("--mode={mode}"), "--verify".to_owned()];
            let arrived = order.perform(&stillframe, guest.pid())?;
            ensure!(!health::is_alive(guest.pid()), "its QEMU did not end");
            let (sent, filled) = (&arrived.sent, arrived.filled.as_ref());
            ensure!(sent["mode"] == mode, "{sent}");
            ensure!(arrived.report["running"] == true, "{}", arrived.report);
            let filled = filled.with_context(|| format!("not filled: {sent}"))?;
            ensure!(number(filled, "/pages")? > 0, "{filled} {sent}");
            ensure!(
                number(sent, "/fetched")? >= number(filled, "/pages")?,
                "{sent}"
            );
            let rounds = number(sent, "/rounds")?;
            ensure!(rounds == if mode == "hybrid" { 2 } else { 1 }, "{sent}");
            expect_complete(&arrived).with_context(|| format!("{}: {mode}", kind.name()))?;
        }
    }
    Ok(())
}

/// Pages that it would write again are not sent before. Two looks and a slow link are enough to see it.
#[test]
fn a_vm_that_writes_much_of_its_memory_does_not_wait_for_the_first_round() -> Result<()> {
    for (writes, cut_short) in [(4000, true), (2, false)] {
        let name = format!("writes-{writes}");
        let guest = writer(Kind::Private, &name, writes)?;
        let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
        let mut order = Order::of(&guest, &name);
        order.migrate = vec!["--bandwidth=30M".to_owned(), "--verify".to_owned()];
        let arrived = order.perform(&stillframe, guest.pid())?;
        let (sent, filled) = (&arrived.sent, arrived.filled.as_ref());
        let early = number(sent, "/pages/sent")?;
        if cut_short {
            ensure!(sent["mode"] == "hybrid", "{sent}");
            ensure!(number(sent, "/rounds")? == 2, "{sent}");
            let filled = filled.with_context(|| format!("not filled: {sent}"))?;
            ensure!(number(filled, "/pages")? > early, "{filled} {sent}");
        } else {
            let workload = 48 << 8;
            ensure!(early > workload, "{sent}");
        }
        expect_complete(&arrived)?;
    }
    Ok(())
}

/// What is in locked memory cannot be made missing.
#[test]
fn a_vm_with_locked_memory_moves_by_pre_copy_only() -> Result<()> {
    let setup = Setup::small(Kind::Private, "locked").with(&["-overcommit", "mem-lock=on"]);
    let guest = setup.boot()?;
    guest.serial.wait_ticks(2, PATIENCE)?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let mut order = Order::of(&guest, "locked");
    order.migrate = vec!["--mode=post-copy".to_owned()];
    let migration = order.start(&stillframe, guest.pid())?;
    let (sent, received) = (migration.source.end()?, migration.destination.end()?);
    ensure!(sent.code == Some(1) && received.code == Some(1), "{sent:?}");
    ensure!(sent.err.contains("--mode pre-copy"), "{sent:?}");
    guest.serial.wait_more(2, PATIENCE)?;
    order.migrate.clear();
    let arrived = order.perform(&stillframe, guest.pid())?;
    ensure!(arrived.sent["mode"] == "pre-copy", "{}", arrived.sent);
    expect_complete(&arrived)
}
