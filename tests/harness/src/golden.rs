//! A guest whose page cache is full of the files of a golden image, which no VM writes to.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::guest::{Guest, Kind, Setup};
use crate::images::run;
use crate::running::PATIENCE;

/// Where the files come from: programs and libraries of this machine, as a guest has its own.
const SOURCES: [&str; 3] = ["/usr/lib", "/usr/bin", "/usr/share"];

/// Makes an image with a file system of at least `mib` MiB of files, where this machine has as much. Returns their bytes.
pub fn make_image(image: &Path, mib: u64) -> Result<u64> {
    let folder = tempfile::tempdir()?;
    let mut files = Vec::new();
    for source in SOURCES {
        regular_files(Path::new(source), &mut files)?;
    }
    let mut bytes = 0;
    for (number, file) in files.iter().enumerate() {
        if bytes >= mib << 20 {
            break;
        }
        bytes += fs::copy(file, folder.path().join(number.to_string()))?;
    }
    ensure!(bytes > 0, "this machine has no files in {SOURCES:?}");
    let disk = fs::File::create(image)?;
    disk.set_len(bytes / 8 * 10 + (64 << 20))?;
    // Blocks of a page, so that each page of a file is one of the image.
    let mut command = Command::new("mkfs.ext4");
    command.args(["-q", "-F", "-b", "4096", "-d"]);
    run(command.arg(folder.path()).arg(image))?;
    Ok(bytes)
}

/// Regular files that are not empty, in an order that is the same each time.
fn regular_files(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    let entries = fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?;
    let mut entries: Vec<(PathBuf, fs::FileType)> = entries
        .into_iter()
        .map(|entry| Ok((entry.path(), entry.file_type()?)))
        .collect::<Result<_>>()?;
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    for (path, kind) in entries {
        if kind.is_dir() {
            regular_files(&path, found)?;
        } else if kind.is_file() && path.metadata()?.len() > 0 {
            found.push(path);
        }
    }
    Ok(())
}

/// Boots a guest with an agent that reads all files of an image, once and after these seconds, and has these MiB of heap besides.
pub fn boot(image: &Path, ram_mib: u32, heap_mib: u32, after_s: u32) -> Result<Guest> {
    let drive = format!("file={},if=virtio,format=raw,readonly=on", image.display());
    let mut setup = Setup::new(Kind::Private)
        .with(&["-drive", &drive])
        .with_agent();
    setup.ram_mib = ram_mib;
    setup.workload.mib = heap_mib;
    setup.workload.tick_ms = 500;
    let words = format!("sf.read={after_s}:vda");
    setup.with_drivers(&words).boot()
}

/// Waits until it has read them.
pub fn wait_read(guest: &Guest) -> Result<()> {
    let read = guest.serial.wait_line("files read", PATIENCE);
    read.context("the guest does not read its files")
}
