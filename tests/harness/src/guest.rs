//! Guests of every kind that Stillframe promises to handle, each in a QEMU started as a user would
//! start it. A guest ends when dropped.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::qmp::Qmp;
use crate::serial::Serial;

/// The kernel's arguments besides its work; `cargo xtask guests` gives the reasons.
pub const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet loglevel=1 panic=-1 no_timer_check \
                                           tsc=reliable nowatchdog mitigations=off";
/// Time for a guest to boot and tick under TCG, on a busy machine.
pub const BOOT_LIMIT: Duration = Duration::from_secs(120);
/// Where memory that is a file lies.
pub const SHM: &str = "/dev/shm/";
/// Put before the name of the file that is the memory of a VM's copy. Short: a copy of a copy has it twice.
pub const COPY_OF: &str = "+";
/// The end of an agent's channel, in the guest's folder.
const AGENT: &str = "agent";

/// A guest's agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentKind {
    /// QEMU's.
    Qemu,
    /// Stillframe's.
    Own,
}

/// A kind of guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// q35, private memory, no special flag.
    Private,
    /// Memory shared by memfd.
    Memfd,
    /// Memory shared by a file on tmpfs.
    FileShared,
    /// `-machine pc`.
    Pc,
    /// Two vCPUs.
    TwoCpus,
    /// 5 GiB: main RAM in two slots, below and above 4 GiB.
    FiveGib,
    /// A scrolling text console: VGA memory changes.
    Console,
    /// QEMU's own system call filter on, everything denied.
    Sandbox,
    /// The boot sector under KVM.
    KvmBootSector,
}

impl Kind {
    /// All of them; the last only where `/dev/kvm` is.
    pub const ALL: [Kind; 9] = [
        Kind::Private,
        Kind::Memfd,
        Kind::FileShared,
        Kind::Pc,
        Kind::TwoCpus,
        Kind::FiveGib,
        Kind::Console,
        Kind::Sandbox,
        Kind::KvmBootSector,
    ];

    /// A short name.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Private => "private",
            Kind::Memfd => "memfd",
            Kind::FileShared => "file-shared",
            Kind::Pc => "pc",
            Kind::TwoCpus => "two-cpus",
            Kind::FiveGib => "five-gib",
            Kind::Console => "console",
            Kind::Sandbox => "sandbox",
            Kind::KvmBootSector => "kvm-boot-sector",
        }
    }
}

/// The workload in a Linux guest; see `guest/workload`.
#[derive(Debug, Clone)]
pub struct Workload {
    /// MiB that it writes and checks.
    pub mib: u32,
    /// Its pattern.
    pub pattern: &'static str,
    /// Milliseconds between two ticks.
    pub tick_ms: u32,
    /// Writes a tick.
    pub writes_per_tick: u32,
    /// One such part of the memory is checked each tick.
    pub share: u32,
}

impl Default for Workload {
    fn default() -> Workload {
        Workload {
            mib: 24,
            pattern: "mixed",
            tick_ms: 100,
            writes_per_tick: 200,
            share: 8,
        }
    }
}

/// A guest to be started.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Its kind.
    pub kind: Kind,
    /// The QEMU to run.
    pub program: PathBuf,
    /// MiB of RAM; the kind may ask for more.
    pub ram_mib: u32,
    /// Its workload.
    pub workload: Workload,
    /// The guest's agent, if it has one and QEMU a channel to it.
    pub agent: Option<AgentKind>,
    /// Whether it has drivers for a disk, a balloon and a network card; more words for its kernel.
    pub drivers: Option<String>,
    /// Whether it has SQLite, too.
    pub database: bool,
    /// More arguments for QEMU.
    pub extra: Vec<String>,
}

impl Setup {
    /// A small guest of this kind.
    pub fn new(kind: Kind) -> Setup {
        Setup {
            kind,
            program: "qemu-system-x86_64".into(),
            ram_mib: 192,
            workload: Workload::default(),
            agent: None,
            drivers: None,
            database: false,
            extra: Vec::new(),
        }
    }

