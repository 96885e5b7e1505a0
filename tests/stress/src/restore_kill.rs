//! `kill -9` of a lazy restore at random moments. Its VM must never run on wrong memory. It is either gone, because
//! the guest had not run yet, or there to be completed by `restore --resume`.
//!
//! Moments drawn at random alone would rarely fall into the milliseconds before the guest runs, or into the detach
//! of the engine from QEMU. So a third of the kills strike before the guest runs, and a third shortly before memory
//! is complete. Half of the latter strike right when QEMU has received the command to close its userfaultfd. Half
//! of the restores that can be resumed are killed once more during the resume.
//!
//! Everything is restored from the checkpoint of a paused VM, whose memory was imaged. Half of the restored VMs
//! stay paused, and every page of them is compared with the image in the end. The other half run, and check
//! themselves.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::restore_exact::setup;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::filling::{Filling, expect_alone, files_kept, runtime_file};
use stillframe_harness::guest::Kind;
use stillframe_harness::health::{children, has_userfaultfd, is_alive, pids_with};
use stillframe_harness::memory::Image;
use stillframe_harness::qmp::Qmp;
use stillframe_harness::random::Random;
use stillframe_harness::restored::Restored;
use stillframe_harness::results::{self, Claim, Goal, percentile};
use stillframe_harness::running::{PATIENCE, Running, signal};

/// Ticks that a guest must survive once its memory is complete.
const TICKS: usize = 10;
/// Filled a second, so that there is a while to strike in.
const LIMIT_FILL: [&str; 2] = ["--limit-fill", "32M"];
/// Time for the guardian's on-disconnect action on a busy machine. It may wait a minute for a QEMU whose vCPU waits
/// for a page while `cont` is answered.
pub(crate) const GUARDIAN_LIMIT: Duration = Duration::from_secs(90);
/// A main thread that does not answer for this long waits for a page.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// The run ends after this many cases of harm.
const HARM_MAX: u64 = 3;
/// Kills of each guest.
const KINDS: [Kind; 3] = [Kind::Private, Kind::Memfd, Kind::TwoCpus];

/// Where a kill is meant to strike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// Before the guest runs.
    Early,
    /// While its memory is filled.
    Filling,
    /// Shortly before memory is complete, or after.
    Late,
    /// When QEMU has closed its userfaultfd.
    LettingGo,
}

/// The n-th kill's moment.
pub fn moment(number: u64) -> Moment {
    match number % 6 {
        0 | 3 => Moment::Early,
        1 | 4 => Moment::Filling,
        2 => Moment::Late,
        _ => Moment::LettingGo,
    }
}

/// The usual durations without a kill, in milliseconds.
#[derive(Debug, Clone, Copy)]
struct Usual {
    /// Until the guest runs.
    runs: u64,
    /// From then on until memory is complete.
    filled: u64,
}

/// A checkpoint of a VM that stood still, and what it holds.
pub struct Case {
    stillframe: Stillframe,
    image: Image,
    usual: Usual,
    folder: tempfile::TempDir,
}

impl Case {
    /// Takes the checkpoint, and sees how long its restore usually takes.
    pub fn begin(kind: Kind) -> Result<Case> {
        let folder = tempfile::Builder::new()
            .prefix("stillframe-restore-kill-")
            .tempdir()?;
        let stillframe = Stillframe::init(&folder.path().join("repo"))?;
        let guest = setup(kind).boot()?;
        let pid = guest.pid_text();
        stillframe.ok(&["watch", "--pid", &pid, "--every", "200ms", "--count", "4"])?;
        let mut monitor = guest.second_monitor()?;
        monitor.execute("stop", json!({}))?;
        stillframe.ok(&["checkpoint", "--pid", &pid])?;
        let image = Image::take(guest.pid(), &mut monitor)?;
        drop(guest);
        let usual = Usual { runs: 0, filled: 0 };
        let mut case = Case {
            stillframe,
            image,
            usual,
            folder,
        };
        case.usual = case.measure()?;
        Ok(case)
    }

