//! Disks that return to a checkpoint: rewinds of a VM with its disks, some after a rewind that was killed, and clones with disks.
//! The guest knows every sector from its memory (`guest/workload`, `disk`), so memory and disks of different moments are
//! found; and the images of a paused VM are those of the checkpoint, to the byte.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use stillframe_harness::committing::expect_no_copy;
use stillframe_harness::health::{children, expect_untouched};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::random::Random;
use stillframe_harness::restored::Restored;
use stillframe_harness::results::{self, Claim, Goal};
use stillframe_harness::running::{PATIENCE, Running, signal};
use stillframe_harness::serial::Serial;

use crate::disk_kills::graph;
use crate::disks::{Bus, Compared, Machine, Scene};

const COMMAND: &str = "cargo xtask bench disk-returns";
/// The machines, in turn.
const MACHINES: [Machine; 4] = [
    Machine::new(Bus::Virtio, "raw", 1),
    Machine::new(Bus::Virtio, "qcow2", 3),
    Machine::new(Bus::Scsi, "qcow2", 1),
    Machine::new(Bus::Ide, "raw", 3),
];
/// Rewinds that the promise asks for.
const REWINDS_MIN: u64 = 50;
/// Clones that it asks for.
const CLONES_MIN: u64 = 25;
/// Before this number of rewinds one is killed; before twice the number with its guardian.
const KILLED_EVERY: u64 = 3;
/// A new checkpoint is taken before this number of rewinds; they go to any of those that there are.
const TAKEN_EVERY: u64 = 4;
/// Upper bound on the time after which a rewind is killed, in microseconds.
const KILLED_WITHIN_US: u64 = 900_000;

/// What came of it.
#[derive(Debug, Default)]
pub struct Returns {
    /// Rewinds that were not killed.
    pub rewinds: u64,
    /// Rewinds that were.
    pub killed: u64,
    /// Those among them that left a VM which could not run.
    pub stuck: u64,
    /// Clones.
    pub clones: u64,
    /// What was wrong, in words.
    pub wrong: Vec<String>,
    /// One record of each rewind.
    pub raw: Vec<Value>,
}

/// Kills a rewind somewhere on its way; returns whether the VM was left unfit to run.
fn strike(
    scene: &Scene,
    monitor: &mut Qmp,
    id: &str,
    random: &mut Random,
    both: bool,
) -> Result<bool> {
    let pid = scene.guest.pid_text();
    let line = ["rewind", id, "--pid", &pid, "--pause-limit", "60s"];
    let mut engine = Running::start(scene.stillframe.command(&line)?)?;
    let delay = Duration::from_micros(random.below(KILLED_WITHIN_US));
    // Half of them strike in the pause.
    if random.below(2) == 0 {
        monitor.execute("query-status", json!({}))?;
        monitor.take_events();
        // It may fail, and have none.
        let _ = monitor.wait_event("STOP", PATIENCE);
        std::thread::sleep(delay / 8);
    } else {
        std::thread::sleep(delay);
    }
    if both {
        for guardian in children(engine.pid(), "stillframe")? {
            signal(guardian as u32, "KILL")?;
        }
    }
    engine.crash()?;
    if !both {
        expect_no_copy(monitor)?;
    }
    if monitor.status()? == "running" {
        return Ok(false);
    }
    Ok(monitor.execute("cont", json!({})).is_err())
}

/// A rewind, and what must hold after it.
fn rewind(
    (scene, monitor): (&Scene, &mut Qmp),
    id: &str,
    before: &BTreeSet<String>,
) -> Result<Value> {
    let pid = scene.guest.pid_text();
    let line = ["rewind", id, "--pid", &pid, "--paused"];
    let report = scene.stillframe.json(&line)?;
    let mut compared = Compared::default();
    scene.compare_images(id, &mut compared)?;
    let differing = compared.differing;
    ensure!(differing == 0, "{differing} pages of images differ");
    let after = graph(monitor)?;
    let changed: Vec<&String> = after.symmetric_difference(before).collect();
    ensure!(changed.is_empty(), "the block graph changed: {changed:?}");
    monitor.execute("cont", json!({}))?;
    scene.goes_on()?;
    expect_untouched(&scene.guest, monitor)?;
    Ok(json!({ "downtime_us": report["downtime_us"], "disks": report["disks"] }))
}

