//! The monitor commands Stillframe uses, with typed arguments and replies.

mod balloon;
mod bitmaps;
pub(crate) mod cpu;
mod devices;
mod disks;
mod dump;
pub(crate) mod guest_address;
mod host_files;
mod jobs;
mod lent;
mod live_views;
mod migration;
mod mirror;
pub(crate) mod ram_blocks;
mod rewound;
mod snapshots;
mod streams;

use std::path::PathBuf;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub(crate) use balloon::BALLOON;
pub use balloon::{Balloon, BalloonStatistics};
pub use bitmaps::{DiskBitmap, bitmap_context};
pub use cpu::FeatureWord;
pub(crate) use cpu::missing as missing_features;
pub(crate) use devices::{BlockNode, DeviceProperty};
pub use disks::{Disk, DiskDevice, LAZY_EXPORT, image_of};
pub use host_files::FileIdentity;
pub(crate) use host_files::HostView;
pub use jobs::Job;
pub use lent::StateFile;
pub use mirror::Mirror;
pub use rewound::RewoundDisk;
pub use snapshots::{DiskSnapshot, EndCommands, PauseTickets, SnapshotNumber};
pub use streams::Streamed;

use crate::qmp::{Client, QmpError, REPLY_LIMIT_SECONDS, Ticket};
use crate::target::{Target, is_qemu_process};

/// How long [`Monitor::stop`] and [`Monitor::cont`] wait, in seconds. Both can take long: `stop`
/// finishes all disk requests in flight and flushes the images.
pub const STOP_LIMIT_SECONDS: u64 = 60;

/// Runs a command of QEMU's human monitor.
const HUMAN: &str = "human-monitor-command";
const RAM_BLOCKS: &str = "info ramblock";
/// How descriptors that we lend QEMU are marked there.
const LENDER: &str = "stillframe";

/// Why a typed command failed.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    /// Every monitor has another client.
    #[error(
        "every QMP monitor of process {pid} ({paths:?}) is held by another client; give the VM \
         one more: -qmp unix:PATH,server=on,wait=off"
    )]
    Busy {
        /// The QEMU process.
        pid: i32,
        /// Its monitors.
        paths: Vec<PathBuf>,
    },
    /// QEMU itself is stopped, so that no monitor answers.
    #[error(
        "process {pid} is stopped (SIGSTOP, or its terminal), so its monitors do not answer; \
         continue it first (SIGCONT)"
    )]
    Stopped {
        /// The QEMU process.
        pid: i32,
    },
    /// The socket was taken over by another VM, started later with the same path.
    #[error(
        "{path} now belongs to process {other_pid}, not to {pid}: two VMs were started with the \
         same -qmp path"
    )]
    OtherVm {
        /// The socket.
        path: PathBuf,
        /// The QEMU process that was meant.
        pid: i32,
        /// The QEMU process that answers.
        other_pid: i32,
    },
    /// There is no monitor to connect to.
    #[error("process {pid} has no QMP monitor")]
    None {
        /// The QEMU process.
        pid: i32,
    },
    /// The protocol or the command failed.
    #[error("the QEMU monitor command failed")]
    Qmp(#[from] QmpError),
    /// QEMU lacks the command.
    #[error("this QEMU is too old: it has no {command}")]
    TooOld {
        /// The command.
        command: &'static str,
    },
    /// A reply that this version of QEMU should not give.
    #[error("QEMU's reply to {command} is not understood: {what}")]
    Unexpected {
        /// The command.
        command: &'static str,
        /// The answer that was not understood.
        what: String,
    },
}

impl MonitorError {
    /// Whether QEMU answered a command with an error, rather than not at all.
    pub fn is_refusal(&self) -> bool {
        matches!(self, MonitorError::Qmp(QmpError::Command { .. }))
    }
}