    /// The median of three.
    fn measure(&self) -> Result<Usual> {
        let (mut runs, mut filled) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            let begin = Instant::now();
            let mut filling = self.start(false)?;
            filling.wait_runs()?;
            runs.push(begin.elapsed().as_secs_f64() * 1e3);
            let (restored, _) = filling.complete()?;
            filled.push(begin.elapsed().as_secs_f64() * 1e3 - runs[runs.len() - 1]);
            expect_alone(&restored)?;
        }
        Ok(Usual {
            runs: percentile(&runs, 0.5) as u64,
            filled: percentile(&filled, 0.5) as u64,
        })
    }

    fn start(&self, paused: bool) -> Result<Filling> {
        let mut more = LIMIT_FILL.to_vec();
        more.extend(paused.then_some("--paused"));
        Filling::start(&self.stillframe, "latest", self.folder.path(), &more)
    }

    fn resume(&self, killed: &Filling) -> Result<Filling> {
        Filling::resume(&self.stillframe, &killed.qmp, &killed.serial, &LIMIT_FILL)
    }

    /// One restore, killed at this moment, and what becomes of its VM.
    pub fn strike(
        &self,
        moment: Moment,
        (paused, again): (bool, bool),
        random: &mut Random,
    ) -> Result<Value> {
        let mut filling = self.start(paused)?;
        self.wait_for(moment, &mut filling, random)?;
        let mut line = json!({"moment": format!("{moment:?}"), "paused": paused});
        let restored = match self.kill(&mut filling, &mut line)? {
            Left::Nothing => {
                // It can be restored as if nothing had been.
                drop(filling);
                self.start(paused)?.complete()?.0
            }
            Left::Complete(pid) => Restored {
                pid,
                qmp: filling.qmp.clone(),
                serial: filling.serial.clone(),
            },
            Left::Unfinished => {
                let mut filling = self.resume(&filling)?;
                if again {
                    self.wait_for(Moment::Filling, &mut filling, random)?;
                    filling = self.kill_again(filling, &mut line)?;
                }
                self.resumed(filling)?
            }
        };
        self.expect_whole(&restored, paused)?;
        Ok(line)
    }

    /// Waits for the moment.
    fn wait_for(&self, moment: Moment, filling: &mut Filling, random: &mut Random) -> Result<()> {
        let Usual { runs, filled } = self.usual;
        match moment {
            // Most of that time is QEMU's start: half of the kills come behind it.
            Moment::Early if random.below(2) == 0 => sleep_up_to(random, runs),
            Moment::Early => {
                std::thread::sleep(Duration::from_millis(runs * 3 / 4));
                sleep_up_to(random, runs / 3);
            }
            Moment::Filling => {
                filling.wait_runs()?;
                sleep_up_to(random, filled);
            }
            Moment::Late => {
                filling.wait_runs()?;
                std::thread::sleep(Duration::from_millis(filled.saturating_sub(100)));
                sleep_up_to(random, 130);
            }
            Moment::LettingGo => {
                filling.wait_runs()?;
                let begin = Instant::now();
                let qemus = pids_with(&filling.qmp.display().to_string())?;
                while qemus
                    .iter()
                    .any(|&qemu| has_userfaultfd(qemu).unwrap_or(false))
                {
                    let late = begin.elapsed() > 2 * PATIENCE;
                    ensure!(!late, "never complete: {}", filling.running.err());
                    // Without it this thread takes the processor that filling needs.
                    std::thread::sleep(Duration::from_micros(500));
                }
                let ms = random.below(2);
                sleep_up_to(random, ms);
            }
        }
        Ok(())
    }

    /// Kills it, and checks the remains. Of a guest that has not run nothing remains. Of a guest that has run, a VM
    /// remains that does not run before its memory is complete.
    fn kill(&self, filling: &mut Filling, line: &mut Value) -> Result<Left> {
        let guardians = match filling.runs() {
            // Looking for it would take longer than letting go of QEMU.
            true => Vec::new(),
            false => children(filling.running.pid(), "stillframe")?,
        };
        kill_and_reap(&mut filling.running)?;
        let ran = filling.runs();
        line["ran"] = json!(ran);
        if !ran {
            // The guardian may have been instructed to end the VM, or to pause it.
            wait_gone(&guardians)?;
        }
        let qmp = filling.qmp.display().to_string();
        let recorded = runtime_file(&filling.qmp, ".filling")?.exists();
        let &[pid] = &pids_with(&qmp)?[..] else {
            ensure!(!ran, "a VM that has run was ended");
            line["phase"] = json!("before it ran");
            return self.expect_gone(&qmp);
        };
        let complete = !has_userfaultfd(pid)?;
        line["phase"] = json!(match (recorded, complete, ran) {
            (false, true, true) => "after it was complete",
            (false, _, _) => "before it ran",
            (true, true, _) => "letting go",
            (true, false, true) => "filling",
            (true, false, false) => "about to run",
        });
        match (recorded, complete && ran) {
            (true, _) => self.settles(pid, complete, filling, line),
            (false, true) => Ok(Left::Complete(pid)),
            (false, false) => self.expect_gone(&qmp),
        }
    }

    /// Waits until the guardian has paused the VM, unless it waits for a page.
    fn settles(
        &self,
        pid: i32,
        complete: bool,
        filling: &Filling,
        line: &mut Value,
    ) -> Result<Left> {
        let begin = Instant::now();
        while begin.elapsed() < GUARDIAN_LIMIT {
            let status = Qmp::status_within(&filling.qmp, ANSWER_LIMIT)?;
            let status = status.as_deref().unwrap_or("waiting");
            line["found"] = json!(status);
            if complete {
                return Ok(Left::Unfinished);
            }
            ensure!(has_userfaultfd(pid)?, "its missing pages are zeros");
            if status != "running" {
                return Ok(Left::Unfinished);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        bail!("the VM runs on without its memory")
    }

    fn expect_gone(&self, qmp: &str) -> Result<Left> {
        wait_gone(&pids_with(qmp)?).context("a QEMU is left behind")?;
        Ok(Left::Nothing)
    }

    /// Kills a process that continues, and starts another.
    fn kill_again(&self, mut filling: Filling, line: &mut Value) -> Result<Filling> {
        let mut second = json!({});
        let left = self.kill(&mut filling, &mut second)?;
        line["again"] = second;
        match left {
            Left::Nothing => bail!("a VM that has run was ended"),
            Left::Unfinished => self.resume(&filling),
            // It was faster: as if it had not been killed.
            Left::Complete(_) => Ok(filling),
        }
    }

    /// After harm was done: what is left must not harm the next.
    fn end_all(&self) {
        let qmp = self.folder.path().join("restored.qmp");
        for pid in pids_with(&qmp.display().to_string()).unwrap_or_default() {
            // A process that has ended meanwhile needs no ending.
            let _ = signal(pid as u32, "KILL");
        }
        let _ = std::fs::remove_file(qmp);
    }

    fn resumed(&self, filling: Filling) -> Result<Restored> {
        if files_kept(&filling.qmp)? == 0
            && let [pid] = pids_with(&filling.qmp.display().to_string())?[..]
        {
            let Filling { qmp, serial, .. } = filling;
            return Ok(Restored { pid, qmp, serial });
        }
        Ok(filling.complete()?.0)
    }

    /// Complete, right, and alone.
    fn expect_whole(&self, restored: &Restored, paused: bool) -> Result<()> {
        expect_alone(restored)?;
        let mut monitor = restored.monitor()?;
        if paused {
            ensure!(monitor.status()? == "paused", "it was to stay paused");
            let differing = self
                .image
                .differing(&Image::take(restored.pid, &mut monitor)?)?;
            ensure!(differing.is_empty(), "{} pages differ", differing.len());
            monitor.execute("cont", json!({}))?;
        }
        ensure!(monitor.status()? == "running", "it does not run");
        restored.serial.wait_more(TICKS, PATIENCE)?;
        Ok(())
    }
}

/// Sleeps for a random time below this one.
pub(crate) fn sleep_up_to(random: &mut Random, ms: u64) {
    std::thread::sleep(Duration::from_micros(random.below(ms * 1000)));
}

/// Kills a process, unless it has ended by itself, and waits for its end.
pub(crate) fn kill_and_reap(running: &mut Running) -> Result<()> {
    if !running.has_ended()? {
        running.kill()?;
    }
    let begin = Instant::now();
    while !running.has_ended()? {
        ensure!(begin.elapsed() < PATIENCE, "it does not die");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Waits until these processes have ended.
pub(crate) fn wait_gone(pids: &[i32]) -> Result<()> {
    let begin = Instant::now();
    while let Some(pid) = pids.iter().find(|&&pid| is_alive(pid)) {
        ensure!(
            begin.elapsed() < GUARDIAN_LIMIT,
            "process {pid} does not end"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// The remains of a killed restore.
enum Left {
    /// No VM.
    Nothing,
    /// A VM whose memory is complete, as if the restore had not been killed.
    Complete(i32),
    /// A VM to continue with.
    Unfinished,
}

/// `kills` restores killed, of three guests; writes `docs/results/restore-kill/`.
pub fn run(kills: u64, seed: u64) -> Result<()> {
    let lines = std::thread::scope(|scope| {
        // Side by side: most of the time is waiting.
        let started: Vec<_> = (0..)
            .zip(KINDS)
            .map(|(share, kind)| scope.spawn(move || one_guest(kind, share, kills, seed)))
            .collect();
        let ended = started.into_iter().map(|case| case.join());
        let lines = ended.map(|case| case.ok().context("a case panicked")?);
        lines.collect::<Result<Vec<Vec<Value>>>>()
    })?;
    record(&lines.concat())
}

/// A guest's share of the kills.
fn one_guest(kind: Kind, share: u64, kills: u64, seed: u64) -> Result<Vec<Value>> {
    let mut random = Random::new(seed + share);
    let case = Case::begin(kind)?;
    eprintln!("{:10} usually {:?} ms", kind.name(), case.usual);
    let mut raw = Vec::new();
    let mut harmed = 0;
    for number in (share..kills).step_by(KINDS.len()) {
        let turn = number / KINDS.len() as u64;
        let moment = moment(turn);
        // Every moment meets both.
        let (paused, again) = ((turn / 6).is_multiple_of(2), (turn / 3).is_multiple_of(2));
        let struck = case.strike(moment, (paused, again), &mut random);
        let mut line = struck.unwrap_or_else(|error| {
            harmed += 1;
            case.end_all();
            eprintln!("{} {number} ({moment:?}) did harm: {error:#}", kind.name());
            json!({"moment": format!("{moment:?}"), "harm": format!("{error:#}")})
        });
        line["kill"] = json!(number);
        line["guest"] = json!(kind.name());
        raw.push(line);
        ensure!(harmed <= HARM_MAX, "giving up after {harmed} cases of harm");
        if turn % 12 == 11 {
            eprintln!("{:10} {} kills, {harmed} did harm", kind.name(), raw.len());
        }
    }
    case.stillframe.ok(&["check", "--read-data"])?;
    Ok(raw)
}

fn record(raw: &[Value]) -> Result<()> {
    let harmed = raw.iter().filter(|line| !line["harm"].is_null()).count();
    let mut phases: BTreeMap<&str, u64> = BTreeMap::new();
    for line in raw {
        let phase = line["phase"].as_str().unwrap_or("harm");
        *phases.entry(phase).or_default() += 1;
    }
    let twice = raw.iter().filter(|line| !line["again"].is_null()).count();
    println!(
        "{} kills, {harmed} did harm; {phases:?}; {twice} killed twice",
        raw.len()
    );
    results::write_raw("restore-kill", "kills.jsonl", raw)?;
    results::write_summary(
        "restore-kill",
        &[Claim::new(
            "restore-kill-survival",
            Goal::Zero,
            harmed as f64,
            "cases",
            "cargo xtask bench restore-kill",
        )
        .if_enough(raw.len() >= 100)],
    )?;
    match harmed {
        0 => Ok(()),
        harmed => bail!("{harmed} kills did harm"),
    }
}
