//! Guests with real software: Debian on a disk image that QEMU opens read-only, with all their writes in RAM. Their
//! workloads are in `guest/debian`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::guest::{self, AgentKind, Guest, KERNEL_ARGUMENTS, Kind};

/// The network card that managers give a Linux guest. Without it q35 has a card whose state takes QEMU half a
/// millisecond of every pause to save.
const NETWORK: &str = "user,model=virtio-net-pci";

/// Time for the slowest of them to prepare itself under TCG, on a busy machine.
pub const READY_LIMIT: Duration = Duration::from_secs(900);

/// The workload of such a guest. It reports each finished unit on its serial port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DebianWorkload {
    /// Nothing.
    Idle,
    /// A file server's operations on a file system in RAM.
    Dbench,
    /// The Linux kernel's build.
    Compile,
    /// Sweeps over arrays of doubles in half of RAM.
    Numeric,
    /// Map and reduce over texts.
    Wordcount,
    /// PostgreSQL under pgbench.
    Database,
    /// Redis, whose client reads all values over and over.
    Redis,
    /// memcached, whose client has filled nine tenths of the available RAM and only sets values.
    Memcached,
    /// PostgreSQL with several clients, half of whose transactions are reads and half updates.
    Postgresql,
    /// A web server and its clients.
    Web,
    /// bzip2 of the kernel's sources.
    Bzip2,
    /// Postmark's transactions on files of a disk, to their end.
    Postmark,
    /// A heap of two thirds of RAM, filled.
    Heap,
    /// An archive of programs, unpacked onto a disk.
    Install,
    /// A log on a disk, compressed.
    Gzip,
    /// The Linux kernel's build, on a disk, for three minutes.
    Make,
    /// Random writes to a whole disk.
    Fio,
    /// PostgreSQL on a disk, under pgbench.
    Pgbench,
}

impl DebianWorkload {
    /// The workloads of FITDOC's evaluation.
    pub const OF_PAPERS: [DebianWorkload; 6] = [
        DebianWorkload::Idle,
        DebianWorkload::Dbench,
        DebianWorkload::Compile,
        DebianWorkload::Numeric,
        DebianWorkload::Wordcount,
        DebianWorkload::Database,
    ];

    /// All that go on for ever and need no disk of their own (`vdb`).
    pub const ALL: [DebianWorkload; 11] = [
        DebianWorkload::Idle,
        DebianWorkload::Dbench,
        DebianWorkload::Compile,
        DebianWorkload::Numeric,
        DebianWorkload::Wordcount,
        DebianWorkload::Database,
        DebianWorkload::Redis,
        DebianWorkload::Memcached,
        DebianWorkload::Postgresql,
        DebianWorkload::Web,
        DebianWorkload::Bzip2,
    ];

    /// Its script in `guest/debian/workloads`.
    pub fn name(self) -> &'static str {
        match self {
            DebianWorkload::Idle => "idle",
            DebianWorkload::Dbench => "dbench",
            DebianWorkload::Compile => "compile",
            DebianWorkload::Numeric => "numeric",
            DebianWorkload::Wordcount => "wordcount",
            DebianWorkload::Database => "database",
            DebianWorkload::Redis => "redis",
            DebianWorkload::Memcached => "memcached",
            DebianWorkload::Postgresql => "postgresql",
            DebianWorkload::Web => "web",
            DebianWorkload::Bzip2 => "bzip2",
            DebianWorkload::Postmark => "postmark",
            DebianWorkload::Heap => "heap",
            DebianWorkload::Install => "install",
            DebianWorkload::Gzip => "gzip",
            DebianWorkload::Make => "make",
            DebianWorkload::Fio => "fio",
            DebianWorkload::Pgbench => "pgbench",
        }
    }
}

/// A Debian guest to be started, of one vCPU.
#[derive(Debug, Clone)]
pub struct DebianSetup {
    /// Its workload.
    pub workload: DebianWorkload,
    /// MiB of RAM, 512 or more; the workloads that fill RAM fill as much as there is.
    pub ram_mib: u32,
    /// Whether QEMU has a channel to its guest agent.
    pub agent: bool,
    /// More arguments for QEMU.
    pub extra: Vec<String>,
}

impl DebianSetup {
    /// Starts it and waits until its work begins. From then on, `serial.units()` counts it.
    pub fn boot(&self) -> Result<Guest> {
        let program = Path::new("qemu-system-x86_64");
        let guest = Guest::start(Kind::Private, program, |folder| self.arguments(folder))?;
        let name = self.workload.name();
        guest
            .serial
            .wait_units(0, READY_LIMIT)
            .with_context(|| format!("the guest of {name} does not get ready"))?;
        Ok(guest)
    }

    /// The arguments of a QEMU whose files are in `folder`.
    pub fn arguments(&self, folder: &Path) -> Result<Vec<String>> {
        let mut extra = self.extra.clone();
        if self.agent {
            extra.extend(guest::agent_channel(folder, AgentKind::Qemu));
        }
        arguments(folder, self.ram_mib, self.workload.name(), &extra)
    }
}

/// The image of the root file system, which all of them share.
pub fn image() -> Result<PathBuf> {
    let image = guest::guests()?.join("debian.ext4");
    if !image.exists() {
        let image = image.display();
        bail!("no Debian image at {image}: run `cargo xtask guests --debian`");
    }
    Ok(image)
}

/// The arguments of a QEMU whose files are in `folder`, with a script of `guest/debian/workloads`.
pub(crate) fn arguments(
    folder: &Path,
    ram_mib: u32,
    workload: &str,
    extra: &[String],
) -> Result<Vec<String>> {
    let image = image()?;
    let drive = format!("file={},if=virtio,format=raw,readonly=on", image.display());
    let command_line = format!("{KERNEL_ARGUMENTS} lab.workload={workload}");
    let mut arguments = guest::surroundings(folder, ram_mib);
    arguments.extend(["-machine", "q35", "-drive", &drive, "-nic", NETWORK].map(str::to_owned));
    arguments.extend(guest::linux("debian-initramfs.cpio", &command_line)?);
    arguments.extend_from_slice(extra);
    Ok(arguments)
}
