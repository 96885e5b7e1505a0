//! Finding VMs by pid, socket and name, and what their record says.

use std::path::Path;

use stillframe_qemu::monitor::{Accelerator, Monitor, MonitorError};
use stillframe_qemu::qmp::Client;
use stillframe_qemu::record::VmRecord;
use stillframe_qemu::target::{Selector, TargetError, find};

use crate::vm::{LONG, Vm, block, wait_until};

const SMALL: &[&str] = &["-machine", "q35", "-m", "64", "-display", "none"];

fn with(more: &[&'static str]) -> Vec<&'static str> {
    [SMALL, more].concat()
}

#[test]
fn by_pid_socket_and_name() {
    let vm = Vm::start(&with(&["-name", "guest=found-by-name,debug-threads=on"]));
    let by_pid = vm.target();
    assert_eq!(by_pid.name.as_deref(), Some("found-by-name"));
    assert_eq!(by_pid.monitors, [vm.path("qmp")]);
    assert_eq!(by_pid.cwd, vm.directory.path());
    assert_eq!(by_pid.arguments[0], "qemu-system-x86_64");
    assert!(by_pid.exe.ends_with("qemu-system-x86_64"));

    let by_socket = find(&Selector::Qmp(vm.path("qmp"))).expect("found");
    assert_eq!(by_socket.process.pid(), vm.pid());
    let by_name = find(&Selector::Name("found-by-name".into())).expect("found");
    assert_eq!(by_name.process.pid(), vm.pid());
}

#[test]
fn two_of_one_name() {
    let arguments = with(&["-name", "same-name"]);
    let (one, other) = (Vm::start(&arguments), Vm::start(&arguments));
    let Err(TargetError::SeveralOfName { mut pids, .. }) =
        find(&Selector::Name("same-name".into()))
    else {
        panic!("two VMs have this name");
    };
    pids.sort_unstable();
    let mut expected = [one.pid(), other.pid()];
    expected.sort_unstable();
    assert_eq!(pids, expected);
}

#[test]
fn a_socket_the_command_line_does_not_show() {
    let vm = Vm::start(SMALL);
    let (_, mut monitor) = vm.connect();
    let extra = vm.path("extra.qmp");
    let chardev = serde_json::json!({ "id": "extra", "backend": { "type": "socket", "data": {
        "addr": { "type": "unix", "data": { "path": extra } }, "server": true, "wait": false } } });
    let client = monitor.client();
    client.execute("chardev-add", chardev).expect("added");
    // A monitor cannot be added to a running QEMU by QMP, but its socket is enough to find it.
    let target = find(&Selector::Qmp(extra.clone())).expect("found");
    assert_eq!(target.process.pid(), vm.pid());
    assert_eq!(target.monitors, [extra, vm.path("qmp")]);
}

#[test]
fn a_vm_without_monitor() {
    let vm = Vm::start(SMALL);
    let mut target = vm.target();
    target.monitors.clear();
    assert!(matches!(
        Monitor::connect(&target, LONG),
        Err(MonitorError::None { .. })
    ));
}

/// The second VM takes the socket's path over; the first one must not be mistaken for it.
#[test]
fn a_socket_taken_over_by_another_vm() {
    let vm = Vm::start(SMALL);
    let qmp = format!("unix:{},server=on,wait=off", vm.path("qmp").display());
    let thief = Vm::start(&[SMALL, &["-qmp", &qmp]].concat());
    wait_until("the path was taken over", || {
        find(&Selector::Qmp(vm.path("qmp"))).is_ok_and(|it| it.process.pid() == thief.pid())
    });
    let result = Monitor::connect(&vm.target(), LONG);
    assert!(
        matches!(
            result,
            Err(MonitorError::OtherVm { pid, other_pid, .. })
                if pid == vm.pid() && other_pid == thief.pid()
        ),
        "{result:?}"
    );
}

#[test]
fn the_record_of_a_vm() {
    let vm = Vm::counting(&with(&[
        "-cdrom",
        "boot.img",
        "-uuid",
        "12345678-1234-1234-1234-123456789abc",
    ]));
    let (target, mut monitor) = vm.connect();
    let record = VmRecord::take(&target, &mut monitor).expect("record");
    assert!(record.label.starts_with("qemu-"), "{}", record.label);
    assert_eq!(record.identity.architecture, "x86_64");
    assert_eq!(record.identity.accelerator, Accelerator::Tcg);
    assert_eq!(record.identity.uuid, "12345678-1234-1234-1234-123456789abc");
    assert!(record.identity.machine.starts_with("pc-q35-"));
    assert!(record.was_running);
    assert_eq!(block(&record.ram_blocks, "pc.ram").total_bytes, 64 << 20);
    let video = record
        .ram_blocks
        .iter()
        .any(|block| block.name.ends_with("vga.vram"));
    assert!(video, "{:?}", record.ram_blocks);
    let paths: Vec<&Path> = record.disks.iter().map(|disk| &*disk.path).collect();
    assert_eq!(paths, [vm.path("boot.img"), vm.path("boot.img")]);
    assert!(
        record
            .disks
            .iter()
            .all(|disk| disk.read_only && disk.identity.is_some())
    );

    // A record that is written into a repository is read from it unchanged.
    let text = serde_json::to_value(&record).expect("serialised");
    let read: VmRecord = serde_json::from_value(text).expect("read");
    assert_eq!(read, record);
}

#[test]
fn the_blocks_lie_where_the_process_maps_memory() {
    let vm = Vm::start(SMALL);
    let (target, mut monitor) = vm.connect();
    let mappings = target.process.mappings().expect("mappings");
    for block in monitor.ram_blocks().expect("blocks") {
        let inside = |address| mappings.iter().any(|map| map.range.contains(address));
        assert!(inside(block.address), "{block:?}");
        assert!(inside(block.address + block.used_bytes - 1), "{block:?}");
    }
}

#[test]
fn a_busy_monitor_is_passed_over() {
    let vm = Vm::start(&with(&["-qmp", "unix:second.qmp,server=on,wait=off"]));
    let target = vm.target();
    assert_eq!(target.monitors, [vm.path("qmp"), vm.path("second.qmp")]);
    let _holder = Client::connect(&target.monitors[0], LONG).expect("free");
    let limit = std::time::Duration::from_secs(2);
    let mut second = Monitor::connect(&target, limit).expect("the second one is free");
    assert!(second.run_state().expect("state").running);
    assert!(matches!(
        Monitor::connect(&target, limit),
        Err(MonitorError::Busy { paths, .. }) if paths.len() == 2
    ));
    drop(second);
    // Half of it is spent on the one that is held.
    let limit = std::time::Duration::from_secs(20);
    assert!(Monitor::connect(&target, limit).is_ok());
}
