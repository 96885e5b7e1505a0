//! `kill -9` of the engine at random moments. The VM must run on, the repository must stay whole, and the next
//! engine's first checkpoint must be exact.
//!
//! Moments drawn at random alone would rarely fall into a pause of a few milliseconds. So a third of the kills wait
//! for QEMU's `STOP` event and strike right after it, and a third strike while the engine attaches.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::random::Random;
use stillframe_harness::results::{self, Claim, Goal};
use stillframe_harness::running::signal;

/// Where a kill strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// In the first milliseconds: start, injection, protection.
    Attach,
    /// After QEMU's `STOP` event.
    Pause,
    /// Any time in the first seconds: full pass, rounds, upload, commit.
    Any,
    /// After SIGTERM, while the engine detaches.
    Detach,
}

/// The n-th kill's moment.
pub fn moment(number: u64) -> Moment {
    match number % 10 {
        0..=2 => Moment::Attach,
        3..=5 => Moment::Pause,
        6..=8 => Moment::Any,
        _ => Moment::Detach,
    }
}

/// The outcome of one kill.
pub fn strike(
    stillframe: &Stillframe,
    guest: &Guest,
    monitor: &mut Qmp,
    schedule: &str,
    moment: Moment,
    random: &mut Random,
) -> Result<Value> {
    monitor.execute("query-status", json!({}))?;
    monitor.take_events();
    let pid = guest.pid_text();
    let begin = Instant::now();
    let mut engine = stillframe.spawn(&[
        "watch",
        "--pid",
        &pid,
        "--every",
        "100ms",
        "--quiet",
        "--schedule",
        schedule,
    ])?;
    let delay = match moment {
        Moment::Attach => Duration::from_micros(random.below(250_000)),
        Moment::Any | Moment::Detach => Duration::from_micros(150_000 + random.below(2_500_000)),
        Moment::Pause => {
            let stops = 1 + random.below(3);
            for _ in 0..stops {
                monitor.wait_event("STOP", Duration::from_secs(60))?;
            }
            Duration::from_micros(random.below(4_000))
        }
    };
    std::thread::sleep(delay);
    if moment == Moment::Detach {
        signal(engine.id(), "TERM")?;
        std::thread::sleep(Duration::from_micros(random.below(30_000)));
    }
    engine.kill()?;
    engine.wait()?;
    let struck_ms = begin.elapsed().as_millis() as u64;
    let resumed_ms = wait_running(monitor).context("the VM did not run on")?;
    Ok(json!({"moment": format!("{moment:?}"), "struck_ms": struck_ms, "resumed_ms": resumed_ms}))
}

fn wait_running(monitor: &mut Qmp) -> Result<u64> {
    let begin = Instant::now();
    loop {
        let status = monitor.status()?;
        if status == "running" {
            return Ok(begin.elapsed().as_millis() as u64);
        }
        if begin.elapsed() > Duration::from_secs(10) {
            bail!("it is {status}");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The next engine's first checkpoint, verified; and the whole repository read.
pub fn aftermath(stillframe: &Stillframe, guest: &mut Guest) -> Result<()> {
    if !guest.is_alive() {
        bail!("QEMU has died");
    }
    let pid = guest.pid_text();
    let report = stillframe.json(&["checkpoint", "--pid", &pid, "--verify"])?;
    let differing = report["verify"]["differing"]
        .as_u64()
        .context("no verify in the report")?;
    if differing != 0 {
        bail!("{differing} pages of the next checkpoint differ");
    }
    stillframe.ok(&["check", "--read-data"])?;
    guest.serial.wait_more(1, Duration::from_secs(60))?;
    Ok(())
}

/// `kills` kills on two guests; writes `docs/results/kill/`.
pub fn run(kills: u64, seed: u64) -> Result<()> {
    let mut random = Random::new(seed);
    let mut raw = Vec::new();
    let mut harmed = 0u64;
    for (share, kind) in [Kind::Private, Kind::Memfd].into_iter().enumerate() {
        let repository = tempfile::Builder::new()
            .prefix("stillframe-repo-")
            .tempdir()?;
        let stillframe = Stillframe::init(&repository.path().join("repo"))?;
        let mut guest = Setup {
            ram_mib: 128,
            ..Setup::new(kind)
        }
        .boot()?;
        let mut monitor = guest.second_monitor()?;
        for number in (share as u64..kills).step_by(2) {
            let moment = moment(number / 2);
            // Every moment meets both ways of tracking.
            let schedule = ["pre-copy", "copy-on-write"][(number / 20 % 2) as usize];
            let struck = strike(
                &stillframe,
                &guest,
                &mut monitor,
                schedule,
                moment,
                &mut random,
            );
            let outcome = struck.and_then(|line| aftermath(&stillframe, &mut guest).map(|()| line));
            let mut line = match outcome {
                Ok(line) => line,
                Err(error) => {
                    harmed += 1;
                    eprintln!("kill {number} ({moment:?}) did harm: {error:#}");
                    json!({"moment": format!("{moment:?}"), "harm": format!("{error:#}")})
                }
            };
            line["kill"] = json!(number);
            line["guest"] = json!(kind.name());
            line["schedule"] = json!(schedule);
            raw.push(line);
            if harmed > 3 {
                bail!("giving up after {harmed} cases of harm");
            }
            if number % 20 < 2 {
                stillframe.ok(&["forget", "--keep-last", "3", "--prune"])?;
                eprintln!(
                    "{:16} {number:4} of {kills} kills, {harmed} did harm",
                    kind.name()
                );
            }
        }
        guest.serial.ticks()?;
    }
    record(&raw, harmed)
}

fn record(raw: &[Value], harmed: u64) -> Result<()> {
    println!("{} kills, {harmed} did harm", raw.len());
    results::write_raw("kill", "kills.jsonl", raw)?;
    results::write_summary(
        "kill",
        &[Claim::new(
            "kill-survival",
            Goal::Zero,
            harmed as f64,
            "cases",
            "cargo xtask bench kill",
        )
        .if_enough(raw.len() >= 200)],
    )?;
    match harmed {
        0 => Ok(()),
        harmed => bail!("{harmed} kills did harm"),
    }
}
