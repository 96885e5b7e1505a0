//! Migrations that do not come about: one clear error on each side, the VM runs on, and nothing is left of the other.

use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::json;
use stillframe_harness::cli::{Stillframe, refusal};
use stillframe_harness::fault;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::{is_alive, processes_with};
use stillframe_harness::migration::Order;
use stillframe_harness::qmp::Qmp;
use stillframe_harness::running::{Ended, PATIENCE, Running};

/// Both sides say why, and only the original is left.
fn is_refused(stillframe: &Stillframe, guest: &Guest, order: &Order, words: &str) -> Result<()> {
    let migration = order.start(stillframe, guest.pid())?;
    let sent = migration.source.end()?;
    // A VM that has moved against expectation ends with the test; and a source that did not even connect would leave the
    // destination waiting.
    let moved = (sent.code == Some(0)).then(|| Qmp::connect(&order.files().0));
    let refused = expect_refusal(&sent, words);
    if let Some(Ok(mut new)) = moved {
        new.execute("quit", json!({}))?;
    }
    refused?;
    expect_refusal(&migration.destination.end()?, words)?;
    only_here(guest, order)
}

fn expect_refusal(ended: &Ended, words: &str) -> Result<()> {
    ensure!(ended.code == Some(1), "{ended:?}");
    ensure!(ended.err.contains(words), "no {words:?}: {ended:?}");
    ensure!(ended.errors() == 1, "{ended:?}");
    Ok(())
}

fn only_here(guest: &Guest, order: &Order) -> Result<()> {
    let qmp = order.files().0.display().to_string();
    ensure!(processes_with(&qmp)? == 0, "a QEMU is left");
    guest.serial.wait_more(2, PATIENCE)?;
    Ok(())
}

#[test]
fn a_destination_that_cannot_take_the_vm_says_why_on_both_sides() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let disk = folder.path().join("disk.img");
    File::create(&disk)?.set_len(4 << 20)?;
    let drive = format!("file={},format=raw,if=ide", disk.display());
    let guest = Setup::small(Kind::Private, "refused")
        .with(&["-drive", &drive])
        .boot()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    File::create(folder.path().join("small.img"))?.set_len(2 << 20)?;
    let replaced = |name: &str| {
        let other = folder.path().join(name);
        format!("--replace={}={}", disk.display(), other.display())
    };
    let cases = [
        (replaced("absent.img"), "absent.img"),
        (replaced("small.img"), "has another size"),
        ("--qemu=/nowhere/qemu".to_owned(), "/nowhere/qemu"),
        (
            "--qemu=/usr/bin/true".to_owned(),
            "/usr/bin/true is now QEMU",
        ),
    ];
    for (number, (word, words)) in cases.into_iter().enumerate() {
        let mut order = Order::of(&guest, format!("refused-{number}"));
        order.receive.push(word);
        is_refused(&stillframe, &guest, &order, words)?;
    }
    // All of that was said by VMs that never stopped; and it moves where nothing is wrong.
    let arrived = Order::of(&guest, "moved").perform(&stillframe, guest.pid())?;
    arrived.vm.serial.wait_ticks(2, PATIENCE)?;
    Ok(())
}

/// Over a connection that carries less than the guest writes.
#[test]
fn a_guest_that_writes_too_much_is_not_stopped_for_it() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut setup = Setup::new(Kind::Private).with(&["-name", "busy"]);
    setup.workload.mib = 40;
    setup.workload.pattern = "sequential";
    setup.workload.tick_ms = 10;
    setup.workload.writes_per_tick = 4000;
    let guest = setup.boot()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let mut order = Order::of(&guest, "busy");
    // All that it writes is sent, so that a round takes longer than the guest ever rests.
    let words = [
        "--mode=pre-copy",
        "--bandwidth=20M",
        "--pause-limit=300ms",
        "--delta-cache=0",
        "--skip-fake=off",
    ];
    order.migrate.extend(words.map(str::to_owned));
    let words = "the guest writes faster than its pages are sent";
    is_refused(&stillframe, &guest, &order, words)?;
    let mut monitor = guest.second_monitor()?;
    ensure!(monitor.status()? == "running");
    Ok(())
}

