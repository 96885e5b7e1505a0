//! The whole recipe: a running VM is saved, a second QEMU takes its state over and runs on, while
//! the first one does too.

use std::fs;

use stillframe_qemu::device_state;
use stillframe_qemu::launch::{LaunchError, LaunchOptions, load_device_state, plan, start};
use stillframe_qemu::record::VmRecord;

use crate::vm::{
    LONG, Vm, checkpoint, counter, main_memory, restore, wait_for_counting, wait_until,
};

/// The recipe for one kind of VM, with the original alive beside the copy.
fn recipe(arguments: &[&str]) {
    let vm = Vm::counting(arguments);
    let (target, mut monitor) = vm.connect();
    let blocks = monitor.ram_blocks().expect("blocks");
    wait_for_counting(&target.process, &blocks);

    let saved = checkpoint(&target, &mut monitor);
    assert!(saved.record.was_running);
    let summary = device_state::validate(&saved.device_state).expect("whole device state");
    assert!(
        summary.sections.iter().any(|name| name == "cpu"),
        "{summary:?}"
    );
    assert!(monitor.run_state().expect("state").running);
    wait_for_counting(&target.process, &blocks);

    let options = vm.launch_options();
    let mut launched = restore(&saved, &options).expect("restored");
    let new_blocks = launched.monitor.ram_blocks().expect("blocks");
    let at = usize::try_from(crate::vm::COUNTER_AT).expect("small");
    let main = main_memory(&saved.record.ram_blocks).name.clone();
    let (_, ram) = saved
        .ram
        .iter()
        .find(|(name, _)| *name == main)
        .expect("main memory");
    let saved_count = u32::from_le_bytes(ram[at..at + 4].try_into().expect("four bytes"));
    assert_eq!(counter(&launched.process, &new_blocks), saved_count);

    launched.monitor.cont().expect("resumed");
    let state = launched.monitor.run_state().expect("state");
    assert!(state.running, "{state:?}");
    wait_for_counting(&launched.process, &new_blocks);
    assert!(monitor.run_state().expect("state").running);

    let identity = launched.monitor.identity().expect("identity");
    assert_eq!(identity, saved.record.identity);
}

#[test]
fn q35() {
    recipe(&["-machine", "q35", "-m", "64", "-display", "none"]);
}

#[test]
fn pc_with_two_processors() {
    recipe(&[
        "-machine", "pc", "-smp", "2", "-m", "64", "-display", "none",
    ]);
}

#[test]
fn shared_memfd_memory() {
    recipe(&[
        "-machine",
        "q35,memory-backend=ram",
        "-object",
        "memory-backend-memfd,id=ram,size=64M,share=on",
        "-m",
        "64",
        "-display",
        "none",
    ]);
}

#[test]
fn sandboxed_with_everything_denied() {
    recipe(&[
        "-machine",
        "q35",
        "-m",
        "64",
        "-display",
        "none",
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    ]);
}

#[test]
fn nographic_on_the_terminal() {
    recipe(&[
        "-M",
        "q35",
        "-m",
        "64",
        "-nographic",
        "-serial",
        "mon:stdio",
    ]);
}

#[test]
fn nographic_with_nothing_said() {
    recipe(&["-M", "pc", "-m", "64", "-nographic", "-name", "plain"]);
}

/// Monitors, serial ports and an agent channel as a manager sets them up.
#[test]
fn managed_style() {
    recipe(&[
        "-machine",
        "q35",
        "-m",
        "64",
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-name",
        "guest=managed,debug-threads=on",
        "-chardev",
        "socket,id=charmonitor,path=second.qmp,server=on,wait=off",
        "-mon",
        "chardev=charmonitor,id=monitor,mode=control",
        "-chardev",
        "pty,id=charserial0",
        "-device",
        r#"{"driver":"isa-serial","chardev":"charserial0","id":"serial0","index":0}"#,
        "-device",
        "virtio-serial-pci,id=virtio-serial0",
        "-chardev",
        "socket,id=charchannel0,path=agent.sock,server=on,wait=off",
        "-device",
        "virtserialport,bus=virtio-serial0.0,nr=1,chardev=charchannel0,id=channel0,name=agent",
        "-device",
        "virtio-net-pci,netdev=net0,id=nic0",
        "-netdev",
        "user,id=net0",
        "-device",
        "virtio-balloon-pci,id=balloon0",
        "-device",
        "VGA,id=video0",
    ]);
}

