//! Every named fault point times every fault: the VM runs again within its limit, nothing committed is
//! lost, and the next checkpoint is exact.

mod clones;
mod lazy;
mod rewind;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::kill::aftermath;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::fault::with_fault;
use stillframe_harness::filling::Filling;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::{checkpoints, expect_nothing_left};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::results::{self, Claim, Goal};
use stillframe_harness::running::{PATIENCE, Running};

/// The faults that can happen at a point.
const FAULTS: [&str; 4] = ["error", "kill", "hang", "slow"];
/// Time after a fault by which an unharmed VM runs: a pause is bounded by 3 s, a missed heartbeat is acted on after
/// 2.5 s.
const RUNS_WITHIN: Duration = Duration::from_secs(20);

/// The verb at work when the fault strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    /// A watch with this schedule.
    Watch(&'static str),
    /// Removal of all but one checkpoint.
    Forget,
    /// One more password.
    AddKey,
    /// One password less.
    RemoveKey,
    /// A lazy restore.
    Restore,
    /// Two clones.
    Clone,
    /// A rewind.
    Rewind,
    /// The indexing of an image.
    Index,
}

/// A point, what passes it, and at which pass the fault strikes.
type Cell = (&'static str, Verb, u32);

/// All points that these verbs pass.
const POINTS: [Cell; 41] = [
    ("attach.opened", Verb::Watch("pre-copy"), 1),
    ("attach.protected", Verb::Watch("pre-copy"), 1),
    ("attach.protected", Verb::Watch("copy-on-write"), 1),
    ("pause.before-stop", Verb::Watch("pre-copy"), 2),
    ("pause.stopped", Verb::Watch("pre-copy"), 2),
    ("pause.stopped", Verb::Watch("copy-on-write"), 2),
    ("pause.before-cont", Verb::Watch("stop-copy"), 2),
    ("pause.after-cont", Verb::Watch("pre-copy"), 2),
    ("copy-on-write.batch", Verb::Watch("copy-on-write"), 3),
    ("copy-on-write.fault", Verb::Watch("copy-on-write"), 20),
    ("store.pack", Verb::Watch("pre-copy"), 2),
    ("store.index", Verb::Watch("pre-copy"), 2),
    ("store.manifest", Verb::Watch("copy-on-write"), 2),
    ("lock.take", Verb::Watch("pre-copy"), 2),
    ("lock.end", Verb::Watch("pre-copy"), 1),
    ("lock.take", Verb::Forget, 1),
    ("forget.remove", Verb::Forget, 1),
    ("prune.remove", Verb::Forget, 1),
    ("index.remove", Verb::Forget, 1),
    ("rewind.stopped", Verb::Rewind, 1),
    ("rewind.inhibited", Verb::Rewind, 1),
    ("rewind.exchange", Verb::Rewind, 1),
    ("rewind.exchanged", Verb::Rewind, 1),
    ("rewind.loaded", Verb::Rewind, 1),
    ("rewind.before-cont", Verb::Rewind, 1),
    ("template.filled", Verb::Clone, 1),
    ("restore.launched", Verb::Clone, 1),
    ("restore.loaded", Verb::Clone, 2),
    ("restore.launched", Verb::Restore, 1),
    ("restore.loaded", Verb::Restore, 1),
    ("lease.take", Verb::Restore, 1),
    ("lazy.fault", Verb::Restore, 20),
    ("lock.refresh", Verb::Restore, 1),
    ("store.working-set", Verb::Restore, 1),
    ("lazy.release", Verb::Restore, 1),
    ("lazy.released", Verb::Restore, 1),
    ("lease.end", Verb::Restore, 1),
    ("store.index", Verb::Index, 1),
    ("store.image", Verb::Index, 1),
    ("key.write", Verb::AddKey, 1),
    ("key.remove", Verb::RemoveKey, 1),
];

/// The outcome of a fault.
#[derive(Default)]
struct Outcome {
    /// How long until the VM ran on, in milliseconds.
    runs_ms: u64,
    /// The exit code.
    exit: Option<i32>,
    /// The output of the process.
    output: Vec<Value>,
    /// Whether the VM was stopped, and could not be resumed, until it was rewound once more.
    stood: bool,
}

/// A VM and its repository, for many faults one after the other.
pub struct Bed {
    guest: Guest,
    monitor: Qmp,
    stillframe: Stillframe,
    folder: tempfile::TempDir,
}

impl Bed {
    /// Boots the VM.
    pub fn new() -> Result<Bed> {
        let folder = tempfile::tempdir()?;
        let stillframe = Stillframe::init(&folder.path().join("repo"))?;
        let mut setup = Setup::small(Kind::Private, "matrix");
        setup.workload.writes_per_tick = 2000;
        let guest = setup.boot()?;
        let monitor = guest.second_monitor()?;
        Ok(Bed {
            guest,
            monitor,
            stillframe,
            folder,
        })
    }

    /// One fault at one point; what came of it.
    fn strike(&mut self, (point, verb, pass): Cell, fault: &str) -> Result<Value> {
        let command = self.command(verb)?;
        let before = checkpoints(&self.stillframe)?;
        let spec = format!("{point}:{fault}:{pass}");
        let (command, reached) = with_fault(&command, &spec, self.folder.path())?;
        let outcome = match verb {
            Verb::Restore => self.strike_restore(command, &reached)?,
            Verb::Rewind => self.strike_rewind(command, &reached)?,
            Verb::Clone => self.strike_clones(command, &reached)?,
            _ => self.strike_others(command, &reached)?,
        };
        fs::remove_file(&reached)?;
        let after = checkpoints(&self.stillframe)?;
        let mut committed: Vec<&str> = match verb {
            Verb::Forget | Verb::Restore => before.last().map(String::as_str).into_iter().collect(),
            _ => before.iter().map(String::as_str).collect(),
        };
        if let Verb::Watch(_) = verb {
            committed.extend(
                outcome
                    .output
                    .iter()
                    .filter_map(|one| one["checkpoint"].as_str()),
            );
        }
        for id in committed {
            ensure!(
                after.iter().any(|other| other == id),
                "checkpoint {id} was committed and is lost"
            );
        }
        aftermath(&self.stillframe, &mut self.guest)?;
        expect_nothing_left(self.guest.pid(), &mut self.monitor)?;
        let Outcome {
            runs_ms,
            exit,
            stood,
            ..
        } = outcome;
        Ok(json!({
            "point": point, "verb": format!("{verb:?}"), "fault": fault, "runs_ms": runs_ms, "exit": exit,
            "stood": stood,
        }))
    }

    /// How long the VM took to run on, and the process's exit and output.
    fn strike_others(&mut self, command: Command, reached: &Path) -> Result<Outcome> {
        let mut engine = Running::start(command)?;
        wait_struck(&mut engine, reached)?;
        let runs_ms = self.runs_again()?;
        let ended = engine.end()?;
        Ok(Outcome {
            runs_ms,
            exit: ended.code,
            output: ended.results().unwrap_or_default(),
            stood: false,
        })
    }

    /// How long the VM took to run on, by itself or by another rewind.
    fn strike_rewind(&mut self, command: Command, reached: &Path) -> Result<Outcome> {
        let mut engine = Running::start(command)?;
        wait_struck(&mut engine, reached)?;
        let begin = Instant::now();
        let ended = engine.end()?;
        let stood = rewind::outlived(&self.stillframe, &self.guest, &mut self.monitor)?;
        Ok(Outcome {
            runs_ms: begin.elapsed().as_millis() as u64,
            exit: ended.code,
            output: Vec::new(),
            stood,
        })
    }

    /// How long it took until every clone that is left ran, and one more. The VM itself is not touched.
    fn strike_clones(&mut self, command: Command, reached: &Path) -> Result<Outcome> {
        let mut engine = Running::start(command)?;
        wait_struck(&mut engine, reached)?;
        let begin = Instant::now();
        let ended = engine.end()?;
        clones::outlived(&self.stillframe, self.folder.path())?;
        Ok(Outcome {
            runs_ms: begin.elapsed().as_millis() as u64,
            exit: ended.code,
            ..Outcome::default()
        })
    }

    /// How long it took until the restored VM ran with all of its memory. Its lease is not for ever.
    fn strike_restore(&mut self, command: Command, reached: &Path) -> Result<Outcome> {
        let mut filling = Filling::run(command, self.folder.path())?;
        wait_struck(&mut filling.running, reached)?;
        let begin = Instant::now();
        let exit = filling.running.wait_exit()?;
        lazy::outlived(&self.stillframe, self.folder.path(), filling)?;
        let runs_ms = begin.elapsed().as_millis() as u64;
        self.stillframe
            .ok(&["forget", "--keep-last", "1", "--prune"])?;
        let left = checkpoints(&self.stillframe)?.len();
        ensure!(left == 1, "{left} checkpoints are held by an ended VM");
        Ok(Outcome {
            runs_ms,
            exit,
            ..Outcome::default()
        })
    }

    /// The command that is struck, with what it needs to be there.
    fn command(&mut self, verb: Verb) -> Result<Command> {
        let pid = self.guest.pid_text();
        let id = self.prepared(verb)?;
        let line: Vec<&str> = match verb {
            Verb::Watch(schedule) => vec![
                "watch",
                "--pid",
                &pid,
                "--every",
                "100ms",
                "--count",
                "4",
                "--json",
                "--schedule",
                schedule,
            ],
            Verb::Forget => vec!["forget", "--keep-last", "1", "--prune", "--json"],
            Verb::AddKey => vec!["key", "add", "--json"],
            Verb::Index => vec!["index", &id, "--json"],
            Verb::RemoveKey => vec!["key", "remove", &id, "--json"],
            Verb::Rewind => vec!["rewind", "latest", "--pid", &pid, "--json"],
            Verb::Clone => return clones::command(&self.stillframe, self.folder.path()),
            Verb::Restore => return lazy::command(&self.stillframe, self.folder.path()),
        };
        let mut command = self.stillframe.command(&line)?;
        command.env("STILLFRAME_NEW_PASSWORD", "another horse");
        Ok(command)
    }

    /// Prepares the needs of the verb; returns the id of a key that may go, or the path of a new image.
    fn prepared(&mut self, verb: Verb) -> Result<String> {
        match verb {
            Verb::Watch(_) | Verb::AddKey => {}
            Verb::Index => {
                // Of content that was not indexed before.
                let image = self.folder.path().join("image");
                let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
                let content = format!("{:<64}", now.as_nanos()).repeat(1 << 14);
                fs::write(&image, content)?;
                return Ok(image.display().to_string());
            }
            Verb::Forget | Verb::Restore => {
                for _ in 0..2 {
                    let pid = self.guest.pid_text();
                    self.stillframe.ok(&["checkpoint", "--pid", &pid])?;
                }
            }
            Verb::Clone | Verb::Rewind => {
                let pid = self.guest.pid_text();
                self.stillframe.ok(&["checkpoint", "--pid", &pid])?;
                self.guest.serial.wait_more(3, PATIENCE)?;
            }
            Verb::RemoveKey => {
                let mut command = self.stillframe.command(&["key", "add", "--json"])?;
                command.env("STILLFRAME_NEW_PASSWORD", "another horse");
                let output = command.output()?;
                ensure!(output.status.success(), "{output:?}");
                let added: Value = serde_json::from_slice(&output.stdout)?;
                let id = added["added"]
                    .as_str()
                    .context("`key add` reported no id")?;
                return Ok(id.to_owned());
            }
        }
        Ok(String::new())
    }

    /// How long the VM takes to run again, in milliseconds.
    fn runs_again(&mut self) -> Result<u64> {
        let begin = Instant::now();
        let ticks = self.guest.serial.ticks()?.len();
        while self.guest.serial.ticks()?.len() < ticks + 2 {
            if begin.elapsed() > RUNS_WITHIN {
                bail!("the VM does not run; it is {}", self.monitor.status()?);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(begin.elapsed().as_millis() as u64)
    }
}

/// Waits until the fault has happened.
fn wait_struck(engine: &mut Running, reached: &Path) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !reached.exists() {
        let ended = engine.has_ended()? && !reached.exists();
        ensure!(
            !ended && Instant::now() < deadline,
            "the fault did not happen: {}",
            engine.err()
        );
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// All points times all faults, written to `docs/results/matrix/`; or those of the points whose names begin so.
pub fn run(only: Option<&str>) -> Result<()> {
    let mut bed = Bed::new()?;
    let (mut cells, mut harmed) = (Vec::new(), 0);
    println!(
        "{:22} {:26} {:6} runs again after",
        "point", "verb", "fault"
    );
    let wanted = |(point, ..): &Cell| only.is_none_or(|only| point.starts_with(only));
    for cell in POINTS.into_iter().filter(wanted) {
        for fault in FAULTS {
            let (point, verb, _) = cell;
            let verb = format!("{verb:?}");
            match bed.strike(cell, fault) {
                Ok(line) => {
                    let how = match line["stood"] == true {
                        true => " (rewound once more)",
                        false => "",
                    };
                    let runs_ms = &line["runs_ms"];
                    println!("{point:22} {verb:26} {fault:6} {runs_ms} ms{how}");
                    cells.push(line);
                }
                Err(error) => {
                    harmed += 1;
                    println!("{point:22} {verb:26} {fault:6} HARMED: {error:#}");
                    let harm = format!("{error:#}");
                    cells.push(json!({"point": point, "verb": verb, "fault": fault, "harm": harm}));
                    bed = Bed::new()?;
                }
            }
        }
    }
    println!("{} cells, {harmed} harmed", cells.len());
    if only.is_none() {
        results::write_raw("matrix", "cells.jsonl", &cells)?;
        results::write_summary(
            "matrix",
            &[Claim::new(
                "fault-matrix",
                Goal::Zero,
                f64::from(harmed),
                "cases",
                "cargo xtask bench matrix",
            )],
        )?;
    }
    ensure!(harmed == 0, "{harmed} cells were harmed");
    Ok(())
}
