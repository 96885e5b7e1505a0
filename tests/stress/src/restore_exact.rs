//! Exactness of restores: checkpoints of a guest that writes all the time, taken in every way there is, each
//! restored eagerly and lazily.
//!
//! The guest is paused behind the engine's back while it is being watched. So the checkpoint of the pause is an
//! increment like all others, made of the guest's writes until then. None of the oracles shares code with
//! Stillframe:
//! - the *frozen* checkpoint: an image of the original, read through `/proc/PID/mem`, is compared with an image of
//!   each VM restored from it. While memory is filled lazily, single pages are read as a vCPU would read them.
//! - the *running* checkpoint, taken before: the restored guest checks its memory itself.
//! - all of them: the same tick has the same sum in each VM that prints it.
//!
//! Most lazy restores are stopped again and again for up to 200 ms while they fill, and fill at different rates, so
//! that pages come in ever other orders.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::exactness::{Mode, writing_all_the_time};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::filling::{Filling, Stops, expect_alone};
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::health::pids_with;
use stillframe_harness::memory::{Image, PAGE_BYTES, ask_for, mapping_of};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::random::Random;
use stillframe_harness::restored::Restored;
use stillframe_harness::results::{self, Claim, Goal};
use stillframe_harness::running::{PATIENCE, Running, signal};
use stillframe_harness::serial::{Serial, Tick};

/// Ticks that a guest must survive once its memory is complete.
const TICKS: usize = 10;
/// Upper bound on the single pages read while memory is filled.
const ASKED_MAX: u64 = 2000;
/// Tries to pause a VM that the engine pauses and resumes, too.
const PAUSES_MAX: u32 = 20;
/// Time for the engine to end a pause of its own, on a busy machine.
const RESUMED_WITHIN: Duration = Duration::from_millis(1500);
/// The run ends after this many wrong restores.
const WRONG_MAX: u64 = 3;

/// The kinds of guest.
const KINDS: [Kind; 4] = [Kind::Private, Kind::Memfd, Kind::TwoCpus, Kind::Pc];

/// Every schedule, with and without deltas.
pub fn modes() -> Vec<Mode> {
    let mut modes = Vec::new();
    for schedule in ["stop-copy", "pre-copy", "copy-on-write", "auto"] {
        for delta_cache in ["256M", "0"] {
            modes.push(vec!["--schedule", schedule, "--delta-cache", delta_cache]);
        }
    }
    modes
}

/// A guest that never rests and is quickly restored.
pub fn setup(kind: Kind) -> Setup {
    let mut setup = writing_all_the_time();
    setup.kind = kind;
    setup.ram_mib = 128;
    setup.workload.mib = 16;
    setup
}

/// The totals found.
#[derive(Debug, Default, Clone, Copy)]
pub struct Tally {
    /// Checkpoints restored both ways.
    pub checkpoints: u64,
    /// Restores.
    pub restores: u64,
    /// Restores that failed, or whose guest found its memory changed.
    pub wrong: u64,
    /// Pages compared with the original's.
    pub pages: u64,
    /// Pages that differed.
    pub differing: u64,
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:4} checkpoints, {:4} restores, {} wrong; {:9} pages compared, {} differing",
            self.checkpoints, self.restores, self.wrong, self.pages, self.differing
        )
    }
}

/// A guest, its repository, and what is known of it.
pub struct Case {
    stillframe: Stillframe,
    guest: Guest,
    monitor: Qmp,
    /// The sums of all ticks, as first printed by any VM.
    sums: HashMap<u64, String>,
    random: Random,
    /// The totals found.
    pub tally: Tally,
    /// One line a restore.
    pub raw: Vec<Value>,
    // Last: the guest's QEMU has ended by then.
    folder: tempfile::TempDir,
}

/// A checkpoint to be restored.
struct Subject<'s> {
    id: &'s str,
    mode: &'s str,
    /// Its contents, if they are known.
    image: Option<&'s Image>,
}

impl Case {
    /// Boots a guest of this kind.
    pub fn begin(kind: Kind, seed: u64) -> Result<Case> {
        let folder = tempfile::Builder::new()
            .prefix("stillframe-restores-")
            .tempdir()?;
        let guest = setup(kind).boot()?;
        Ok(Case {
            stillframe: Stillframe::init(&folder.path().join("repo"))?,
            monitor: guest.second_monitor()?,
            guest,
            sums: HashMap::new(),
            random: Random::new(seed),
            tally: Tally::default(),
            raw: Vec::new(),
            folder,
        })
    }

