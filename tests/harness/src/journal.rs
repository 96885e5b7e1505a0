//! A guest that keeps a journal on its disk, as a database does: it says that a record is committed when its disk says so.
//! After a crash each record that was said to be committed must be there.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use crate::cli::Stillframe;
use crate::guest::{Guest, Kind, Setup};
use crate::migration::Order;
use crate::qmp::Qmp;
use crate::running::PATIENCE;
use crate::serial::Serial;

/// MiB of the disk.
const DISK_MIB: u32 = 32;
/// MiB of it that the journal may fill. The rest is bytes like these.
const JOURNAL_MIB: u32 = 16;
const BALLAST: u8 = 0x5a;
/// The disk's name.
const DEVICE: &str = "journal";
/// Bytes of a record (`guest/init`).
const RECORD_BYTES: usize = 512;

/// A guest with a journal, and a place for a copy of its disk, as if on another host.
pub struct WithJournal {
    /// The guest.
    pub guest: Guest,
    /// The program.
    pub stillframe: Stillframe,
    /// The guest's disk.
    pub disk: PathBuf,
    /// Where its copy is expected.
    pub copy: PathBuf,
    format: &'static str,
    // After the guest: ends last.
    folder: tempfile::TempDir,
}

impl WithJournal {
    /// Boots it, with a disk of this format and more arguments for QEMU.
    pub fn boot(name: &str, format: &'static str) -> Result<WithJournal> {
        let folder = tempfile::tempdir()?;
        let place = |host: &str| folder.path().join(host).join("disk.img");
        let (disk, copy) = (place("here"), place("there"));
        for path in [&disk, &copy] {
            fs::create_dir(path.parent().context("no folder")?)?;
        }
        make_image(&disk, format, DISK_MIB)?;
        let ballast = format!(
            "write -P {BALLAST} {JOURNAL_MIB}M {}M",
            DISK_MIB - JOURNAL_MIB
        );
        let written = Command::new("qemu-io")
            .args(["-f", format, "-c", &ballast])
            .arg(&disk)
            .output()?;
        ensure!(written.status.success(), "qemu-io: {written:?}");
        let drive = format!(
            "file={},format={format},if=none,id={DEVICE}",
            disk.display()
        );
        let device = format!("virtio-blk-pci,drive={DEVICE}");
        let setup = Setup::small(Kind::Private, name).with_drivers("sf.journal=vda");
        let guest = setup.with(&["-drive", &drive, "-device", &device]).boot()?;
        guest.serial.wait_line("committed 3", PATIENCE)?;
        Ok(WithJournal {
            guest,
            stillframe: Stillframe::init(&folder.path().join("repo"))?,
            disk,
            copy,
            format,
            folder,
        })
    }

    /// A migration that copies the disk.
    pub fn order(&self, name: &str) -> Order {
        let mut order = Order::of(&self.guest, name);
        let place = |host: &str| self.folder.path().join(host).display().to_string();
        order.migrate.push("--copy-disks".to_owned());
        let map = format!("--map={}={}", place("here"), place("there"));
        order.receive.push(map);
        order
    }

    /// Makes sure that an image has all that was said to be committed, and returns how much that is.
    pub fn expect_all(&self, image: &Path, serials: &[&Serial]) -> Result<u64> {
        // What is said first is on the disk when it is read then.
        let said = serials.iter().map(|serial| committed(serial)).max();
        let said = said.unwrap_or(0);
        let found = self.records(image)?;
        ensure!(
            found >= said,
            "{} has {found} records, and {said} were committed",
            image.display()
        );
        Ok(found)
    }

    /// The records of an image that no QEMU uses; each must be the one after that before.
    pub fn records(&self, image: &Path) -> Result<u64> {
        let raw = self.folder.path().join("content");
        convert(image, self.format, &raw)?;
        let content = fs::read(&raw)?;
        ensure!(
            content.len() == (DISK_MIB as usize) << 20,
            "{} bytes",
            content.len()
        );
        let (content, ballast) = content.split_at((JOURNAL_MIB as usize) << 20);
        let kept = ballast.iter().all(|&byte| byte == BALLAST);
        ensure!(kept, "{} is damaged beyond the journal", image.display());
        let (mut records, mut ended) = (0, false);
        for record in content.chunks(RECORD_BYTES) {
            let expected = format!("{:<511}\n", format!("record {}", records + 1));
            match record == expected.as_bytes() {
                true if !ended => records += 1,
                false if record.iter().all(|&byte| byte == 0) => ended = true,
                _ => bail!("{} is damaged after record {records}", image.display()),
            }
        }
        Ok(records)
    }
}

/// Copies the content of an image. A QEMU that was killed may have it locked for a moment more.
fn convert(image: &Path, format: &str, raw: &Path) -> Result<()> {
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

/// Waits until a guest has said that more records are committed, as seen from now or from its first word.
pub fn wait_more(serial: &Serial, more: u64) -> Result<u64> {
    let (begin, mut before) = (Instant::now(), committed(serial));
    while begin.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(20));
        let now = committed(serial);
        match before {
            0 => before = now,
            _ if now >= before + more => return Ok(now),
            _ => {}
        }
    }
    bail!("no {more} records more than {before} within {PATIENCE:?}")
}

/// Makes sure that no job and no block node of ours is left in a QEMU, or soon will not be.
pub fn expect_no_copy(monitor: &mut Qmp) -> Result<()> {
    let mut left = String::new();
    for _ in 0..100 {
        let jobs = monitor.execute("query-jobs", json!({}))?;
        let nodes = monitor.execute("query-named-block-nodes", json!({ "flat": true }))?;
        left = format!("{jobs} {nodes}");
        if !left.contains("stillframe-") {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    bail!("left in QEMU: {left}")
}

/// The last record that a guest has said to be committed.
pub fn committed(serial: &Serial) -> u64 {
    let text = serial.text();
    // The last line may not be whole.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let numbers = whole
        .lines()
        .filter_map(|line| line.strip_prefix("committed "));
    let last = numbers
        .filter_map(|number| number.trim().parse().ok())
        .max();
    last.unwrap_or(0)
}

/// Makes an empty image.
pub fn make_image(path: &Path, format: &str, mib: u32) -> Result<()> {
    if format == "raw" {
        return Ok(File::create(path)?.set_len(u64::from(mib) << 20)?);
    }
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", format])
        .arg(path)
        .arg(format!("{mib}M"))
        .status()?;
    ensure!(made.success(), "qemu-img create {}", path.display());
    Ok(())
}
