//! A QEMU process for a test, and a guest that counts.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use stillframe_qemu::launch::{
    LaunchError, LaunchOptions, Launched, load_device_state, plan, start,
};
use stillframe_qemu::monitor::{Monitor, RamBlock};
use stillframe_qemu::record::VmRecord;
use stillframe_qemu::target::{Selector, Target, find};
use stillframe_sys::memfd::{Access, Memfd};
use stillframe_sys::memory::RemoteMemory;
use stillframe_sys::process::{AddressRange, Process};

/// Long enough for the slowest machine; tests never wait for it unless they fail.
pub const LONG: Duration = Duration::from_secs(120);

/// Where the counting guest keeps its counter, a guest-physical address below 640 KiB and thus the
/// same offset in `pc.ram`.
pub const COUNTER_AT: u64 = 0x9000;

/// A running QEMU, killed and reaped when dropped.
pub struct Vm {
    child: Child,
    pub directory: tempfile::TempDir,
}

impl Vm {
    /// Starts QEMU under TCG with a QMP monitor at `qmp` in the VM's own directory, where it also
    /// runs, and waits until that monitor listens.
    pub fn start(arguments: &[&str]) -> Vm {
        Vm::start_in(tempfile::tempdir().expect("temporary directory"), arguments)
    }

    pub fn start_in(directory: tempfile::TempDir, arguments: &[&str]) -> Vm {
        let qmp = format!(
            "unix:{},server=on,wait=off",
            directory.path().join("qmp").display()
        );
        let log = File::create(directory.path().join("stderr")).expect("log");
        let child = Command::new("qemu-system-x86_64")
            .args(["-accel", "tcg", "-qmp", &qmp])
            .args(arguments)
            .current_dir(&directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("qemu-system-x86_64 is installed");
        let mut vm = Vm { child, directory };
        wait_until("the monitor listens", || {
            let ended = vm.child.try_wait().expect("waited for");
            let log = fs::read_to_string(vm.path("stderr")).unwrap_or_default();
            assert!(ended.is_none(), "QEMU ended: {log}");
            is_listened_on(&vm.path("qmp"))
        });
        vm
    }

    /// A VM that boots the counting guest from a disk opened read-only.
    pub fn counting(arguments: &[&str]) -> Vm {
        let directory = tempfile::tempdir().expect("temporary directory");
        Vm::counting_in(directory, arguments)
    }

    /// The same, in a directory that holds files of its own.
    pub fn counting_in(directory: tempfile::TempDir, arguments: &[&str]) -> Vm {
        write_boot_disk(&directory.path().join("boot.img"));
        let drive = ["-drive", "file=boot.img,format=raw,if=virtio,readonly=on"];
        Vm::start_in(directory, &[arguments, &drive].concat())
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("pids are small")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn target(&self) -> Target {
        find(&Selector::Pid(self.pid())).expect("found")
    }

    pub fn connect(&self) -> (Target, Monitor) {
        let target = self.target();
        let monitor = Monitor::connect(&target, LONG).expect("connected");
        (target, monitor)
    }

    /// Ends QEMU, keeping its directory.
    pub fn end(&mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("reaped");
    }

    pub fn launch_options(&self) -> LaunchOptions {
        LaunchOptions {
            helper: env!("CARGO_BIN_EXE_launch-helper").into(),
            ..LaunchOptions::new(self.path("new.qmp"), self.path("new.log"))
        }
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A disk whose boot sector counts in guest memory for ever: `inc dword [0x9000]` in a loop.
pub fn write_boot_disk(path: &Path) {
    let code = [
        0x31, 0xc0, // xor ax, ax
        0x8e, 0xd8, // mov ds, ax
        0x66, 0xff, 0x06, 0x00, 0x90, // again: inc dword [0x9000]
        0xeb, 0xf9, // jmp again
    ];
    let mut disk = vec![0; 1 << 20];
    disk[..code.len()].copy_from_slice(&code);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    fs::write(path, disk).expect("disk written");
}

pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < deadline, "timed out: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn block<'a>(blocks: &'a [RamBlock], name: &str) -> &'a RamBlock {
    let found = blocks.iter().find(|block| block.name == name);
    found.unwrap_or_else(|| panic!("no block {name}"))
}

/// The main memory has another name with a memory backend.
pub fn main_memory(blocks: &[RamBlock]) -> &RamBlock {
    let largest = blocks.iter().max_by_key(|block| block.total_bytes);
    largest.expect("some block")
}

pub fn counter(process: &Process, blocks: &[RamBlock]) -> u32 {
    let mut bytes = [0; 4];
    RemoteMemory::open(process)
        .read(main_memory(blocks).address + COUNTER_AT, &mut bytes)
        .expect("guest memory is readable");
    u32::from_le_bytes(bytes)
}

pub fn wait_for_counting(process: &Process, blocks: &[RamBlock]) {
    let start = counter(process, blocks);
    wait_until("the guest counts", || {
        counter(process, blocks).wrapping_sub(start) > 1000
    });
}

/// Whether some process listens on a unix socket; the path exists a moment before it does.
pub fn is_listened_on(path: &Path) -> bool {
    const ACCEPTS_CONNECTIONS: &str = " 00010000 ";
    let sockets = fs::read_to_string("/proc/net/unix").expect("the kernel's list");
    let path = path.to_str().expect("UTF-8");
    sockets
        .lines()
        .any(|line| line.contains(ACCEPTS_CONNECTIONS) && line.ends_with(path))
}

/// The contents of a checkpoint, held in memory.
pub struct Checkpoint {
    pub record: VmRecord,
    pub device_state: Vec<u8>,
    pub ram: Vec<(String, Vec<u8>)>,
}

/// Pauses the VM, saves everything, and lets it run on if it ran.
pub fn checkpoint(target: &Target, monitor: &mut Monitor) -> Checkpoint {
    let file = Memfd::create("state").expect("memfd");
    let writable = file.reopen(Access::Write).expect("reopened");
    let record = VmRecord::take(target, monitor).expect("record");
    let state = monitor
        .begin_device_state(std::os::fd::AsFd::as_fd(&writable))
        .expect("descriptor lent");
    monitor.stop().expect("stopped");
    let ticket = monitor.send_save_device_state(&state).expect("sent");
    let ram = record.ram_blocks.iter().map(|block| {
        let mut bytes = vec![0; usize::try_from(block.used_bytes).expect("small VM")];
        RemoteMemory::open(&target.process)
            .read(block.address, &mut bytes)
            .expect("guest memory is readable");
        (block.name.clone(), bytes)
    });
    let ram = ram.collect();
    monitor.wait_device_state(ticket, LONG).expect("saved");
    if record.was_running {
        monitor.cont().expect("resumed");
    }
    monitor.end_device_state(state).expect("taken back");
    Checkpoint {
        record,
        device_state: file.read_all(64 << 20).expect("device state"),
        ram,
    }
}

/// Starts a new VM from a checkpoint; it is paused then.
pub fn restore(saved: &Checkpoint, options: &LaunchOptions) -> Result<Launched, LaunchError> {
    let plan = plan(&saved.record, options)?;
    let mut launched = start(&plan, options)?.wait(LONG)?;
    let blocks = launched.monitor.ram_blocks().expect("blocks");
    assert_eq!(blocks.len(), saved.record.ram_blocks.len());
    for (name, bytes) in &saved.ram {
        let block = block(&blocks, name);
        let range = AddressRange {
            start: block.address,
            end: block.address + bytes.len() as u64,
        };
        RemoteMemory::open(&launched.process)
            .write_vectored(&[bytes.as_slice()], &[range])
            .expect("guest memory is writable");
    }
    let machine = &saved.record.identity.machine;
    let wrapped = stillframe_qemu::device_state::wrap(&saved.device_state, machine)?;
    load_device_state(&mut launched, &wrapped, LONG)?;
    Ok(launched)
}