    /// Two checkpoints taken in this way, each restored both ways.
    pub fn round(&mut self, mode: &Mode) -> Result<()> {
        let (running, frozen) = self.take(mode)?;
        let image = Image::take(self.guest.pid(), &mut self.monitor)?;
        let words = mode.join(" ");
        for (id, image) in [(&frozen, Some(&image)), (&running, None)] {
            let subject = Subject {
                id,
                mode: &words,
                image,
            };
            let eagerly = self.eagerly(&subject);
            self.note(&subject, "eager", eagerly)?;
            let lazily = self.lazily(&subject);
            self.note(&subject, "lazy", lazily)?;
            self.tally.checkpoints += 1;
        }
        self.monitor.execute("cont", json!({}))?;
        let ticks = self.guest.serial.wait_more(2, PATIENCE)?;
        self.compare_sums(&ticks)
    }

    /// Watches the guest and pauses it meanwhile: a checkpoint taken before, and the first of the pause.
    fn take(&mut self, mode: &Mode) -> Result<(String, String)> {
        let pid = self.guest.pid_text();
        let mut line = vec!["watch", "--pid", &pid, "--every", "100ms", "--json"];
        line.extend(mode);
        let mut watch = Running::start(self.stillframe.command(&line)?)?;
        let before = watch.wait_results(3)?;
        std::thread::sleep(Duration::from_millis(self.random.below(300)));
        let paused_at = self.pause()?;
        let mut count = before.len();
        let frozen = loop {
            let reports = watch.wait_results(count + 1)?;
            count = reports.len();
            if let Some(report) = first_after(&reports, paused_at)? {
                break id_of(report)?;
            }
        };
        watch.signal("INT")?;
        let ended = watch.end()?;
        ensure!(ended.code == Some(0), "watch failed: {ended:?}");
        ensure!(
            self.monitor.status()? == "paused",
            "the engine resumed a VM that was not its own to resume"
        );
        let running = &before[self.random.below(before.len() as u64) as usize];
        Ok((id_of(running)?, frozen))
    }

    /// Pauses the guest, whatever the engine does. Returns the time from which on it is paused.
    fn pause(&mut self) -> Result<jiff::Timestamp> {
        for _ in 0..PAUSES_MAX {
            self.monitor.forget_events()?;
            self.monitor.execute("stop", json!({}))?;
            let paused_at = jiff::Timestamp::now();
            // In a pause of the engine this was nothing new, and the engine resumes the VM after it.
            let resumed = self.monitor.wait_event("RESUME", RESUMED_WITHIN);
            if resumed.is_err() && self.monitor.status()? == "paused" {
                return Ok(paused_at);
            }
        }
        bail!("the VM cannot be paused while it is watched")
    }

    fn eagerly(&mut self, subject: &Subject<'_>) -> Result<Value> {
        let more: &[&str] = match subject.image {
            Some(_) => &["--paused"],
            None => &[],
        };
        // As [`Filling::start`] does.
        let _ = std::fs::remove_file(self.folder.path().join("restored.serial"));
        let restored = Restored::start(&self.stillframe, subject.id, self.folder.path(), more)?;
        let mut line = json!({});
        self.expect_whole(subject, &restored, &mut line)?;
        Ok(line)
    }

    fn lazily(&mut self, subject: &Subject<'_>) -> Result<Value> {
        let limit = limit_fill(&mut self.random);
        let mut more: Vec<&str> = Vec::new();
        more.extend(subject.image.map(|_| "--paused"));
        if let Some(limit) = &limit {
            more.extend(["--limit-fill", limit]);
        }
        let place = self.folder.path();
        let mut filling = Filling::start(&self.stillframe, subject.id, place, &more)?;
        let disturbed = self.random.below(4) > 0;
        let (stops, asked) = match subject.image {
            Some(image) => disturbed_and_asked(&mut filling, image, disturbed, &mut self.random)?,
            None if disturbed => (filling.disturb(&mut self.random)?, Asked::default()),
            None => (Stops::default(), Asked::default()),
        };
        let (restored, report) = filling.complete()?;
        let lazy = &report["lazy"];
        let mut line = json!({
            "limit_fill": limit, "stops": stops.count, "stopped_ms": stops.ms,
            "runs_after_us": lazy["runs_after_us"], "total_us": report["total_us"],
            "faults": lazy["faults"], "asked": asked.pages, "asked_differing": asked.differing,
        });
        self.tally.pages += asked.pages;
        self.tally.differing += asked.differing;
        expect_alone(&restored)?;
        self.expect_whole(subject, &restored, &mut line)?;
        Ok(line)
    }