/// `query-status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunState {
    /// Whether the virtual CPUs run.
    pub running: bool,
    /// `running`, `paused`, `prelaunch`, `inmigrate`, `postmigrate`, `guest-panicked`, ...
    pub status: String,
}

impl RunState {
    /// Whether the guest is suspended to RAM. Its virtual CPUs are stopped until an event or a command wakes it.
    pub fn is_suspended(&self) -> bool {
        self.status == "suspended"
    }
}

/// One block of guest memory: main memory, video memory, a ROM, a firmware table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamBlock {
    /// Its name in the migration stream, such as `pc.ram`; the same in every process of this VM.
    pub name: String,
    /// Host page size of its memory, in bytes.
    pub page_bytes: u64,
    /// Its place among all blocks, in bytes. No guest-physical address.
    pub offset: u64,
    /// Bytes in use; less than the total for blocks that can grow.
    pub used_bytes: u64,
    /// Bytes reserved.
    pub total_bytes: u64,
    /// Address in the QEMU process; another one in every process.
    pub address: u64,
}

/// How guest instructions are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// The kernel's KVM runs it.
    Kvm,
    /// QEMU's translator runs it.
    Tcg,
}

/// The properties of a VM that a second QEMU must share to take its state over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Such as `10.0.2`.
    pub qemu_version: String,
    /// The distributor's words; often empty.
    pub package: String,
    /// The versioned machine type, such as `pc-q35-10.0`.
    pub machine: String,
    /// Such as `x86_64`.
    pub architecture: String,
    /// The VM's UUID; zeros when it was given none.
    pub uuid: String,
    /// Its `-name`.
    pub name: Option<String>,
    /// How guest instructions are run.
    pub accelerator: Accelerator,
}

/// A device of the VM that was added by option or by hot-plug.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Peripheral {
    /// Its id; `device[0]` and the like for those without.
    pub(crate) id: String,
    /// Its type, such as `virtio-net-pci`.
    pub(crate) driver: String,
    /// Whether it has no id of its own.
    pub(crate) anonymous: bool,
}

impl Peripheral {
    /// Its place in QEMU's tree of objects.
    pub(crate) fn path(&self) -> String {
        let folder = match self.anonymous {
            true => "peripheral-anon",
            false => "peripheral",
        };
        format!("/machine/{folder}/{}", self.id)
    }
}

/// `query-version`.
#[derive(Deserialize)]
struct Version {
    qemu: Numbers,
    package: String,
}

#[derive(Deserialize)]
struct Numbers {
    major: u32,
    minor: u32,
    micro: u32,
}

impl std::fmt::Display for Numbers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

/// A connection to a VM.
#[derive(Debug)]
pub struct Monitor {
    client: Client,
    pid: i32,
    cwd: PathBuf,
    /// A block node by whose name disks can be drained.
    drain_node: Option<String>,
    /// Whether an active dump belongs to this engine.
    expects_dump: bool,
}

/// A connection to the monitor of a certain process, over which nothing was said yet.
#[derive(Debug)]
pub struct Reached {
    client: Client,
    path: PathBuf,
    pid: i32,
}

impl Reached {
    /// Waits for another client to leave, and for QEMU's greeting.
    pub fn negotiate(self, timeout: Duration) -> Result<Monitor, MonitorError> {
        let client = self.client.negotiate(&self.path, timeout)?;
        // Paths are only made of it for VMs that were not started by us.
        Ok(Monitor::new(client, self.pid, PathBuf::from("/")))
    }
}

