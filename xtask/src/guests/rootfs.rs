//! Builds the guests with real software: a Debian on a disk image, and the initramfs that boots it.
//!
//! Only some benches need it: building takes minutes, root, and 1 GB. `guest/debian` has its workloads, and the script
//! that prepares it after its packages are installed.

use super::cpio::Archive;
use super::{KERNEL_ARGUMENTS, kernel, modules, read, replace, started_archive};
use crate::run::{output, run};
use crate::setup;
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail};
use std::fmt::{self, Write};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

/// The release, independent of that of this machine.
const SUITE: &str = "bookworm";
/// Packages beyond debootstrap's minimum: programs and compilers of the workloads.
const PACKAGES: &[&str] = &[
    "bc",
    "bison",
    "busybox",
    "bzip2",
    "dbench",
    "fio",
    "flex",
    "gcc",
    "libc6-dev",
    "linux-source-6.1",
    "make",
    "postgresql-15",
    "python3-minimal",
    "qemu-guest-agent",
    "redis-server",
    "redis-tools",
];
/// Modules for the root file system, the guest agent's channel, and the balloon.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_blk",
    "ext4",
    "overlay",
    "virtio_console",
    "virtio_balloon",
];
/// Programs that build it, with their packages.
const PROGRAMS: &[(&str, &str)] = &[
    ("debootstrap", "debootstrap"),
    ("mkfs.ext4", "e2fsprogs"),
    ("unshare", "util-linux"),
];
/// The parts of `guest/debian` that go into the image, under `/lab`.
const PARTS: &[&str] = &["prepare", "run", "serial", "src", "workloads"];
/// Space for the file system itself, in MiB.
const SPARE_MIB: u64 = 64;

/// The files that a Debian guest boots from, besides the kernel of all guests.
pub struct Rootfs {
    /// An ext4 file system, used read-only.
    pub image: PathBuf,
    /// The initramfs that mounts it.
    pub initramfs: PathBuf,
}

impl fmt::Display for Rootfs {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{:<12}{}", "image", self.image.display())?;
        writeln!(out, "{:<12}{}", "initramfs", self.initramfs.display())?;
        write!(
            out,
            "boot with   qemu-system-x86_64 -machine q35 -accel tcg -m 1024 -display none -kernel \
             vmlinuz -initrd debian-initramfs.cpio -serial file:SERIAL -drive \
             file=debian.ext4,if=virtio,format=raw,readonly=on -append '{KERNEL_ARGUMENTS} \
             lab.workload=compile'"
        )
    }
}

/// Builds files that are missing or do not match their recipe.
pub fn build(workspace: &Workspace) -> Result<Rootfs> {
    let folder = workspace.target.join("guests");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let sources = workspace.root.join("guest/debian");
    let rootfs = Rootfs {
        image: folder.join("debian.ext4"),
        initramfs: folder.join("debian-initramfs.cpio"),
    };
    let initramfs = initramfs(&sources, &kernel::fetch(&folder)?)?;
    replace(&rootfs.initramfs, &initramfs, 0o644)?;
    let recipe = recipe(&sources)?;
    let stamp = folder.join("debian.recipe");
    let built_from = fs::read_to_string(&stamp).unwrap_or_default();
    if !rootfs.image.is_file() || built_from != recipe {
        println!("guests: building a Debian root file system (once, some minutes)");
        build_image(&sources, &folder, &rootfs.image)?;
        // Written last, so that an interrupted build is repeated.
        replace(&stamp, recipe.as_bytes(), 0o644)?;
    }
    Ok(rootfs)
}

fn initramfs(sources: &Path, modules: &Path) -> Result<Vec<u8>> {
    let mut archive: Archive = started_archive(&read(&sources.join("init"))?)?;
    modules::add(&mut archive, modules, MODULES)?;
    Ok(archive.finish())
}

/// All sources of the image as one text, except the versions of the packages.
fn recipe(sources: &Path) -> Result<String> {
    let mut recipe = format!("{SUITE} {}\n", PACKAGES.join(" "));
    for part in PARTS {
        add_to_recipe(&mut recipe, &sources.join(part))?;
    }
    Ok(recipe)
}

