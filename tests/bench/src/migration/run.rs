//! One migration: the same saved guest, on one host of a link, moved to the other in one way.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value, json};

use super::guest::{Saved, Size};
use super::hosts::Hosts;
use super::meter::{self, Peak};
use super::qemu::{self, Tuning};
use crate::peers;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::Guest;
use stillframe_harness::network::{ADDRESSES, Namespace};
use stillframe_harness::qmp::{Qmp, event_time_s};
use stillframe_harness::restored::Restored;
use stillframe_harness::running::{Ended, Running};
use stillframe_harness::serial::Serial;

/// Time for the guest to get into its stride before, and to show afterwards that it goes on.
const STRIDE: Duration = Duration::from_secs(2);
const PROOF: Duration = Duration::from_secs(120);
const PORT: u16 = 7800;
/// Events that have not come by then do not come: the source's QEMU has ended, or has stopped for good.
const NO_MORE: Duration = Duration::from_millis(50);
/// Checkpoints before a watched VM is migrated, and the time between two of them.
const CHECKPOINTS: usize = 3;
const INTERVAL: Duration = Duration::from_secs(1);
/// In the guest's folder.
const REPOSITORY: &str = "repository";

/// A way to migrate.
#[derive(Debug, Clone, Copy)]
pub enum Way {
    /// QEMU by itself.
    Qemu(Tuning),
    /// Stillframe, with these arguments.
    Stillframe(&'static [&'static str]),
    /// The same by pre-copy, without deltas.
    WithoutDeltas(&'static [&'static str]),
    /// Stillframe, with these arguments, into a QEMU that was started before; encrypted or not.
    Into {
        /// The arguments.
        words: &'static [&'static str],
        /// Whether it is encrypted.
        tls: bool,
    },
    /// Stillframe, while it takes checkpoints of the VM into a repository that both hosts reach.
    Watched,
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// From the command until the source knows that all is there; none where that took too long.
    pub total_ms: Option<f64>,
    /// From the source's STOP event to the destination's RESUME event.
    pub downtime_ms: Option<f64>,
    /// Bytes that crossed the link, both ways, headers included.
    pub bytes: u64,
    /// Seconds of all processors that both QEMUs took meanwhile, and the engines in all.
    pub processor_s: f64,
    /// The most that the engines had in memory, in MiB: that at the source, and that at the destination.
    pub engines_mib: Option<[f64; 2]>,
    /// What the guest did a second at the source, from the command until it was stopped.
    pub ticks_per_s: Option<f64>,
    /// The program's own report.
    pub report: Value,
}

impl Outcome {
    /// As raw data.
    pub fn raw(&self) -> Value {
        json!({
            "total_ms": self.total_ms, "downtime_ms": self.downtime_ms, "bytes": self.bytes,
            "processor_s": self.processor_s, "engines_mib": self.engines_mib, "ticks_per_s": self.ticks_per_s,
            "report": self.report,
        })
    }
}

impl Outcome {
    /// As a line of progress.
    pub fn in_short(&self) -> String {
        let ms = |value: Option<f64>| value.map_or("-".to_owned(), |ms| format!("{ms:.1} ms"));
        let mib = self.bytes as f64 / f64::from(1 << 20);
        let (total, pause) = (ms(self.total_ms), ms(self.downtime_ms));
        format!("{total}, pause {pause}, {mib:.1} MiB")
    }
}

/// Migrates the guest once.
pub fn migrate(saved: &Saved, hosts: &Hosts, way: Way) -> Result<Outcome> {
    let [here, there] = &hosts.link.hosts;
    let mut source = start(saved, here)?;
    let move_it = Move {
        saved,
        hosts,
        source: &source,
    };
    let to_new = |words: &[&str], receive: &[&str]| {
        let target = Target::new(source.folder());
        move_it.by_stillframe(target, (words, receive), false)
    };
    let outcome = match way {
        Way::Qemu(tuning) => move_it.by_qemu(tuning),
        Way::Stillframe(words) => to_new(words, &[]),
        Way::WithoutDeltas(words) => {
            // The paper's migration ends when the VM is stopped for the rest.
            let words = [words, &["--delta-cache=0", "--mode=pre-copy"]].concat();
            to_new(&words, &[])
        }
        Way::Into { words, tls } => {
            let waiting = saved.start(there)?;
            // It answers when it has all of its memory.
            waiting
                .second_monitor()?
                .execute("query-status", json!({}))?;
            let target = Target::Waiting(waiting);
            move_it.by_stillframe(target, (words, &[]), tls)
        }
        Way::Watched => move_it.watched(|| to_new(&[], &["--seed"])),
    };
    source.kill()?;
    outcome
}

