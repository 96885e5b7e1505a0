//! Measuring for the copy-on-write thesis: one stretch of the kernel's build is repeated from the same state, alone
//! and watched. Verified checkpoints and QEMU's own ways are measured too.
//!
//! A unit of the guest's work is an object compiled, of some seconds under TCG. Objects differ: a count of units in
//! a window of time would measure the objects more than the engine. So the guest is checkpointed once, and every
//! run restores it. The measured time is the time for the very same objects.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::papers::numbers::{mean, standard_error};
use crate::peers::{self, Saved};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::debian::{DebianSetup, DebianWorkload};
use stillframe_harness::guest::Guest;
use stillframe_harness::restored::Restored;
use stillframe_harness::running::Running;

/// MiB of the guest's RAM.
pub const RAM_MIB: u32 = 1024;
/// Time for an object to be compiled, on a busy machine.
const UNITS_LIMIT: Duration = Duration::from_secs(600);
/// Between restoring and the stretch: the first checkpoint of a watch, of all memory, is done by then.
const LEAD: Duration = Duration::from_secs(6);
/// Between two measurements of the floor, so that the guest does something.
const BETWEEN_FLOORS: Duration = Duration::from_millis(300);

/// Time from the start of a checkpoint to the start of the next, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Every(pub u32);

/// The interval that most figures are about.
pub const TWO_S: Every = Every(2000);
/// The longest.
pub const EIGHT_S: Every = Every(8000);
/// Not one of the thesis'.
pub const TENTH_S: Every = Every(100);

impl Every {
    /// As `watch` wants it.
    fn argument(self) -> String {
        format!("{}ms", self.0)
    }
}

impl fmt::Display for Every {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 % 1000 {
            0 => write!(f, "{} s", self.0 / 1000),
            _ => write!(f, "{} ms", self.0),
        }
    }
}

