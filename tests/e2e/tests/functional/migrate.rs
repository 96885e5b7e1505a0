//! Migrations: what scripts may rely on, disks that are given up and taken, and what a user does when the other host is
//! lost in the middle.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::{Stillframe, refusal};
use stillframe_harness::fault;
use stillframe_harness::filling::runtime_file;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health;
use stillframe_harness::migration::Order;
use stillframe_harness::running::{PATIENCE, Running};

/// A guest that reads its disk for ever.
struct WithDisk {
    guest: Guest,
    stillframe: Stillframe,
    disk: PathBuf,
    // After the guest: ends last.
    _folder: tempfile::TempDir,
}

impl WithDisk {
    fn boot(name: &str, format: &str) -> Result<WithDisk> {
        let folder = tempfile::tempdir()?;
        let disk = folder.path().join("disk.img");
        let made = Command::new("qemu-img")
            .args(["create", "-q", "-f", format])
            .arg(&disk)
            .arg("8M")
            .status()?;
        ensure!(made.success(), "qemu-img create");
        let drive = format!("file={},format={format},if=virtio", disk.display());
        let setup = Setup::small(Kind::Private, name).with_drivers("sf.disk=vda");
        let guest = setup.with(&["-drive", &drive]).boot()?;
        guest.serial.wait_line("disk read 1", PATIENCE)?;
        Ok(WithDisk {
            guest,
            stillframe: Stillframe::init(&folder.path().join("repo"))?,
            disk,
            _folder: folder,
        })
    }

    fn order(&self, name: &str) -> Order {
        Order::of(&self.guest, name)
    }
}

/// Whether a QEMU has the lock of an image.
fn is_locked(disk: &Path) -> Result<bool> {
    // To write: a reader is let in beside a raw image's user.
    let opened = Command::new("qemu-io")
        .args(["-c", "length"])
        .arg(disk)
        .output()?;
    let said = [opened.stdout, opened.stderr].concat();
    Ok(String::from_utf8_lossy(&said).contains("lock"))
}

fn number(report: &Value, name: &str) -> Result<u64> {
    let number = report.pointer(name).and_then(Value::as_u64);
    number.with_context(|| format!("no {name} in {report}"))
}

#[test]
fn a_vm_with_a_disk_moves_there_and_back() -> Result<()> {
    for format in ["raw", "qcow2"] {
        let there_and_back = WithDisk::boot("mover", format)?;
        let WithDisk {
            guest,
            stillframe,
            disk,
            ..
        } = &there_and_back;
        let there = there_and_back
            .order("there")
            .perform(stillframe, guest.pid())?;
        ensure!(!health::is_alive(guest.pid()), "its QEMU did not end");
        let (sent, received) = (&there.sent, &there.report);
        for name in [
            "/total_us",
            "/downtime_us",
            "/bytes_sent",
            "/pages/sent",
            "/pages/zero",
        ] {
            ensure!(number(sent, name)? > 0, "{name} in {sent}");
        }
        for name in ["delta", "known", "postponed", "doomed"] {
            number(sent, &format!("/pages/{name}"))?;
        }
        ensure!(number(sent, "/pages/fake")? == 0, "{sent}");
        ensure!(number(sent, "/rounds")? >= 1, "{sent}");
        // By itself it may also decide that the rest comes later, where the machine is slow.
        ensure!(
            sent["mode"] == "pre-copy" || sent["mode"] == "hybrid",
            "{sent}"
        );
        ensure!(sent["vm"] == "mover", "{sent}");
        ensure!(received["vm"] == "mover", "{received}");
        ensure!(received["running"] == true, "{received}");
        ensure!(received["qmp"] == json!(there.vm.qmp), "{received}");
        let rounds = guest.serial.text().matches("disk read").count();
        let next = format!("disk read {}", rounds + 2);
        there.vm.serial.wait_line(&next, PATIENCE)?;
        ensure!(is_locked(disk)?, "{format}: no QEMU has the disk's lock");
        let back = there_and_back.order("back");
        let back = back.perform(stillframe, there.vm.pid)?;
        back.vm.serial.wait_ticks(3, PATIENCE)?;
        ensure!(is_locked(disk)?, "{format}: no QEMU has the disk's lock");
        for qmp in [&there.vm.qmp, &back.vm.qmp] {
            let record = runtime_file(qmp, ".received")?;
            ensure!(!record.exists(), "{} is left", record.display());
        }
    }
    Ok(())
}

