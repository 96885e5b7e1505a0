//! Devices that come and go during a watch. Every checkpoint that is reported as good must restore to a VM with the
//! devices of its moment.
//!
//! All of them can be unplugged without the guest: serial ports, USB devices, SCSI disks. A checkpoint
//! whose moment lies within a plug or unplug may be of either side of it.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use jiff::Timestamp;
use serde_json::{Value, json};

use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::random::Random;
use stillframe_harness::restored::Restored;
use stillframe_harness::results::{self, Claim, Goal};
use stillframe_harness::running::{PATIENCE, Running};

const EVERY: &str = "200ms";
/// Longest time between two plugs, in milliseconds.
const REST_MS_MAX: u64 = 500;
const CONTROLLERS: [&str; 6] = [
    "-device",
    "virtio-serial-pci,id=vs",
    "-device",
    "qemu-xhci,id=usb",
    "-device",
    "virtio-scsi-pci,id=scsi",
];
/// The devices that are plugged in and unplugged: id, driver, bus.
const DEVICES: [(&str, &str, &str); 7] = [
    ("port-a", "virtserialport", "vs.0"),
    ("port-b", "virtserialport", "vs.0"),
    ("port-c", "virtserialport", "vs.0"),
    ("mouse", "usb-tablet", "usb.0"),
    ("keys", "usb-kbd", "usb.0"),
    ("disk-a", "scsi-hd", "scsi.0"),
    ("disk-b", "scsi-hd", "scsi.0"),
];
const DISK_BYTES: u64 = 1 << 20;

type Ids = BTreeSet<String>;

/// The devices that there were from the beginning of one plug or unplug to the end of the next.
#[derive(Debug, Clone)]
pub struct Span {
    from: Timestamp,
    to: Timestamp,
    ids: Ids,
}

/// `plugs` plugs and unplugs, and each checkpoint restored; writes `docs/results/hotplug/`.
pub fn run(plugs: u64, seed: u64) -> Result<()> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-hotplug-")
        .tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let (reports, spans) = watch(&stillframe, folder.path(), plugs, seed)?;
    let mut raw = Vec::new();
    let mut wrong = 0;
    for (number, report) in reports.iter().enumerate() {
        let restored = restore(&stillframe, folder.path(), report, &spans);
        if let Err(error) = &restored {
            wrong += 1;
            eprintln!("checkpoint {number}: {error:#}");
        }
        let error = restored.err().map(|error| format!("{error:#}"));
        raw.push(json!({"checkpoint": number, "time": report["time"], "error": error}));
        if number % 20 == 0 {
            eprintln!("{number:4} of {} restored, {wrong} wrong", reports.len());
        }
    }
    println!(
        "{plugs} plugs, {} checkpoints restored, {wrong} wrong",
        raw.len()
    );
    results::write_raw("hotplug", "checkpoints.jsonl", &raw)?;
    let command = "cargo xtask bench hotplug";
    let claim = Claim::new(
        "hotplug-restores",
        Goal::Zero,
        wrong as f64,
        "wrong restores",
        command,
    );
    results::write_summary("hotplug", &[claim.if_enough(plugs >= 200)])?;
    ensure!(wrong == 0, "{wrong} checkpoints were wrong");
    Ok(())
}

/// Watches a guest while devices come and go; the guest ends with it, because two VMs must not use its
/// disks. The reports, and which devices there were when.
pub fn watch(
    stillframe: &Stillframe,
    folder: &Path,
    plugs: u64,
    seed: u64,
) -> Result<(Vec<Value>, Vec<Span>)> {
    let guest = Setup::small(Kind::Private, "hotplug").with(&CONTROLLERS);
    let guest = guest.boot()?;
    let mut monitor = guest.second_monitor()?;
    add_disks(&mut monitor, folder)?;
    let pid = guest.pid_text();
    let line = ["watch", "--pid", &pid, "--every", EVERY, "--json"];
    let mut watch = Running::start(stillframe.command(&line)?)?;
    watch.wait_results(1)?;
    let mut random = Random::new(seed);
    let mut ids = Ids::new();
    let mut spans = Vec::new();
    let mut from = Timestamp::UNIX_EPOCH;
    for _ in 0..plugs {
        std::thread::sleep(Duration::from_millis(random.below(REST_MS_MAX)));
        let device = DEVICES[random.below(DEVICES.len() as u64) as usize];
        let begin = Timestamp::now();
        let next = exchange(&mut monitor, &ids, device)?;
        let end = Timestamp::now();
        spans.push(Span { from, to: end, ids });
        (from, ids) = (begin, next);
    }
    let last = watch.results()?.len();
    watch.wait_results(last + 2)?;
    watch.signal("TERM")?;
    let ended = watch.end()?;
    spans.push(Span {
        from,
        to: Timestamp::now(),
        ids,
    });
    ensure!(ended.code == Some(0), "{ended:?}");
    let discarded = ended.err.matches("no checkpoint this time").count();
    eprintln!("{discarded} captures discarded");
    still_well(&guest)?;
    Ok((ended.results()?, spans))
}

fn still_well(guest: &Guest) -> Result<()> {
    guest.serial.wait_more(2, PATIENCE).map(drop)
}

/// An image for each disk, which outlives its device.
fn add_disks(monitor: &mut Qmp, folder: &Path) -> Result<()> {
    for (id, driver, _) in DEVICES {
        if driver == "scsi-hd" {
            let path = folder.join(id);
            File::create(&path)?.set_len(DISK_BYTES)?;
            let file = json!({"driver": "file", "filename": path});
            let node = json!({"driver": "raw", "node-name": format!("node-{id}"), "file": file});
            monitor.execute("blockdev-add", node)?;
        }
    }
    Ok(())
}

/// Plugs a device in that is not there, unplugs one that is; the devices there are then.
fn exchange(monitor: &mut Qmp, ids: &Ids, (id, driver, bus): (&str, &str, &str)) -> Result<Ids> {
    let mut ids = ids.clone();
    if ids.remove(id) {
        monitor.execute("device_del", json!({"id": id}))?;
        loop {
            let gone = monitor.wait_event("DEVICE_DELETED", PATIENCE)?;
            if gone["data"]["device"] == id {
                return Ok(ids);
            }
        }
    }
    let mut device = json!({"driver": driver, "id": id, "bus": bus});
    if driver == "scsi-hd" {
        device["drive"] = json!(format!("node-{id}"));
    }
    monitor.execute("device_add", device)?;
    ids.insert(id.to_owned());
    Ok(ids)
}

/// Restores a checkpoint and compares its devices.
pub fn restore(
    stillframe: &Stillframe,
    folder: &Path,
    report: &Value,
    spans: &[Span],
) -> Result<()> {
    let id = report["checkpoint"].as_str().context("no checkpoint")?;
    let time: Timestamp = report["time"].as_str().context("no time")?.parse()?;
    let restored = Restored::start(stillframe, id, folder, &[])?;
    let mut monitor = restored.monitor()?;
    let there = monitor.execute("qom-list", json!({"path": "/machine/peripheral"}))?;
    let there = there.as_array().into_iter().flatten();
    let there: Ids = there
        .filter_map(|member| member["name"].as_str())
        .filter(|name| DEVICES.iter().any(|(id, ..)| id == name))
        .map(str::to_owned)
        .collect();
    let mut of_then = spans
        .iter()
        .filter(|span| span.from <= time && time <= span.to);
    if !of_then.any(|span| span.ids == there) {
        bail!("{id} of {time} has {there:?}");
    }
    drop(monitor);
    restored.serial.wait_ticks(2, PATIENCE).map(drop)
}
