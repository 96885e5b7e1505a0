//! One migration: the same saved guest, on one host of a link, moved to the other in one way.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::guest::{Saved, Size};
use super::qemu::{self, Tuning};
use crate::peers;
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::Guest;
use stillframe_harness::network::{ADDRESSES, Link};
use stillframe_harness::qmp::{Qmp, event_time_s};
use stillframe_harness::restored::Restored;
use stillframe_harness::running::Running;
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
    /// The program's own report.
    pub report: Value,
}

impl Outcome {
    /// As raw data.
    pub fn raw(&self) -> Value {
        json!({
            "total_ms": self.total_ms, "downtime_ms": self.downtime_ms, "bytes": self.bytes, "report": self.report,
        })
    }
}

impl Outcome {
    /// For whoever waits for the bench.
    pub fn in_short(&self) -> String {
        let ms = |value: Option<f64>| value.map_or("-".to_owned(), |ms| format!("{ms:.1} ms"));
        let mib = self.bytes as f64 / f64::from(1 << 20);
        let (total, pause) = (ms(self.total_ms), ms(self.downtime_ms));
        format!("{total}, pause {pause}, {mib:.1} MiB")
    }
}

/// Migrates the guest once.
pub fn migrate(saved: &Saved, link: &Link, way: Way) -> Result<Outcome> {
    let [here, _] = &link.hosts;
    let mut source = saved.start(here)?;
    let mut monitor = source.second_monitor()?;
    peers::load_mapped_ram(&mut monitor, saved.file())?;
    peers::set_capabilities(&mut monitor, &["mapped-ram"], false)?;
    monitor.execute("cont", json!({}))?;
    drop(monitor);
    thread::sleep(STRIDE);
    let outcome = match way {
        Way::Qemu(tuning) => by_qemu(saved, link, &source, tuning),
        Way::Stillframe(words) => by_stillframe(saved, link, &source, (words, &[])),
        Way::WithoutDeltas(words) => {
            // The paper's migration ends when the VM is stopped for the rest.
            let words = [words, &["--delta-cache=0", "--mode=pre-copy"]].concat();
            by_stillframe(saved, link, &source, (&words, &[]))
        }
        Way::Watched => watched(saved, link, &source),
    };
    source.kill()?;
    outcome
}

/// The VM is migrated in the middle between two checkpoints.
fn watched(saved: &Saved, link: &Link, source: &Guest) -> Result<Outcome> {
    let stillframe = Stillframe::init(&source.folder().join(REPOSITORY))?;
    let pid = source.pid_text();
    let line = ["watch", "--json", "--every", "1s", "--pid", &pid];
    let mut watch = Running::start(link.hosts[0].enter(&stillframe.command(&line)?))?;
    watch.wait_results(CHECKPOINTS)?;
    thread::sleep(INTERVAL / 2);
    let outcome = by_stillframe(saved, link, source, (&[], &["--seed"]))?;
    let ended = watch.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    Ok(outcome)
}

fn by_qemu(saved: &Saved, link: &Link, source: &Guest, tuning: Tuning) -> Result<Outcome> {
    let Size { ram_mib, .. } = saved.size();
    let limit = saved.size().limit();
    let destination = saved.start(&link.hosts[1])?;
    let mut from = source.second_monitor()?;
    let mut to = destination.second_monitor()?;
    let address = format!("tcp:{}:{PORT}", ADDRESSES[1]);
    qemu::prepare(&mut from, &mut to, tuning, ram_mib)?;
    to.execute("migrate-incoming", json!({"uri": address}))?;
    from.forget_events()?;
    let before = link.bytes()?;
    let begin = Instant::now();
    let report = qemu::migrate(&mut from, &address, tuning, limit)?;
    let total_ms = begin.elapsed().as_secs_f64() * 1e3;
    let bytes = link.bytes()? - before;
    if report["status"] != "completed" {
        return Ok(Outcome {
            total_ms: None,
            downtime_ms: None,
            bytes,
            report,
        });
    }
    let downtime_ms = downtime(&mut from, to.wait_event("RESUME", PROOF)?)?;
    saved.wait_more(&destination.serial, PROOF)?;
    Ok(Outcome {
        total_ms: Some(total_ms),
        downtime_ms: Some(downtime_ms),
        bytes,
        report,
    })
}