fn add_to_recipe(recipe: &mut String, path: &Path) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // Writing to a String cannot fail.
    let _ = writeln!(recipe, "== {name}");
    if !path.is_dir() {
        let text = fs::read_to_string(path);
        *recipe += &text.with_context(|| format!("cannot read {}", path.display()))?;
        return Ok(());
    }
    let entries = fs::read_dir(path).with_context(|| format!("cannot list {}", path.display()))?;
    let mut paths = Vec::new();
    for entry in entries {
        paths.push(entry?.path());
    }
    paths.sort();
    paths
        .iter()
        .try_for_each(|path| add_to_recipe(recipe, path))
}

fn build_image(sources: &Path, folder: &Path, image: &Path) -> Result<()> {
    setup::need_programs(PROGRAMS)?;
    if !setup::is_root()? {
        bail!("building a Debian root file system needs root");
    }
    let root = folder.join("debian");
    clear(&root)?;
    let mut debootstrap = in_own_mounts("debootstrap");
    debootstrap
        .arg("--variant=minbase")
        .arg(format!("--include={}", PACKAGES.join(",")))
        .arg(SUITE)
        .arg(&root);
    // Without a mirror, debootstrap uses Debian's own.
    if let Some(mirror) = setup::mirror(SUITE)? {
        debootstrap.arg(mirror);
    }
    run(&mut debootstrap)?;
    let lab = root.join("lab");
    fs::create_dir(&lab).with_context(|| format!("cannot create {}", lab.display()))?;
    let parts = PARTS.iter().map(|part| sources.join(part));
    run(Command::new("cp")
        .args(["--recursive", "--preserve=mode"])
        .args(parts)
        .arg(&lab))?;
    let jobs = thread::available_parallelism().map_or(1, |count| count.get());
    run(in_own_mounts("chroot")
        .arg(&root)
        .args(["/lab/prepare", &jobs.to_string()]))?;
    make_file_system(&root, image)?;
    clear(&root)
}

/// Runs the program in a mount namespace of its own, so that its mounts end with it. The folder can then be removed
/// without removing mounted files.
fn in_own_mounts(program: &str) -> Command {
    let mut command = Command::new("unshare");
    command
        .env("LC_ALL", "C")
        // A user's PATH often lacks the sbin folders.
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .args(["--mount", program]);
    command
}

fn make_file_system(root: &Path, image: &Path) -> Result<()> {
    let du = output(Command::new("du").args(["-s", "-B1M"]).arg(root))?;
    let mib: u64 = du
        .split_whitespace()
        .next()
        .and_then(|word| word.parse().ok())
        .context("du printed no size")?;
    // 10 % for inodes and block lists.
    let mib = mib + mib / 10 + SPARE_MIB;
    let new = image.with_extension("new");
    if new.exists() {
        fs::remove_file(&new).with_context(|| format!("cannot remove {}", new.display()))?;
    }
    run(Command::new("/usr/sbin/mkfs.ext4")
        // Read-only: no journal, no blocks reserved for root.
        .args(["-q", "-F", "-O", "^has_journal", "-m", "0", "-i", "8192"])
        .arg("-d")
        .args([root, &new])
        .arg(format!("{mib}M")))?;
    fs::rename(&new, image).with_context(|| format!("cannot install {}", image.display()))
}

fn clear(folder: &Path) -> Result<()> {
    match folder.exists() {
        true => {
            fs::remove_dir_all(folder).with_context(|| format!("cannot clear {}", folder.display()))
        }
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recipe_changes_with_any_file_and_not_with_their_order_on_disk() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        for part in ["src", "workloads"] {
            fs::create_dir(folder.path().join(part)).unwrap();
        }
        for name in [
            "prepare",
            "run",
            "serial",
            "src/a.c",
            "workloads/b",
            "workloads/a",
        ] {
            write(name, name);
        }
        let first = recipe(folder.path()).unwrap();
        fs::remove_file(folder.path().join("workloads/b")).unwrap();
        write("workloads/b", "workloads/b");
        assert_eq!(recipe(folder.path()).unwrap(), first);
        write("workloads/b", "workloads/b and more");
        assert_ne!(recipe(folder.path()).unwrap(), first);
    }
}