/// Gives the VM up, and loses the other host before that answers.
fn given_up(with_disk: &WithDisk) -> Result<Vec<String>> {
    let WithDisk {
        guest, stillframe, ..
    } = with_disk;
    let order = with_disk.order("lost");
    let words = order.new_vm();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (mut destination, at) =
        order.listen(order.receiver(stillframe, "127.0.0.1:0", &words)?)?;
    let migrator = order.migrator(stillframe, guest.pid(), at, &[])?;
    let folder = tempfile::tempdir()?;
    let (faulty, reached) = fault::with_fault(&migrator, "commit.given-up:kill", folder.path())?;
    Running::start(faulty)?.end()?;
    ensure!(reached.exists(), "the fault did not happen");
    // It was ready, and its QEMU ends with it.
    destination.kill()?;
    destination.wait_exit()?;
    let qmp = order.files().0.display().to_string();
    for _ in 0..1000 {
        if health::processes_with(&qmp)? == 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let line = order.migrator(stillframe, guest.pid(), at, &["--reconnect", "1s"])?;
    let line = line.get_args().map(|word| word.display().to_string());
    Ok(line.collect())
}

#[test]
fn a_vm_whose_destination_is_lost_is_taken_back_unless_its_disk_says_otherwise() -> Result<()> {
    let with_disk = WithDisk::boot("taken", "raw")?;
    let WithDisk {
        guest,
        stillframe,
        disk,
        ..
    } = &with_disk;
    let line = given_up(&with_disk)?;
    let line: Vec<&str> = line.iter().map(String::as_str).collect();
    let with = |wish: &'static str| [&line[..], &[wish]].concat();
    let stands = || -> Result<()> {
        let status = guest.second_monitor()?.status()?;
        ensure!(status == "paused", "{status}");
        Ok(())
    };
    stands()?;

    let said = refusal(&mut stillframe.command(&with("--resume"))?, 1)?;
    ensure!(said.contains("may run at the destination"), "{said}");
    ensure!(said.contains("--take-back"), "{said}");
    stands()?;

    let written = fs::metadata(disk)?.modified()?;
    File::options()
        .write(true)
        .open(disk)?
        .set_modified(SystemTime::now())?;
    let said = refusal(&mut stillframe.command(&with("--take-back"))?, 1)?;
    ensure!(said.contains("was written to"), "{said}");
    stands()?;

    let held = File::options().append(true).open(disk)?;
    held.set_modified(written)?;
    let mut other = Command::new("sleep")
        .arg("60")
        .stdin(Stdio::from(held))
        .spawn()?;
    let said = refusal(&mut stillframe.command(&with("--take-back"))?, 1);
    other.kill()?;
    other.wait()?;
    let said = said?;
    ensure!(said.contains("is open in process"), "{said}");
    stands()?;

    let settled: Value = serde_json::from_str(&stillframe.ok(&with("--take-back"))?)?;
    ensure!(
        settled == json!({ "vm": "taken", "moved": false }),
        "{settled}"
    );
    guest.serial.wait_more(3, PATIENCE)?;
    ensure!(is_locked(disk)?, "no QEMU has the disk's lock");
    // There is nothing left to be settled, and the VM can be migrated.
    let said = refusal(&mut stillframe.command(&with("--resume"))?, 1)?;
    ensure!(said.contains("is undecided"), "{said}");
    let moved = with_disk.order("again").perform(stillframe, guest.pid())?;
    moved.vm.serial.wait_ticks(3, PATIENCE)?;
    Ok(())
}

/// A manager's QEMU, started without -S: it would run the VM as soon as it has it.
#[test]
fn a_vm_moves_into_a_qemu_that_a_manager_started() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let guest = Setup::small(Kind::Memfd, "managed").boot()?;
    let waiting = Setup::small(Kind::Memfd, "managed").with(&["-incoming", "defer"]);
    let mut other = waiting.clone();
    other.ram_mib = 160;
    let order = Order::of(&guest, "into");
    let migrate = |into: &Guest| -> Result<_> {
        let command = order.receiver_into(&stillframe, &into.qmp_path())?;
        let (destination, at) = order.listen(command)?;
        let migrator = order.migrator(&stillframe, guest.pid(), at, &["--verify"])?;
        Ok((Running::start(migrator)?.end()?, destination.end()?))
    };
    let (sent, received) = migrate(&guest)?;
    ensure!(sent.code == Some(1) && received.code == Some(1), "{sent:?}");
    ensure!(received.err.contains("-incoming defer"), "{received:?}");
    let mut wrong = other.start()?;
    let (sent, received) = migrate(&wrong)?;
    ensure!(sent.code == Some(1) && received.code == Some(1), "{sent:?}");
    ensure!(received.err.contains("RAM blocks differ"), "{received:?}");
    for _ in 0..1000 {
        if !wrong.is_alive() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    ensure!(!wrong.is_alive(), "it is of no use any more, and is left");
    guest.serial.wait_more(2, PATIENCE)?;

    let into = waiting.start()?;
    let (sent, received) = migrate(&into)?;
    ensure!(
        sent.code == Some(0) && received.code == Some(0),
        "{sent:?} {received:?}"
    );
    let report = received.results()?.pop().context("no report")?;
    ensure!(
        report["pid"] == into.pid() && report["running"] == true,
        "{report}"
    );
    ensure!(report["verify"]["differing"] == 0, "{report}");
    ensure!(!health::is_alive(guest.pid()), "its QEMU did not end");
    into.serial.wait_ticks(3, PATIENCE)?;
    // The manager has its monitor back.
    ensure!(into.second_monitor()?.status()? == "running");
    Ok(())
}
