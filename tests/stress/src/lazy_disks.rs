//! `kill -9` of a restore that fills the disks of its VM while it runs (`restore --lazy --disks lazy=DIR`), and `restore
//! --resume` after it.
//!
//! Three oracles:
//! - the guest knows every sector from its memory (`guest/workload`, `disk`): a block that is lost, wrong or cannot be read
//!   is found by it;
//! - the images of a VM that was restored with `--paused` are those of the checkpoint, to the byte;
//! - the images of a VM that ended early are what they held then, above the disks of the checkpoint.
//!
//! Of the kills one of six strikes before the guest runs, one while its memory is filled, two while its disks are, and two
//! shortly before the end. A third are of the guardian, too. Half of the restores are killed once more after `--resume`. In a
//! fifth of the cases QEMU is killed as well, and `--resume` completes the images.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use stillframe_harness::committing::expect_no_copy;
use stillframe_harness::filling::{Filling, expect_alone, files_kept, runtime_file};
use stillframe_harness::health::{children, expect_whole, has_userfaultfd, pids_with};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::random::Random;
use stillframe_harness::restored::Restored;
use stillframe_harness::results::{self, Claim, Goal};
use stillframe_harness::running::{PATIENCE, signal};

use self::images::Images;
use crate::disks::{Bus, Machine, Scene};
use crate::restore_kill::{ANSWER_LIMIT, GUARDIAN_LIMIT, kill_and_reap, sleep_up_to, wait_gone};

mod images;

const COMMAND: &str = "cargo xtask bench lazy-disks";
/// The machines, in turn.
const MACHINES: [Machine; 4] = [
    Machine::new(Bus::Virtio, "raw", 1).with_ballast(BALLAST_MIB),
    Machine::new(Bus::Virtio, "qcow2", 3).with_ballast(BALLAST_MIB),
    Machine::new(Bus::Scsi, "qcow2", 1).with_ballast(BALLAST_MIB),
    Machine::new(Bus::Ide, "raw", 3).with_ballast(BALLAST_MIB),
];
/// Points at which a restore was killed and gone on with that the promise asks for.
const POINTS_MIN: u64 = 50;
/// MiB of each disk that only the restore writes: the guest soon writes all others.
pub const BALLAST_MIB: u32 = 48;
/// Filled a second, so that there is a while to strike in.
const LIMIT_FILL: &str = "--limit-fill=48M";
/// The message when memory is complete.
const FILLS_DISKS: &str = "filling its disks";
/// The message when `--resume` begins to complete an image of a VM that has ended.
const COMPLETES: &str = "completing its disk";
/// The message when it has completed all.
const COMPLETED: &str = "disks are complete now";
/// Time for `qemu-img` to complete the images, in milliseconds.
const COMPLETING_MS: u64 = 250;
/// In most cases the engine finds an image complete, and ends, within this time, in milliseconds.
const FOUND_COMPLETE_MS: u64 = 150;
/// The run of one machine ends after this number of wrong strikes.
const WRONG_MAX: usize = 3;

/// Where a kill strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// Before the guest runs.
    Early,
    /// While memory is filled.
    Memory,
    /// While disks are filled.
    Disks,
    /// Shortly before the last of them is complete, or after.
    Late,
    /// When the last image is complete, and the engine does not know it yet, or has just learned it.
    LettingGo,
}

/// In turn.
const MOMENTS: [Moment; 6] = [
    Moment::Disks,
    Moment::Memory,
    Moment::Disks,
    Moment::Early,
    Moment::LettingGo,
    Moment::Late,
];

/// What is done in one strike.
#[derive(Debug, Clone, Copy)]
struct Choice {
    moment: Moment,
    /// The VM stays paused.
    paused: bool,
    /// The guardian is killed, too.
    both: bool,
    /// What goes on is killed, too.
    again: bool,
    /// QEMU is killed, too.
    ends: bool,
    /// `--resume` comes before the guardian has paused the VM.
    at_once: bool,
}

impl Choice {
    /// Of the strike with this number. Every moment meets all others.
    fn of(number: u64) -> Choice {
        let turn = number / MOMENTS.len() as u64;
        Choice {
            moment: MOMENTS[number as usize % MOMENTS.len()],
            paused: number.is_multiple_of(5),
            both: (number + turn) % 3 == 2,
            again: !(number + turn).is_multiple_of(2),
            ends: number % 5 == 2,
            at_once: (number + turn) % 4 >= 2,
        }
    }
}

