//! What goes wrong while a VM is handed over: one engine is killed, hangs or fails at each named point of the
//! hand-over, or at a random moment; or the connection is cut. Then its users do what the messages say, until it is
//! settled. The VM never runs twice, and always runs in the end.

use std::fmt;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::victims::{self, Disk, Victim};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::fault;
use stillframe_harness::guest::Guest;
use stillframe_harness::health;
use stillframe_harness::migration::Order;
use stillframe_harness::qmp::Qmp;
use stillframe_harness::random::Random;
use stillframe_harness::relay::Relay;
use stillframe_harness::running::Running;

/// Longest delay of a random strike after the destination has started QEMU: a small guest takes about so long.
const STRIKE_WITHIN_MS: u64 = 1000;
/// How often it is looked where the VM runs.
const LOOK: Duration = Duration::from_millis(20);
/// Time for a monitor to answer.
const ANSWER: Duration = Duration::from_millis(500);
/// Time until everything is settled.
const SETTLE_LIMIT: Duration = Duration::from_secs(90);

/// The end of the name of the destination's record.
const RECEIVED: &str = ".received";

/// Points that are passed in post-copy only.
const SERVING: &str = "commit.serving";
const FILLING: &str = "takeover.filling";
/// The modes, in turn.
const MODES: [&str; 4] = ["pre-copy", "stop-copy", "hybrid", "post-copy"];

/// The points of the source's half.
const SOURCE_POINTS: [&str; 8] = [
    SERVING,
    "stopped.saving",
    "commit.giving-up",
    "commit.blocking",
    "commit.given-up",
    "commit.sent",
    "commit.ending",
    "commit.ended",
];
/// The points of the destination's half.
const DESTINATION_POINTS: [&str; 10] = [
    FILLING,
    "arriving.loading",
    "takeover.loaded",
    "takeover.marked",
    "takeover.ready",
    "takeover.releasing",
    "takeover.released",
    "takeover.committed",
    "takeover.running",
    "takeover.said",
];
/// Kills at each point, besides the first: they leave the most to be settled.
const KILLS_MORE: usize = 4;
/// The points at which the connection falls silent.
const SILENT: [&str; 10] = [
    SERVING,
    FILLING,
    "stopped.saving",
    "arriving.loading",
    "takeover.loaded",
    "takeover.marked",
    "commit.giving-up",
    "commit.given-up",
    "takeover.committed",
    "takeover.running",
];
/// What happens there.
const FAULTS: [&str; 4] = ["kill", "error", "hang", "slow"];

/// Which process is struck.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The engine of the source.
    Source,
    /// The engine of the destination.
    Destination,
}

/// What goes wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Strike {
    /// A fault at a named point.
    At(Side, String),
    /// `kill -9`, so long after the destination has started QEMU.
    Kill(Side, Duration),
    /// The connection is cut, so long after that.
    Cut(Duration),
    /// Nothing comes through it any more from a named point on: that of a side that hangs there for a while.
    Silence(Side, String),
}

impl Strike {
    /// Whether other modes do not pass the point.
    fn of_post_copy(&self) -> bool {
        match self {
            Strike::At(_, fault) | Strike::Silence(_, fault) => {
                fault.starts_with(SERVING) || fault.starts_with(FILLING)
            }
            Strike::Kill(..) | Strike::Cut(_) => false,
        }
    }
}

impl fmt::Display for Strike {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Strike::At(side, fault) => write!(f, "{side:?} {fault}"),
            Strike::Kill(side, delay) => write!(f, "{side:?} killed after {delay:?}"),
            Strike::Cut(delay) => write!(f, "cut after {delay:?}"),
            Strike::Silence(side, fault) => write!(f, "silence in {side:?} {fault}"),
        }
    }
}

/// Where the VM runs in the end, and how often its users had to do something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settled {
    /// At the destination.
    pub moved: bool,
    /// Commands that were given.
    pub commands: u32,
}

/// What came of many strikes.
#[derive(Debug, Default)]
pub struct Struck {
    /// One record each.
    pub raw: Vec<Value>,
    /// Those after which the VM ran twice, was lost, or could not be settled.
    pub wrong: u64,
    /// Kills of one side at random moments.
    pub killed: u64,
    /// Those of them that are among the wrong.
    pub killed_wrong: u64,
    resumed: u64,
    moved: u64,
}

