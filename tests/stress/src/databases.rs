//! Databases that commit while checkpoints with their disk are taken: memory and disk of one checkpoint are of one moment.
//!
//! - A VM that is restored goes on committing, without any recovery: the next transaction is the one after those of the
//!   checkpoint. When it is killed, its disk has all that it said to be committed.
//! - The disk alone recovers, as after a power failure: with all that was said to be committed before the pause.
//!
//! SQLite commits alone. PostgreSQL also serves two clients with pgbench's mix, whose sums are compared after each recovery.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use stillframe_harness::committing::Committing;
use stillframe_harness::databases::Database;
use stillframe_harness::health::expect_whole;
use stillframe_harness::restored::Restored;
use stillframe_harness::results::{self, Claim, Goal};

use crate::disks::SCHEDULES;

const COMMAND: &str = "cargo xtask bench databases";
/// Lower bound on the checkpoints of each promise.
const CHECKPOINTS_MIN: u64 = 50;
/// The name of the database's disk.
const DISK: &str = "journal";
/// The folder of the disks of a restored VM.
const RESTORED: &str = "restored";
/// Transactions that a restored VM commits before it is killed. PostgreSQL has several processes: each of them has seconds to go
/// on with its memory.
const MORE_SQLITE: u64 = 5;
const MORE_POSTGRESQL: u64 = 300;

/// What came of the checkpoints.
#[derive(Debug, Default)]
pub struct Databases {
    /// How many there were.
    pub checkpoints: u64,
    /// What was wrong, in words.
    pub wrong: Vec<String>,
    /// One record of each.
    pub raw: Vec<Value>,
}

/// One checkpoint: a VM from it, and its disk alone.
fn checkpoint(it: &Committing, database: Database, number: u64) -> Result<Value> {
    let before = it.guest.serial.wait_more_committed(1)?;
    let (pid, schedule) = (
        it.guest.pid_text(),
        SCHEDULES[number as usize % SCHEDULES.len()],
    );
    let mut line = vec!["checkpoint", "--pid", &pid, "--disks", "capture"];
    line.extend(["--schedule", schedule]);
    let report = it.stillframe.json(&line)?;
    let id = report["checkpoint"].as_str().context("no id")?;
    let after = it
        .guest
        .serial
        .committed()
        .context("nothing is committed")?;
    let folder = it.guest.folder().join(RESTORED);
    let lazy = number % 2 == 1;
    let (first, last) = go_on(it, database, id, &folder, lazy)?;
    // The one under way at the pause is said by both, or by neither.
    ensure!(
        (before..=after + 1).contains(&first),
        "the VM goes on at {first}, after {before} and before {after}"
    );
    let name = it.disk.file_name().context("no name")?;
    let image = folder.join(name);
    let of_vm = it.recover(&image).context("the disk of the restored VM")?;
    ensure!(
        of_vm >= last,
        "{of_vm} of {last} transactions are on its disk"
    );
    fs::remove_file(&image)?;
    let to = image.display().to_string();
    it.stillframe
        .ok(&["export", id, "--disk", DISK, "-o", &to])?;
    let alone = it.recover(&image).context("the disk alone")?;
    fs::remove_file(&image)?;
    ensure!(
        (before..=after + 1).contains(&alone),
        "{alone} transactions on the disk alone, after {before} and before {after}"
    );
    // The transaction that the memory goes on with is the one after those on the disk, or it is there and not yet acknowledged.
    ensure!(
        first == alone + 1 || first == alone,
        "the VM goes on at {first}, and its disk has {alone} transactions"
    );
    Ok(json!({
        "database": database.name(), "schedule": schedule, "committed_before": before, "committed_after": after,
        "first_of_vm": first, "last_of_vm": last, "on_disk_of_vm": of_vm, "on_disk_alone": alone, "lazy": lazy,
        "pause_us": report["downtime_us"]["total"], "disk": report["disks"][0],
    }))
}

/// Restores a VM with its disk in a folder, and kills it after further transactions. Returns the first and the last
/// transaction that it has acknowledged.
fn go_on(
    it: &Committing,
    database: Database,
    id: &str,
    folder: &Path,
    lazy: bool,
) -> Result<(u64, u64)> {
    let disks = format!("--disks=new={}", folder.display());
    let more = match lazy {
        true => "--lazy",
        false => "--quiet",
    };
    let restored = Restored::start(&it.stillframe, id, it.guest.folder(), &[&disks, more])?;
    restored.serial.wait_more_committed(match database {
        Database::Sqlite => MORE_SQLITE,
        Database::Postgresql => MORE_POSTGRESQL,
    })?;
    restored.crash()?;
    let text = restored.serial.text();
    let first = text
        .lines()
        .find_map(|line| line.strip_prefix("committed "));
    let first = first.context("no first transaction")?.trim().parse()?;
    let last = restored.serial.committed().context("no last transaction")?;
    database.expect_no_recovery(&restored.serial)?;
    Ok((first, last))
}

/// This number of checkpoints of one VM.
pub fn series(database: Database, count: u64) -> Result<Databases> {
    let it = Committing::database("databases", database)?;
    let name = database.name();
    let mut databases = Databases::default();
    for number in 0..count {
        databases.checkpoints += 1;
        match checkpoint(&it, database, number) {
            Ok(record) => databases.raw.push(record),
            Err(error) => {
                let wrong = format!("{name}: checkpoint {number}: {error:#}");
                eprintln!("{wrong}");
                databases
                    .raw
                    .push(json!({ "database": name, "wrong": wrong }));
                databases.wrong.push(wrong);
                // A disk that is left there would fail the next restore.
                let _ = fs::remove_dir_all(it.guest.folder().join(RESTORED));
            }
        }
        if (number + 1).is_multiple_of(10) {
            eprintln!(
                "{name}: {} checkpoints, {} wrong",
                databases.checkpoints,
                databases.wrong.len()
            );
        }
    }
    expect_whole(
        &it.stillframe,
        &stillframe_harness::health::checkpoints(&it.stillframe)?,
    )?;
    Ok(databases)
}

/// This number of checkpoints of each database, which write `docs/results/databases/`, or of `only` one.
pub fn run(count: u64, only: Option<&str>) -> Result<()> {
    let (mut raw, mut wrong, mut claims) = (Vec::new(), Vec::new(), Vec::new());
    for database in Database::ALL {
        if only.is_some_and(|only| only != database.name()) {
            continue;
        }
        let databases = series(database, count)?;
        let id = match database {
            Database::Sqlite => "one-instant",
            Database::Postgresql => "one-instant-postgresql",
        };
        let value = databases.wrong.len() as f64;
        let claim = Claim::new(id, Goal::Zero, value, "checkpoints", COMMAND);
        claims.push(claim.if_enough(databases.checkpoints >= CHECKPOINTS_MIN));
        raw.extend(databases.raw);
        wrong.extend(databases.wrong);
    }
    if claims.is_empty() {
        bail!("there is no such database");
    }
    if only.is_none() {
        results::write_raw("databases", "checkpoints.jsonl", &raw)?;
        results::write_summary("databases", &claims)?;
    }
    match wrong.first() {
        None => Ok(()),
        Some(first) => bail!("{} checkpoints are wrong: {first}", wrong.len()),
    }
}