/// The guest at work on that host.
pub fn start(saved: &Saved, host: &Namespace) -> Result<Guest> {
    let source = saved.start(host)?;
    let mut monitor = source.second_monitor()?;
    peers::load_mapped_ram(&mut monitor, saved.file())?;
    peers::set_capabilities(&mut monitor, &["mapped-ram"], false)?;
    monitor.execute("cont", json!({}))?;
    thread::sleep(STRIDE);
    Ok(source)
}

/// Where the VM goes.
enum Target {
    /// Into a QEMU that is started for it, with this monitor and serial port.
    New { qmp: PathBuf, serial: PathBuf },
    /// Into this one, which waits.
    Waiting(Guest),
}

impl Target {
    fn new(folder: &Path) -> Target {
        Target::New {
            qmp: folder.join("there.qmp"),
            serial: folder.join("there.serial"),
        }
    }

    /// The arguments of `receive`.
    fn words(&self) -> Vec<String> {
        match self {
            Target::New { qmp, serial } => vec![
                format!("--qmp={}", qmp.display()),
                format!("--serial=file:{}", serial.display()),
            ],
            Target::Waiting(guest) => vec![format!("--into={}", guest.qmp_path().display())],
        }
    }

    /// A monitor that Stillframe does not take.
    fn monitor(&self) -> PathBuf {
        match self {
            Target::New { qmp, .. } => qmp.clone(),
            Target::Waiting(guest) => guest.folder().join("qmp2"),
        }
    }

    fn serial(&self) -> Serial {
        match self {
            Target::New { serial, .. } => Serial::new(serial),
            Target::Waiting(guest) => Serial::new(guest.serial.path()),
        }
    }

    /// What its QEMU has taken so far; one that is not there yet has taken nothing.
    fn processor_s(&self) -> Result<f64> {
        match self {
            Target::New { .. } => Ok(0.0),
            Target::Waiting(guest) => meter::processor_s(guest.pid()),
        }
    }
}

/// A guest that is to be moved.
struct Move<'a> {
    saved: &'a Saved,
    hosts: &'a Hosts,
    source: &'a Guest,
}