    /// Its memory is that of the image, if there is one, and the guest continues with it.
    fn expect_whole(
        &mut self,
        subject: &Subject<'_>,
        restored: &Restored,
        line: &mut Value,
    ) -> Result<()> {
        if let Some(image) = subject.image {
            let mut monitor = restored.monitor()?;
            let copy = Image::take(restored.pid, &mut monitor)?;
            let differing = image.differing(&copy)?;
            if !differing.is_empty() {
                eprintln!("differing: {:?}", &differing[..differing.len().min(8)]);
            }
            line["pages"] = json!(image.pages());
            line["differing"] = json!(differing.len());
            self.tally.pages += image.pages();
            self.tally.differing += differing.len() as u64;
            monitor.execute("cont", json!({}))?;
        }
        let ticks = restored.serial.wait_more(TICKS, PATIENCE)?;
        line["ticks"] = json!(ticks.len());
        if subject.image.is_some() {
            goes_on_from(&self.guest.serial, &ticks)?;
        }
        self.compare_sums(&ticks)
    }

    fn compare_sums(&mut self, ticks: &[Tick]) -> Result<()> {
        for Tick { number, sum } in ticks {
            let known = self.sums.entry(*number).or_insert_with(|| sum.clone());
            ensure!(known == sum, "tick {number} has sum {sum} and {known}");
        }
        Ok(())
    }

    /// Notes what became of one restore.
    fn note(&mut self, subject: &Subject<'_>, how: &str, outcome: Result<Value>) -> Result<()> {
        self.tally.restores += 1;
        let mut line = outcome.unwrap_or_else(|error| {
            self.tally.wrong += 1;
            eprintln!("{how} restore of {} was wrong: {error:#}", subject.id);
            json!({"wrong": format!("{error:#}")})
        });
        line["guest"] = json!(self.guest.kind.name());
        line["mode"] = json!(subject.mode);
        line["checkpoint"] = json!(subject.id);
        line["how"] = json!(how);
        line["of"] = json!(subject.image.map_or("running", |_| "frozen"));
        self.raw.push(line);
        if self.tally.wrong > WRONG_MAX {
            bail!("giving up after {} wrong restores", self.tally.wrong);
        }
        Ok(())
    }
}

/// Single pages read while memory was filled.
#[derive(Debug, Default, Clone, Copy)]
struct Asked {
    pages: u64,
    differing: u64,
}

/// Stops a lazy restore at random moments, or waits for it, while a thread reads random pages of a paused VM.
fn disturbed_and_asked(
    filling: &mut Filling,
    image: &Image,
    disturbed: bool,
    random: &mut Random,
) -> Result<(Stops, Asked)> {
    filling.wait_runs()?;
    let qmp = filling.qmp.display().to_string();
    let [pid] = pids_with(&qmp)?[..] else {
        bail!("not one QEMU at {qmp}");
    };
    let seed = random.below(u64::MAX) + 1;
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| ask(pid, image, Random::new(seed), &end));
        let stops = match disturbed {
            true => filling.disturb(random),
            false => wait(filling),
        };
        end.store(true, Ordering::Relaxed);
        if stops.is_err() {
            // A thread that waits for one of its pages is woken by this.
            signal(pid as u32, "KILL")?;
        }
        let asked = asking.join().ok().context("the asking thread panicked")?;
        Ok((stops?, asked?))
    })
}