impl Struck {
    /// Takes down what came of one.
    fn note(
        &mut self,
        number: usize,
        mode: &str,
        disk: Disk,
        what: &Strike,
        settled: &Result<Settled>,
    ) {
        let outcome = match settled {
            Ok(settled) => format!("{settled:?}"),
            Err(error) => format!("wrong: {error:#}"),
        };
        eprintln!("{number:3} {mode} {disk:?} {what}: {outcome}");
        self.raw.push(json!({
            "strike": what.to_string(), "mode": mode, "disk": format!("{disk:?}"), "outcome": outcome,
        }));
        if let Strike::Kill(..) = what {
            self.killed += 1;
            self.killed_wrong += u64::from(settled.is_err());
        }
        match settled {
            Ok(settled) => {
                self.resumed += u64::from(settled.commands > 0);
                self.moved += u64::from(settled.moved);
            }
            Err(_) => self.wrong += 1,
        }
    }
}

impl fmt::Display for Struck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (all, wrong) = (self.raw.len(), self.wrong);
        let (resumed, moved) = (self.resumed, self.moved);
        write!(
            f,
            "{all} strikes, {wrong} wrong; {moved} VMs moved all the same; {resumed} were settled by a command"
        )
    }
}

/// A migration that was struck.
struct Scene<'s> {
    stillframe: &'s Stillframe,
    order: &'s Order,
    guest: &'s Guest,
    relay: Relay,
    listen: String,
    source: Option<Running>,
    destination: Option<Running>,
    commands: u32,
    /// What the processes said that have ended.
    said: Vec<String>,
}

/// Whether the VM runs here, and there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Runs {
    here: bool,
    there: bool,
}

impl Scene<'_> {
    fn runs(&self) -> Result<Runs> {
        let here = || running(&self.guest.folder().join("qmp2"));
        let there = || running(&self.order.files().0);
        let runs = Runs {
            here: here(),
            there: there(),
        };
        // They were looked at one after the other; only this order shows that both run at one time.
        if runs.here && runs.there && here() {
            bail!("two of the VM run; {}", self.said.join("; "));
        }
        Ok(runs)
    }

    /// Notes processes that have ended.
    fn reap(&mut self) -> Result<()> {
        for process in [&mut self.source, &mut self.destination] {
            if process.as_mut().map_or(Ok(false), Running::has_ended)?
                && let Some(ended) = process.take()
            {
                let ended = ended.end()?;
                self.said
                    .push(format!("exit {:?}: {}", ended.code, ended.err.trim()));
            }
        }
        Ok(())
    }

    /// Its users look after it, until one VM runs and the other is gone.
    fn settle(&mut self) -> Result<Settled> {
        let deadline = Instant::now() + SETTLE_LIMIT;
        while Instant::now() < deadline {
            self.reap()?;
            let runs = self.runs()?;
            let new = health::pids_with(&self.order.files().0.display().to_string())?;
            let here = self.guest_lives();
            // A destination may wait for a source that has nothing to ask.
            let kept = runs.here && new.is_empty() && !self.has_record(".given-up")?;
            let moved = runs.there && !here;
            if self.source.is_none() && (kept || moved) {
                return Ok(Settled {
                    moved: runs.there,
                    commands: self.commands,
                });
            }
            if self.source.is_none() || self.destination.is_none() {
                self.command(here)?;
            }
            std::thread::sleep(LOOK);
        }
        bail!("not settled; {}", self.said.join("; "))
    }

    fn guest_lives(&self) -> bool {
        health::is_alive(self.guest.pid())
    }

    /// What a user does who finds that a process has ended.
    fn command(&mut self, here: bool) -> Result<()> {
        // First the destination listens again, so that the source is answered.
        if self.destination.is_none() && self.has_record(RECEIVED)? {
            let command = self
                .order
                .receiver(self.stillframe, &self.listen, &["--resume"])?;
            self.destination = Some(self.order.listen(command)?.0);
            self.commands += 1;
        }
        if self.source.is_none() && here && (self.has_record(".given-up")? || self.waits()) {
            let (pid, to) = (self.guest.pid(), self.relay.address());
            let words = ["--resume", "--reconnect", "2s"];
            let command = self.order.migrator(self.stillframe, pid, to, &words)?;
            self.source = Some(Running::start(command)?);
            self.commands += 1;
        }
        Ok(())
    }

    /// Whether the destination waits for a source that was never to give the VM up.
    fn waits(&self) -> bool {
        self.destination.is_some() && self.has_record(".giving-up").unwrap_or(false)
    }

    /// Whether one of the engines has left a file with this end.
    fn has_record(&self, end: &str) -> Result<bool> {
        let (folder, name) = (&self.order.folder, &self.order.name);
        let folder = folder.file_name().context("a folder")?.display();
        let received = format!("{folder}!{name}.qmp.received");
        let given_up = format!("{}-", self.guest.pid());
        let files = fs::read_dir(Stillframe::runtime_folder())
            .into_iter()
            .flatten();
        let mut names = files
            .flatten()
            .map(|file| file.file_name().display().to_string());
        Ok(names.any(|file| match end {
            RECEIVED => file.ends_with(&received),
            end => file.starts_with(&given_up) && file.ends_with(end),
        }))
    }
}