impl Monitor {
    /// Connects to the first monitor of the VM that has no other client; `timeout` is shared among
    /// all of them.
    ///
    /// # Errors
    /// [`MonitorError::Busy`] when none is free, [`MonitorError::OtherVm`], [`MonitorError::Qmp`].
    pub fn connect(target: &Target, timeout: Duration) -> Result<Monitor, MonitorError> {
        let pid = target.process.pid();
        let count = u32::try_from(target.monitors.len()).unwrap_or(u32::MAX);
        let each = timeout / count.max(1);
        let (mut busy, mut first_error) = (false, None);
        for path in &target.monitors {
            match Client::connect(path, each) {
                Ok(client) => {
                    let other_pid = client.peer_pid()?;
                    // A manager that made the socket for QEMU is the peer then; another QEMU never
                    // rightly is.
                    if other_pid == pid || !is_qemu_process(other_pid) {
                        return Ok(Monitor::over(client, target));
                    }
                    first_error.get_or_insert(MonitorError::OtherVm {
                        path: path.clone(),
                        pid,
                        other_pid,
                    });
                }
                Err(QmpError::Busy { .. }) => busy = true,
                Err(error) => {
                    first_error.get_or_insert(error.into());
                }
            }
        }
        Err(if busy && matches!(target.process.run_state(), Ok('T')) {
            MonitorError::Stopped { pid }
        } else if busy {
            MonitorError::Busy {
                pid,
                paths: target.monitors.clone(),
            }
        } else {
            first_error.unwrap_or(MonitorError::None { pid })
        })
    }

    fn over(client: Client, target: &Target) -> Monitor {
        Monitor::new(client, target.process.pid(), target.cwd.clone())
    }

    pub(crate) fn new(client: Client, pid: i32, cwd: PathBuf) -> Monitor {
        Monitor {
            client,
            pid,
            cwd,
            drain_node: None,
            expects_dump: false,
        }
    }

    /// Connects to the monitor of a VM that we started, and makes sure that it is the VM's. Nothing is said
    /// yet: QEMU may not be able to answer.
    ///
    /// # Errors
    /// [`MonitorError::OtherVm`] when another process listens there.
    pub fn reach(
        path: &std::path::Path,
        pid: i32,
        timeout: Duration,
    ) -> Result<Reached, MonitorError> {
        let client = Client::reach(path, timeout)?;
        let other_pid = client.peer_pid()?;
        match other_pid == pid {
            true => Ok(Reached {
                client,
                path: path.to_owned(),
                pid,
            }),
            false => Err(MonitorError::OtherVm {
                path: path.to_owned(),
                pid,
                other_pid,
            }),
        }
    }

    /// The connection itself, for commands of one's own, events, and the guardian.
    pub fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// Whether the VM runs (`query-status`).
    pub fn run_state(&mut self) -> Result<RunState, MonitorError> {
        self.query("query-status")
    }

    /// Whether the guest is suspended to RAM; not where QEMU does not answer.
    pub fn is_suspended(&mut self) -> bool {
        self.run_state().is_ok_and(|state| state.is_suspended())
    }

    /// Pauses the VM: the CPUs halt, requests in flight are finished, images flushed.
    pub fn stop(&mut self) -> Result<(), MonitorError> {
        self.slow("stop")
    }

    /// Resumes the VM.
    pub fn cont(&mut self) -> Result<(), MonitorError> {
        self.slow("cont")
    }

    /// Ends QEMU, which flushes its disks first. Returns when QEMU has answered, or has closed its monitor.
    pub fn quit(&mut self) -> Result<(), MonitorError> {
        match self.slow("quit") {
            Err(MonitorError::Qmp(QmpError::Closed)) => Ok(()),
            other => other,
        }
    }

    /// Has the VM pause, without waiting for it.
    pub fn send_stop(&mut self) -> Result<Ticket, MonitorError> {
        Ok(self.client.send("stop", Value::Null)?)
    }

    /// Waits until the VM has paused.
    pub fn wait_stopped(&mut self, ticket: Ticket) -> Result<(), MonitorError> {
        let limit = Duration::from_secs(STOP_LIMIT_SECONDS);
        Ok(self.client.wait(ticket, limit).map(drop)?)
    }

    /// QEMU's version (`query-version`), such as `10.0.2`.
    pub fn version(&mut self) -> Result<String, MonitorError> {
        let version: Version = self.query("query-version")?;
        Ok(version.qemu.to_string())
    }

