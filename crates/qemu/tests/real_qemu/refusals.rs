//! Refusals, with their causes: unsuitable VMs, and launches that would destroy something.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::process::Command;

use serde_json::json;
use stillframe_qemu::launch::{LaunchError, LaunchOptions, plan, restorability, start};
use stillframe_qemu::record::VmRecord;
use stillframe_qemu::suitability::{Unsuitable, check};

use crate::vm::{LONG, Vm, wait_until, write_boot_disk};

const SMALL: &[&str] = &["-machine", "q35", "-m", "64", "-display", "none"];

fn check_vm(more: &[&str]) -> Result<(), Unsuitable> {
    let vm = Vm::start(&[SMALL, more].concat());
    let (target, mut monitor) = vm.connect();
    check(&target, &mut monitor).map(drop)
}

#[test]
fn suitable_vms() {
    check_vm(&[]).expect("a plain VM");
    check_vm(&["-S"]).expect("a VM not yet started");
    check_vm(&[
        "-device",
        "virtio-net-pci,id=nic0,netdev=n",
        "-netdev",
        "user,id=n",
    ])
    .expect("a VM with a network card");
}

#[test]
fn unsuitable_vms() {
    let incoming = check_vm(&["-incoming", "defer"]);
    assert!(
        matches!(&incoming, Err(Unsuitable::RunState { status }) if status == "inmigrate"),
        "{incoming:?}"
    );
    let shared = check_vm(&[
        "-object",
        "memory-backend-memfd,id=s,size=1M,share=on",
        "-device",
        "ivshmem-plain,memdev=s",
    ]);
    assert!(
        matches!(shared, Err(Unsuitable::VhostUser { .. })),
        "{shared:?}"
    );
    let fat = tempfile::tempdir().expect("temporary directory");
    let drive = format!("file=fat:rw:{},format=raw,if=virtio", fat.path().display());
    let blocked = check_vm(&["-drive", &drive]);
    assert!(
        matches!(&blocked, Err(Unsuitable::MigrationBlocked { reasons }) if !reasons.is_empty()),
        "{blocked:?}"
    );
}

#[test]
fn a_vm_that_is_being_migrated() {
    let vm = Vm::counting(SMALL);
    let (target, mut monitor) = vm.connect();
    // In bytes a second. QEMU divides it by ten, and takes zero for no limit.
    let slowly = json!({ "max-bandwidth": 4096 });
    let client = monitor.client();
    client
        .execute("migrate-set-parameters", slowly)
        .expect("set");
    let uri = json!({ "uri": format!("file:{}", vm.path("out").display()) });
    client.execute("migrate", uri).expect("begun");
    wait_until("the migration runs", || {
        matches!(
            check(&target, &mut monitor),
            Err(Unsuitable::MigrationRunning { status }) if status == "active"
        )
    });
    let client = monitor.client();
    client
        .execute("migrate_cancel", json!({}))
        .expect("cancelled");
    wait_until("the migration is over", || {
        check(&target, &mut monitor).is_ok()
    });
}

#[test]
fn a_device_added_or_removed_while_the_vm_runs() {
    let vm = Vm::start(
        &[
            SMALL,
            &[
                "-device",
                "pcie-root-port,id=port0",
                "-device",
                "virtio-rng-pci,id=rng0",
            ],
        ]
        .concat(),
    );
    let (target, mut monitor) = vm.connect();
    check(&target, &mut monitor).expect("as it was started");
    let device = json!({ "driver": "virtio-rng-pci", "id": "late", "bus": "port0" });
    monitor
        .client()
        .execute("device_add", device)
        .expect("added");
    let hot_plug = check(&target, &mut monitor).expect("followed");
    let option = hot_plug.plugged.first().expect("one option");
    assert_eq!(hot_plug.plugged.len(), 1, "{hot_plug:?}");
    for part in ["virtio-rng-pci", "\"late\"", "\"port0\"", "\"00.0\""] {
        assert!(option.value.contains(part), "{part}: {option:?}");
    }
}

/// A VM with one writable disk, `disk.img`, and its record.
fn with_disk(drive: &str) -> (Vm, VmRecord) {
    let directory = tempfile::tempdir().expect("temporary directory");
    write_boot_disk(&directory.path().join("disk.img"));
    let vm = Vm::start_in(directory, &[SMALL, &["-drive", drive]].concat());
    let (target, mut monitor) = vm.connect();
    let record = VmRecord::take(&target, &mut monitor).expect("record");
    (vm, record)
}