    /// A guest of this kind and name, as small as a test of anything but memory likes it.
    pub fn small(kind: Kind, name: &str) -> Setup {
        let mut setup = Setup::new(kind).with(&["-name", name]);
        setup.ram_mib = 128;
        setup.workload.mib = 16;
        setup
    }

    /// With more arguments for QEMU.
    pub fn with(mut self, arguments: &[&str]) -> Setup {
        self.extra
            .extend(arguments.iter().map(|&word| word.to_owned()));
        self
    }

    /// With QEMU's guest agent.
    pub fn with_agent(mut self) -> Setup {
        self.agent = Some(AgentKind::Qemu);
        self
    }

    /// With Stillframe's guest agent.
    pub fn with_own_agent(mut self) -> Setup {
        self.agent = Some(AgentKind::Own);
        self
    }

    /// With drivers for virtio devices, and more words for its kernel: `sf.disk=vda` reads that disk for
    /// ever, `sf.suspend=3` goes to sleep after three seconds.
    pub fn with_drivers(mut self, words: &str) -> Setup {
        self.drivers = Some(words.to_owned());
        self
    }

    /// With a database on this disk.
    pub fn with_database(mut self, disk: &str) -> Setup {
        self.database = true;
        self.with_drivers(&format!("sf.database={disk}"))
    }

    /// The arguments of a QEMU whose files are in `folder`.
    pub fn arguments(&self, folder: &Path) -> Result<Vec<String>> {
        let ram_mib = match self.kind {
            Kind::FiveGib => 5120,
            _ => self.ram_mib,
        };
        let ram = format!("{ram_mib}M");
        let mut arguments = surroundings(folder, ram_mib);
        let mut add = |words: &[&str]| arguments.extend(words.iter().map(|&word| word.to_owned()));
        match self.kind {
            Kind::Private | Kind::Console | Kind::FiveGib => add(&["-machine", "q35"]),
            Kind::Memfd => {
                let object = format!("memory-backend-memfd,id=mem,size={ram},share=on");
                add(&["-machine", "q35,memory-backend=mem", "-object", &object]);
            }
            Kind::FileShared => {
                let file = format!("{SHM}stillframe-{}", folder_name(folder));
                let object =
                    format!("memory-backend-file,id=mem,size={ram},mem-path={file},share=on");
                add(&["-machine", "q35,memory-backend=mem", "-object", &object]);
            }
            Kind::Pc => add(&["-machine", "pc"]),
            Kind::TwoCpus => add(&["-machine", "q35", "-smp", "2"]),
            Kind::Sandbox => {
                let filter =
                    "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
                add(&["-machine", "q35", "-sandbox", filter]);
            }
            Kind::KvmBootSector => {
                let image = guests()?.join("boot-sector.img");
                let drive = format!(
                    "file={},format=raw,if=ide,readonly=off,snapshot=on",
                    image.display()
                );
                add(&["-machine", "pc", "-accel", "kvm", "-drive", &drive]);
            }
        }
        if self.kind != Kind::KvmBootSector {
            let initramfs = match (self.agent, &self.drivers) {
                (Some(_), _) => "agent-initramfs.cpio",
                (None, Some(_)) if self.database => "database-initramfs.cpio",
                (None, Some(_)) => "drivers-initramfs.cpio",
                (None, None) => "initramfs.cpio",
            };
            arguments.extend(linux(initramfs, &self.kernel_command_line())?);
        }
        if let Some(agent) = self.agent {
            arguments.extend(agent_channel(folder, agent));
        }
        arguments.extend(self.extra.iter().cloned());
        Ok(arguments)
    }

