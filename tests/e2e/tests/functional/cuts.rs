//! A link that breaks while pages move: both sides connect again, and what came before is not sent once more.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Kind, Setup};
use stillframe_harness::health;
use stillframe_harness::migration::Order;
use stillframe_harness::running::PATIENCE;

/// About 60 MiB take several seconds.
const SLOWLY: &str = "--bandwidth=8M";

#[test]
fn a_migration_goes_on_when_the_link_is_back() -> Result<()> {
    let kinds = [
        (Kind::Private, "--mode=pre-copy"),
        (Kind::Memfd, "--mode=hybrid"),
    ];
    for (kind, mode) in kinds {
        let guest = Setup::small(kind, "cut").booted()?;
        let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
        let mut order = Order::of(&guest, "cut-there");
        order.receive.push("--reconnect=60s".to_owned());
        let words = [mode, "--verify", SLOWLY, "--reconnect=60s"];
        order.migrate.extend(words.map(str::to_owned));
        let cuts = [Duration::from_millis(2500), Duration::from_millis(1500)];
        let moved = order.perform_cut(&stillframe, guest.pid(), &cuts)?;
        ensure!(moved.report["verify"]["differing"] == 0, "{}", moved.report);
        // Each time the first round has begun anew, with what had come.
        let seeded = moved.sent["pages"]["seeded"].as_u64();
        ensure!(seeded.is_some_and(|pages| pages > 1000), "{}", moved.sent);
        moved.vm.serial.wait_ticks(3, PATIENCE)?;
    }
    Ok(())
}

/// It would wait for an hour otherwise, and turn others away.
#[test]
fn a_destination_is_free_again_when_a_migration_is_cancelled() -> Result<()> {
    let guest = Setup::small(Kind::Private, "cancelled").booted()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let mut order = Order::of(&guest, "not-there");
    order.receive.push("--reconnect=1h".to_owned());
    order.migrate = ["--mode=pre-copy", "--bandwidth=1M"]
        .map(str::to_owned)
        .to_vec();
    let qmp = order.files().0.display().to_string();
    for wait in [Duration::ZERO, Duration::from_secs(2)] {
        let migration = order.start(&stillframe, guest.pid())?;
        let deadline = Instant::now() + PATIENCE;
        while health::processes_with(&qmp)? == 0 {
            ensure!(Instant::now() < deadline, "{}", migration.source.err());
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(wait);
        migration.source.signal("INT")?;
        let (sent, received) = (migration.source.end()?, migration.destination.end()?);
        ensure!(sent.code == Some(1), "{sent:?}");
        ensure!(
            sent.err.contains("interrupted before it was done"),
            "{sent:?}"
        );
        ensure!(received.code == Some(1), "{received:?}");
        ensure!(received.err.contains("was cancelled"), "{received:?}");
        ensure!(health::processes_with(&qmp)? == 0, "a QEMU is left");
        guest.serial.wait_more(3, PATIENCE)?;
    }
    order.migrate.clear();
    let moved = order.perform(&stillframe, guest.pid())?;
    moved.vm.serial.wait_ticks(3, PATIENCE)?;
    Ok(())
}