impl Move<'_> {
    /// The VM is migrated in the middle between two checkpoints.
    fn watched(&self, migrate: impl FnOnce() -> Result<Outcome>) -> Result<Outcome> {
        let stillframe = Stillframe::init(&self.source.folder().join(REPOSITORY))?;
        let pid = self.source.pid_text();
        let line = ["watch", "--json", "--every", "1s", "--pid", &pid];
        let [here, _] = &self.hosts.link.hosts;
        let mut watch = Running::start(here.enter(&stillframe.command(&line)?))?;
        watch.wait_results(CHECKPOINTS)?;
        thread::sleep(INTERVAL / 2);
        let outcome = migrate()?;
        let ended = watch.end()?;
        ensure!(ended.code == Some(0), "{ended:?}");
        Ok(outcome)
    }

    fn by_qemu(&self, tuning: Tuning) -> Result<Outcome> {
        let (saved, link) = (self.saved, &self.hosts.link);
        let Size { ram_mib, .. } = saved.size();
        let limit = saved.size().limit();
        let destination = saved.start(&link.hosts[1])?;
        let mut from = self.source.second_monitor()?;
        let mut to = destination.second_monitor()?;
        let address = format!("tcp:{}:{PORT}", ADDRESSES[1]);
        qemu::prepare(self.hosts, &mut from, &mut to, (tuning, ram_mib))?;
        to.execute("migrate-incoming", json!({"uri": address}))?;
        from.forget_events()?;
        let so_far = || self.so_far(meter::processor_s(destination.pid())?);
        let before = so_far()?;
        let begin = Instant::now();
        let report = qemu::migrate(&mut from, &address, tuning, limit)?;
        let total_ms = begin.elapsed().as_secs_f64() * 1e3;
        let after = so_far()?;
        let mut outcome = Outcome {
            total_ms: None,
            downtime_ms: None,
            bytes: after.bytes - before.bytes,
            processor_s: after.processor_s - before.processor_s,
            engines_mib: None,
            ticks_per_s: None,
            report,
        };
        if outcome.report["status"] == "completed" {
            let resume = to.wait_event("RESUME", PROOF)?;
            outcome.total_ms = Some(total_ms);
            outcome.downtime_ms = Some((event_time_s(&resume) - stopped_at(&mut from)?) * 1e3);
            saved.wait_more(&destination.serial, PROOF)?;
        }
        anyhow::Ok(outcome)
    }

    /// With these arguments for the source, and for the destination.
    fn by_stillframe(
        &self,
        target: Target,
        (words, receive): (&[&str], &[&str]),
        tls: bool,
    ) -> Result<Outcome> {
        let own = target.words();
        let own: Vec<&str> = own.iter().map(String::as_str).collect();
        let listen = format!("{}:0", ADDRESSES[1]);
        let line = [&["receive", "--listen", &listen][..], &own, receive].concat();
        let mut destination = self.engine(1, &line, tls)?;
        let listening = &destination.wait_results(1)?[0]["listening"];
        let to = listening.as_str().context("no address")?.to_owned();
        let mut from = self.source.second_monitor()?;
        from.forget_events()?;
        let limit = self.saved.size().limit() + PROOF;
        let monitor = target.monitor();
        let resumed = thread::spawn(move || resumed(&monitor, limit));
        let before = self.so_far(target.processor_s()?)?;
        let begin = Instant::now();
        let pid = self.source.pid_text();
        let line = [&["migrate", "--pid", &pid, "--to", &to], words].concat();
        let source = self.engine(0, &line, tls)?;
        let peaks = [Peak::of(source.pid()), Peak::of(destination.pid())];
        let ended = source.end_within(limit)?;
        let total_ms = begin.elapsed().as_secs_f64() * 1e3;
        let bytes = self.hosts.link.bytes()? - before.bytes;
        let (there, report) = reports(&ended, &destination.end()?)?;
        let after = self.so_far(meter::processor_s(there)?)?;
        let vm = Restored {
            pid: there,
            qmp: target.monitor(),
            serial: target.serial(),
        };
        let resumed = resumed.join();
        let resume = resumed.map_err(|_| anyhow!("the listener panicked"))??;
        let stopped_s = stopped_at(&mut from)?;
        self.saved.wait_more(&vm.serial, PROOF)?;
        Ok(Outcome {
            total_ms: Some(total_ms),
            downtime_ms: Some((event_time_s(&resume) - stopped_s) * 1e3),
            bytes,
            processor_s: after.processor_s - before.processor_s,
            engines_mib: Some(peaks.map(Peak::mib)),
            ticks_per_s: Some((after.ticks - before.ticks) / (stopped_s - before.at_s)),
            report,
        })
    }

    /// Starts `stillframe` on that host.
    fn engine(&self, side: usize, line: &[&str], tls: bool) -> Result<Running> {
        let stillframe = Stillframe::at(&self.source.folder().join(REPOSITORY));
        let certificates = self.hosts.certificates(side).display().to_string();
        let security = match tls {
            true => &["--certs", &certificates][..],
            false => &["--plain-text"],
        };
        let line = [line, &["--json"], security].concat();
        Running::start(self.hosts.link.hosts[side].enter(&stillframe.command(&line)?))
    }

    /// What has crossed the link and been taken so far, `there_s` by the QEMU at the destination.
    fn so_far(&self, there_s: f64) -> Result<SoFar> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
        Ok(SoFar {
            at_s: now.as_secs_f64(),
            bytes: self.hosts.link.bytes()?,
            processor_s: meter::processor_s(self.source.pid())? + meter::children_s()? + there_s,
            ticks: self.source.serial.ticks()?.len() as f64,
        })
    }
}

/// Counters that only grow.
struct SoFar {
    at_s: f64,
    bytes: u64,
    processor_s: f64,
    ticks: f64,
}

/// The process id of the new QEMU, and what both sides reported.
fn reports(ended: &Ended, arrived: &Ended) -> Result<(i32, Value)> {
    ensure!(ended.code == Some(0), "{ended:?}");
    ensure!(arrived.code == Some(0), "{arrived:?}");
    let mut report = ended.results()?.pop().context("no report")?;
    report["said"] = ended.err.lines().collect();
    report["complete"] = arrived.event("complete").into();
    let arrived = arrived.results()?.pop().context("no report")?;
    report["arrived"] = arrived["pages"].clone();
    let there = arrived["pid"].as_i64().context("no pid")?;
    Ok((there as i32, report))
}

/// The event by which the new VM says that it runs. The monitor comes when its QEMU is started.
fn resumed(qmp: &Path, limit: Duration) -> Result<Value> {
    Qmp::connect(qmp)?.wait_event("RESUME", limit)
}

/// The time of the source's last STOP event, in seconds since the epoch; a checkpoint may have caused one before.
fn stopped_at(source: &mut Qmp) -> Result<f64> {
    let mut stop = source.wait_event("STOP", PROOF)?;
    while let Ok(later) = source.wait_event("STOP", NO_MORE) {
        stop = later;
    }
    Ok(event_time_s(&stop))
}