/// The usual durations without a kill, in milliseconds.
#[derive(Debug, Clone, Copy)]
pub struct Usual {
    /// Until the guest runs.
    runs: u64,
    /// From then on until memory is complete.
    memory: u64,
    /// From then on until the disks are.
    disks: u64,
}

impl Usual {
    /// A guess of the durations of one disk.
    pub const GUESS: Usual = Usual {
        runs: 1000,
        memory: 1500,
        disks: 1000,
    };
}

/// What came of the strikes.
#[derive(Debug, Default)]
pub struct Strikes {
    /// Restores that were killed.
    pub strikes: u64,
    /// Points at which one was killed and gone on with, by `--resume`.
    pub points: u64,
    /// By phase that was struck.
    pub phases: BTreeMap<String, u64>,
    /// What was wrong, in words.
    pub wrong: Vec<String>,
    /// One record of each.
    pub raw: Vec<Value>,
}

/// What a killed process has left.
enum Left {
    /// No VM.
    Nothing,
    /// A VM that is complete, as if there had been no kill.
    Complete(i32),
    /// A VM to go on with.
    Unfinished(i32),
}

/// A VM that is stopped, its checkpoint, and a place for VMs that are restored from it.
struct Case {
    scene: Scene,
    id: String,
    images: Images,
    usual: Usual,
}

impl Case {
    /// Takes the checkpoint, and sees how long its restore usually takes, unless that is known.
    fn begin(machine: Machine, usual: Option<Usual>) -> Result<Case> {
        let scene = machine.boot()?;
        let pid = scene.guest.pid_text();
        let line = ["checkpoint", "--pid", &pid, "--disks", "capture"];
        let report = scene.stillframe.json(&line)?;
        // It takes no processor time from the VMs that are restored.
        scene.guest.second_monitor()?.execute("stop", json!({}))?;
        let id = report["checkpoint"].as_str().context("no id")?.to_owned();
        let images = Images::new(&scene, &id, &report["disks"])?;
        let mut case = Case {
            images,
            scene,
            id,
            usual: usual.unwrap_or(Usual::GUESS),
        };
        if usual.is_none() {
            case.usual = case.measure()?;
        }
        Ok(case)
    }

    fn measure(&self) -> Result<Usual> {
        let begin = Instant::now();
        let ms = || begin.elapsed().as_millis() as u64;
        let mut filling = self.start(false, &[LIMIT_FILL])?;
        filling.wait_runs()?;
        let runs = ms();
        filling.running.wait_words(FILLS_DISKS)?;
        let memory = ms();
        let (restored, _) = filling.complete()?;
        let disks = ms();
        drop(restored);
        self.images.expect_complete(&[0])?;
        fs::remove_dir_all(&self.images.folder)?;
        Ok(Usual {
            runs,
            memory: memory - runs,
            disks: disks - memory,
        })
    }