/// With these arguments for the source, and for the destination.
fn by_stillframe(
    saved: &Saved,
    link: &Link,
    source: &Guest,
    (words, receive): (&[&str], &[&str]),
) -> Result<Outcome> {
    let [here, there] = &link.hosts;
    let stillframe = Stillframe::at(&source.folder().join(REPOSITORY));
    let path = |name: &str| source.folder().join(name);
    let (qmp, serial) = (path("there.qmp"), path("there.serial"));
    let (qmp_text, spec) = (
        qmp.display().to_string(),
        format!("file:{}", serial.display()),
    );
    let listen = format!("{}:0", ADDRESSES[1]);
    let line = ["receive", "--json", "--plain-text", "--listen", &listen];
    let own = ["--qmp", &qmp_text, "--serial", &spec];
    let line = [&line[..], &own, receive].concat();
    let mut destination = Running::start(there.enter(&stillframe.command(&line)?))?;
    let listening = &destination.wait_results(1)?[0]["listening"];
    let to = listening.as_str().context("no address")?.to_owned();
    let mut from = source.second_monitor()?;
    from.forget_events()?;
    let limit = saved.size().limit() + PROOF;
    let resumed = thread::spawn(move || resumed(&qmp, limit));
    let pid = source.pid_text();
    let line = [
        "migrate",
        "--json",
        "--plain-text",
        "--pid",
        &pid,
        "--to",
        &to,
    ];
    let line = [&line[..], words].concat();
    let command = here.enter(&stillframe.command(&line)?);
    let before = link.bytes()?;
    let begin = Instant::now();
    let ended = Running::start(command)?.end_within(limit)?;
    let total_ms = begin.elapsed().as_secs_f64() * 1e3;
    let bytes = link.bytes()? - before;
    ensure!(ended.code == Some(0), "{ended:?}");
    let mut report = ended.results()?.pop().context("no report")?;
    report["said"] = ended.err.lines().collect();
    let arrived = destination.end()?;
    ensure!(arrived.code == Some(0), "{arrived:?}");
    report["complete"] = arrived.event("complete").into();
    let arrived = arrived.results()?.pop().context("no report")?;
    report["arrived"] = arrived["pages"].clone();
    let vm = Restored {
        pid: arrived["pid"].as_i64().context("no pid")? as i32,
        qmp: path("there.qmp"),
        serial: Serial::new(&serial),
    };
    let resumed = resumed.join();
    let resume = resumed.map_err(|_| anyhow::anyhow!("the listener panicked"))??;
    let downtime_ms = downtime(&mut from, resume)?;
    saved.wait_more(&vm.serial, PROOF)?;
    Ok(Outcome {
        total_ms: Some(total_ms),
        downtime_ms: Some(downtime_ms),
        bytes,
        report,
    })
}

/// The event by which the new VM says that it runs. The monitor comes when its QEMU is started.
fn resumed(qmp: &Path, limit: Duration) -> Result<Value> {
    Qmp::connect(qmp)?.wait_event("RESUME", limit)
}

/// From the source's last STOP event, which a checkpoint may have caused before, to the destination's RESUME event.
fn downtime(source: &mut Qmp, resume: Value) -> Result<f64> {
    let mut stop = source.wait_event("STOP", PROOF)?;
    while let Ok(later) = source.wait_event("STOP", NO_MORE) {
        stop = later;
    }
    Ok((event_time_s(&resume) - event_time_s(&stop)) * 1e3)
}