    fn kernel_command_line(&self) -> String {
        let Workload {
            mib,
            pattern,
            tick_ms,
            writes_per_tick,
            share,
        } = &self.workload;
        let scroll = if self.kind == Kind::Console {
            ",--scroll-lines=20"
        } else {
            ""
        };
        format!(
            "{KERNEL_ARGUMENTS} sf.args=--mib={mib},--pattern={pattern},--tick-ms={tick_ms},\
             --writes-per-tick={writes_per_tick},--share={share}{scroll} {}",
            self.drivers.as_deref().unwrap_or_default()
        )
    }

    /// Starts it, without waiting for it to boot.
    pub fn start(&self) -> Result<Guest> {
        Guest::start(self.kind, &self.program, |folder| self.arguments(folder))
    }

    /// Starts it and waits until the workload has ticked.
    ///
    /// A Linux of several vCPUs under TCG now and then hangs before its first word, long before anything of
    /// Stillframe touches it. Such a guest is reported, with its registers, and started once more. A guest that has
    /// output something and hangs is not.
    pub fn boot(&self) -> Result<Guest> {
        let guest = self.start()?;
        let booted = guest.serial.wait_ticks(3, BOOT_LIMIT);
        if booted.is_ok() || !guest.serial.text().is_empty() {
            return booted.map(|_| guest);
        }
        // QEMU itself may have ended, too.
        let registers = guest.second_monitor();
        let registers = registers.and_then(|mut monitor| monitor.human("info registers -a"));
        let log = fs::read_to_string(guest.folder().join("qemu.log")).unwrap_or_default();
        eprintln!(
            "a guest that said nothing is started once more; its registers: {registers:?}; QEMU said: {log}"
        );
        drop(guest);
        let guest = self.start()?;
        guest.serial.wait_ticks(3, BOOT_LIMIT)?;
        Ok(guest)
    }
}

/// The arguments of every guest: its RAM, its monitors and its serial port, which are in `folder`.
pub fn surroundings(folder: &Path, ram_mib: u32) -> Vec<String> {
    let path = |name: &str| folder.join(name).display().to_string();
    [
        "-display",
        "none",
        "-no-user-config",
        "-qmp",
        &format!("unix:{},server=on,wait=off", path("qmp")),
        "-qmp",
        &format!("unix:{},server=on,wait=off", path("qmp2")),
        "-serial",
        &format!("file:{}", path("serial")),
        "-m",
        &format!("{ram_mib}M"),
    ]
    .map(str::to_owned)
    .to_vec()
}

pub(crate) fn agent_channel(folder: &Path, agent: AgentKind) -> [String; 6] {
    let path = folder.join(AGENT);
    let backend = format!("socket,id=agent,path={},server=on,wait=off", path.display());
    let name = match agent {
        AgentKind::Qemu => "org.qemu.guest_agent.0",
        AgentKind::Own => "org.stillframe.agent.0",
    };
    let port = format!("virtserialport,chardev=agent,name={name}");
    [
        "-chardev",
        &backend,
        "-device",
        "virtio-serial-pci",
        "-device",
        &port,
    ]
    .map(str::to_owned)
}

/// The arguments of every Linux guest.
pub fn linux(initramfs: &str, command_line: &str) -> Result<Vec<String>> {
    let guests = guests()?;
    let path = |name: &str| guests.join(name).display().to_string();
    Ok([
        "-accel",
        "tcg",
        "-kernel",
        &path("vmlinuz"),
        "-initrd",
        &path(initramfs),
        "-append",
        command_line,
    ]
    .map(str::to_owned)
    .to_vec())
}

/// A running guest.
#[derive(Debug)]
pub struct Guest {
    /// Its kind.
    pub kind: Kind,
    process: Child,
    folder: TempDir,
    /// Its serial port.
    pub serial: Serial,
}