    /// Waits until a QEMU that ends has closed its files: it has no command line a while before.
    fn wait_closed(&self) -> Result<()> {
        let monitor = self.scene.path("restored.qmp").display().to_string();
        let deadline = Instant::now() + PATIENCE;
        while fs::read_to_string("/proc/net/unix")?.contains(&monitor) {
            ensure!(Instant::now() < deadline, "a process listens on {monitor}");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn start(&self, paused: bool, limits: &[&str]) -> Result<Filling> {
        let disks = format!("--disks=lazy={}", self.images.folder.display());
        let mut more = [&[&*disks], limits].concat();
        more.extend(paused.then_some("--paused"));
        // Not in the folder of the images, where no other file may be.
        let around = self.images.folder.parent().context("no folder")?;
        self.wait_closed()?;
        Filling::start(&self.scene.stillframe, &self.id, around, &more)
    }

    fn resume(&self, killed: &Filling, limits: &[&str]) -> Result<Filling> {
        let Filling { qmp, serial, .. } = killed;
        Filling::resume(&self.scene.stillframe, qmp, serial, limits)
    }

    /// One restore, killed, and what becomes of its VM. The record has what is known of it if it is wrong.
    fn strike(
        &self,
        choice: Choice,
        random: &mut Random,
        record: &mut Value,
        points: &mut u64,
    ) -> Result<()> {
        let mut filling = self.start(choice.paused, &[LIMIT_FILL])?;
        let guardians = self.wait_for(choice.moment, &mut filling, random)?;
        let both = choice.both.then_some(&guardians);
        let left = match self.kill(&mut filling, both, record)? {
            Left::Unfinished(pid) if choice.ends => {
                *points += 1;
                return self.ends(pid, &filling, choice, random, record);
            }
            left => left,
        };
        let restored = match left {
            Left::Complete(pid) if choice.ends => {
                // It may have written nothing out by itself.
                signal(pid as u32, "KILL")?;
                wait_gone(&[pid])?;
                self.wait_closed()?;
                return self.images.expect_complete(&[0, 3]);
            }
            Left::Nothing => {
                // It can be restored as if nothing had been.
                drop(filling);
                self.clear()?;
                self.start(choice.paused, &[])?.complete()?.0
            }
            Left::Complete(pid) => Restored {
                pid,
                qmp: filling.qmp.clone(),
                serial: filling.serial.clone(),
            },
            Left::Unfinished(pid) => {
                if !choice.both && !choice.at_once {
                    record["found"] = self.settles(pid, &filling)?.into();
                }
                *points += 1;
                self.go_on(&filling, choice, random, record, points)?
            }
        };
        self.expect_right(restored, choice.paused)
    }

    /// Goes on with a VM, in half of the cases after one more kill.
    fn go_on(
        &self,
        killed: &Filling,
        choice: Choice,
        random: &mut Random,
        record: &mut Value,
        points: &mut u64,
    ) -> Result<Restored> {
        if !choice.again {
            return Ok(self.resume(killed, &[])?.complete()?.0);
        }
        let mut filling = self.resume(killed, &[LIMIT_FILL])?;
        // Somewhere before the end, also before it has reached the VM.
        sleep_up_to(random, self.usual.memory + self.usual.disks);
        let guardians = children(filling.running.pid(), "stillframe")?;
        let both = (random.below(3) == 0).then_some(&guardians);
        let mut second = json!({});
        let left = self.kill(&mut filling, both, &mut second);
        record["again"] = second;
        match left? {
            Left::Nothing => bail!("a VM that has run was ended"),
            Left::Complete(pid) => Ok(Restored {
                pid,
                qmp: filling.qmp.clone(),
                serial: filling.serial.clone(),
            }),
            Left::Unfinished(_) => {
                *points += 1;
                Ok(self.resume(&filling, &[])?.complete()?.0)
            }
        }
    }

    /// Waits for the moment; returns the guardians.
    fn wait_for(
        &self,
        moment: Moment,
        filling: &mut Filling,
        random: &mut Random,
    ) -> Result<Vec<i32>> {
        let Usual {
            runs,
            memory,
            disks,
        } = self.usual;
        if moment == Moment::Early {
            // The first third of that time, in which QEMU is not there yet, is left out in half of the cases.
            let skipped = random.below(2) * runs / 3;
            std::thread::sleep(Duration::from_millis(skipped));
            sleep_up_to(random, runs / 2);
            return children(filling.running.pid(), "stillframe");
        }
        filling.wait_runs()?;
        let guardians = children(filling.running.pid(), "stillframe")?;
        if moment == Moment::Memory {
            sleep_up_to(random, memory);
            return Ok(guardians);
        }
        filling.running.wait_words(FILLS_DISKS)?;
        match moment {
            Moment::Late => {
                std::thread::sleep(Duration::from_millis(disks.saturating_sub(400)));
                sleep_up_to(random, 500);
            }
            Moment::LettingGo => {
                let deadline = Instant::now() + PATIENCE;
                while !self.images.are_complete()? && !filling.running.has_ended()? {
                    ensure!(Instant::now() < deadline, "the disks are never complete");
                }
                sleep_up_to(random, FOUND_COMPLETE_MS);
            }
            _ => sleep_up_to(random, disks),
        }
        Ok(guardians)
    }

    /// Kills a process, and finds what it has left.
    fn kill(
        &self,
        filling: &mut Filling,
        guardians: Option<&Vec<i32>>,
        record: &mut Value,
    ) -> Result<Left> {
        let mine = children(filling.running.pid(), "stillframe");
        for &guardian in guardians.into_iter().flatten() {
            // One that has ended needs no signal.
            let _ = signal(guardian as u32, "KILL");
        }
        kill_and_reap(&mut filling.running)?;
        let said = filling.running.err();
        let ran = filling.runs();
        let recorded = runtime_file(&filling.qmp, ".filling")?.exists();
        if !ran && !recorded && guardians.is_none() {
            // It ends the VM.
            wait_gone(&mine?)?;
        }
        let qemus = pids_with(&filling.qmp.display().to_string())?;
        let phase = match (recorded, ran, said.contains(FILLS_DISKS)) {
            (false, true, _) => "after it was complete",
            (false, false, _) => "before it ran",
            (true, false, _) => "about to run",
            (true, true, false) => "memory",
            (true, true, true) if self.images.are_complete()? => "letting go",
            (true, true, true) => "disks",
        };
        record["phase"] = phase.into();
        record["said"] = said.lines().last().unwrap_or_default().into();
        match (&qemus[..], recorded, ran) {
            (&[pid], true, _) => Ok(Left::Unfinished(pid)),
            (&[pid], false, true) => Ok(Left::Complete(pid)),
            (_, false, false) if guardians.is_some() => {
                record["left_waiting"] = qemus.len().into();
                self.images.end_all()?;
                Ok(Left::Nothing)
            }
            (_, false, false) => {
                wait_gone(&qemus).context("a QEMU is left behind")?;
                Ok(Left::Nothing)
            }
            _ => bail!("a VM that has run was ended: {qemus:?}"),
        }
    }

    /// Waits until the guardian has paused the VM, unless its main thread waits for a page or a block. Of one that is
    /// complete it has nothing to do.
    fn settles(&self, pid: i32, filling: &Filling) -> Result<String> {
        let begin = Instant::now();
        while begin.elapsed() < GUARDIAN_LIMIT {
            let status = Qmp::status_within(&filling.qmp, ANSWER_LIMIT)?;
            let status = status.as_deref().unwrap_or("waiting");
            let whole = self.images.are_complete()? && !has_userfaultfd(pid)?;
            if status != "running" || whole {
                return Ok(status.to_owned());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        bail!("the VM runs on without its disks")
    }

    /// Ends QEMU, too, and has its images completed: they hold what they held, above the disks of the checkpoint.
    fn ends(
        &self,
        pid: i32,
        killed: &Filling,
        choice: Choice,
        random: &mut Random,
        record: &mut Value,
    ) -> Result<()> {
        signal(pid as u32, "KILL")?;
        wait_gone(&[pid])?;
        self.wait_closed()?;
        let kept = self.images.keep()?;
        let mut filling = self.resume(killed, &[])?;
        let mut ended = None;
        if choice.again {
            filling
                .running
                .wait_until(COMPLETES, |it| Ok(it.err().contains(COMPLETES)))?;
            sleep_up_to(random, COMPLETING_MS);
            kill_and_reap(&mut filling.running)?;
            let said = filling.running.err();
            record["again"] = json!({ "phase": "completing", "said": said });
            if said.contains(COMPLETED) {
                ended = Some(said);
            } else {
                filling = self.resume(killed, &[])?;
            }
        }
        if ended.is_none() {
            let end = filling.running.end()?;
            ensure!(end.code == Some(1), "{end:?}");
            ended = Some(end.err);
        }
        let said = ended.unwrap_or_default();
        ensure!(said.contains(COMPLETED), "{said}");
        ensure!(files_kept(&killed.qmp)? == 0, "files are left");
        // A QEMU that is killed may leave clusters without a use.
        self.images.expect_complete(&[0, 3])?;
        self.images.expect_as_kept(&kept)?;
        match choice.paused {
            true => self.images.expect_as_captured(),
            false => Ok(()),
        }
    }

    /// Complete, right, and alone.
    fn expect_right(&self, restored: Restored, paused: bool) -> Result<()> {
        expect_alone(&restored)?;
        let mut monitor = restored.monitor()?;
        expect_no_copy(&mut monitor)?;
        if paused {
            ensure!(monitor.status()? == "paused", "it was to stay paused");
            // QEMU writes out what it has cached of the images.
            monitor.execute("stop", json!({}))?;
            self.images.expect_as_captured()?;
            monitor.execute("cont", json!({}))?;
        }
        ensure!(monitor.status()? == "running", "it does not run");
        self.scene.finds_all_anew(&restored.serial)?;
        expect_no_errors(&mut monitor)?;
        drop(monitor);
        drop(restored);
        self.images.expect_complete(&[0])
    }

    /// No trace of a strike is left for the next one.
    fn clear(&self) -> Result<()> {
        self.images.end_all()?;
        for name in ["lazy", "restored.qmp"] {
            let path = self.scene.path(name);
            // What is not there is cleared already.
            let _ = match path.is_dir() {
                true => fs::remove_dir_all(path),
                false => fs::remove_file(path),
            };
        }
        Ok(())
    }
}

/// No request of the guest has failed in QEMU.
fn expect_no_errors(monitor: &mut Qmp) -> Result<()> {
    let all = monitor.execute("query-blockstats", json!({}))?;
    for device in all.as_array().context("no statistics")? {
        let stats = &device["stats"];
        for what in ["rd", "wr", "flush"] {
            let failed = &stats[format!("failed_{what}_operations")];
            ensure!(*failed == 0, "{failed} requests ({what}) failed: {device}");
        }
    }
    Ok(())
}

/// This number of strikes at restores of one machine, whose durations are measured if they are not known.
pub fn one_machine(
    machine: Machine,
    usual: Option<Usual>,
    count: u64,
    random: &mut Random,
    strikes: &mut Strikes,
) -> Result<()> {
    let case = Case::begin(machine, usual)?;
    eprintln!("{:20} usually {:?} ms", machine.name(), case.usual);
    let wrong_before = strikes.wrong.len();
    for _ in 0..count {
        let (number, begin) = (strikes.strikes, Instant::now());
        let choice = Choice::of(number);
        strikes.strikes += 1;
        let mut record = json!({
            "strike": number, "machine": machine.name(), "moment": format!("{:?}", choice.moment), "paused": choice.paused,
            "guardian_killed": choice.both, "qemu_killed": choice.ends, "resumed_at_once": choice.at_once,
        });
        let done = case.strike(choice, random, &mut record, &mut strikes.points);
        record["took_ms"] = json!(begin.elapsed().as_millis() as u64);
        let phase = record["phase"].as_str().unwrap_or("none");
        *strikes.phases.entry(phase.to_owned()).or_default() += 1;
        if let Err(error) = done {
            record["wrong"] = format!("{error:#}").into();
            eprintln!("wrong: {record}");
            strikes.wrong.push(record.to_string());
        }
        strikes.raw.push(record);
        case.clear()?;
        // What is wrong here would be wrong after each further strike.
        if strikes.wrong.len() - wrong_before >= WRONG_MAX {
            break;
        }
    }
    expect_whole(&case.scene.stillframe, std::slice::from_ref(&case.id))
}

/// All machines in turn; writes `docs/results/lazy-disks/`.
pub fn run(count: u64, seed: u64) -> Result<()> {
    let mut random = Random::new(seed);
    let mut strikes = Strikes::default();
    let begin = Instant::now();
    for machine in MACHINES {
        let share = count.div_ceil(MACHINES.len() as u64);
        one_machine(machine, None, share, &mut random, &mut strikes)
            .with_context(|| machine.name())?;
        eprintln!(
            "{:20} {} strikes so far, {:?}; {} points gone on from, {} wrong, {} s",
            machine.name(),
            strikes.strikes,
            strikes.phases,
            strikes.points,
            strikes.wrong.len(),
            begin.elapsed().as_secs()
        );
    }
    results::write_raw("lazy-disks", "strikes.jsonl", &strikes.raw)?;
    let wrong = strikes.wrong.len() as f64;
    let claim = Claim::new("lazy-disks", Goal::Zero, wrong, "strikes", COMMAND);
    let enough = strikes.points >= POINTS_MIN;
    results::write_summary("lazy-disks", &[claim.if_enough(enough)])?;
    match strikes.wrong.first() {
        None => Ok(()),
        Some(first) => bail!("{} were wrong: {first}", strikes.wrong.len()),
    }
}