/// A device or memory is plugged in while pages move. The next migration takes the VM as it is then.
#[test]
fn a_vm_that_gets_a_device_or_memory_meanwhile_does_not_move() -> Result<()> {
    let guest = Setup::small(Kind::Private, "plugged")
        .with(&["-m", "192M,slots=2,maxmem=512M"])
        .with(&["-device", "pcie-root-port,id=rp1,chassis=1"])
        .booted()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let mut monitor = guest.second_monitor()?;
    let device = json!({"driver": "virtio-rng-pci", "id": "random", "bus": "rp1"});
    let backend = json!({"qom-type": "memory-backend-ram", "id": "more", "size": 64 << 20});
    let memory = json!({"driver": "pc-dimm", "id": "dimm", "memdev": "more"});
    let cases = [
        ("devices changed", vec![("device_add", device)]),
        (
            "RAM blocks changed",
            vec![("object-add", backend), ("device_add", memory)],
        ),
    ];
    let mut order = Order::of(&guest, "plugged-there");
    let qmp = order.files().0.display().to_string();
    order.migrate = ["--mode=pre-copy", "--bandwidth=16M"]
        .map(str::to_owned)
        .to_vec();
    for (words, commands) in cases {
        let migration = order.start(&stillframe, guest.pid())?;
        let deadline = Instant::now() + PATIENCE;
        while processes_with(&qmp)? == 0 {
            ensure!(Instant::now() < deadline, "{}", migration.source.err());
            std::thread::sleep(Duration::from_millis(10));
        }
        for (command, arguments) in commands {
            monitor.execute(command, arguments)?;
        }
        expect_refusal(&migration.source.end()?, words)?;
        expect_refusal(&migration.destination.end()?, words)?;
        only_here(&guest, &order)?;
    }
    order.migrate.clear();
    let moved = order.perform(&stillframe, guest.pid())?;
    moved.vm.serial.wait_ticks(3, PATIENCE)?;
    Ok(())
}

/// Another client resumes or ends the VM when all is there and it is about to be given up.
#[test]
fn a_vm_that_another_client_resumes_or_ends_in_the_middle_does_not_move() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let mut guest = Setup::small(Kind::Private, "meddled").boot()?;
    for (command, words) in [
        ("cont", "another client resumed the VM"),
        ("quit", "the VM has ended"),
    ] {
        let order = Order::of(&guest, command);
        let more = order.new_vm();
        let more: Vec<&str> = more.iter().map(String::as_str).collect();
        let receiver = order.receiver(&stillframe, "127.0.0.1:0", &more)?;
        let (destination, at) = order.listen(receiver)?;
        let migrator = order.migrator(&stillframe, guest.pid(), at, &[])?;
        let own = folder.path().join(command);
        std::fs::create_dir(&own)?;
        let (faulty, reached) = fault::with_fault(&migrator, "commit.giving-up:hang", &own)?;
        let mut source = Running::start(faulty)?;
        source.wait_until("a hang", |_| Ok(reached.exists()))?;
        guest.second_monitor()?.execute(command, json!({}))?;
        let (sent, received) = (source.end()?, destination.end()?);
        expect_refusal(&sent, words)?;
        expect_refusal(&received, words)?;
        let qmp = order.files().0.display().to_string();
        ensure!(processes_with(&qmp)? == 0, "a QEMU is left");
    }
    ensure!(!guest.is_alive(), "it was ended");
    Ok(())
}

