//! `kill -9` of the engine while the filters of a checkpoint with disks are in QEMU, or on their way, and while its disks are copied
//! in rounds: of the engine alone, and of engine and guardian together. The guest must see no error of its disks, QEMU's block graph must be as it was, and the
//! next checkpoint must hold the disks to the byte.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use stillframe_harness::committing::expect_no_copy;
use stillframe_harness::health::{children, expect_whole};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::random::Random;
use stillframe_harness::results::{self, Claim, Goal};
use stillframe_harness::running::{PATIENCE, Running, signal};

use crate::disks::{Bus, Compared, Machine, SCHEDULES, Scene};

const COMMAND: &str = "cargo xtask bench disk-kills";
/// The machines, in turn.
const MACHINES: [Machine; 4] = [
    Machine::new(Bus::Virtio, "raw", 1),
    Machine::new(Bus::Virtio, "qcow2", 3),
    Machine::new(Bus::Scsi, "qcow2", 1),
    Machine::new(Bus::Ide, "raw", 3),
];
/// How the disks are captured: of this number of kills one strikes rounds.
const ROUNDS_EVERY: u64 = 3;
/// Kills with a filter that the promise asks for.
const KILLS_MIN: u64 = 200;
/// One VM of this number of kills is restored, and goes on.
const RESTORED_EVERY: u64 = 10;
/// Of this number of kills one is of the guardian, too.
const BOTH_EVERY: u64 = 4;

/// Where a kill strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// Filters are being made, or the first round is copied.
    Coming,
    /// After QEMU's `STOP` event: filters go below the devices, or QEMU is held.
    Pause,
    /// Filters are in place, and the disks are read; or the last rounds are copied, and what follows.
    Storing,
}

const MOMENTS: [Moment; 3] = [Moment::Coming, Moment::Pause, Moment::Storing];

/// What came of the kills.
#[derive(Debug, Default)]
pub struct Kills {
    /// How many there were.
    pub kills: u64,
    /// Those with filters.
    pub filters: u64,
    /// What was wrong, in words.
    pub wrong: Vec<String>,
    /// One record of each.
    pub raw: Vec<Value>,
}

/// The block graph of QEMU: what is below what, and the bitmaps, without numbers that change.
pub(crate) fn graph(monitor: &mut Qmp) -> Result<BTreeSet<String>> {
    let graph = monitor.execute("x-debug-query-block-graph", json!({}))?;
    let nodes = graph["nodes"].as_array().context("no nodes")?;
    let name = |id: &Value| {
        let mut nodes = nodes.iter();
        let node = nodes.find(|node| node["id"] == *id);
        node.map_or(Value::Null, |node| node["name"].clone())
    };
    let edges = graph["edges"].as_array().context("no edges")?;
    let edges = edges.iter().map(|edge| {
        format!(
            "{} {} {}",
            name(&edge["parent"]),
            edge["name"],
            name(&edge["child"])
        )
    });
    let nodes = nodes.iter().map(|node| node["name"].to_string());
    let mut all: BTreeSet<String> = nodes.chain(edges).collect();
    let flat = monitor.execute("query-named-block-nodes", json!({ "flat": true }))?;
    for node in flat.as_array().into_iter().flatten() {
        for bitmap in node["dirty-bitmaps"].as_array().into_iter().flatten() {
            all.insert(format!(
                "bitmap {} of {}",
                bitmap["name"], node["node-name"]
            ));
        }
    }
    Ok(all)
}

/// Waits for a node of this kind (`filter`, `view`, `live`) to be there.
fn wait_node(monitor: &mut Qmp, kind: &str) -> Result<()> {
    let begin = format!("\"stillframe-{kind}-0\"");
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        let nodes = monitor.execute("query-named-block-nodes", json!({ "flat": true }))?;
        if nodes.to_string().contains(&begin) {
            return Ok(());
        }
    }
    bail!("no {kind} within {PATIENCE:?}")
}

