//! `rewind`: the same QEMU, in the state of a checkpoint; or, whatever goes wrong, as it was.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::fault::with_fault;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::{expect_nothing_left, expect_untouched};
use stillframe_harness::memory::Image;
use stillframe_harness::qmp::Qmp;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::{PATIENCE, Running};
use stillframe_harness::serial::{Serial, Tick};

/// Waits until the guest, which was rewound to before tick `after` when it had ticked `seen` times, has
/// ticked on. Each tick must say what it said the first time.
fn expect_again(serial: &Serial, seen: usize, after: u64) -> Result<()> {
    let ticks = serial.wait_ticks(seen + 5, PATIENCE)?;
    // One may have been printed while the checkpoint was taken, or the guest was about to be stopped.
    let back = ticks
        .windows(2)
        .position(|pair| pair[1].number <= pair[0].number);
    let back = back.context("it never went back")? + 1;
    ensure!(
        ticks[back].number.abs_diff(after) <= 1,
        "went on with tick {}, not after {after}",
        ticks[back].number
    );
    let mut first: HashMap<u64, &Tick> = HashMap::new();
    for tick in &ticks {
        let before = first.entry(tick.number).or_insert(tick);
        ensure!(before.sum == tick.sum, "tick {} differs", tick.number);
    }
    Ok(())
}

fn repository(folder: &Path) -> Result<Stillframe> {
    Stillframe::init(&folder.join("repo"))
}

/// Memory by an oracle that knows nothing of us; and the guest continues from there, as the first time.
#[test]
fn a_guest_of_every_kind_goes_back() -> Result<()> {
    for kind in [
        Kind::Private,
        Kind::Memfd,
        Kind::FileShared,
        Kind::Pc,
        Kind::TwoCpus,
        Kind::Console,
        Kind::Sandbox,
    ] {
        let guest = Setup::small(kind, "back").booted()?;
        let folder = tempfile::tempdir()?;
        let stillframe = repository(folder.path())?;
        let pid = guest.pid_text();
        // So that some pages are whole, some deltas, and some were never written.
        stillframe.ok(&["watch", "--pid", &pid, "--every", "200ms", "--count", "4"])?;
        let mut monitor = guest.second_monitor()?;
        monitor.execute("stop", json!({}))?;
        stillframe.ok(&["checkpoint", "--pid", &pid])?;
        let after = guest.serial.ticks()?.last().context("no tick")?.number;
        let then = Image::take(guest.pid(), &mut monitor)?;
        for _ in 0..2 {
            monitor.execute("cont", json!({}))?;
            guest.serial.wait_more(6, PATIENCE)?;
            let report = stillframe.json(&["rewind", "latest", "--pid", &pid, "--paused"])?;
            ensure!(report["running"] == json!(false), "{report}");
            ensure!(report["written"].as_u64() > Some(0), "{report}");
            let now = Image::take(guest.pid(), &mut monitor)?;
            let differing = then.differing(&now)?;
            ensure!(differing.is_empty(), "{}: {differing:?}", kind.name());
        }
        let seen = guest.serial.ticks()?.len();
        monitor.execute("cont", json!({}))?;
        expect_again(&guest.serial, seen, after).with_context(|| kind.name())?;
        expect_untouched(&guest, &mut monitor)?;
        // It can be tracked on, and what is taken of it now is right.
        stillframe.ok(&["checkpoint", "--pid", &pid, "--verify"])?;
    }
    Ok(())
}

/// Other code lies where that of now lies: nothing of what QEMU has translated may be used.
#[test]
fn a_guest_goes_back_to_its_boot() -> Result<()> {
    let guest = Setup::small(Kind::Private, "young").boot()?;
    let folder = tempfile::tempdir()?;
    let stillframe = repository(folder.path())?;
    let pid = guest.pid_text();
    let mut monitor = guest.second_monitor()?;
    monitor.execute("system_reset", json!({}))?;
    let report = stillframe.json(&["checkpoint", "--pid", &pid])?;
    let early = report["checkpoint"].as_str().context("no id")?.to_owned();
    for boots in 1..=3 {
        wait_boots(&guest, boots)?;
        // Nearly all of it differs.
        let line = ["rewind", &early, "--pid", &pid, "--copy-buffer", "16M"];
        let said = stillframe.fails(&line, 1)?;
        ensure!(said.contains("more with --copy-buffer"), "{said}");
        expect_untouched(&guest, &mut monitor)?;
        stillframe.ok(&["rewind", &early, "--pid", &pid, "--verify"])?;
    }
    wait_boots(&guest, 4)?;
    expect_untouched(&guest, &mut monitor)
}