const WRITABLE: &str = "file=disk.img,format=raw,if=virtio";

#[test]
fn a_disk_that_the_original_still_writes_to() {
    let (mut vm, record) = with_disk(WRITABLE);
    assert!(!record.disks[0].read_only);
    let mut options = vm.launch_options();
    for as_they_are in [false, true] {
        options.disks_as_they_are = as_they_are;
        let result = plan(&record, &options);
        assert!(
            matches!(result, Err(LaunchError::DiskInUse { pid, .. }) if pid == vm.pid()),
            "{result:?}"
        );
    }
    vm.end();
    options.disks_as_they_are = false;
    plan(&record, &options).expect("the disk is free and unchanged");
}

#[test]
fn a_disk_that_changed() {
    let (mut vm, record) = with_disk(WRITABLE);
    vm.end();
    let options = vm.launch_options();
    let as_they_are = LaunchOptions {
        disks_as_they_are: true,
        ..options.clone()
    };
    let disk = vm.path("disk.img");
    let mut file = OpenOptions::new().write(true).open(&disk).expect("opened");
    // The clock of a file system may be coarse: write until the time of the change is another.
    let before = fs::metadata(&disk)
        .expect("metadata")
        .modified()
        .expect("time");
    wait_until("the time of the change moved", || {
        file.write_all(b"x").expect("written");
        fs::metadata(&disk)
            .expect("metadata")
            .modified()
            .expect("time")
            != before
    });
    drop(file);
    let expect = |what: &str| match plan(&record, &options) {
        Err(LaunchError::DiskChanged { what: found, .. }) => assert_eq!(found, what),
        other => panic!("{other:?}"),
    };
    expect("was written to");
    plan(&record, &as_they_are).expect("wished");

    let bytes = fs::read(&disk).expect("read");
    fs::write(vm.path("copy"), &bytes).expect("written");
    fs::rename(vm.path("copy"), &disk).expect("renamed");
    expect("was replaced by another file");
    fs::remove_file(&disk).expect("removed");
    for options in [&options, &as_they_are] {
        assert!(matches!(
            plan(&record, options),
            Err(LaunchError::DiskMissing { .. })
        ));
    }
}

/// Writes of the guest between the record and the pause are no change after the checkpoint.
#[test]
fn a_disk_written_to_before_the_pause() {
    let (mut vm, mut record) = with_disk(WRITABLE);
    fs::write(vm.path("disk.img"), vec![0; 2 << 20]).expect("written");
    record.look_at_disks_again();
    vm.end();
    plan(&record, &vm.launch_options()).expect("unchanged since the pause");
}

#[test]
fn a_disk_of_nodes_that_are_named() {
    let directory = tempfile::tempdir().expect("temporary directory");
    write_boot_disk(&directory.path().join("disk.img"));
    let file = r#"{"driver":"file","node-name":"f","filename":"disk.img","auto-read-only":true}"#;
    let format = r#"{"driver":"raw","node-name":"r","file":"f","read-only":true}"#;
    let device = "virtio-blk-pci,drive=r,id=disk0";
    let disk = ["-blockdev", file, "-blockdev", format, "-device", device];
    let vm = Vm::start_in(directory, &[SMALL, &disk].concat());
    let (target, mut monitor) = vm.connect();
    check(&target, &mut monitor).expect("suitable");
    let record = VmRecord::take(&target, &mut monitor).expect("record");
    let [disk] = record.disks.as_slice() else {
        panic!("{:?}", record.disks);
    };
    assert_eq!((&*disk.device, &*disk.format), ("disk0", "raw"));
    assert_eq!(disk.path, vm.path("disk.img"));
    assert!(disk.read_only && disk.identity.is_some());
    plan(&record, &vm.launch_options()).expect("planned beside the reader");
}