/// Kills a watch at this moment of one of its checkpoints.
fn strike(scene: &Scene, monitor: &mut Qmp, number: u64, random: &mut Random) -> Result<Value> {
    let moment = MOMENTS[number as usize % MOMENTS.len()];
    let schedule = SCHEDULES[number as usize % SCHEDULES.len()];
    let both = number % BOTH_EVERY == BOTH_EVERY - 1;
    // Not in step with the moments.
    let way = match (number / MOMENTS.len() as u64).is_multiple_of(ROUNDS_EVERY) {
        true => "rounds",
        false => "filter",
    };
    monitor.execute("query-status", json!({}))?;
    monitor.take_events();
    let pid = scene.guest.pid_text();
    let line = ["watch", "--pid", &pid, "--every", "50ms", "--json"];
    let more = ["--disks", "capture", "--schedule", schedule];
    let line = [&line[..], &more, &["--disk-schedule", way]].concat();
    let command = scene.stillframe.command(&line)?;
    let mut engine = Running::start(command)?;
    // An increment has a bitmap besides.
    let taken = random.below(3) as usize;
    engine.wait_results(taken)?;
    let guardians = children(engine.pid(), "stillframe")?;
    let delay_us = match moment {
        Moment::Coming => {
            wait_node(monitor, if way == "rounds" { "live" } else { way })?;
            random.below(3_000)
        }
        Moment::Pause => {
            monitor.take_events();
            monitor.wait_event("STOP", PATIENCE)?;
            random.below(4_000)
        }
        Moment::Storing => {
            wait_node(monitor, if way == "rounds" { "live" } else { "view" })?;
            random.below(60_000)
        }
    };
    std::thread::sleep(Duration::from_micros(delay_us));
    if both {
        for guardian in &guardians {
            signal(*guardian as u32, "KILL")?;
        }
    }
    engine.crash()?;
    if !both {
        // The guardian clears up by itself.
        expect_no_copy(monitor)?;
    }
    Ok(json!({
        "moment": format!("{moment:?}"), "schedule": schedule, "disks": way, "taken": taken, "delay_us": delay_us,
        "guardian_killed": both,
    }))
}

/// What must hold after a kill.
fn aftermath(
    (scene, monitor): (&Scene, &mut Qmp),
    number: u64,
    before: &BTreeSet<String>,
    compared: &mut Compared,
) -> Result<()> {
    let running = |monitor: &mut Qmp| Ok::<bool, anyhow::Error>(monitor.status()? == "running");
    let deadline = Instant::now() + PATIENCE;
    while !running(monitor)? {
        ensure!(Instant::now() < deadline, "the VM did not run on");
    }
    scene.goes_on()?;
    let differing = compared.differing;
    let schedule = SCHEDULES[(number / 2) as usize % SCHEDULES.len()];
    let (id, _) = scene.checkpoint(schedule, 1, compared)?;
    ensure!(
        compared.differing == differing,
        "{} pages differ",
        compared.differing - differing
    );
    let after = graph(monitor)?;
    let changed: Vec<&String> = after.symmetric_difference(before).collect();
    ensure!(changed.is_empty(), "the block graph changed: {changed:?}");
    if number.is_multiple_of(RESTORED_EVERY) {
        scene.restore(&id, "--quiet")?;
        expect_whole(&scene.stillframe, &[id])?;
    }
    scene.goes_on()
}

/// This number of kills of one machine.
pub fn one_machine(
    machine: Machine,
    count: u64,
    random: &mut Random,
    kills: &mut Kills,
) -> Result<()> {
    let scene = machine.boot()?;
    let mut compared = Compared::default();
    let mut monitor = scene.guest.second_monitor()?;
    let before = graph(&mut monitor)?;
    for _ in 0..count {
        let number = kills.kills;
        let mut record = strike(&scene, &mut monitor, number, random)?;
        record["machine"] = machine.name().into();
        kills.kills += 1;
        kills.filters += u64::from(record["disks"] == "filter");
        if let Err(error) = aftermath((&scene, &mut monitor), number, &before, &mut compared) {
            record["wrong"] = format!("{error:#}").into();
            kills.wrong.push(format!("{record}"));
            kills.raw.push(record);
            // What is wrong with this VM would be wrong after each further kill.
            return Ok(());
        }
        kills.raw.push(record);
    }
    Ok(())
}

/// All machines in turn; writes `docs/results/disk-kills/`.
pub fn run(count: u64, seed: u64) -> Result<()> {
    let mut random = Random::new(seed);
    let mut kills = Kills::default();
    for machine in MACHINES {
        let share = count.div_ceil(MACHINES.len() as u64);
        one_machine(machine, share, &mut random, &mut kills).with_context(|| machine.name())?;
        eprintln!(
            "{:20} {} kills so far, {} wrong",
            machine.name(),
            kills.kills,
            kills.wrong.len()
        );
    }
    results::write_raw("disk-kills", "kills.jsonl", &kills.raw)?;
    let wrong = kills.wrong.len() as f64;
    let claim = Claim::new("disk-kills", Goal::Zero, wrong, "kills", COMMAND);
    let enough = kills.filters >= KILLS_MIN;
    results::write_summary("disk-kills", &[claim.if_enough(enough)])?;
    match kills.wrong.first() {
        None => Ok(()),
        Some(first) => bail!("{} kills were wrong: {first}", kills.wrong.len()),
    }
}