fn wait(filling: &mut Filling) -> Result<Stops> {
    for _ in 0..PATIENCE.as_millis() / 5 {
        if filling.running.has_ended()? {
            return Ok(Stops::default());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    bail!("it does not end: {}", filling.running.err())
}

fn ask(pid: i32, image: &Image, mut random: Random, end: &AtomicBool) -> Result<Asked> {
    let (block, pages) = image.largest()?;
    let start = mapping_of(pid, pages * PAGE_BYTES)?;
    let mut asked = Asked::default();
    while asked.pages < ASKED_MAX && !end.load(Ordering::Relaxed) {
        let page = random.below(pages as u64) as usize;
        let bytes = ask_for(pid, start + page * PAGE_BYTES)?;
        asked.pages += 1;
        asked.differing += u64::from(image.page(block, page) != Some(&bytes[..]));
        std::thread::sleep(Duration::from_micros(random.below(3000)));
    }
    Ok(asked)
}

/// From none, which fills as fast as it can, down to 8 MiB a second.
fn limit_fill(random: &mut Random) -> Option<String> {
    match random.below(4) {
        0 => None,
        1 => Some(format!("{}M", 8 + random.below(24))),
        _ => Some(format!("{}M", 24 + random.below(104))),
    }
}

/// The first tick of a restored guest is the one after the last of the paused original. It is the tick after that
/// one, if the original has printed half a line.
fn goes_on_from(original: &Serial, ticks: &[Tick]) -> Result<()> {
    let last = original.ticks()?.last().map_or(0, |tick| tick.number);
    let first = ticks.first().map_or(0, |tick| tick.number);
    ensure!(
        (last + 1..=last + 2).contains(&first),
        "the original stands at tick {last}, the restored guest began with {first}"
    );
    Ok(())
}

fn first_after(reports: &[Value], time: jiff::Timestamp) -> Result<Option<&Value>> {
    for report in reports {
        let stood: jiff::Timestamp = report["time"].as_str().context("time")?.parse()?;
        if stood > time {
            return Ok(Some(report));
        }
    }
    Ok(None)
}

fn id_of(report: &Value) -> Result<String> {
    let id = report["checkpoint"].as_str().context("checkpoint")?;
    Ok(id.to_owned())
}

/// Runs this many rounds of each kind of guest and each way; writes `docs/results/restore-exact/`.
pub fn run(rounds: u64, seed: u64) -> Result<()> {
    let mut total = Tally::default();
    let mut raw = Vec::new();
    let cases = std::thread::scope(|scope| {
        // Side by side: most of the time is waiting.
        let started: Vec<_> = (1..)
            .zip(KINDS)
            .map(|(number, kind)| scope.spawn(move || one_guest(kind, rounds, seed + number)))
            .collect();
        let ended = started.into_iter().map(|case| case.join());
        let cases = ended.map(|case| case.ok().context("a case panicked")?);
        cases.collect::<Result<Vec<Case>>>()
    })?;
    for mut case in cases {
        total.add(case.tally);
        raw.append(&mut case.raw);
    }
    record(&raw, total)
}

fn one_guest(kind: Kind, rounds: u64, seed: u64) -> Result<Case> {
    let mut case = Case::begin(kind, seed)?;
    for mode in modes() {
        for _ in 0..rounds {
            case.round(&mode).with_context(|| kind.name())?;
        }
        eprintln!("{:10} {:48} {}", kind.name(), mode.join(" "), case.tally);
    }
    case.stillframe.ok(&["check", "--read-data"])?;
    Ok(case)
}

impl Tally {
    fn add(&mut self, more: Tally) {
        self.checkpoints += more.checkpoints;
        self.restores += more.restores;
        self.wrong += more.wrong;
        self.pages += more.pages;
        self.differing += more.differing;
    }
}

fn record(raw: &[Value], total: Tally) -> Result<()> {
    println!("{total}");
    results::write_raw("restore-exact", "restores.jsonl", raw)?;
    let claim = |id, value: u64, unit| {
        let command = "cargo xtask bench restore-exact";
        Claim::new(id, Goal::Zero, value as f64, unit, command).if_enough(total.checkpoints >= 100)
    };
    results::write_summary(
        "restore-exact",
        &[
            claim("restored-pages", total.differing, "pages"),
            claim("restored-guests", total.wrong, "wrong restores"),
        ],
    )?;
    match (total.wrong, total.differing) {
        (0, 0) => Ok(()),
        (wrong, differing) => bail!("{wrong} restores were wrong, {differing} pages differ"),
    }
}
