//! Devices that are plugged in or unplugged while a VM is watched: a checkpoint is of the VM as it was
//! then, or there is none.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::fault::with_fault;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::{PATIENCE, Running};

/// Root ports to plug into, and a controller for serial ports.
const PLACES: [&str; 8] = [
    "-device",
    "pcie-root-port,id=rp1,chassis=1",
    "-device",
    "pcie-root-port,id=rp2,chassis=2",
    "-device",
    "pcie-root-port,id=rp3,chassis=3",
    "-device",
    "virtio-serial-pci,id=vs",
];

fn guest(name: &str, more: &[&str]) -> Result<(Guest, Qmp, Stillframe)> {
    let setup = Setup::small(Kind::Private, name).with(&PLACES).with(more);
    let guest = setup.boot()?;
    let monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    Ok((guest, monitor, stillframe))
}

fn watch(stillframe: &Stillframe, name: &str) -> Result<Running> {
    let line = ["watch", "--vm", name, "--every", "200ms", "--json"];
    Running::start(stillframe.command(&line)?)
}

fn plug(monitor: &mut Qmp, device: Value) -> Result<()> {
    monitor.execute("device_add", device).map(drop)
}

/// The first checkpoint of a moment after now.
fn next(watch: &mut Running) -> Result<String> {
    let now = jiff::Timestamp::now();
    loop {
        let results = watch.results()?;
        for result in &results {
            let time = result["time"].as_str().context("no time")?;
            if time.parse::<jiff::Timestamp>()? > now {
                let id = result["checkpoint"].as_str().context("no id")?;
                return Ok(id.to_owned());
            }
        }
        watch.wait_results(results.len() + 1)?;
    }
}

fn devices(monitor: &mut Qmp) -> Result<Vec<String>> {
    let listed = monitor.execute("qom-list", json!({"path": "/machine/peripheral"}))?;
    let mut names: Vec<String> = listed
        .as_array()
        .into_iter()
        .flatten()
        .filter(|member| member["type"] != "string")
        .filter_map(|member| Some(member["name"].as_str()?.to_owned()))
        .collect();
    names.sort();
    Ok(names)
}

/// Everything that a device can be given, as it is, and its bus.
fn properties(monitor: &mut Qmp, id: &str) -> Result<Vec<(String, Value)>> {
    let path = format!("/machine/peripheral/{id}");
    let get = |monitor: &mut Qmp, name: &str| {
        monitor.execute("qom-get", json!({"path": path, "property": name}))
    };
    let kind = get(monitor, "type")?;
    let known = monitor.execute("device-list-properties", json!({"typename": kind}))?;
    let mut all = vec![("type".to_owned(), kind)];
    let known = known.as_array().into_iter().flatten();
    let names = known.filter_map(|property| property["name"].as_str());
    for name in names.chain(["parent_bus"]) {
        if let Ok(value) = get(monitor, name) {
            all.push((name.to_owned(), value));
        }
    }
    all.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(all)
}

fn restore(stillframe: &Stillframe, id: &str, folder: &Path) -> Result<Restored> {
    let restored = Restored::start(stillframe, id, folder, &[])?;
    restored.serial.wait_ticks(3, PATIENCE)?;
    Ok(restored)
}

/// The restored VM has these devices with all their properties, and continues to be checkpointed.
fn expect_same(
    stillframe: &Stillframe,
    restored: &Restored,
    expected: &[(&str, Vec<(String, Value)>)],
) -> Result<()> {
    let mut monitor = restored.monitor()?;
    for (id, before) in expected {
        let now = properties(&mut monitor, id).with_context(|| format!("device {id}"))?;
        for (then, now) in before.iter().zip(&now) {
            ensure!(then == now, "{id}: {then:?} became {now:?}");
        }
        ensure!(before.len() == now.len(), "{id}: {before:?} became {now:?}");
    }
    drop(monitor);
    let pid = restored.pid.to_string();
    stillframe.json(&["checkpoint", "--pid", &pid]).map(drop)
}

