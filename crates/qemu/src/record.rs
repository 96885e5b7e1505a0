//! The record of a VM in a checkpoint, from which the VM can be started again.

use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize};

use stillframe_sys::process::Process;

use crate::arguments::{CommandLine, without_own_monitor};
use crate::credentials::Credentials;
use crate::devices::HotPlug;
use crate::executable::Digest;
use crate::monitor::{
    Accelerator, Disk, FeatureWord, HostView, Identity, Monitor, MonitorError, RamBlock,
};
use crate::target::{self, Target};

/// A VM as it was when a checkpoint was taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmRecord {
    /// The VM's label: its `-name`, or `qemu-` and eight digits made from its arguments. So the same command line
    /// always has the same label.
    pub label: String,
    /// The QEMU program.
    pub exe: PathBuf,
    /// The content of that program, if a user other than root can exchange it and the VM could do all that this user
    /// can; none in an older record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exe_digest: Option<Digest>,
    /// Its arguments, `argv[0]` included.
    #[serde(deserialize_with = "recorded_arguments")]
    pub arguments: Vec<String>,
    /// Its working directory.
    pub cwd: PathBuf,
    /// QEMU's version, machine type and the like.
    pub identity: Identity,
    /// How its devices differ from those of the arguments.
    #[serde(default, skip_serializing_if = "HotPlug::is_empty")]
    pub hot_plug: HotPlug,
    /// All RAM blocks.
    pub ram_blocks: Vec<RamBlock>,
    /// All files of all disks.
    pub disks: Vec<Disk>,
    /// The features of its processors; none where QEMU, or an older record, does not report them.
    #[serde(default)]
    pub cpu_features: Vec<FeatureWord>,
    /// Whether the VM ran when the record was taken.
    pub was_running: bool,
    /// Whether its guest was suspended to RAM then; a record of before does not say.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub was_suspended: bool,
    /// The QEMU process.
    pub pid: i32,
    /// When that process started, in clock ticks since boot.
    pub process_start_time: u64,
    /// The credentials of the process; none where an older record lacks them.
    #[serde(default)]
    pub credentials: Option<Credentials>,
    /// The obstacles to restoring it, in words ([`VmRecord::find_obstacles`]).
    #[serde(default)]
    pub obstacles: Vec<String>,
}

impl VmRecord {
    /// Queries the VM for everything but the devices that were plugged in and unplugged since its start, which
    /// [`crate::suitability::check`] finds. About ten round trips; the VM runs on meanwhile.
    pub fn take(target: &Target, monitor: &mut Monitor) -> Result<VmRecord, MonitorError> {
        let state = monitor.run_state()?;
        Ok(VmRecord {
            label: label(target.name.as_deref(), &target.arguments),
            exe: target.exe.clone(),
            exe_digest: Digest::of_running(&target.process, &target.exe),
            arguments: target.arguments.clone(),
            cwd: target.cwd.clone(),
            identity: monitor.identity()?,
            hot_plug: HotPlug::default(),
            ram_blocks: monitor.ram_blocks()?,
            disks: monitor.disks()?,
            cpu_features: monitor.cpu_features()?,
            was_running: state.running,
            was_suspended: state.is_suspended(),
            pid: target.process.pid(),
            process_start_time: target.process.start_time(),
            credentials: Credentials::of(&target.process),
            obstacles: Vec::new(),
        })
    }

    /// Queries again the disks, which may have changed since the record was taken. One round trip. Its RAM blocks
    /// stay those it was taken with.
    pub fn refresh(&mut self, monitor: &mut Monitor) -> Result<(), MonitorError> {
        self.disks = monitor.disks()?;
        Ok(())
    }

    /// The command line that makes the VM as it was recorded: that of its start, and what was plugged in
    /// and unplugged since.
    pub fn command_line(&self) -> CommandLine {
        let mut line = CommandLine::parse(&self.arguments);
        self.hot_plug.apply(&mut line);
        line
    }

    /// Where its first QMP monitor with a unix socket of its own listened; none where a manager made the socket.
    pub fn monitor_socket(&self) -> Option<PathBuf> {
        let path = target::monitor_paths(&self.command_line()).next();
        path.map(|path| self.cwd.join(path))
    }

    /// Takes the identity of all disk files again. It is to be called while the VM is stopped, if the record was
    /// taken before. Otherwise the guest's writes in between would look like a change after the checkpoint. It does
    /// not speak to QEMU and takes microseconds.
    pub fn look_at_disks_again(&mut self) {
        let host = HostView::new(self.pid, &self.cwd);
        for disk in &mut self.disks {
            disk.look_again(&host);
        }
    }
}