/// Shared RAM in a file needs the old VM gone; the new one then uses the same file.
#[test]
fn shared_file_memory_after_the_end_of_the_original() {
    let mut vm = Vm::counting(&[
        "-machine",
        "q35,memory-backend=ram",
        "-object",
        "memory-backend-file,id=ram,size=64M,mem-path=ram.bin,share=on",
        "-m",
        "64",
        "-display",
        "none",
    ]);
    let (target, mut monitor) = vm.connect();
    let blocks = monitor.ram_blocks().expect("blocks");
    wait_for_counting(&target.process, &blocks);
    let saved = checkpoint(&target, &mut monitor);
    let options = vm.launch_options();
    assert!(matches!(
        plan(&saved.record, &options),
        Err(LaunchError::RamInUse { pid, .. }) if pid == vm.pid()
    ));
    vm.end();
    let mut launched = restore(&saved, &options).expect("restored");
    launched.monitor.cont().expect("resumed");
    let blocks = launched.monitor.ram_blocks().expect("blocks");
    wait_for_counting(&launched.process, &blocks);
}

#[test]
fn a_paused_vm_stays_paused() {
    let vm = Vm::counting(&["-machine", "q35", "-m", "64", "-display", "none"]);
    let (target, mut monitor) = vm.connect();
    monitor.stop().expect("stopped");
    let saved = checkpoint(&target, &mut monitor);
    assert!(!saved.record.was_running);
    assert!(!monitor.run_state().expect("state").running);
    let mut launched = restore(&saved, &vm.launch_options()).expect("restored");
    assert!(!launched.monitor.run_state().expect("state").running);
}

#[test]
fn the_serial_port_goes_where_it_is_asked_to() {
    let vm = Vm::counting(&[
        "-machine",
        "q35",
        "-m",
        "64",
        "-display",
        "none",
        "-serial",
        "file:old.serial",
    ]);
    let (target, mut monitor) = vm.connect();
    let saved = checkpoint(&target, &mut monitor);
    fs::write(vm.path("old.serial"), "kept").expect("written");
    let options = LaunchOptions {
        serial: Some(format!("file:{}", vm.path("new.serial").display())),
        ..vm.launch_options()
    };
    let launched = restore(&saved, &options).expect("restored");
    assert!(vm.path("new.serial").exists());
    let (process, _) = launched.keep();
    // Without a wish it goes nowhere.
    let options = LaunchOptions {
        qmp: vm.path("third.qmp"),
        ..vm.launch_options()
    };
    restore(&saved, &options).expect("restored");
    assert_eq!(
        fs::read_to_string(vm.path("old.serial")).expect("read"),
        "kept"
    );
    process.signal(9).expect("ended");
}

#[test]
fn a_kept_vm_outlives_its_starter_and_another_does_not() {
    let vm = Vm::counting(&["-machine", "q35", "-m", "64", "-display", "none"]);
    let (target, mut monitor) = vm.connect();
    let saved = checkpoint(&target, &mut monitor);

    let launched = restore(&saved, &vm.launch_options()).expect("restored");
    let pid = launched.process.pid();
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("alive");
    let after_name = stat.rsplit(')').next().expect("stat has a name");
    let session = after_name.split_whitespace().nth(3).expect("session");
    assert_eq!(session, pid.to_string(), "it leads a session of its own");
    let (process, kept_monitor) = launched.keep();
    drop(kept_monitor);
    assert!(process.is_alive());
    process.signal(9).expect("ended");
    assert!(process.wait_exit(LONG));
    // Reaped too, though this process lives on.
    wait_until("no zombie stays", || {
        !fs::exists(format!("/proc/{pid}")).expect("looked")
    });

    let launched = restore(&saved, &vm.launch_options()).expect("restored");
    let process = launched.process.clone();
    drop(launched);
    assert!(!process.is_alive());
}