    /// All RAM blocks (`info ramblock`).
    pub fn ram_blocks(&mut self) -> Result<Vec<RamBlock>, MonitorError> {
        let ticket = self.ask_ram_blocks()?;
        self.answered_ram_blocks(ticket)
    }

    /// Asks for them, for [`Monitor::answered_ram_blocks`].
    pub fn ask_ram_blocks(&mut self) -> Result<Ticket, MonitorError> {
        let arguments = json!({ "command-line": RAM_BLOCKS });
        Ok(self.client.send(HUMAN, arguments)?)
    }

    /// The RAM blocks, when QEMU came to the question.
    pub fn answered_ram_blocks(&mut self, asked: Ticket) -> Result<Vec<RamBlock>, MonitorError> {
        let limit = Duration::from_secs(REPLY_LIMIT_SECONDS);
        let table: String = typed(HUMAN, self.client.wait(asked, limit)?)?;
        ram_blocks::parse(&table).map_err(|what| unexpected(RAM_BLOCKS, what))
    }

    /// The identity of the VM.
    pub fn identity(&mut self) -> Result<Identity, MonitorError> {
        #[derive(Deserialize)]
        struct Name {
            name: Option<String>,
        }
        #[derive(Deserialize)]
        struct Uuid {
            #[serde(rename = "UUID")]
            uuid: String,
        }
        let version: Version = self.query("query-version")?;
        let name: Name = self.query("query-name")?;
        let uuid: Uuid = self.query("query-uuid")?;
        let kvm = self.uses_kvm()?;
        Ok(Identity {
            qemu_version: version.qemu.to_string(),
            package: version.package,
            machine: self.machine()?,
            architecture: self.architecture()?,
            uuid: uuid.uuid,
            name: name.name,
            accelerator: if kvm {
                Accelerator::Kvm
            } else {
                Accelerator::Tcg
            },
        })
    }

    /// Whether the guest runs under KVM.
    pub(crate) fn uses_kvm(&mut self) -> Result<bool, MonitorError> {
        #[derive(Deserialize)]
        struct Kvm {
            enabled: bool,
        }
        let kvm: Kvm = self.query("query-kvm")?;
        Ok(kvm.enabled)
    }

    /// The guest's architecture (`query-target`).
    pub(crate) fn architecture(&mut self) -> Result<String, MonitorError> {
        #[derive(Deserialize)]
        struct Target {
            arch: String,
        }
        let target: Target = self.query("query-target")?;
        Ok(target.arch)
    }

    /// The versioned machine type: the QOM type of `/machine` is its name and `-machine`.
    fn machine(&mut self) -> Result<String, MonitorError> {
        #[derive(Deserialize)]
        struct Machine {
            name: String,
        }
        let arguments = json!({ "path": "/machine", "property": "type" });
        let kind: String = self.run("qom-get", arguments)?;
        let name = kind.strip_suffix("-machine").unwrap_or(&kind);
        let known: Vec<Machine> = self.query("query-machines")?;
        if known.iter().any(|machine| machine.name == name) {
            Ok(name.to_owned())
        } else {
            Err(unexpected("qom-get", format!("machine type {kind:?}")))
        }
    }

    /// The features of the guest's first processor; none where QEMU does not report them.
    pub fn cpu_features(&mut self) -> Result<Vec<FeatureWord>, MonitorError> {
        #[derive(Deserialize)]
        struct Cpu {
            #[serde(rename = "qom-path")]
            path: String,
        }
        let cpus: Vec<Cpu> = self.query("query-cpus-fast")?;
        let Some(cpu) = cpus.first() else {
            return Ok(Vec::new());
        };
        let arguments = json!({ "path": cpu.path, "property": "feature-words" });
        match self.run("qom-get", arguments) {
            Err(MonitorError::Qmp(QmpError::Command { .. })) => Ok(Vec::new()),
            other => other,
        }
    }

