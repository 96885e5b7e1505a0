//! Guests with a database on a disk of their own. Each prints on its serial port what the disk has, after any recovery: `found ok
//! ROWS LAST WRONG`; then `committed N` after each transaction that the database has acknowledged.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::debian::{self, READY_LIMIT};
use crate::guest::{Guest, Kind, Setup};
use crate::images::{RAW, drive, make_file_system};
use crate::running::PATIENCE;
use crate::serial::Serial;

/// MiB of a disk for SQLite, and for PostgreSQL.
const SQLITE_MIB: u32 = 64;
const POSTGRESQL_MIB: u32 = 256;
/// MiB of RAM of the guest with PostgreSQL.
const POSTGRESQL_RAM_MIB: u32 = 512;
/// The script in `guest/debian/workloads`.
const POSTGRESQL_WORKLOAD: &str = "transactions";
/// PostgreSQL's log has these words at each of its starts.
const STARTED: &str = "database system was";
/// It has these at a start after a crash.
const RECOVERED: &str = "automatic recovery in progress";

/// A database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Database {
    /// SQLite in the small guest (`guest/init`).
    Sqlite,
    /// PostgreSQL in the Debian guest, under pgbench besides.
    Postgresql,
}

impl Database {
    /// All of them.
    pub const ALL: [Database; 2] = [Database::Sqlite, Database::Postgresql];

    /// Its name in arguments and results.
    pub fn name(self) -> &'static str {
        match self {
            Database::Sqlite => "sqlite",
            Database::Postgresql => "postgresql",
        }
    }

    /// Makes its disk, with an empty file system.
    pub fn make_disk(self, disk: &Path) -> Result<()> {
        let mib = match self {
            Database::Sqlite => SQLITE_MIB,
            Database::Postgresql => POSTGRESQL_MIB,
        };
        make_file_system(disk, mib)
    }

    /// Boots a guest of this name on a disk, and returns the number of transactions that it finds there. None of them is left
    /// out, and none is damaged.
    pub fn boot(self, name: &str, disk: &Path) -> Result<(Guest, u64)> {
        let (guest, limit) = match self {
            Database::Sqlite => {
                let drive = drive(disk, RAW);
                let drive: Vec<&str> = drive.iter().map(String::as_str).collect();
                let setup = Setup::small(Kind::Private, name).with(&drive);
                (setup.with_database("vda").boot()?, PATIENCE)
            }
            Database::Postgresql => (start_debian(name, disk)?, READY_LIMIT),
        };
        let line = guest.serial.wait_for("found ", limit)?;
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["found", "ok", count, last, "0"] if count == last => Ok((guest, count.parse()?)),
            _ => bail!("the database is damaged: {line}"),
        }
    }

    /// Boots a guest on the disk of a VM that was killed, and returns the number of transactions that it finds there.
    pub fn recover(self, disk: &Path) -> Result<u64> {
        let (guest, found) = self.boot("recovery", disk)?;
        // The same log shows that a restored VM does not recover.
        ensure!(
            self == Database::Sqlite || guest.serial.text().contains(RECOVERED),
            "the log of PostgreSQL does not say that it recovers"
        );
        Ok(found)
    }

    /// Checks that the database of a restored VM has neither started again nor recovered. SQLite has no log: its program goes
    /// on, or ends with a failure.
    pub fn expect_no_recovery(self, serial: &Serial) -> Result<()> {
        let text = serial.text();
        let started = text.lines().find(|line| line.contains(STARTED));
        match started {
            None => Ok(()),
            Some(line) => bail!("the database of the restored VM has started again: {line}"),
        }
    }
}

/// A Debian guest with PostgreSQL on this disk.
fn start_debian(name: &str, disk: &Path) -> Result<Guest> {
    let mut extra = ["-name", name].map(str::to_owned).to_vec();
    // After the image of the root file system, which is vda.
    let [option, drive, ..] = drive(disk, RAW);
    extra.extend([option, drive.replace("if=none", "if=virtio")]);
    let program = Path::new("qemu-system-x86_64");
    Guest::start(Kind::Private, program, |folder| {
        debian::arguments(folder, POSTGRESQL_RAM_MIB, POSTGRESQL_WORKLOAD, &extra)
    })
    .context("the guest with PostgreSQL does not start")
}
