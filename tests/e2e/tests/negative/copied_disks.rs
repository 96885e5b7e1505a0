//! Copies of disks that do not come about: the guest goes on writing, and nothing is left of them.

use anyhow::{Result, ensure};
use stillframe_harness::committing::{Committing, expect_no_copy, make_image};
use stillframe_harness::health::processes_with;
use stillframe_harness::migration::{Migration, Order};
use stillframe_harness::running::Ended;

/// The guest goes on, and nothing of the copy is left at either side.
fn only_here(it: &Committing, order: &Order) -> Result<()> {
    it.guest.serial.wait_more_committed(3)?;
    expect_no_copy(&mut it.guest.second_monitor()?)?;
    let qmp = order.files().0.display().to_string();
    ensure!(processes_with(&qmp)? == 0, "a QEMU is left");
    // It would connect to another descriptor of its own, read from it and close it.
    ensure!(it.reconnects()? == 0, "QEMU has tried to connect again");
    Ok(())
}

fn expect_one_error(ended: &Ended, words: &str) -> Result<()> {
    ensure!(ended.code == Some(1) && ended.errors() == 1, "{ended:?}");
    ensure!(ended.err.contains(words), "no {words:?}: {ended:?}");
    Ok(())
}

#[test]
fn a_disk_that_cannot_be_copied_is_named_on_both_sides() -> Result<()> {
    let it = Committing::journal("not-copied", "raw")?;
    it.log_reconnects()?;
    let small = it.copy.with_file_name("small.img");
    make_image(&small, "raw", 8)?;
    let to = |path: &std::path::Path| format!("--map={}={}", it.disk.display(), path.display());
    let cases = [
        ("--copy-disks=none", vec![], "it has journal"),
        ("--copy-disks", vec![to(&small)], "which exists"),
        (
            "--copy-disks",
            vec![to(&small), "--overwrite-disks".to_owned()],
            "has 67108864 bytes, and its new image",
        ),
        (
            "--copy-disks",
            vec![to(&it.copy.join("no").join("folder"))],
            "Make its directory",
        ),
    ];
    for (number, (copy, receive, words)) in cases.into_iter().enumerate() {
        let mut order = it.order(&format!("refused-{number}"));
        order.migrate = vec![copy.to_owned()];
        if !receive.is_empty() {
            order.receive = receive;
        }
        let migration = order.start(&it.stillframe, it.guest.pid())?;
        expect_one_error(&migration.source.end()?, words)?;
        expect_one_error(&migration.destination.end()?, words)?;
        only_here(&it, &order)?;
        ensure!(!it.copy.exists(), "{words}: an image is left");
        ensure!(it.records(&small).is_err(), "it was written to");
    }
    Ok(())
}

/// Starts to copy so slowly that it does not come to its end.
fn under_way(it: &Committing, name: &str) -> Result<(Order, Migration)> {
    let mut order = it.order(name);
    order.migrate.push("--bandwidth=1M".to_owned());
    let mut migration = order.start(&it.stillframe, it.guest.pid())?;
    migration.source.wait_words("copying disks")?;
    ensure!(it.copy.exists(), "no image");
    Ok((order, migration))
}

#[test]
fn a_side_that_dies_while_a_disk_is_copied_leaves_nothing() -> Result<()> {
    let it = Committing::journal("half-copied", "raw")?;
    it.log_reconnects()?;
    let (order, mut migration) = under_way(&it, "source-dies")?;
    migration.source.kill()?;
    let ended = migration.destination.end()?;
    expect_one_error(&ended, "connection")?;
    only_here(&it, &order)?;
    ensure!(!it.copy.exists(), "an image is left");

    let (order, mut migration) = under_way(&it, "destination-dies")?;
    migration.destination.kill()?;
    migration.destination.wait_exit()?;
    let ended = migration.source.end()?;
    // Whichever of its connections shows it first.
    let named = ended.err.contains("disk journal was not copied");
    let words = if named {
        "journal"
    } else {
        "closed the connection"
    };
    expect_one_error(&ended, words)?;
    only_here(&it, &order)?;
    // Only the process that was killed could have removed it.
    std::fs::remove_file(&it.copy)?;

    // A user who changes his mind.
    let (order, migration) = under_way(&it, "cancelled")?;
    migration.source.signal("INT")?;
    migration.source.end()?;
    expect_one_error(&migration.destination.end()?, "connection")?;
    only_here(&it, &order)?;
    ensure!(!it.copy.exists(), "an image is left");
    Ok(())
}

/// A write of the guest may wait for either engine then.
#[test]
fn a_side_that_hangs_when_each_write_is_copied_holds_the_guest_for_seconds_only() -> Result<()> {
    let it = Committing::journal("held", "raw")?;
    it.log_reconnects()?;
    for side in ["source", "destination"] {
        let mut order = it.order(side);
        let slowly = ["--mode=pre-copy", "--bandwidth=4M"].map(str::to_owned);
        order.migrate.extend(slowly);
        let mut migration = order.start(&it.stillframe, it.guest.pid())?;
        // The disk is copied then.
        migration.source.wait_words("round 1")?;
        let (hung, other) = match side {
            "source" => (&migration.source, "destination"),
            _ => (&migration.destination, "source"),
        };
        hung.signal("STOP")?;
        it.guest.serial.wait_more_committed(20)?;
        hung.signal("CONT")?;
        let (sent, received) = (migration.source.end()?, migration.destination.end()?);
        let ended = if other == "source" { &sent } else { &received };
        ensure!(
            ended.code == Some(1) && ended.errors() == 1,
            "{side}: {ended:?}"
        );
        only_here(&it, &order)?;
        ensure!(!it.copy.exists(), "{side}: an image is left");
    }
    Ok(())
}