/// Waits until the guest has booted `boots` times since its first boot, and ticks again. Each boot restarts the numbers
/// of the ticks.
fn wait_boots(guest: &Guest, boots: usize) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let ticks = guest.serial.ticks()?;
        let begins = ticks.windows(2).enumerate();
        let begins = begins.filter(|(_, pair)| pair[1].number <= pair[0].number);
        let begins: Vec<usize> = begins.map(|(at, _)| at + 1).collect();
        ensure!(begins.len() <= boots, "{} boots", begins.len());
        if begins.len() == boots && ticks.len() >= begins[boots - 1] + 4 {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "{} of {boots} boots",
            begins.len()
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The VM of a checkpoint, restored: another process, the same VM.
#[test]
fn a_restored_vm_goes_back_too() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut guest = Setup::small(Kind::Private, "again").booted()?;
    let stillframe = repository(folder.path())?;
    stillframe.ok(&["checkpoint", "--vm", "again"])?;
    guest.kill()?;
    let restored =
        stillframe_harness::restored::Restored::start(&stillframe, "latest", folder.path(), &[])?;
    restored.serial.wait_ticks(5, PATIENCE)?;
    stillframe.ok(&["rewind", "latest", "--vm", "again"])?;
    let seen = restored.serial.ticks()?.len();
    let first = restored.serial.ticks()?[0].number;
    expect_again(&restored.serial, seen, first - 1)?;
    expect_nothing_left(restored.pid, &mut restored.monitor()?)
}

/// Refused: the guest runs on, and nothing of us is left.
#[test]
fn what_cannot_be_rewound_goes_on() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let disk = folder.path().join("disk.img");
    std::fs::File::create(&disk)?.set_len(4 << 20)?;
    let drive = format!("file={},format=raw,if=virtio", disk.display());
    let guest = Setup::small(Kind::Private, "mine")
        .with(&["-drive", &drive])
        .boot()?;
    let other = Setup::small(Kind::Private, "other")
        .with(&["-device", "virtio-rng-pci"])
        .boot()?;
    let larger = Setup::new(Kind::Private).with(&["-name", "mine"]).boot()?;
    let stillframe = repository(folder.path())?;
    let mut ids = Vec::new();
    for guest in [&other, &larger, &guest] {
        let pid = guest.pid_text();
        // Without the content of disks.
        let line = ["checkpoint", "--pid", &pid, "--disks", "reference"];
        let report = stillframe.json(&line)?;
        ids.push(report["checkpoint"].as_str().context("no id")?.to_owned());
    }
    let pid = guest.pid_text();
    let mut monitor = guest.second_monitor()?;
    let mut refused = |line: &[&str], code: i32, words: &str| -> Result<()> {
        let line = [&["rewind", "--pid", &pid], line].concat();
        let said = stillframe.fails(&line, code)?;
        ensure!(said.contains(words), "{line:?}: {said}");
        expect_untouched(&guest, &mut monitor)
    };
    refused(&[&ids[0]], 2, "is one of VM other")?;
    refused(&[&ids[0], "--of-vm", "other"], 5, "is missing")?;
    refused(&[&ids[1]], 1, "RAM blocks differ")?;
    refused(&["0123456789"], 1, "no checkpoint")?;
    guest.serial.wait_more(3, PATIENCE)?;
    std::fs::OpenOptions::new()
        .append(true)
        .open(&disk)?
        .set_len(8 << 20)?;
    refused(&[&ids[2]], 1, "disk")?;
    let pid = guest.pid_text();
    stillframe.ok(&["rewind", &ids[2], "--pid", &pid, "--disks-as-they-are"])?;
    expect_untouched(&guest, &mut monitor)
}

/// Started anew with one device more, the VM is not the one that the guest of the checkpoint knows.
#[test]
fn a_vm_with_more_devices_goes_on() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = repository(folder.path())?;
    let mut one = Setup::small(Kind::Private, "grown").booted()?;
    stillframe.ok(&["checkpoint", "--pid", &one.pid_text()])?;
    one.kill()?;
    let more = Setup::small(Kind::Private, "grown").with(&["-device", "virtio-rng-pci"]);
    let two = more.boot()?;
    let mut monitor = two.second_monitor()?;
    let said = stillframe.fails(&["rewind", "latest", "--pid", &two.pid_text()], 5)?;
    ensure!(said.contains("had not at the checkpoint"), "{said}");
    ensure!(said.contains("virtio-rng"), "{said}");
    two.serial.wait_more(9, PATIENCE)?;
    expect_untouched(&two, &mut monitor)
}