/// Whether the VM with this monitor runs, as far as it says so now.
fn running(qmp: &Path) -> bool {
    let status = Qmp::status_within(qmp, ANSWER);
    matches!(status, Ok(Some(status)) if status == "running")
}

/// Migrates the guest, strikes, and has it settled. An error where the VM runs twice, or nowhere in the end.
pub fn strike(
    stillframe: &Stillframe,
    victim: &Victim,
    order: &Order,
    strike: &Strike,
) -> Result<Settled> {
    let guest = victim.guest();
    let folder = tempfile::tempdir()?;
    let words = order.new_vm();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut receiver = order.receiver(stillframe, "127.0.0.1:0", &words)?;
    let mut reached = None;
    if let Strike::At(Side::Destination, fault) | Strike::Silence(Side::Destination, fault) = strike
    {
        let faulty = fault::with_fault(&receiver, fault, folder.path())?;
        (receiver, reached) = (faulty.0, Some(faulty.1));
    }
    let (destination, at) = order.listen(receiver)?;
    let relay = Relay::start(at)?;
    let words: Vec<&str> = order.migrate.iter().map(String::as_str).collect();
    let words = [&["--reconnect", "15s"], &words[..]].concat();
    let mut migrator = order.migrator(stillframe, guest.pid(), relay.address(), &words)?;
    if let Strike::At(Side::Source, fault) | Strike::Silence(Side::Source, fault) = strike {
        let faulty = fault::with_fault(&migrator, fault, folder.path())?;
        (migrator, reached) = (faulty.0, Some(faulty.1));
    }
    let mut scene = Scene {
        stillframe,
        order,
        guest,
        relay,
        listen: at.to_string(),
        source: Some(Running::start(migrator)?),
        destination: Some(destination),
        commands: 0,
        said: Vec::new(),
    };
    if let Strike::Kill(_, delay) | Strike::Cut(delay) = strike {
        let qmp = order.files().0;
        let destination = scene.destination.as_mut().context("a destination")?;
        destination.wait_until("a QEMU", |_| Ok(qmp.exists()))?;
        std::thread::sleep(*delay);
        match strike {
            Strike::Kill(Side::Source, _) => scene.source.as_mut(),
            Strike::Kill(Side::Destination, _) => scene.destination.as_mut(),
            _ => None,
        }
        .map_or(Ok(()), Running::kill)?;
        if let Strike::Cut(_) = strike {
            scene.relay.cut();
        }
    }
    if let (Strike::Silence(..), Some(reached)) = (strike, &reached) {
        let destination = scene.destination.as_mut().context("a destination")?;
        destination.wait_until("the point", |_| Ok(reached.exists()))?;
        scene.relay.silence();
    }
    let settled = scene.settle()?;
    if let Some(reached) = reached {
        ensure!(
            reached.exists(),
            "the fault did not happen: {:?}",
            scene.said
        );
    }
    victim.expect_going_on(order, settled.moved)?;
    victims::end_there(order)?;
    victim.expect_disk(order, settled.moved)?;
    Ok(settled)
}