/// An engine dies when the VM is given up. Other clients, which do not know of it, want it to run or to be checkpointed.
#[test]
fn a_vm_that_is_given_up_is_nothing_for_other_clients() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let guest = Setup::small(Kind::Private, "given").boot()?;
    let order = Order::of(&guest, "there");
    let more = order.new_vm();
    let more: Vec<&str> = more.iter().map(String::as_str).collect();
    let (destination, at) = order.listen(order.receiver(&stillframe, "127.0.0.1:0", &more)?)?;
    let migrator = order.migrator(&stillframe, guest.pid(), at, &[])?;
    let (faulty, _) = fault::with_fault(&migrator, "commit.given-up:kill", folder.path())?;
    ensure!(Running::start(faulty)?.end()?.code.is_none());
    expect_blocked(&guest)?;
    let line = ["checkpoint", "--json", "--pid", &guest.pid_text()];
    let said = refusal(&mut stillframe.command(&line)?, 5)?;
    ensure!(said.contains("migrate --take-back"), "{said}");
    let resumed = order.migrator(&stillframe, guest.pid(), at, &["--resume"])?;
    let resumed = Running::start(resumed)?.end()?;
    ensure!(resumed.code == Some(0), "{resumed:?}");
    let received = destination.end()?;
    ensure!(received.code == Some(0), "{received:?}");
    ensure!(!is_alive(guest.pid()), "its QEMU did not end");
    Qmp::connect(&order.files().0)?.execute("quit", json!({}))?;
    Ok(())
}

/// Nor may it be resumed once it was taken back, where it was paused before.
#[test]
fn a_vm_that_is_given_up_and_taken_back_is_as_it_was() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let guest = Setup::small(Kind::Private, "back").boot()?;
    for (fault, wanted) in [
        ("commit.given-up:kill", "running"),
        ("commit.blocking:error", "running"),
        ("commit.given-up:kill", "paused"),
    ] {
        if wanted == "paused" {
            guest.second_monitor()?.execute("stop", json!({}))?;
        }
        let order = Order::of(&guest, "not");
        let more = order.new_vm();
        let more: Vec<&str> = more.iter().map(String::as_str).collect();
        let (destination, at) =
            order.listen(order.receiver(&stillframe, "127.0.0.1:0", &more)?)?;
        let words = ["--reconnect", "1s"];
        let migrator = order.migrator(&stillframe, guest.pid(), at, &words)?;
        let own = tempfile::tempdir_in(folder.path())?;
        let (faulty, _) = fault::with_fault(&migrator, fault, own.path())?;
        let failed = Running::start(faulty)?.end()?;
        ensure!(failed.code != Some(0), "{failed:?}");
        if fault == "commit.given-up:kill" {
            expect_blocked(&guest)?;
            let line = order.migrator(&stillframe, guest.pid(), at, &["--take-back"])?;
            let back = Running::start(line)?.end()?;
            ensure!(back.code == Some(0), "{back:?}");
        }
        let received = destination.end()?;
        ensure!(received.code == Some(1), "{received:?}");
        let status = guest.second_monitor()?.status()?;
        ensure!(status == wanted, "{status} after {fault}");
    }
    guest.second_monitor()?.execute("cont", json!({}))?;
    guest.serial.wait_more(2, PATIENCE)?;
    Ok(())
}

/// QEMU refuses `cont` of any client.
fn expect_blocked(guest: &Guest) -> Result<()> {
    let mut monitor = guest.second_monitor()?;
    ensure!(
        monitor.execute("cont", json!({})).is_err(),
        "it was resumed"
    );
    let status = monitor.status()?;
    ensure!(status == "paused", "{status}");
    Ok(())
}

/// The VM could come without it; the user decides.
#[test]
fn a_checkpoint_that_cannot_be_read_is_no_seed() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let repository = folder.path().join("repo");
    let stillframe = Stillframe::init(&repository)?;
    let guest = Setup::small(Kind::Private, "no-seed").booted()?;
    stillframe.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    std::fs::rename(repository.join("packs"), folder.path().join("away"))?;
    std::fs::create_dir(repository.join("packs"))?;
    let mut order = Order::of(&guest, "no-seed");
    order.receive.push("--seed".to_owned());
    is_refused(&stillframe, &guest, &order, "without --seed it comes whole")
}
