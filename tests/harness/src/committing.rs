//! Guests that say what they have committed to their disk: records of a journal, or a database's transactions. After a crash
//! each of them must be there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;
use tempfile::TempDir;

use crate::cli::Stillframe;
use crate::databases::Database;
use crate::guest::{Guest, Kind, Setup};
pub use crate::images::make_image;
use crate::images::{RAW, convert, drive, nodes, run};
use crate::migration::Order;
use crate::qmp::Qmp;
use crate::running::PATIENCE;
use crate::serial::Serial;

/// MiB of the disk.
const DISK_MIB: u32 = 64;
/// MiB of it that the journal may fill. The rest is bytes like these.
const JOURNAL_MIB: u32 = 48;
const BALLAST: u8 = 0x5a;
/// Bytes of a record (`guest/init`).
const RECORD_BYTES: usize = 4096;

/// Such a guest, and a place for a copy of its disk, as if on another host.
pub struct Committing {
    /// The guest.
    pub guest: Guest,
    /// The program.
    pub stillframe: Stillframe,
    /// The guest's disk.
    pub disk: PathBuf,
    /// Where its copy is expected.
    pub copy: PathBuf,
    format: &'static str,
    database: Option<Database>,
    // After the guest: ends last.
    folder: TempDir,
}

/// The folder of both hosts, the disk and the place of its copy.
fn places() -> Result<(TempDir, PathBuf, PathBuf)> {
    let folder = tempfile::tempdir()?;
    let place = |host: &str| folder.path().join(host).join("disk.img");
    let (disk, copy) = (place("here"), place("there"));
    for path in [&disk, &copy] {
        fs::create_dir(path.parent().context("no folder")?)?;
    }
    Ok((folder, disk, copy))
}

/// A guest that is called this, with this disk.
fn with_disk(name: &str, disk: &Path, format: &str) -> Setup {
    let drive = drive(disk, format);
    let drive: Vec<&str> = drive.iter().map(String::as_str).collect();
    Setup::small(Kind::Private, name).with(&drive)
}

impl Committing {
    /// Boots a guest with a journal on a disk of this format.
    pub fn journal(name: &str, format: &'static str) -> Result<Committing> {
        let (folder, disk, copy) = places()?;
        make_journal(&disk, format)?;
        let words = drive(&disk, format);
        Committing::boot_journal(name, (folder, disk, copy), format, &words)
    }

    /// The same with `-blockdev`.
    pub fn journal_of_nodes(name: &str, format: &'static str) -> Result<Committing> {
        let (folder, disk, copy) = places()?;
        make_journal(&disk, format)?;
        let words = nodes(&disk, format);
        Committing::boot_journal(name, (folder, disk, copy), format, &words)
    }

    fn boot_journal(
        name: &str,
        places: (TempDir, PathBuf, PathBuf),
        format: &'static str,
        words: &[String],
    ) -> Result<Committing> {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let setup = Setup::small(Kind::Private, name).with(&words);
        let guest = setup.with_drivers("sf.journal=vda").boot()?;
        Committing::new(guest, places, format, None)
    }

    /// Boots a guest with a database in a file system on a raw disk.
    pub fn database(name: &str, database: Database) -> Result<Committing> {
        let (folder, disk, copy) = places()?;
        database.make_disk(&disk)?;
        let (guest, found) = database.boot(name, &disk)?;
        ensure!(found == 0, "a new database has {found} transactions");
        Committing::new(guest, (folder, disk, copy), RAW, Some(database))
    }

    fn new(
        guest: Guest,
        (folder, disk, copy): (TempDir, PathBuf, PathBuf),
        format: &'static str,
        database: Option<Database>,
    ) -> Result<Committing> {
        guest.serial.wait_line("committed 3", PATIENCE)?;
        Ok(Committing {
            guest,
            stillframe: Stillframe::init(&folder.path().join("repo"))?,
            disk,
            copy,
            format,
            database,
            folder,
        })
    }

