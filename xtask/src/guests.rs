//! `guests`: builds the guests of the tests into the target folder.
//!
//! The kernel is fetched once. Everything else is built from this repository each time, in seconds and without network;
//! a file is replaced only if it differs.

mod agent;
mod cpio;
pub mod elf;
mod kernel;
mod modules;
pub mod newer_qemu;
mod package;
mod program;
pub mod rootfs;

use crate::run::{cargo, run};
use crate::setup::{find_program, static_busybox};
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail};
use cpio::Archive;
use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Programs of guests must be static: the initramfs has no C library.
const TARGET: &str = "x86_64-unknown-linux-gnu";
const STATIC: &str = "-C target-feature=+crt-static -C strip=symbols";

/// The files of the guests.
pub struct Guests {
    /// The folder of all files.
    pub folder: PathBuf,
}

impl Guests {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

impl fmt::Display for Guests {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, name) in [
            ("kernel", "vmlinuz"),
            ("initramfs", "initramfs.cpio"),
            ("with agent", "agent-initramfs.cpio"),
            ("with drivers", "drivers-initramfs.cpio"),
            ("with SQLite", "database-initramfs.cpio"),
            ("boot sector", "boot-sector.img"),
            ("workload", "workload"),
        ] {
            writeln!(out, "{what:<13}{}", self.path(name).display())?;
        }
        write!(
            out,
            "boot with    qemu-system-x86_64 -machine q35 -accel tcg -m 256 -display none -kernel \
             vmlinuz -initrd initramfs.cpio -serial file:SERIAL -append '{KERNEL_ARGUMENTS} \
             sf.args=--mib=64,--pattern=random,--tick-ms=500,--writes-per-tick=4000'"
        )
    }
}

/// Modules of a guest that uses its devices: disks (virtio, SCSI, IDE), balloon, network card.
const DRIVERS: &[&str] = &[
    "virtio_pci",
    "virtio_blk",
    "virtio_scsi",
    "sd_mod",
    "ata_piix",
    "ext4",
    "virtio_balloon",
    "virtio_net",
];

/// A database of the distribution, for a guest that keeps one on its disk.
const DATABASE: &str = "sqlite3";

/// Kernel arguments besides those of the workload. On a busy host emulated timers are late, which triggers checks of
/// the kernel: `no_timer_check`, `tsc=reliable` and `nowatchdog` disable them. `loglevel=1` keeps kernel messages out
/// of the workload's lines on the serial port, and `panic=-1` ends the machine at once, if QEMU has `-no-reboot`.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet loglevel=1 panic=-1 no_timer_check tsc=reliable nowatchdog mitigations=off";

/// Builds files that are missing or older than their sources.
pub fn build(workspace: &Workspace) -> Result<Guests> {
    let guests = Guests {
        folder: workspace.target.join("guests"),
    };
    fs::create_dir_all(&guests.folder)
        .with_context(|| format!("cannot create {}", guests.folder.display()))?;
    let modules = kernel::fetch(&guests.folder)?;
    let agent = agent::fetch(&guests.folder)?;
    let workload = build_static(workspace, "stillframe-guest-workload")?;
    let own_agent = read(&own_agent(workspace)?)?;
    replace(&guests.path("workload"), &workload, 0o755)?;
    let sources = workspace.root.join("guest");
    let init = read(&sources.join("init"))?;
    let mut plain = started_archive(&init)?;
    plain.program("workload", &workload)?;
    replace(&guests.path("initramfs.cpio"), &plain.finish(), 0o644)?;
    let mut with_agent = started_archive(&init)?;
    with_agent.program("workload", &workload)?;
    let drivers = [DRIVERS, agent::MODULES].concat();
    modules::add(&mut with_agent, &modules, &drivers)?;
    agent::add(&mut with_agent, &agent, &own_agent)?;
    let with_agent = with_agent.finish();
    replace(&guests.path("agent-initramfs.cpio"), &with_agent, 0o644)?;
    let mut with_drivers = started_archive(&init)?;
    with_drivers.program("workload", &workload)?;
    modules::add(&mut with_drivers, &modules, DRIVERS)?;
    let with_drivers = with_drivers.finish();
    replace(&guests.path("drivers-initramfs.cpio"), &with_drivers, 0o644)?;
    let mut with_database = started_archive(&init)?;
    with_database.program("workload", &workload)?;
    modules::add(&mut with_database, &modules, DRIVERS)?;
    let sqlite = find_program(DATABASE).context("sqlite3 is missing: run `cargo xtask setup`")?;
    program::add(&mut with_database, &sqlite, DATABASE)?;
    let with_database = with_database.finish();
    replace(
        &guests.path("database-initramfs.cpio"),
        &with_database,
        0o644,
    )?;
    let sector = build_boot_sector(&sources.join("boot-sector/boot-sector.s"), &guests.folder)?;
    replace(&guests.path("boot-sector.img"), &sector, 0o644)?;
    Ok(guests)
}

