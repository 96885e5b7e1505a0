//! A database that commits while checkpoints with its disk are taken: memory and disk of one checkpoint are of one moment.
//!
//! - A VM that is restored goes on committing, without any recovery: the next transaction is the one after those of the
//!   checkpoint. When it is killed, its disk has all that it said to be committed.
//! - The disk alone recovers, as after a power failure: with all that was said to be committed before the pause.

use std::fs;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use stillframe_harness::committing::Committing;
use stillframe_harness::health::expect_whole;
use stillframe_harness::restored::Restored;
use stillframe_harness::results::{self, Claim, Goal};

use crate::disks::SCHEDULES;

const COMMAND: &str = "cargo xtask bench databases";
/// Checkpoints that the promise asks for.
const CHECKPOINTS_MIN: u64 = 50;
/// The name of the database's disk.
const DISK: &str = "journal";
/// Transactions that a restored VM commits before it is killed.
const MORE: u64 = 5;

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
fn checkpoint(it: &Committing, number: u64) -> Result<Value> {
    let before = it.guest.serial.wait_more_committed(1)?;
    let (pid, schedule) = (
        it.guest.pid_text(),
        SCHEDULES[number as usize % SCHEDULES.len()],
    );
    let line = [
        "checkpoint",
        "--pid",
        &pid,
        "--disks",
        "capture",
        "--schedule",
        schedule,
    ];
    let report = it.stillframe.json(&line)?;
    let id = report["checkpoint"].as_str().context("no id")?;
    let after = it
        .guest
        .serial
        .committed()
        .context("nothing is committed")?;
    let folder = it.guest.folder().join("restored");
    let words = format!("--disks=new={}", folder.display());
    let more = match number % 2 {
        0 => "--quiet",
        _ => "--lazy",
    };
    let restored = Restored::start(&it.stillframe, id, it.guest.folder(), &[&words, more])?;
    let last = restored.serial.wait_more_committed(MORE)?;
    let text = restored.serial.text();
    let first = text
        .lines()
        .find_map(|line| line.strip_prefix("committed "));
    let first: u64 = first.context("no first transaction")?.trim().parse()?;
    restored.crash()?;
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
        "schedule": schedule, "committed_before": before, "committed_after": after, "first_of_vm": first,
        "last_of_vm": last, "on_disk_of_vm": of_vm, "on_disk_alone": alone, "lazy": number % 2 == 1,
        "pause_us": report["downtime_us"]["total"], "disk": report["disks"][0],
    }))
}

/// This number of checkpoints of one VM.
pub fn some(count: u64) -> Result<Databases> {
    let it = Committing::database("databases")?;
    let mut databases = Databases::default();
    for number in 0..count {
        databases.checkpoints += 1;
        match checkpoint(&it, number) {
            Ok(record) => databases.raw.push(record),
            Err(error) => {
                let wrong = format!("checkpoint {number}: {error:#}");
                eprintln!("{wrong}");
                databases.raw.push(json!({ "wrong": wrong }));
                databases.wrong.push(wrong);
            }
        }
        if (number + 1).is_multiple_of(10) {
            eprintln!(
                "{} checkpoints, {} wrong",
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

/// All of them; writes `docs/results/databases/`.
pub fn run(count: u64) -> Result<()> {
    let databases = some(count)?;
    results::write_raw("databases", "checkpoints.jsonl", &databases.raw)?;
    let wrong = databases.wrong.len() as f64;
    let claim = Claim::new("one-instant", Goal::Zero, wrong, "checkpoints", COMMAND);
    let enough = databases.checkpoints >= CHECKPOINTS_MIN;
    results::write_summary("databases", &[claim.if_enough(enough)])?;
    match databases.wrong.first() {
        None => Ok(()),
        Some(first) => bail!("{} checkpoints are wrong: {first}", databases.wrong.len()),
    }
}