    /// Has QEMU log each time that one of its NBD clients connects anew.
    pub fn log_reconnects(&self) -> Result<()> {
        let mut monitor = self.guest.second_monitor()?;
        let log = self.log();
        for line in [
            &*format!("logfile {}", log.display()),
            "trace-event nbd_reconnect_attempt on",
        ] {
            let answer = monitor.human(line)?;
            ensure!(answer.is_empty(), "{line}: {answer}");
        }
        Ok(())
    }

    /// How often one did since.
    pub fn reconnects(&self) -> Result<usize> {
        let log = match self.log().exists() {
            true => fs::read_to_string(self.log())?,
            false => String::new(),
        };
        Ok(log.matches("nbd_reconnect_attempt").count())
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// A QEMU that waits for the guest with the journal, as the manager of another host starts it, with an empty disk.
    pub fn waiting_qemu(&self) -> Result<Guest> {
        make_image(&self.copy, self.format, DISK_MIB)?;
        let setup = with_disk("waiting", &self.copy, self.format).with_drivers("sf.journal=vda");
        setup.with(&["-incoming", "defer"]).start()
    }

    /// Boots a guest of its own from an image of the database. Returns the number of its transactions, of which none is
    /// left out, and none is damaged.
    pub fn recover(&self, image: &Path) -> Result<u64> {
        let database = self.database.context("the guest has no database")?;
        database.recover(image)
    }

    /// A migration that copies the disk.
    pub fn order(&self, name: &str) -> Order {
        let mut order = Order::of(&self.guest, name);
        order.migrate.push("--copy-disks".to_owned());
        let map = format!("--map={}={}", self.disk.display(), self.copy.display());
        order.receive.push(map);
        order
    }

    /// Makes sure that an image has all that was said to be committed, and returns how much that is.
    pub fn expect_all(&self, image: &Path, serials: &[&Serial]) -> Result<u64> {
        // What is said first is on the disk when it is read then.
        let said = serials.iter().filter_map(|serial| serial.committed());
        let said = said.max().unwrap_or(0);
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
        self.records_as(image, self.format)
    }

    /// The same of an image of another format.
    pub fn records_as(&self, image: &Path, format: &str) -> Result<u64> {
        let raw = self.folder.path().join("content");
        convert(image, format, &raw)?;
        self.records_of_raw(&raw)
    }

    /// The same of an image that is nothing but the disk's content.
    pub fn records_of_raw(&self, image: &Path) -> Result<u64> {
        let content = fs::read(image)?;
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
            let expected = format!("{:<4095}\n", format!("record {}", records + 1));
            match record == expected.as_bytes() {
                true if !ended => records += 1,
                false if record.iter().all(|&byte| byte == 0) => ended = true,
                _ => bail!("{} is damaged after record {records}", image.display()),
            }
        }
        Ok(records)
    }
}

/// Makes sure that no job and no block node of ours is left in a QEMU, or soon will not be.
pub fn expect_no_copy(monitor: &mut Qmp) -> Result<()> {
    let mut left = String::new();
    for _ in 0..100 {
        let jobs = monitor.execute("query-jobs", json!({}))?;
        let nodes = monitor.execute("query-named-block-nodes", json!({ "flat": true }))?;
        left = format!("{jobs} {nodes}");
        // Names, not paths.
        if !left.contains("\"stillframe-") {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    bail!("left in QEMU: {left}")
}

/// Makes an image with room for a journal, and the rest filled.
fn make_journal(disk: &Path, format: &str) -> Result<()> {
    make_image(disk, format, DISK_MIB)?;
    let ballast = format!(
        "write -P {BALLAST} {JOURNAL_MIB}M {}M",
        DISK_MIB - JOURNAL_MIB
    );
    run(Command::new("qemu-io")
        .args(["-f", format, "-c", &ballast])
        .arg(disk))
}