    /// Has the guest's network cards tell the network where they are now (`announce-self`), five times
    /// within a second.
    pub fn announce(&mut self) -> Result<(), MonitorError> {
        let arguments = json!({ "initial": 50, "max": 550, "rounds": 5, "step": 100 });
        self.client.execute("announce-self", arguments)?;
        Ok(())
    }

    /// The devices that were added by option or by hot-plug.
    pub(crate) fn peripherals(&mut self) -> Result<Vec<Peripheral>, MonitorError> {
        #[derive(Deserialize)]
        struct Member {
            name: String,
            #[serde(rename = "type")]
            kind: String,
        }
        let mut peripherals = Vec::new();
        for path in ["/machine/peripheral", "/machine/peripheral-anon"] {
            let members: Vec<Member> = self.run("qom-list", json!({ "path": path }))?;
            for Member { name, kind } in members {
                let driver = kind
                    .strip_prefix("child<")
                    .and_then(|kind| kind.strip_suffix('>'));
                if let Some(driver) = driver {
                    peripherals.push(Peripheral {
                        id: name,
                        driver: driver.to_owned(),
                        anonymous: path.ends_with("-anon"),
                    });
                }
            }
        }
        Ok(peripherals)
    }

    /// A command of the human monitor, for facts that the machine protocol does not report.
    pub(crate) fn human(&mut self, command: &str) -> Result<String, MonitorError> {
        self.run(HUMAN, json!({ "command-line": command }))
    }

    /// The ROMs that QEMU copies into the guest's memory anew at each reset, by name (`info roms`): kernels and
    /// files that the command line loads, never firmware.
    pub fn roms_in_ram(&mut self) -> Result<Vec<String>, MonitorError> {
        Ok(roms_in_ram(&self.human("info roms")?))
    }

    fn slow(&mut self, command: &'static str) -> Result<(), MonitorError> {
        self.slow_with(command, Value::Null)
    }

    /// A command that waits for disks.
    fn slow_with(&mut self, command: &'static str, arguments: Value) -> Result<(), MonitorError> {
        let ticket = self.client.send(command, arguments)?;
        self.wait_stopped(ticket)
    }

    pub(crate) fn query<T: DeserializeOwned>(
        &mut self,
        command: &'static str,
    ) -> Result<T, MonitorError> {
        self.run(command, Value::Null)
    }

    pub(crate) fn run<T: DeserializeOwned>(
        &mut self,
        command: &'static str,
        arguments: Value,
    ) -> Result<T, MonitorError> {
        typed(command, self.client.execute(command, arguments)?)
    }
}

/// The names of the ROMs in RAM, in lines like `addr=00100000 size=0x040000 mem=ram name="kernel"`.
pub(crate) fn roms_in_ram(table: &str) -> Vec<String> {
    let in_ram = table.lines().filter(|line| line.contains(" mem=ram "));
    in_ram
        .map(|line| match line.split_once("name=") {
            Some((_, name)) => name.trim().trim_matches('"').to_owned(),
            None => line.trim().to_owned(),
        })
        .collect()
}

fn typed<T: DeserializeOwned>(command: &'static str, reply: Value) -> Result<T, MonitorError> {
    serde_json::from_value(reply).map_err(|error| unexpected(command, error.to_string()))
}

fn unexpected(command: &'static str, what: String) -> MonitorError {
    MonitorError::Unexpected { command, what }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_in_ram_is_named() {
        let table = "addr=00000000fffc0000 size=0x040000 mem=rom name=\"bios-256k.bin\"\n\
            addr=0000000000100000 size=0x001000 mem=ram name=\"loaded.bin\"\n\
            /rom@etc/acpi/tables size=0x200000 name=\"etc/acpi/tables\"\n";
        assert_eq!(roms_in_ram(table), ["loaded.bin"]);
    }
}