/// QEMU gives up in the middle, over a feature of a device that it was started without: the guest continues
/// where it stood, with its own memory and devices.
#[test]
fn a_state_that_qemu_does_not_take_is_undone() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let device = |more: &str| format!("virtio-rng-pci{more}");
    let boot = |more: &str| {
        let setup = Setup::small(Kind::Private, "same-name");
        setup.with(&["-device", &device(more)]).boot()
    };
    let stillframe = repository(folder.path())?;
    let mut one = boot("")?;
    stillframe.ok(&["checkpoint", "--pid", &one.pid_text()])?;
    one.kill()?;
    let two = boot(",disable-legacy=on")?;
    let mut monitor = two.second_monitor()?;
    let pid = two.pid_text();
    stillframe.ok(&["checkpoint", "--pid", &pid])?;
    // The first time, because QEMU resets its own tables then: all of its memory, what firmware made of
    // those included, is what it was.
    monitor.execute("stop", json!({}))?;
    let before = Image::take(two.pid(), &mut monitor)?;
    stillframe.fails(&["rewind", "latest~1", "--pid", &pid], 1)?;
    let differing = before.differing(&Image::take(two.pid(), &mut monitor)?)?;
    ensure!(differing.is_empty(), "{differing:?}");
    monitor.execute("cont", json!({}))?;
    for _ in 0..2 {
        two.serial.wait_more(2, PATIENCE)?;
        let said = stillframe.fails(&["rewind", "latest~1", "--pid", &pid], 1)?;
        ensure!(said.contains("failed to load the device state"), "{said}");
        // The guest checks all its memory in eight ticks.
        let ticks = two.serial.wait_more(9, PATIENCE)?;
        let numbers: Vec<u64> = ticks.iter().map(|tick| tick.number).collect();
        ensure!(numbers.is_sorted(), "it went back: {numbers:?}");
        expect_untouched(&two, &mut monitor)?;
    }
    stillframe.ok(&["rewind", "latest", "--pid", &pid])?;
    expect_untouched(&two, &mut monitor)
}

/// A rewind killed before its first change leaves the guest running. Killed later, it leaves the guest paused;
/// QEMU refuses `cont`, and `checkpoint` refuses the VM, until the next rewind.
#[test]
fn a_kill_leaves_a_guest_that_can_be_rewound() -> Result<()> {
    let guest = Setup::small(Kind::Private, "killed").booted()?;
    let folder = tempfile::tempdir()?;
    let stillframe = repository(folder.path())?;
    let pid = guest.pid_text();
    let mut monitor = guest.second_monitor()?;
    monitor.execute("stop", json!({}))?;
    stillframe.ok(&["checkpoint", "--pid", &pid])?;
    let then = Image::take(guest.pid(), &mut monitor)?;
    monitor.execute("cont", json!({}))?;
    // Comparing makes the time long in which pages are exchanged and devices are not.
    let line = [
        "rewind",
        "latest",
        "--pid",
        &pid,
        "--verify",
        "--pause-limit",
        "5m",
    ];
    let (mut changed, mut ran, mut ran_changed) = (0, 0, 0);
    for turn in 0..60 {
        guest.serial.wait_more(2, PATIENCE)?;
        let running = Running::start(stillframe.command(&line)?)?;
        wait_paused(&mut monitor, turn % 4 == 3)?;
        std::thread::sleep(Duration::from_millis(turn * 37 % 400));
        running.signal("STOP")?;
        let stands = monitor.status()? == "paused";
        let now = Image::take(guest.pid(), &mut monitor)?;
        let all_changed = stands && then.differing(&now)?.is_empty();
        running.signal("KILL")?;
        running.end()?;
        std::thread::sleep(Duration::from_millis(300));
        match (monitor.status()? == "paused", all_changed) {
            // Between the guardian's duty and the first change there is an instant in which it is whole.
            (true, _) => {
                if monitor.execute("cont", json!({})).is_err() {
                    changed += 1;
                    let said = stillframe.fails(&["checkpoint", "--pid", &pid], 5)?;
                    ensure!(said.contains("rewind it again"), "{said}");
                    stillframe.ok(&line)?;
                    ensure!(monitor.status()? == "paused", "it was let go");
                    monitor.execute("cont", json!({}))?;
                }
            }
            (false, false) => ran += 1,
            // Its devices may have been loaded by then, too.
            (false, true) => ran_changed += 1,
        }
        guest.serial.wait_more(1, PATIENCE)?;
        if turn >= 7 && changed > 1 && ran > 0 {
            break;
        }
    }
    ensure!(
        changed > 1 && ran > 0 && ran_changed <= 1,
        "{changed} changed, {ran} ran on, {ran_changed} ran on though changed"
    );
    // The guest checks all its memory in eight ticks.
    guest.serial.wait_more(9, PATIENCE)?;
    expect_untouched(&guest, &mut monitor)
}