/// Builds Stillframe's agent for guests. Returns where it is.
pub fn own_agent(workspace: &Workspace) -> Result<PathBuf> {
    let folder = workspace.target.join("guests");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let path = folder.join(agent::OWN);
    replace(&path, &build_static(workspace, agent::OWN)?, 0o755)?;
    Ok(path)
}

/// A program of this workspace that needs no libraries.
fn build_static(workspace: &Workspace, package: &str) -> Result<Vec<u8>> {
    // A folder of its own: other flags in the same folder would rebuild everything each time.
    let folder = workspace.target.join("guest-build");
    run(cargo()
        .env("RUSTFLAGS", STATIC)
        .current_dir(&workspace.root)
        .args(["build", "--quiet", "--release", "--package", package])
        .args(["--target", TARGET])
        .arg("--target-dir")
        .arg(&folder))?;
    let path = folder.join(TARGET).join("release").join(package);
    let program = read(&path)?;
    if !elf::is_static(&program) {
        bail!("{} is not static", path.display());
    }
    Ok(program)
}

/// An initramfs with busybox and this `/init`, to which files can be added.
fn started_archive(init: &[u8]) -> Result<Archive> {
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "proc", "sys"] {
        archive.folder(folder);
    }
    // The kernel opens it as standard output of /init, before devtmpfs is mounted.
    archive.character_device("dev/console", 5, 1);
    archive.program("bin/busybox", &read(&static_busybox()?)?)?;
    archive.program("init", init)?;
    Ok(archive)
}

fn build_boot_sector(source: &Path, folder: &Path) -> Result<Vec<u8>> {
    let object = folder.join("boot-sector.o");
    let linked = folder.join("boot-sector.linked");
    run(Command::new("as")
        .args(["--32", "-o"])
        .arg(&object)
        .arg(source))?;
    run(Command::new("ld")
        .args(["-m", "elf_i386", "-Ttext", "0x7c00", "--oformat", "binary"])
        .arg("-o")
        .args([&linked, &object]))?;
    let sector = read(&linked)?;
    for temporary in [object, linked] {
        fs::remove_file(&temporary)
            .with_context(|| format!("cannot remove {}", temporary.display()))?;
    }
    if sector.len() != 512 || !sector.ends_with(&[0x55, 0xaa]) {
        bail!("{} does not assemble to a boot sector", source.display());
    }
    Ok(sector)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Replaces a file by a new one. A guest that runs from the old file keeps it.
fn replace(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    match fs::read(path) {
        Ok(old) if old == bytes => return Ok(()),
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot read {}", path.display()));
        }
        _ => {}
    }
    use std::os::unix::fs::PermissionsExt;
    let new = path.with_extension("new");
    fs::write(&new, bytes)
        .and_then(|()| fs::set_permissions(&new, fs::Permissions::from_mode(mode)))
        .and_then(|()| fs::rename(&new, path))
        .with_context(|| format!("cannot write {}", path.display()))
}