/// QEMU shows an unplugged disk among its drives until its memory is freed, up to a second after the device has left
/// the tree of devices: under its id, or under no name. Checkpoints of that time have neither.
#[test]
fn a_disk_on_its_way_out_is_in_no_checkpoint() -> Result<()> {
    let (guest, mut monitor, stillframe) =
        guest("leaving", &["-device", "virtio-scsi-pci,id=scsi"])?;
    let image = guest.folder().join("disk.img");
    File::create(&image)?.set_len(1 << 20)?;
    let file = json!({"driver": "file", "filename": image});
    let node = json!({"driver": "raw", "node-name": "n0", "file": file});
    monitor.execute("blockdev-add", node)?;
    let line = ["watch", "--vm", "leaving", "--every", "20ms", "--json"];
    let mut watch = Running::start(stillframe.command(&line)?)?;
    let disk = json!({"driver": "scsi-hd", "id": "disk", "bus": "scsi.0", "drive": "n0"});
    let nameless = json!({"driver": "scsi-hd", "bus": "scsi.0", "drive": "n0"});
    for (device, root) in [
        (&disk, "/machine/peripheral"),
        (&nameless, "/machine/peripheral-anon"),
    ]
    .repeat(8)
    {
        plug(&mut monitor, device.clone())?;
        next(&mut watch)?;
        let members = monitor.execute("qom-list", json!({"path": root}))?;
        let mut members = members.as_array().into_iter().flatten();
        let plugged = members.find(|member| member["type"] == "child<scsi-hd>");
        let name = plugged.context("no disk")?["name"].as_str();
        let path = format!("{root}/{}", name.context("no name")?);
        monitor.execute("device_del", json!({"id": path}))?;
        while monitor.wait_event("DEVICE_DELETED", PATIENCE)?["data"]["path"] != path {}
        next(&mut watch)?;
    }
    watch.signal("TERM")?;
    let ended = watch.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    let is_taken_for_another = ended.err.contains("plugged in and unplugged");
    ensure!(!is_taken_for_another, "{}", ended.err);
    for report in ended.results()? {
        let obstacles = report["obstacles"].as_array();
        ensure!(
            obstacles.is_none_or(Vec::is_empty),
            "{report} {}",
            ended.err
        );
    }
    Ok(())
}