/// Every fault at every point, `more` kills at each, then random kills and cuts, `count` in all or more.
fn all(more: usize, count: u64, seed: u64) -> Vec<Strike> {
    let mut random = Random::new(seed);
    let mut all = Vec::new();
    let faults = FAULTS
        .into_iter()
        .chain(std::iter::repeat_n(FAULTS[0], more));
    for fault in faults {
        let named = |side, points: &[&str]| {
            let at = |point: &&str| Strike::At(side, format!("{point}:{fault}"));
            points.iter().map(at).collect::<Vec<_>>()
        };
        all.extend(named(Side::Source, &SOURCE_POINTS));
        all.extend(named(Side::Destination, &DESTINATION_POINTS));
    }
    for fault in SILENT {
        let side = match SOURCE_POINTS.contains(&fault) {
            true => Side::Source,
            false => Side::Destination,
        };
        all.push(Strike::Silence(side, format!("{fault}:hang")));
    }
    for number in 0..count {
        let delay = Duration::from_millis(random.below(STRIKE_WITHIN_MS));
        all.push(match number % 3 {
            0 => Strike::Kill(Side::Source, delay),
            1 => Strike::Kill(Side::Destination, delay),
            _ => Strike::Cut(delay),
        });
    }
    all
}

/// Those that say most, and a few random ones.
pub fn some(seed: u64) -> Vec<Strike> {
    let at = |side, fault: &str| Strike::At(side, fault.to_owned());
    let named = [
        at(Side::Source, "stopped.saving:kill"),
        at(Side::Destination, "arriving.loading:kill"),
        at(Side::Source, "commit.giving-up:kill"),
        at(Side::Source, "commit.given-up:kill"),
        at(Side::Source, "commit.sent:error"),
        at(Side::Destination, "takeover.ready:kill"),
        at(Side::Destination, "takeover.released:kill"),
        at(Side::Destination, "takeover.committed:kill"),
        at(Side::Destination, "takeover.running:error"),
        at(Side::Source, "commit.serving:kill"),
        at(Side::Destination, "takeover.filling:kill"),
        Strike::Silence(Side::Source, "commit.given-up:hang".to_owned()),
    ];
    let random = all(0, 3, seed).into_iter().rev().take(3);
    named.into_iter().chain(random).collect()
}

/// A few of a VM whose disk is copied.
pub fn while_copying(seed: u64) -> Vec<Strike> {
    let named = [
        Strike::At(Side::Source, "commit.giving-up:kill".to_owned()),
        // While the VM is stopped, and the end of the copy waits for the other side.
        Strike::Silence(Side::Source, "stopped.saving:hang".to_owned()),
        Strike::At(Side::Destination, "takeover.released:kill".to_owned()),
    ];
    let random = all(0, 3, seed).into_iter().rev().take(3);
    named.into_iter().chain(random).collect()
}

/// Every fault at every point, then `count` random kills and cuts, of small guests in all modes. As many again of guests
/// whose disk is copied, without more kills at each point, and with half the random ones.
pub fn run(stillframe: &Stillframe, count: u64, seed: u64) -> Result<Struck> {
    let mut struck = Struck::default();
    each(
        stillframe,
        &all(KILLS_MORE, count, seed),
        &[Disk::None],
        &mut struck,
    )?;
    let copied = [Disk::Copied("raw"), Disk::Copied("qcow2")];
    each(
        stillframe,
        &all(0, count / 2, seed + 1),
        &copied,
        &mut struck,
    )?;
    Ok(struck)
}

/// These, one after the other, of VMs with these disks in turn.
pub fn each(
    stillframe: &Stillframe,
    strikes: &[Strike],
    disks: &[Disk],
    struck: &mut Struck,
) -> Result<()> {
    let mut victims: Vec<Option<Victim>> = disks.iter().map(|_| None).collect();
    for (number, what) in strikes.iter().enumerate() {
        let (disk, turn) = (disks[number % disks.len()], number % disks.len());
        let victim = match victims[turn].take() {
            Some(victim) => victim,
            None => Victim::boot(disk)?,
        };
        // All modes meet all disks.
        let round = number / disks.len();
        let mode = match what.of_post_copy() {
            true => MODES[2 + round % 2],
            false => MODES[round % MODES.len()],
        };
        let mut order = victim.order(format!("struck-{number}"));
        order.migrate.push(format!("--mode={mode}"));
        let settled = strike(stillframe, &victim, &order, what);
        victims::end_there(&order)?;
        struck.note(number, mode, disk, what, &settled);
        if let Ok(Settled { moved: false, .. }) = settled {
            victims[turn] = victim.again()?;
        }
    }
    Ok(())
}