impl Guest {
    /// Starts QEMU with the arguments that it gets for its folder, without waiting for it to boot.
    pub fn start(
        kind: Kind,
        program: &Path,
        arguments: impl FnOnce(&Path) -> Result<Vec<String>>,
    ) -> Result<Guest> {
        let folder = tempfile::Builder::new()
            .prefix("stillframe-e2e-")
            .tempdir()?;
        let arguments = arguments(folder.path())?;
        let log = fs::File::create(folder.path().join("qemu.log"))?;
        let process = Command::new(program)
            .args(&arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| {
                let program = program.display();
                format!("cannot start {program}; `cargo xtask setup` installs QEMU")
            })?;
        let serial = Serial::new(&folder.path().join("serial"));
        let mut guest = Guest {
            kind,
            process,
            folder,
            serial,
        };
        if let Err(error) = Qmp::connect(&guest.qmp_path()) {
            let log = fs::read_to_string(guest.folder.path().join("qemu.log")).unwrap_or_default();
            let _ = guest.process.kill();
            bail!("QEMU did not start: {error:#}: {log}");
        }
        Ok(guest)
    }

    /// QEMU's process id.
    pub fn pid(&self) -> i32 {
        self.process.id() as i32
    }

    /// The same as a word for a command line.
    pub fn pid_text(&self) -> String {
        self.process.id().to_string()
    }

    /// The monitor that Stillframe takes.
    pub fn qmp_path(&self) -> PathBuf {
        self.folder.path().join("qmp")
    }

    /// The channel of its agent, if it has one.
    pub fn agent_path(&self) -> PathBuf {
        self.folder.path().join(AGENT)
    }

    /// A folder for the test's own files, that ends with the guest.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A connection to the second monitor, which is the test's own.
    pub fn second_monitor(&self) -> Result<Qmp> {
        Qmp::connect(&self.folder.path().join("qmp2"))
    }

    /// Whether QEMU still runs.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }

    /// Ends QEMU as a crash would.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }
}

/// signal(7).
const SIGKILL: i32 = 9;

impl Guest {
    /// Whether QEMU runs, for the error of a test: its log and the serial port go with the folder.
    pub fn state(&mut self) -> String {
        let status = match self.process.try_wait() {
            Ok(None) => return "QEMU runs".into(),
            Ok(Some(status)) => status.to_string(),
            Err(error) => error.to_string(),
        };
        let log = self.folder.path().join("qemu.log");
        let log = fs::read_to_string(log).unwrap_or_default();
        let last = self.serial.last_lines();
        format!("QEMU has ended ({status}): {log}; the guest said at last: {last}")
    }

    /// Prints why QEMU has ended, if neither the guest nor a test's SIGKILL ended it.
    fn tell_why_it_ended(&mut self) {
        let Ok(Some(status)) = self.process.try_wait() else {
            return;
        };
        if !status.success() && status.signal() != Some(SIGKILL) {
            eprintln!("{}", self.state());
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.tell_why_it_ended();
        let _ = self.kill();
        if self.kind == Kind::FileShared {
            remove_memory_files(&format!("stillframe-{}", folder_name(self.folder.path())));
        }
    }
}

/// Where kernel, initramfs and boot sector are: `STILLFRAME_GUESTS`, which `cargo xtask` sets, or
/// the usual folder.
pub fn guests() -> Result<PathBuf> {
    let folder = std::env::var_os("STILLFRAME_GUESTS").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guests"),
        PathBuf::from,
    );
    folder.canonicalize().with_context(|| {
        format!(
            "no guests at {}: run `cargo xtask guests`",
            folder.display()
        )
    })
}

/// Removes the files that were the memory of a guest and of its copies.
fn remove_memory_files(name: &str) {
    for file in fs::read_dir(SHM).into_iter().flatten().flatten() {
        let file_name = file.file_name();
        if file_name.to_string_lossy().trim_start_matches(COPY_OF) == name {
            let _ = fs::remove_file(file.path());
        }
    }
}

fn folder_name(folder: &Path) -> String {
    folder
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}