/// A device is replaced at another address just after a pause, before the engine has processed QEMU's events
/// of that pause.
#[test]
fn a_device_exchanged_at_the_end_of_a_pause_is_restored_where_it_is() -> Result<()> {
    let (guest, mut monitor, stillframe) = guest("exchanged", &[])?;
    let port = |nr: u8| json!({"driver": "virtserialport", "id": "port", "bus": "vs.0", "nr": nr});
    plug(&mut monitor, port(1))?;
    let line = ["watch", "--vm", "exchanged", "--every", "500ms", "--json"];
    let command = stillframe.command(&line)?;
    let (command, reached) = with_fault(&command, "pause.after-cont:slow:3", guest.folder())?;
    let mut watch = Running::start(command)?;
    let patient = Instant::now() + PATIENCE;
    while !reached.exists() {
        ensure!(
            Instant::now() < patient,
            "the fault did not happen: {}",
            watch.err()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    monitor.execute("device_del", json!({"id": "port"}))?;
    monitor.wait_event("DEVICE_DELETED", PATIENCE)?;
    plug(&mut monitor, port(2))?;
    let id = next(&mut watch)?;
    let expected = [("port", properties(&mut monitor, "port")?)];
    watch.signal("TERM")?;
    ensure!(watch.end()?.code == Some(0), "the watch failed");
    let restored = restore(&stillframe, &id, guest.folder())?;
    expect_same(&stillframe, &restored, &expected)
}

#[test]
fn devices_plugged_in_during_a_watch_are_restored() -> Result<()> {
    let (mut guest, mut monitor, stillframe) = guest("plugs", &[])?;
    let disk = guest.folder().join("disk.raw");
    File::create(&disk)?.set_len(16 << 20)?;
    let mut watch = watch(&stillframe, "plugs")?;
    let before = next(&mut watch)?;
    let file = json!({"driver": "file", "filename": disk});
    let node =
        json!({"driver": "raw", "node-name": "node", "cache": {"direct": true}, "file": file});
    monitor.execute("blockdev-add", node)?;
    plug(
        &mut monitor,
        json!({"driver": "virtio-blk-pci", "id": "disk", "drive": "node", "bus": "rp1", "serial": "a,b"}),
    )?;
    plug(
        &mut monitor,
        json!({"driver": "virtio-balloon-pci", "id": "balloon", "bus": "rp2"}),
    )?;
    plug(
        &mut monitor,
        json!({"driver": "virtserialport", "id": "port", "bus": "vs.0", "name": "x"}),
    )?;
    // One on a controller that was plugged in itself, and whose id sorts behind.
    plug(
        &mut monitor,
        json!({"driver": "virtio-serial-pci", "id": "zs", "bus": "rp3"}),
    )?;
    plug(
        &mut monitor,
        json!({"driver": "virtserialport", "id": "behind", "bus": "zs.0"}),
    )?;
    let id = next(&mut watch)?;
    watch.signal("TERM")?;
    let ended = watch.end()?;
    ensure!(ended.code == Some(0) && ended.errors() == 0, "{ended:?}");
    // Now, because a snapshot shows at a disk.
    let names = ["disk", "balloon", "port", "zs", "behind"];
    let mut expected = Vec::new();
    for name in names {
        expected.push((name, properties(&mut monitor, name)?));
    }
    // Its disk must not have two users.
    guest.kill()?;
    let restored = restore(&stillframe, &id, guest.folder())?;
    expect_same(&stillframe, &restored, &expected)?;
    drop(restored);
    let restored = restore(&stillframe, &before, guest.folder())?;
    let there = devices(&mut restored.monitor()?)?;
    ensure!(there == ["rp1", "rp2", "rp3", "vs"], "{there:?}");
    Ok(())
}

/// A card has a ROM, so that there is one more RAM block, too.
#[test]
fn a_network_card_plugged_in_during_a_watch_is_restored() -> Result<()> {
    let (guest, mut monitor, stillframe) = guest("cards", &[])?;
    let mut watch = watch(&stillframe, "cards")?;
    next(&mut watch)?;
    monitor.execute("netdev_add", json!({"type": "user", "id": "net"}))?;
    plug(
        &mut monitor,
        json!({"driver": "virtio-net-pci", "id": "card", "netdev": "net", "bus": "rp2"}),
    )?;
    let id = next(&mut watch)?;
    let expected = [("card", properties(&mut monitor, "card")?)];
    watch.signal("TERM")?;
    watch.end()?;
    let restored = restore(&stillframe, &id, guest.folder())?;
    expect_same(&stillframe, &restored, &expected)
}

/// The device is left out and so is its end at the host; what remains keeps its place.
#[test]
fn a_device_unplugged_during_a_watch_is_not_restored() -> Result<()> {
    let ports = [
        "-device",
        "virtserialport,id=gone,chardev=c",
        "-device",
        "virtserialport,id=stays",
    ];
    let back = ["-chardev", "null,id=c"];
    let (guest, mut monitor, stillframe) = guest("unplugs", &[back.as_slice(), &ports].concat())?;
    let mut watch = watch(&stillframe, "unplugs")?;
    let before = next(&mut watch)?;
    let stays = properties(&mut monitor, "stays")?;
    monitor.execute("device_del", json!({"id": "gone"}))?;
    monitor.wait_event("DEVICE_DELETED", PATIENCE)?;
    monitor.execute("chardev-remove", json!({"id": "c"}))?;
    let id = next(&mut watch)?;
    watch.signal("TERM")?;
    let ended = watch.end()?;
    ensure!(ended.code == Some(0) && ended.errors() == 0, "{ended:?}");
    let restored = restore(&stillframe, &id, guest.folder())?;
    expect_same(&stillframe, &restored, &[("stays", stays)])?;
    let there = devices(&mut restored.monitor()?)?;
    ensure!(!there.contains(&"gone".to_owned()), "{there:?}");
    drop(restored);
    let restored = restore(&stillframe, &before, guest.folder())?;
    let there = devices(&mut restored.monitor()?)?;
    ensure!(there.contains(&"gone".to_owned()), "{there:?}");
    Ok(())
}

/// By others, before Stillframe came.
#[test]
fn a_vm_with_plugged_memory_is_attached_to_and_restored() -> Result<()> {
    let (guest, mut monitor, stillframe) = guest("memory", &["-m", "192M,slots=2,maxmem=512M"])?;
    let backend = json!({"qom-type": "memory-backend-ram", "id": "more", "size": 64 << 20});
    monitor.execute("object-add", backend)?;
    plug(
        &mut monitor,
        json!({"driver": "pc-dimm", "id": "dimm", "memdev": "more"}),
    )?;
    let expected = [("dimm", properties(&mut monitor, "dimm")?)];
    let taken = stillframe.json(&["checkpoint", "--vm", "memory", "--verify"])?;
    ensure!(taken["verify"]["differing"] == 0, "{taken}");
    let id = taken["checkpoint"].as_str().context("no id")?;
    let restored = restore(&stillframe, id, guest.folder())?;
    expect_same(&stillframe, &restored, &expected)
}

/// What QEMU does not report cannot be made again: no checkpoint, until it is gone.
#[test]
fn what_cannot_be_followed_is_refused_by_name() -> Result<()> {
    let (_guest, mut monitor, stillframe) = guest("refused", &[])?;
    let mut watch = watch(&stillframe, "refused")?;
    next(&mut watch)?;
    monitor.execute(
        "netdev_add",
        json!({"type": "socket", "id": "net", "udp": "127.0.0.1:9", "localaddr": "127.0.0.1:0"}),
    )?;
    // Without a ROM, so that no RAM block shows it.
    plug(
        &mut monitor,
        json!({"driver": "virtio-net-pci", "id": "card", "netdev": "net", "bus": "rp1", "romfile": ""}),
    )?;
    watch.wait_words("card (virtio-net-pci) was plugged in")?;
    watch.signal("TERM")?;
    watch.end()?;
    let refusal = stillframe.fails(&["checkpoint", "--vm", "refused"], 5)?;
    ensure!(refusal.contains("type socket"), "{refusal}");
    Ok(())
}