#[test]
fn a_throw_away_disk() {
    let (vm, record) = with_disk("file=disk.img,format=raw,if=virtio,snapshot=on");
    assert!(record.disks[0].temporary, "{:?}", record.disks);
    assert!(record.disks[1].path == vm.path("disk.img") && record.disks[1].read_only);
    let mut options = vm.launch_options();
    assert!(matches!(
        plan(&record, &options),
        Err(LaunchError::DiskTemporary { .. })
    ));
    options.disks_as_they_are = true;
    plan(&record, &options).expect("wished");
}

#[test]
fn a_chain_of_images() {
    let directory = tempfile::tempdir().expect("temporary directory");
    write_boot_disk(&directory.path().join("base.img"));
    let made = Command::new("qemu-img")
        .args([
            "create",
            "-q",
            "-f",
            "qcow2",
            "-F",
            "raw",
            "-b",
            "base.img",
            "top,1.qcow2",
        ])
        .current_dir(&directory)
        .status()
        .expect("qemu-img is installed");
    assert!(made.success());
    let drive = [
        "-drive",
        "file=top,,1.qcow2,if=none,id=d0",
        "-device",
        "virtio-blk-pci,drive=d0,id=disk0",
    ];
    let mut vm = Vm::start_in(directory, &[SMALL, &drive].concat());
    let (target, mut monitor) = vm.connect();
    let record = VmRecord::take(&target, &mut monitor).expect("record");
    let seen: Vec<_> = record
        .disks
        .iter()
        .map(|disk| {
            (
                &*disk.device,
                disk.path.clone(),
                &*disk.format,
                disk.read_only,
            )
        })
        .collect();
    assert_eq!(
        seen,
        [
            ("d0", vm.path("top,1.qcow2"), "qcow2", false),
            ("d0", vm.path("base.img"), "raw", true),
        ]
    );
    vm.end();
    let options = vm.launch_options();
    plan(&record, &options).expect("free and unchanged");
    fs::write(vm.path("base.img"), "shorter").expect("written");
    assert!(matches!(
        plan(&record, &options),
        Err(LaunchError::DiskChanged {
            what: "has another size",
            ..
        })
    ));
}

#[test]
fn a_disk_exchanged_while_the_vm_runs() {
    let (mut vm, _) = with_disk(WRITABLE);
    let (target, mut monitor) = vm.connect();
    let overlay = json!({ "device": "virtio0", "snapshot-file": vm.path("overlay.qcow2") });
    let client = monitor.client();
    client
        .execute("blockdev-snapshot-sync", overlay)
        .expect("exchanged");
    let mut record = VmRecord::take(&target, &mut monitor).expect("record");
    vm.end();
    // Over a disk that the command line names, it takes that disk's place.
    let options = vm.launch_options();
    let planned = plan(&record, &options).expect("planned").arguments;
    assert!(restorability(&record).is_empty());
    let drive = planned.iter().find(|word| word.contains("overlay.qcow2"));
    assert!(
        drive.is_some_and(|drive| drive.contains("format=qcow2")),
        "{planned:?}"
    );
    // Over another, the place is unknown.
    record.disks.truncate(1);
    assert!(matches!(
        plan(&record, &options),
        Err(LaunchError::DiskNotInArguments { .. })
    ));
    assert_eq!(restorability(&record).len(), 1);
}

#[test]
fn other_programs_and_paths() {
    let vm = Vm::start(SMALL);
    let (target, mut monitor) = vm.connect();
    let record = VmRecord::take(&target, &mut monitor).expect("record");
    let options = vm.launch_options();
    plan(&record, &options).expect("planned");

    let mut older = record.clone();
    older.identity.qemu_version = "7.2.0".into();
    let older = plan(&older, &options).expect("planned");
    let started = start(&older, &options).and_then(|starting| starting.wait(LONG));
    for differs in [older.check_version(), started.map(drop)] {
        assert!(matches!(
            differs,
            Err(LaunchError::VersionDiffers { recorded, .. }) if recorded == "7.2.0"
        ));
    }
    let mut elsewhere = record.clone();
    elsewhere.exe = "/nowhere/qemu-system-x86_64".into();
    assert!(matches!(
        plan(&elsewhere, &options),
        Err(LaunchError::ProgramMissing { .. })
    ));
    let taken = LaunchOptions {
        qmp: vm.path("qmp"),
        ..options
    };
    assert!(matches!(
        plan(&record, &taken),
        Err(LaunchError::MonitorInUse { .. })
    ));
}