/// Makes this number of clones of a checkpoint, with its disks, and waits until each has found all of them right.
fn clones(scene: &Scene, id: &str, count: u64) -> Result<()> {
    let at = |name: &str| scene.path(name).display().to_string();
    let (qmp, serial) = (at("clone-{}.qmp"), at("clone-{}.serial"));
    let (serial, disks) = (
        format!("file:{serial}"),
        format!("--disks=new={}", at("images")),
    );
    let (template, count_text) = (at("template"), count.to_string());
    let line = ["clone", id, "--qmp", &qmp, "--serial", &serial, &disks];
    let more = ["--template-dir", &template, "-n", &count_text, "--json"];
    let out = scene
        .stillframe
        .command(&[&line[..], &more].concat())?
        .output()?;
    ensure!(out.status.success(), "{out:?}");
    let mut all = Vec::new();
    for report in String::from_utf8(out.stdout)?.lines() {
        let report: Value = serde_json::from_str(report)?;
        let Some(pid) = report["pid"].as_i64() else {
            continue;
        };
        let number = all.len() + 1;
        all.push(Restored {
            pid: pid as i32,
            qmp: scene.path(&format!("clone-{number}.qmp")),
            serial: Serial::new(&scene.path(&format!("clone-{number}.serial"))),
        });
    }
    ensure!(all.len() as u64 == count, "{} clones", all.len());
    all.iter()
        .try_for_each(|clone| scene.finds_all(&clone.serial))?;
    drop(all);
    let line = ["clone", "--drop-templates", "--template-dir", &template];
    scene.stillframe.ok(&line)?;
    Ok(())
}

/// Rewinds of one machine, and clones of its last checkpoint.
pub fn one_machine(
    machine: Machine,
    (rewinds, count): (u64, u64),
    random: &mut Random,
    returns: &mut Returns,
) -> Result<()> {
    let scene = machine.boot()?;
    let mut monitor = scene.guest.second_monitor()?;
    let before = graph(&mut monitor)?;
    let mut taken: Vec<String> = Vec::new();
    for number in 0..rewinds {
        if number % TAKEN_EVERY == 0 {
            let pid = scene.guest.pid_text();
            let line = ["checkpoint", "--pid", &pid, "--disks", "capture"];
            let report = scene.stillframe.json(&line)?;
            taken.push(report["checkpoint"].as_str().context("no id")?.to_owned());
        }
        let id = &taken[random.below(taken.len() as u64) as usize];
        let other = &taken[random.below(taken.len() as u64) as usize];
        let (killed, both) = (
            number % KILLED_EVERY == KILLED_EVERY - 1,
            number % (2 * KILLED_EVERY) == KILLED_EVERY - 1,
        );
        let mut record =
            json!({ "machine": machine.name(), "killed_before": killed, "guardian_killed": both });
        let done = (|| {
            if killed {
                returns.killed += 1;
                let stuck = strike(&scene, &mut monitor, other, random, both)?;
                returns.stuck += u64::from(stuck);
                record["stuck"] = stuck.into();
            }
            rewind((&scene, &mut monitor), id, &before)
        })();
        returns.rewinds += 1;
        match done {
            Ok(report) => record["report"] = report,
            Err(error) => {
                record["wrong"] = format!("{error:#}").into();
                returns.wrong.push(record.to_string());
                returns.raw.push(record);
                // What is wrong with this VM would be wrong after each further rewind.
                return Ok(());
            }
        }
        returns.raw.push(record);
    }
    let last = taken.last().context("no checkpoint")?;
    returns.clones += count;
    if let Err(error) = clones(&scene, last, count) {
        returns
            .wrong
            .push(format!("{}: clones: {error:#}", machine.name()));
    }
    Ok(())
}

/// All machines in turn; writes `docs/results/disk-returns/`.
pub fn run(rewinds: u64, clones: u64, seed: u64) -> Result<()> {
    let mut random = Random::new(seed);
    let mut returns = Returns::default();
    let begin = Instant::now();
    for machine in MACHINES {
        let shares = [rewinds, clones].map(|all| all.div_ceil(MACHINES.len() as u64));
        one_machine(machine, shares.into(), &mut random, &mut returns)
            .with_context(|| machine.name())?;
        eprintln!(
            "{:20} {} rewinds so far, after {} that were killed ({} left the VM paused), {} clones, {} wrong, {} s",
            machine.name(),
            returns.rewinds,
            returns.killed,
            returns.stuck,
            returns.clones,
            returns.wrong.len(),
            begin.elapsed().as_secs()
        );
    }
    results::write_raw("disk-returns", "rewinds.jsonl", &returns.raw)?;
    let wrong = returns.wrong.len() as f64;
    let claim = Claim::new("disk-returns", Goal::Zero, wrong, "returns", COMMAND);
    let enough = returns.rewinds >= REWINDS_MIN && returns.clones >= CLONES_MIN;
    results::write_summary("disk-returns", &[claim.if_enough(enough)])?;
    match returns.wrong.first() {
        None => Ok(()),
        Some(first) => bail!("{} were wrong: {first}", returns.wrong.len()),
    }
}