/// How much of everything.
#[derive(Debug)]
pub struct Plan {
    /// About the time that the stretch takes alone.
    pub stretch: Duration,
    /// Interval in seconds and schedules of each round; each begins with a run alone.
    pub rounds: &'static [(Every, &'static [&'static str])],
    /// Watches that verify.
    pub iterations: usize,
    /// Checkpoints of each of them.
    pub verified: usize,
    /// Measurements of the floor after each run, nothing being attached.
    pub floors: usize,
    /// How often QEMU's own ways are tried.
    pub saves: usize,
}

/// One run of the stretch.
#[derive(Debug)]
pub struct Run {
    /// As `--schedule` names it; none: alone.
    pub schedule: Option<&'static str>,
    /// The interval of checkpoints.
    pub every: Every,
    /// The time for the stretch. None if the first checkpoint was not done when it began.
    pub took_s: Option<f64>,
    /// The report of the first checkpoint, of all memory.
    pub first: Option<Value>,
    /// The reports of the checkpoints that followed.
    pub increments: Vec<Value>,
}

/// Everything measured.
#[derive(Debug)]
pub struct Measured {
    /// The runs, in their order.
    pub runs: Vec<Run>,
    /// Objects compiled in the stretch.
    pub units: u64,
    /// QEMU's floor, in milliseconds.
    pub floors_ms: Vec<f64>,
    /// Reports of the watches that verified.
    pub verified: Vec<Vec<Value>>,
    /// QEMU's own ways to save.
    pub saves: Vec<(&'static str, Vec<Saved>)>,
}

/// Work that a guest lost, in percent of its work alone.
#[derive(Debug, Clone, Copy)]
pub struct Lost {
    /// The loss, in percent.
    pub percent: f64,
    /// The standard error of that; no number where there were too few runs to tell.
    pub error_percent: f64,
}

/// From when the guest has said that it begins one unit until it says so of another.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    first: u64,
    last: u64,
}

/// Measures all of it.
pub fn measure(plan: &Plan) -> Result<Measured> {
    let folder = folder()?;
    eprintln!("booting the guest");
    let guest = DebianSetup {
        workload: DebianWorkload::Compile,
        ram_mib: RAM_MIB,
        agent: false,
        extra: Vec::new(),
    }
    .boot()?;
    guest.serial.wait_units(2, UNITS_LIMIT)?;
    let saves = saves(&guest, plan.saves, folder.path())?;
    let verified = verified(&guest, plan, folder.path())?;
    let origin = Stillframe::init(&folder.path().join("origin"))?;
    origin.ok(&["checkpoint", "--pid", &guest.pid_text()])?;
    drop(guest);
    let mut measured = Measured {
        runs: Vec::new(),
        units: 0,
        floors_ms: Vec::new(),
        verified,
        saves,
    };
    let mut stretch = None;
    for (number, &(every, schedules)) in plan.rounds.iter().enumerate() {
        let rounds = plan.rounds.len();
        eprintln!("round {} of {rounds}: every {every}", number + 1);
        let laid_out = alone(&origin, plan, stretch, every, &mut measured)?;
        stretch = Some(laid_out);
        measured.units = laid_out.last - laid_out.first;
        for schedule in schedules {
            let kind = (*schedule, every);
            watched(&origin, plan, laid_out, kind, &mut measured)?;
        }
    }
    Ok(measured)
}

fn folder() -> Result<TempDir> {
    let mut builder = tempfile::Builder::new();
    Ok(builder.prefix("stillframe-cow-").tempdir()?)
}

fn tell(run: &Run) {
    let schedule = run.schedule.unwrap_or("alone");
    let count = run.increments.len();
    match run.took_s {
        Some(took_s) => eprintln!("  {schedule}: {took_s:.2} s, {count} increments"),
        None => eprintln!("  {schedule}: no time, the first checkpoint came too late"),
    }
}

/// QEMU's own ways, in turns.
fn saves(guest: &Guest, times: usize, folder: &Path) -> Result<Vec<(&'static str, Vec<Saved>)>> {
    let file = folder.join("migration");
    let mut qmp = guest.second_monitor()?;
    let mut saves = vec![
        ("stop, migrate file:, cont", Vec::new()),
        ("migrate file: with mapped-ram", Vec::new()),
        ("background-snapshot", Vec::new()),
    ];
    for time in 0..times {
        eprintln!("QEMU's own ways: {} of {times}", time + 1);
        saves[0]
            .1
            .push(peers::migrate_standing(&mut qmp, &file, 0)?);
        for (number, capability) in [(1, "mapped-ram"), (2, "background-snapshot")] {
            let saved = peers::migrate_to_file(&mut qmp, &file, &[capability])?;
            saves[number].1.push(saved);
        }
    }
    Ok(saves)
}

/// Watches that compare each checkpoint with an image taken in its pause, each in a repository of its own.
fn verified(guest: &Guest, plan: &Plan, folder: &Path) -> Result<Vec<Vec<Value>>> {
    let (pid, count) = (guest.pid_text(), plan.verified.to_string());
    let mut all = Vec::new();
    for iteration in 0..plan.iterations {
        let repository = folder.join("verified");
        let stillframe = Stillframe::init(&repository)?;
        let mut watch = vec!["watch", "--pid", &pid, "--every", "1s", "--count", &count];
        watch.extend(["--schedule", "copy-on-write", "--verify", "--quiet"]);
        let reports = stillframe.json_lines(&watch)?;
        std::fs::remove_dir_all(&repository)?;
        let differing = differing(&reports)?;
        let total = plan.iterations;
        eprintln!(
            "verified: {} of {total}, {differing} pages wrong",
            iteration + 1
        );
        all.push(reports);
    }
    Ok(all)
}

/// Pages that these checkpoints hold wrongly.
pub fn differing(reports: &[Value]) -> Result<u64> {
    let each = reports
        .iter()
        .map(|report| report["verify"]["differing"].as_u64());
    each.sum::<Option<u64>>()
        .context("a checkpoint was not verified")
}

/// The stretch alone, and the floor on the same guest. The first one says where the stretch is.
fn alone(
    origin: &Stillframe,
    plan: &Plan,
    stretch: Option<Stretch>,
    every: Every,
    measured: &mut Measured,
) -> Result<Stretch> {
    let folder = folder()?;
    let guest = Restored::start(origin, "latest", folder.path(), &[])?;
    let (stretch, took_s) = match stretch {
        Some(stretch) => (stretch, stretch.time(&guest)?),
        None => Stretch::lay_out(&guest, plan.stretch)?,
    };
    let run = Run {
        schedule: None,
        every,
        took_s: Some(took_s),
        first: None,
        increments: Vec::new(),
    };
    tell(&run);
    measured.runs.push(run);
    measured.floors_ms.extend(floors_ms(&guest, plan.floors)?);
    Ok(stretch)
}

/// QEMU's floor on a guest that nothing is attached to.
fn floors_ms(guest: &Restored, times: usize) -> Result<Vec<f64>> {
    let mut qmp = guest.monitor()?;
    let file = PathBuf::from(format!("/dev/shm/stillframe-floor-{}", std::process::id()));
    let mut floors_ms = Vec::new();
    for _ in 0..times {
        std::thread::sleep(BETWEEN_FLOORS);
        floors_ms.push(peers::floor_ms(&mut qmp, &file)?);
    }
    let _ = std::fs::remove_file(&file);
    Ok(floors_ms)
}

/// The stretch while checkpoints go to an empty repository.
fn watched(
    origin: &Stillframe,
    plan: &Plan,
    stretch: Stretch,
    (schedule, every): (&'static str, Every),
    measured: &mut Measured,
) -> Result<()> {
    let folder = folder()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let guest = Restored::start(origin, "latest", folder.path(), &[])?;
    let (pid, interval) = (guest.pid.to_string(), every.argument());
    let mut watch = vec!["watch", "--pid", &pid, "--every", &interval, "--json"];
    watch.extend(["--schedule", schedule, "--quiet"]);
    let mut watch = Running::start(stillframe.command(&watch)?)?;
    watch.wait_results(1)?;
    let begun = guest.serial.units()?.unwrap_or_default() >= stretch.first;
    let took_s = stretch.time(&guest)?;
    watch.signal("INT")?;
    let ended = watch.end()?;
    let mut reports = ended.results()?.into_iter();
    if ended.code != Some(0) || reports.len() < 2 {
        let (code, count) = (ended.code, reports.len());
        bail!(
            "watch ended with {code:?} after {count} checkpoints: {}",
            ended.err
        );
    }
    let run = Run {
        schedule: Some(schedule),
        every,
        took_s: (!begun).then_some(took_s),
        first: reports.next(),
        increments: reports.collect(),
    };
    tell(&run);
    measured.runs.push(run);
    measured.floors_ms.extend(floors_ms(&guest, plan.floors)?);
    Ok(())
}

impl Stretch {
    /// Finds one of about this length in a guest just restored, and its time.
    fn lay_out(guest: &Restored, length: Duration) -> Result<(Stretch, f64)> {
        // A guest just restored has said nothing yet.
        let next = || anyhow::Ok(guest.serial.wait_units(1, UNITS_LIMIT)? + 1);
        std::thread::sleep(LEAD);
        let first = next()?;
        guest.serial.wait_units(first, UNITS_LIMIT)?;
        let begin = Instant::now();
        std::thread::sleep(length);
        let last = next()?;
        guest.serial.wait_units(last, UNITS_LIMIT)?;
        Ok((Stretch { first, last }, begin.elapsed().as_secs_f64()))
    }

    /// Seconds that it takes.
    fn time(self, guest: &Restored) -> Result<f64> {
        guest.serial.wait_units(self.first, UNITS_LIMIT)?;
        let begin = Instant::now();
        guest.serial.wait_units(self.last, UNITS_LIMIT)?;
        Ok(begin.elapsed().as_secs_f64())
    }
}

impl Run {
    /// Returns it as raw data.
    pub fn raw(&self) -> Value {
        json!({
            "schedule": self.schedule,
            "every_ms": self.every.0,
            "took_s": self.took_s,
            "first": self.first,
            "increments": self.increments,
        })
    }
}

impl Measured {
    /// The times for the stretch alone.
    pub fn alone_s(&self) -> Vec<f64> {
        let alone = self.runs.iter().filter(|run| run.schedule.is_none());
        alone.filter_map(|run| run.took_s).collect()
    }

    /// The times for the stretch in each run of this kind.
    pub fn took_s(&self, schedule: &str, every: Every) -> Vec<f64> {
        self.watched(schedule, every)
            .filter_map(|run| run.took_s)
            .collect()
    }

    /// Work lost to being watched, by the means.
    pub fn lost(&self, schedule: &str, every: Every) -> Lost {
        let (alone, watched) = (self.alone_s(), self.took_s(schedule, every));
        let error_s = standard_error(&alone).hypot(standard_error(&watched));
        Lost {
            percent: (1.0 - mean(&alone) / mean(&watched)) * 100.0,
            error_percent: error_s / mean(&watched) * 100.0,
        }
    }

    /// Intervals that a schedule was measured at, ascending.
    pub fn intervals(&self, schedule: &str) -> Vec<Every> {
        let runs = self
            .runs
            .iter()
            .filter(|run| run.schedule == Some(schedule));
        let mut all: Vec<Every> = runs.map(|run| run.every).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Reports of increments, in their order.
    pub fn increments(&self, schedule: &str, every: Every) -> Vec<&Value> {
        self.watched(schedule, every)
            .flat_map(|run| &run.increments)
            .collect()
    }

    /// Reports of first checkpoints.
    pub fn firsts(&self, schedule: &str, every: Every) -> Vec<&Value> {
        self.watched(schedule, every)
            .filter_map(|run| run.first.as_ref())
            .collect()
    }

    /// Pages wrong in all verified checkpoints.
    pub fn wrong_pages(&self) -> Result<u64> {
        self.verified.iter().map(|reports| differing(reports)).sum()
    }

    fn watched(&self, schedule: &str, every: Every) -> impl Iterator<Item = &Run> {
        self.runs
            .iter()
            .filter(move |run| run.schedule == Some(schedule) && run.every == every)
    }
}