#[test]
fn device_state_that_does_not_fit_ends_the_new_vm_with_its_own_words() {
    let vm = Vm::counting(&["-machine", "q35", "-m", "64", "-display", "none"]);
    let (target, mut monitor) = vm.connect();
    let saved = checkpoint(&target, &mut monitor);
    let options = vm.launch_options();
    let plan = plan(&saved.record, &options).expect("planned");
    let good =
        device_state::wrap(&saved.device_state, &saved.record.identity.machine).expect("whole");
    let other_machine = device_state::wrap(&saved.device_state, "pc-i440fx-10.0").expect("whole");
    let cut = good[..good.len() / 2].to_vec();
    let noise = b"QEVM\0\0\0\x03 and then nothing of use".to_vec();
    for wrapped in [other_machine, cut, noise] {
        let mut launched = start(&plan, &options)
            .and_then(|starting| starting.wait(LONG))
            .expect("started");
        let process = launched.process.clone();
        let error = load_device_state(&mut launched, &wrapped, LONG).expect_err("refused");
        assert!(!process.is_alive());
        let words = error.to_string();
        assert!(words.contains("qemu-system-x86_64:"), "{words}");
    }
}

#[test]
fn a_vm_that_cannot_start_tells_why() {
    let vm = Vm::counting(&["-machine", "q35", "-m", "64", "-display", "none"]);
    let (target, mut monitor) = vm.connect();
    let record = VmRecord::take(&target, &mut monitor).expect("record");
    let options = vm.launch_options();
    let mut plan = plan(&record, &options).expect("planned");
    plan.arguments
        .extend(["-device".into(), "no-such-device".into()]);
    fs::write(&options.log, "older words\n").expect("written");
    match start(&plan, &options).and_then(|starting| starting.wait(LONG)) {
        Err(LaunchError::Exited { log, .. }) => {
            assert!(log.contains("no-such-device"), "{log}");
            assert!(!log.contains("older words"), "{log}");
        }
        other => panic!("{other:?}"),
    }
}

/// QEMU carries the content of flash memory with the device state, and writes it to the file when the VM runs.
#[test]
fn flash_memory_comes_back_whatever_its_file_holds_by_then() {
    let by_drive = [
        "-drive",
        "if=pflash,unit=0,format=raw,readonly=on,file=code.fd",
        "-drive",
        "if=pflash,unit=1,format=raw,file=vars.fd",
    ];
    let by_node = [
        "-blockdev",
        "driver=file,node-name=code,read-only=on,filename=code.fd",
        "-blockdev",
        "driver=file,node-name=vars,filename=vars.fd",
        "-machine",
        "pflash0=code,pflash1=vars",
    ];
    for flash in [&by_drive[..], &by_node[..]] {
        let folder = tempfile::tempdir().expect("temporary folder");
        let vars = folder.path().join("vars.fd");
        fs::copy(
            "/usr/share/seabios/bios-256k.bin",
            folder.path().join("code.fd"),
        )
        .expect("QEMU's firmware");
        let then = [0xa5; 256 << 10];
        fs::write(&vars, then).expect("written");
        let small = ["-machine", "q35", "-m", "64", "-display", "none"];
        let mut vm = Vm::counting_in(folder, &[&small, flash].concat());
        let (target, mut monitor) = vm.connect();
        let blocks = monitor.ram_blocks().expect("blocks");
        wait_for_counting(&target.process, &blocks);
        let saved = checkpoint(&target, &mut monitor);
        let disks = saved.record.disks.iter();
        assert_eq!(disks.filter(|disk| disk.flash).count(), 2);
        vm.end();
        fs::write(&vars, [0x5a; 256 << 10]).expect("written");
        let options = vm.launch_options();
        let plan = plan(&saved.record, &options).expect("planned");
        let is_told = |change: &String| change.contains("vars.fd is written when the VM runs");
        assert!(plan.changes.iter().any(is_told), "{:?}", plan.changes);
        let mut launched = restore(&saved, &options).expect("restored");
        launched.monitor.cont().expect("resumed");
        let new_blocks = launched.monitor.ram_blocks().expect("blocks");
        wait_for_counting(&launched.process, &new_blocks);
        assert!(fs::read(&vars).expect("read") == then);
    }
}
