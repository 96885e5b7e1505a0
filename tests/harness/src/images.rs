//! Images of disks: made, copied, and given to a QEMU.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::running::PATIENCE;

/// The format of an image that is nothing but the disk's content.
pub const RAW: &str = "raw";
/// The disk's name in QEMU.
const DEVICE: &str = "journal";

/// QEMU's arguments for a disk.
pub fn drive(disk: &Path, format: &str) -> [String; 4] {
    let drive = format!(
        "file={},format={format},if=none,id={DEVICE}",
        disk.display()
    );
    let device = format!("virtio-blk-pci,drive={DEVICE}");
    ["-drive".to_owned(), drive, "-device".to_owned(), device]
}

/// The same with a node for the file and one for the format, as managers give them.
pub(crate) fn nodes(disk: &Path, format: &str) -> [String; 6] {
    let file = format!("driver=file,node-name=stored,filename={}", disk.display());
    let node = format!("driver={format},node-name=format,file=stored");
    let device = format!("virtio-blk-pci,drive=format,id={DEVICE}");
    let options = ["-blockdev", "-blockdev", "-device"].map(str::to_owned);
    let [first, second, third] = options;
    [first, file, second, node, third, device]
}

/// Makes an empty image.
pub fn make_image(path: &Path, format: &str, mib: u32) -> Result<()> {
    let size = format!("{mib}M");
    let mut command = Command::new("qemu-img");
    run(command
        .args(["create", "-q", "-f", format])
        .arg(path)
        .arg(size))
}

/// Makes a raw image with an empty file system. Its blocks are of a page: whole pages of the guest's memory are on the disk.
pub fn make_file_system(path: &Path, mib: u32) -> Result<()> {
    make_image(path, RAW, mib)?;
    let format = ["-q", "-F", "-b", "4096"];
    run(Command::new("mkfs.ext4").args(format).arg(path))
}

/// Runs a program to its end, and fails unless it succeeds.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let ended = command.output()?;
    ensure!(ended.status.success(), "{command:?}: {ended:?}");
    Ok(())
}

/// Copies the content of an image. A QEMU that was killed may have it locked for a moment more.
pub(crate) fn convert(image: &Path, format: &str, raw: &Path) -> Result<()> {
    let begin = Instant::now();
    loop {
        let converted = Command::new("qemu-img")
            .args(["convert", "-f", format, "-O", "raw"])
            .args([image, raw])
            .output()?;
        if converted.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&converted.stderr).into_owned();
        ensure!(
            said.contains("lock") && begin.elapsed() < PATIENCE,
            "{said}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}