/// Between the end of the inhibitor and `cont` only the guardian would resume the guest.
#[test]
fn a_kill_before_cont_leaves_a_guest_that_runs() -> Result<()> {
    let guest = Setup::small(Kind::Private, "almost").booted()?;
    let folder = tempfile::tempdir()?;
    let stillframe = repository(folder.path())?;
    let pid = guest.pid_text();
    stillframe.ok(&["checkpoint", "--pid", &pid])?;
    guest.serial.wait_more(3, PATIENCE)?;
    let command = stillframe.command(&["rewind", "latest", "--pid", &pid])?;
    let (command, reached) = with_fault(&command, "rewind.before-cont:kill", folder.path())?;
    let ended = Running::start(command)?.end()?;
    ensure!(ended.code.is_none() && reached.exists(), "{ended:?}");
    guest.serial.wait_more(9, PATIENCE)?;
    // The next one takes back what QEMU was lent.
    stillframe.ok(&["rewind", "latest", "--pid", &pid, "--verify"])?;
    expect_untouched(&guest, &mut guest.second_monitor()?)
}

/// A QEMU that dies in the middle takes the guest with it; the checkpoint starts in a new one.
#[test]
fn a_qemu_that_dies_in_a_rewind_is_named_and_its_checkpoint_restored() -> Result<()> {
    for point in ["rewind.stopped", "rewind.exchanged"] {
        let mut guest = Setup::small(Kind::Private, "dies").booted()?;
        let folder = tempfile::tempdir()?;
        let stillframe = repository(folder.path())?;
        let pid = guest.pid_text();
        stillframe.ok(&["checkpoint", "--pid", &pid])?;
        guest.serial.wait_more(3, PATIENCE)?;
        let command = stillframe.command(&["rewind", "latest", "--pid", &pid])?;
        let (command, reached) = with_fault(&command, &format!("{point}:hang"), folder.path())?;
        let mut engine = Running::start(command)?;
        engine.wait_until("the fault", |_| Ok(reached.exists()))?;
        guest.kill()?;
        let ended = engine.end()?;
        ensure!(ended.code == Some(1) && ended.errors() == 1, "{ended:?}");
        ensure!(
            ended.err.contains("ended while it was being rewound"),
            "{ended:?}"
        );
        let restored = Restored::start(&stillframe, "latest", folder.path(), &["--verify"])?;
        restored.serial.wait_ticks(3, PATIENCE)?;
    }
    Ok(())
}

fn wait_paused(monitor: &mut Qmp, not_at_all: bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !not_at_all && monitor.status()? != "paused" {
        ensure!(Instant::now() < deadline, "it is never paused");
    }
    Ok(())
}

/// A guest that is paused stays so, and is back all the same.
#[test]
fn a_paused_guest_stays_paused() -> Result<()> {
    let guest: Guest = Setup::small(Kind::Memfd, "standing").booted()?;
    let folder = tempfile::tempdir()?;
    let stillframe = repository(folder.path())?;
    let mut monitor = guest.second_monitor()?;
    let pid = guest.pid_text();
    stillframe.ok(&["checkpoint", "--pid", &pid])?;
    guest.serial.wait_more(3, PATIENCE)?;
    monitor.execute("stop", json!({}))?;
    let report = stillframe.json(&["rewind", "latest", "--pid", &pid])?;
    ensure!(report["running"] == json!(false), "{report}");
    ensure!(monitor.status()? == "paused");
    let ticks = guest.serial.ticks()?;
    monitor.execute("cont", json!({}))?;
    let back = guest.serial.wait_ticks(ticks.len() + 1, PATIENCE)?;
    let last = ticks.last().context("no tick")?.number;
    ensure!(back[ticks.len()].number <= last, "it did not go back");
    expect_untouched(&guest, &mut monitor)
}
