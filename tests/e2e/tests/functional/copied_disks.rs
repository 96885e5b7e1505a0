//! A disk that only the source reaches moves with its VM.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use stillframe_harness::committing::Committing;
use stillframe_harness::databases::Database;
use stillframe_harness::guest::Guest;
use stillframe_harness::running::Running;

/// Of each byte, both ways.
const DELAY: Duration = Duration::from_millis(30);

#[test]
fn a_disk_is_copied_with_all_that_was_committed() -> Result<()> {
    for (format, mode, more) in [
        ("raw", "pre-copy", "--rehearse"),
        ("qcow2", "post-copy", "--connections=1"),
        ("raw", "stop-copy", "--connections=2"),
    ] {
        let it = Committing::journal(&format!("copied-{mode}"), format)?;
        let mut order = it.order("there");
        let words = [format!("--mode={mode}"), more.to_owned()];
        order.migrate.extend(words);
        // Over a slow link: a write that the guest does not wait for is not there when it is stopped.
        let there = order.perform_delayed(&it.stillframe, it.guest.pid(), DELAY)?;
        let (old, new) = (&it.guest.serial, &there.vm.serial);
        let disk_bytes = there.sent["disk_bytes"].as_u64().unwrap_or(0);
        ensure!(disk_bytes > 16 << 20, "{}", there.sent);
        ensure!(there.sent["bytes_sent"].as_u64() > Some(disk_bytes));
        let before = old.committed().unwrap_or(0);
        ensure!(
            new.wait_more_committed(5)? > before,
            "{mode}: it does not go on"
        );
        // The disk here is what it was when the VM was given up.
        let left = it.expect_all(&it.disk, &[old])?;
        ensure!(left <= before + 1, "{left} of {before} records");
        there.vm.crash()?;
        let found = it.expect_all(&it.copy, &[old, new])?;
        ensure!(found > before + 3, "{mode}: {found} of {before} records");
    }
    Ok(())
}

/// After a crash of the new host, every transaction is there that was said to be committed on either.
#[test]
fn a_database_recovers_with_every_acknowledged_transaction() -> Result<()> {
    let it = Committing::database("accounts", Database::Sqlite)?;
    let there = it.order("there").perform(&it.stillframe, it.guest.pid())?;
    let (old, new) = (&it.guest.serial, &there.vm.serial);
    let before = old.committed().unwrap_or(0);
    ensure!(new.wait_more_committed(10)? > before, "it does not go on");
    there.vm.crash()?;
    let said = new.committed().unwrap_or(0);
    let found = it.recover(&it.copy).context("the copy")?;
    ensure!(found >= said, "{found} of {said} transactions");
    // What was left behind is the state of the hand-over, which a crash here would have left.
    let left = it.recover(&it.disk).context("the original")?;
    ensure!(
        (before..said).contains(&left),
        "{left} of {before} transactions"
    );
    Ok(())
}

/// A manager's QEMU has its own image, and perhaps its own use for the one NBD server of a QEMU.
#[test]
fn a_disk_is_copied_into_the_qemu_of_a_manager() -> Result<()> {
    let it = Committing::journal("managed-disk", "qcow2")?;
    let order = it.order("into");
    let migrate = |into: &Guest| -> Result<_> {
        let command = order.receiver_into(&it.stillframe, &into.qmp_path())?;
        let (destination, at) = order.listen(command)?;
        let migrator = order.migrator(&it.stillframe, it.guest.pid(), at, &["--copy-disks"])?;
        Ok((Running::start(migrator)?.end()?, destination.end()?))
    };
    let busy = it.waiting_qemu()?;
    let path = order.folder.join("nbd").display().to_string();
    let address = json!({ "type": "unix", "data": { "path": path } });
    busy.second_monitor()?
        .execute("nbd-server-start", json!({ "addr": address }))?;
    let (sent, received) = migrate(&busy)?;
    for ended in [sent, received] {
        ensure!(ended.code == Some(1) && ended.errors() == 1, "{ended:?}");
        ensure!(ended.err.contains("NBD server"), "{ended:?}");
    }
    drop(busy);
    it.guest.serial.wait_more_committed(3)?;

    let mut into = it.waiting_qemu()?;
    let (sent, received) = migrate(&into)?;
    ensure!(
        sent.code == Some(0) && received.code == Some(0),
        "{sent:?} {received:?}"
    );
    into.serial.wait_more_committed(5)?;
    let exports = into
        .second_monitor()?
        .execute("query-block-exports", json!({}))?;
    ensure!(exports == json!([]), "{exports}");
    into.kill()?;
    it.expect_all(&it.copy, &[&it.guest.serial, &into.serial])?;
    Ok(())
}