/// A VM that is known by its command line alone, and was never seen running.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    /// The VM's label; if none, the one of its command line.
    pub label: Option<String>,
    /// The QEMU program.
    pub exe: PathBuf,
    /// That program's version.
    pub qemu_version: String,
    /// Its arguments, `argv[0]` included.
    pub arguments: Vec<String>,
    /// Its working directory.
    pub cwd: PathBuf,
}

impl VmRecord {
    /// The part of a record that its command line contains.
    pub fn described(vm: Described) -> VmRecord {
        let name = CommandLine::parse(&vm.arguments).guest_name();
        VmRecord {
            label: vm
                .label
                .unwrap_or_else(|| label(name.as_deref(), &vm.arguments)),
            exe: vm.exe,
            exe_digest: None,
            arguments: vm.arguments,
            cwd: vm.cwd,
            identity: Identity {
                qemu_version: vm.qemu_version,
                package: String::new(),
                machine: String::new(),
                architecture: String::new(),
                uuid: String::new(),
                name,
                accelerator: Accelerator::Tcg,
            },
            hot_plug: HotPlug::default(),
            ram_blocks: Vec::new(),
            disks: Vec::new(),
            cpu_features: Vec::new(),
            was_running: true,
            was_suspended: false,
            pid: 0,
            process_start_time: 0,
            credentials: Credentials::own(),
            obstacles: Vec::new(),
        }
    }

    /// Takes the missing facts from a QEMU that was started with this command line and never ran. The contents of
    /// its disks when the VM ran are unknown, so they get no identity.
    pub fn complete(
        &mut self,
        process: &Process,
        monitor: &mut Monitor,
    ) -> Result<(), MonitorError> {
        self.identity = monitor.identity()?;
        self.ram_blocks = monitor.ram_blocks()?;
        self.cpu_features = monitor.cpu_features()?;
        self.disks = monitor.disks()?;
        for disk in &mut self.disks {
            disk.identity = None;
        }
        self.pid = process.pid();
        self.process_start_time = process.start_time();
        self.credentials = Credentials::of(process);
        Ok(())
    }
}

/// The arguments of a record, whose VM may have been restored by a version that did not leave its own
/// monitor out.
fn recorded_arguments<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    let arguments = Vec::<String>::deserialize(from)?;
    Ok(without_own_monitor(&arguments))
}

fn label(name: Option<&str>, arguments: &[String]) -> String {
    match name {
        Some(name) => name.to_owned(),
        None => format!("qemu-{:08x}", fnv1a(arguments)),
    }
}

/// 32-bit FNV-1a over the arguments, a zero byte after each. Chosen because it is the same on every
/// machine and in every version, which the standard library's hashes do not promise.
fn fnv1a(arguments: &[String]) -> u32 {
    const OFFSET: u32 = 0x811c_9dc5;
    const PRIME: u32 = 0x0100_0193;
    let bytes = arguments
        .iter()
        .flat_map(|word| word.bytes().chain(std::iter::once(0)));
    bytes.fold(OFFSET, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(PRIME)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels() {
        let arguments = ["qemu", "-m", "64"].map(str::to_owned);
        assert_eq!(label(Some("foo"), &arguments), "foo");
        let unnamed = label(None, &arguments);
        assert_eq!(unnamed, "qemu-373494d3");
        assert_ne!(unnamed, label(None, &arguments[..2]));
        // Test vector of the function's authors: FNV-1a of the empty text is the offset.
        assert_eq!(fnv1a(&[]), 0x811c_9dc5);
    }
    #[test]
    fn records_hold_no_monitor_of_ours_and_older_ones_no_owner() {
        let mut record = VmRecord::described(Described {
            label: None,
            exe: "/q".into(),
            qemu_version: "10.0.2".into(),
            arguments: ["q", "-m", "64"].map(str::to_owned).to_vec(),
            cwd: "/".into(),
        });
        let plain = record.arguments.clone();
        for word in ["-chardev", "socket,id=stillframe-monitor,fd=3"] {
            record.arguments.push(word.to_owned());
        }
        for word in ["-mon", "chardev=stillframe-monitor,mode=control"] {
            record.arguments.push(word.to_owned());
        }
        let mut value = serde_json::to_value(&record).expect("encoded");
        value.as_object_mut().expect("object").remove("credentials");
        let read: VmRecord = serde_json::from_value(value).expect("decoded");
        assert_eq!(read.arguments, plain);
        assert!(record.credentials.is_some() && read.credentials.is_none());
    }
}
