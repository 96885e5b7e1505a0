//! Transfers: a VM into a new QEMU of another process, over a connection; every page compared.
//!
//! Two oracles, as for checkpoints:
//! - `transfer send --verify`: Stillframe's own, for every transfer of a working guest. Sender and receiver each
//!   hash all of their memory by a slow way, and compare.
//! - the byte comparison: the test pauses the VM itself and reads all memory through `/proc/PID/mem`. It has the
//!   paused VM transferred, and compares the new VM's memory byte by byte.
//!
//! After each, the guests that run must find their memory whole.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::exactness::{Tally, wait_gone, writing_all_the_time};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{COPY_OF, Guest, Kind, SHM, Setup};
use stillframe_harness::health;
use stillframe_harness::memory::{Difference, Image};
use stillframe_harness::qmp::Qmp;
use stillframe_harness::random::Random;
use stillframe_harness::restored::Restored;
use stillframe_harness::results::{self, Claim, Goal};
use stillframe_harness::running::{Ended, Running, signal};
use stillframe_harness::serial::Serial;

/// Time for a guest to tick, on a busy machine.
const TICK_LIMIT: Duration = Duration::from_secs(120);
/// Longest delay of a kill after the receiver has started QEMU.
const STRIKE_WITHIN_MS: u64 = 2500;
/// How often, and how many times, it is inspected where the VM runs after a kill.
const SETTLE_EVERY: Duration = Duration::from_millis(200);
const SETTLE_LOOKS: u32 = 50;

/// What happens to the original.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// It runs on.
    Copy,
    /// It ends.
    HandOver,
}

/// Both processes of one transfer.
pub struct Transfer {
    /// The sender; not started yet while `None`.
    pub sender: Running,
    /// The receiver.
    pub receiver: Running,
    qmp: PathBuf,
    serial: PathBuf,
}

/// A VM that has arrived.
pub struct Arrived {
    /// The new VM.
    pub vm: Restored,
    /// The receiver's report.
    pub report: Value,
    /// The sender's report.
    pub sent: Value,
}

/// Where a transfer's sockets and files are, and how it is done.
#[derive(Debug, Clone)]
pub struct Order {
    /// The folder of its files.
    pub folder: PathBuf,
    /// Sets its files apart from those of others.
    pub name: String,
    /// What happens to the original.
    pub mode: Mode,
    /// More arguments for the sender.
    pub send: Vec<String>,
    /// More arguments for the receiver.
    pub receive: Vec<String>,
}

impl Order {
    /// A transfer of this guest, with the arguments that its kind needs.
    pub fn of(guest: &Guest, name: impl Into<String>, mode: Mode) -> Order {
        Order {
            folder: guest.folder().to_owned(),
            name: name.into(),
            mode,
            send: Vec::new(),
            receive: needs(guest),
        }
    }

    /// Starts both sides.
    pub fn start(&self, stillframe: &Stillframe, pid: i32) -> Result<Transfer> {
        let path = |what: &str| self.folder.join(format!("{}.{what}", self.name));
        let (qmp, serial) = (path("qmp"), path("serial"));
        let monitor = qmp.display().to_string();
        let spec = format!("file:{}", serial.display());
        let mut receive = vec!["transfer", "receive", "--json", "--listen", "127.0.0.1:0"];
        receive.extend(["--qmp", &monitor, "--serial", &spec]);
        let security = self.security(stillframe)?;
        receive.extend(security.iter().map(String::as_str));
        receive.extend(self.receive.iter().map(String::as_str));
        let mut receiver = Running::start(stillframe.command(&receive)?)?;
        let listening = &receiver.wait_results(1)?[0]["listening"];
        let to = listening.as_str().context("no address")?;
        let pid = pid.to_string();
        let mut send = vec!["transfer", "send", "--json", "--pid", &pid, "--to", to];
        send.extend(security.iter().map(String::as_str));
        if self.mode == Mode::HandOver {
            send.push("--hand-over");
        }
        send.extend(self.send.iter().map(String::as_str));
        let sender = Running::start(stillframe.command(&send)?)?;
        Ok(Transfer {
            sender,
            receiver,
            qmp,
            serial,
        })
    }

    /// Encrypted, with the certificate of this host.
    fn security(&self, stillframe: &Stillframe) -> Result<[String; 2]> {
        let path = |name: &str| self.folder.join(name).display().to_string();
        let (authority, host) = (path("authority"), path("certs"));
        if !Path::new(&host).exists() {
            stillframe.ok(&["certs", "authority", &authority])?;
            let line = ["certs", "host", "127.0.0.1", "--authority", &authority];
            stillframe.ok(&[&line[..], &["--output", &host]].concat())?;
        }
        Ok(["--certs".to_owned(), host])
    }

    /// Transfers the VM.
    pub fn perform(&self, stillframe: &Stillframe, pid: i32) -> Result<Arrived> {
        self.start(stillframe, pid)?.arrive()
    }
}

impl Transfer {
    /// Waits for both ends.
    pub fn arrive(self) -> Result<Arrived> {
        let sent = self.sender.end()?;
        let received = self.receiver.end();
        let received = received.with_context(|| format!("sender: {sent:?}"))?;
        let report = |ended: &Ended| {
            let mut reports = ended.results().unwrap_or_default();
            (ended.code == Some(0)).then(|| reports.pop()).flatten()
        };
        let (Some(sent), Some(report)) = (report(&sent), report(&received)) else {
            bail!("sender: {sent:?}; receiver: {received:?}");
        };
        let pid = report["pid"].as_i64().context("no pid")? as i32;
        Ok(Arrived {
            vm: Restored {
                pid,
                qmp: self.qmp,
                serial: Serial::new(&self.serial),
            },
            report,
            sent,
        })
    }
}

/// Transfers a working guest. Both its memories are compared in the pause, and each guest that runs afterwards
/// finds its memory whole.
pub fn verified(stillframe: &Stillframe, pid: i32, mut order: Order) -> Result<(Arrived, Tally)> {
    order.send.push("--verify".to_owned());
    let arrived = order.perform(stillframe, pid)?;
    let verify = arrived
        .report
        .get("verify")
        .context("no verify in the report")?;
    let tally = Tally {
        checkpoints: 1,
        pages: verify["pages"].as_u64().context("pages")?,
        differing: verify["differing"].as_u64().context("differing")?,
    };
    arrived.vm.serial.wait_ticks(4, TICK_LIMIT)?;
    Ok((arrived, tally))
}

/// Pauses the guest, transfers it, and compares both memories byte by byte. The new VM runs then, and the original,
/// where there still is one, stays paused.
pub fn byte_by_byte(
    stillframe: &Stillframe,
    guest: &Guest,
    mut order: Order,
) -> Result<(Arrived, Tally)> {
    let mut monitor = guest.second_monitor()?;
    monitor.execute("stop", json!({}))?;
    let original = Image::take(guest.pid(), &mut monitor)?;
    order.receive.push("--paused".to_owned());
    let arrived = order.perform(stillframe, guest.pid())?;
    match order.mode {
        Mode::Copy => ensure!(monitor.status()? == "paused", "a paused VM did not stay so"),
        Mode::HandOver => wait_gone(guest.pid())?,
    }
    let mut copy = arrived.vm.monitor()?;
    let mut differing = original.differing(&Image::take(arrived.vm.pid, &mut copy)?)?;
    if guest.kind == Kind::KvmBootSector
        && let Some(clock) = differing.iter().position(Difference::may_be_kvm_clock)
    {
        // Its one vCPU has one clock, which the firmware requested.
        differing.remove(clock);
    }
    if !differing.is_empty() {
        eprintln!("differing: {:?}", &differing[..differing.len().min(8)]);
    }
    copy.execute("cont", json!({}))?;
    arrived.vm.serial.wait_ticks(4, TICK_LIMIT)?;
    let tally = Tally {
        checkpoints: 1,
        pages: original.pages(),
        differing: differing.len() as u64,
    };
    Ok((arrived, tally))
}

/// Arguments of the receiver without which this kind of guest cannot run beside its original.
fn needs(guest: &Guest) -> Vec<String> {
    let words = match guest.kind {
        Kind::KvmBootSector => "--disks-as-they-are".to_owned(),
        // Each transfer gives the memory another file than the one before.
        Kind::FileShared => format!("--replace={SHM}={SHM}{COPY_OF}"),
        _ => return Vec::new(),
    };
    vec![words]
}

/// A new VM whose memory would be the file that the original writes to is refused; the original runs on.
fn refused_with_the_same_file(
    stillframe: &Stillframe,
    guest: &Guest,
    mut order: Order,
) -> Result<()> {
    order.receive.clear();
    let Transfer {
        sender, receiver, ..
    } = order.start(stillframe, guest.pid())?;
    let (sent, received) = (sender.end()?, receiver.end()?);
    ensure!(sent.code != Some(0), "two VMs with one memory: {sent:?}");
    let why = format!("is in use by process {}", guest.pid());
    ensure!(received.err.contains(&why), "{received:?}");
    guest.serial.wait_more(2, TICK_LIMIT)?;
    Ok(())
}

/// Copies and hand-overs of one guest, which has ended afterwards.
pub fn one_guest(
    stillframe: &Stillframe,
    guest: &Guest,
    count: u64,
    mut note: impl FnMut(&str, &Arrived, Tally),
) -> Result<()> {
    let order = |name, mode| Order::of(guest, name, mode);
    for number in 0..count {
        let order = order(format!("copy-{number}"), Mode::Copy);
        let (copy, tally) = verified(stillframe, guest.pid(), order)?;
        note("copy", &copy, tally);
        guest.serial.wait_more(2, TICK_LIMIT)?;
    }
    let (copy, tally) = byte_by_byte(stillframe, guest, order("copy-bytes".into(), Mode::Copy))?;
    note("copy, byte by byte", &copy, tally);
    drop(copy);
    guest.second_monitor()?.execute("cont", json!({}))?;
    guest.serial.wait_more(2, TICK_LIMIT)?;
    let hand_over = |name: String| order(name, Mode::HandOver);
    if guest.kind == Kind::FileShared {
        refused_with_the_same_file(stillframe, guest, hand_over("refused".into()))?;
    }
    let (mut arrived, tally) = byte_by_byte(stillframe, guest, hand_over("over-bytes".into()))?;
    note("hand-over, byte by byte", &arrived, tally);
    for number in 0..count {
        let before = arrived.vm.pid;
        let order = hand_over(format!("over-{number}"));
        let (next, tally) = verified(stillframe, before, order)?;
        wait_gone(before)?;
        arrived = next;
        note("hand-over", &arrived, tally);
    }
    Ok(())
}

/// All kinds of guest, and one that writes all the time, or `only` one; all of them write `docs/results/transfer/`.
pub fn run(count: u64, kills: u64, only: Option<&str>) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let mut total = Tally::default();
    let mut raw = Vec::new();
    let mut setups: Vec<(&str, Setup)> = Kind::ALL
        .into_iter()
        .map(|kind| (kind.name(), Setup::new(kind)))
        .collect();
    setups.push(("busy", writing_all_the_time()));
    setups.retain(|(name, _)| only.is_none_or(|only| only == *name));
    for (name, setup) in setups {
        if setup.kind == Kind::KvmBootSector && !Path::new("/dev/kvm").exists() {
            eprintln!("{name:16} left out: this machine has no /dev/kvm");
            continue;
        }
        let guest = setup.boot()?;
        let note = |what: &str, arrived: &Arrived, tally: Tally| {
            total.add(&format!("{name}: {what}"), tally);
            raw.push(json!({
                "guest": name, "what": what, "pages": tally.pages, "differing": tally.differing,
                "sent": arrived.sent, "received": arrived.report,
            }));
        };
        one_guest(&stillframe, &guest, count, note).with_context(|| name.to_owned())?;
    }
    println!("{total}");
    if only.is_none() {
        let command = "cargo xtask bench transfer";
        let (struck, wrong) = strikes(&stillframe, kills, 1)?;
        println!("{kills} kills, {wrong} wrong");
        results::write_raw("transfer", "transfers.jsonl", &raw)?;
        results::write_raw("transfer", "kills.jsonl", &struck)?;
        let pages = total.differing as f64;
        let pages = Claim::new("transfer-pages", Goal::Zero, pages, "pages", command);
        let cases = Claim::new("transfer-kills", Goal::Zero, wrong as f64, "cases", command);
        let claims = [
            pages.if_enough(total.checkpoints >= 50),
            cases.if_enough(kills >= 60),
        ];
        results::write_summary("transfer", &claims)?;
        ensure!(wrong == 0, "{wrong} kills ended wrong");
    }
    match total.differing {
        0 => Ok(()),
        differing => bail!("{differing} pages differ"),
    }
}

/// One of the two processes of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Of the original.
    Sender,
    /// Of the new VM.
    Receiver,
}

/// Where a VM runs after a transfer in which a side was killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The original runs; there is no other.
    Here,
    /// The new VM runs; the original is gone, or paused.
    There,
    /// A copy: both run.
    Both,
    /// The original is paused; the receiver, which was allowed to run the VM, has ended it.
    Paused,
}

/// The state of the original; none if it has ended, which it may do while it is queried.
fn status_here(guest: &mut Guest) -> Result<Option<String>> {
    let status = guest
        .second_monitor()
        .and_then(|mut monitor| monitor.status());
    for _ in 0..SETTLE_LOOKS {
        if status.is_ok() || !guest.is_alive() {
            return Ok(status.ok());
        }
        std::thread::sleep(SETTLE_EVERY);
    }
    status.map(Some)
}

/// Kills one side of a transfer `delay` after it has started QEMU. An error where the VM runs twice, or a copy's
/// original does not run.
pub fn strike(
    stillframe: &Stillframe,
    guest: &mut Guest,
    order: &Order,
    side: Side,
    delay: Duration,
) -> Result<Outcome> {
    let Transfer {
        mut sender,
        mut receiver,
        qmp,
        ..
    } = order.start(stillframe, guest.pid())?;
    receiver.wait_until("a QEMU", |_| Ok(qmp.exists()))?;
    std::thread::sleep(delay);
    match side {
        Side::Sender => sender.kill()?,
        Side::Receiver => receiver.kill()?,
    }
    let (sent, received) = (sender.end()?, receiver.end()?);
    let reports = || format!("sender: {sent:?}; receiver: {received:?}");
    let word = qmp.display().to_string();
    let mut last = None;
    for _ in 0..SETTLE_LOOKS {
        let there = match health::pids_with(&word)?.is_empty() {
            true => None,
            false => Qmp::status_within(&qmp, SETTLE_EVERY).unwrap_or_default(),
        };
        let here = status_here(guest)?;
        let runs = |status: &Option<String>| status.as_deref() == Some("running");
        last = match (runs(&here), runs(&there), order.mode) {
            (true, true, Mode::HandOver) => bail!("two of the VM run; {}", reports()),
            (true, true, Mode::Copy) => Some(Outcome::Both),
            (true, false, _) if there.is_none() => Some(Outcome::Here),
            (false, true, Mode::HandOver) => Some(Outcome::There),
            (false, false, Mode::HandOver) if there.is_none() => Some(Outcome::Paused),
            _ => None,
        };
        if last.is_some_and(|outcome| outcome != Outcome::Paused) {
            break;
        }
        std::thread::sleep(SETTLE_EVERY);
    }
    let outcome = last.with_context(|| format!("the VM runs nowhere; {}", reports()))?;
    if outcome == Outcome::Paused {
        let knows = side == Side::Receiver && sent.err.contains("must never run on both sides");
        ensure!(knows && guest.is_alive(), "lost; {}", reports());
        guest.second_monitor()?.execute("cont", json!({}))?;
    }
    match outcome {
        Outcome::There => Serial::new(&order.folder.join(format!("{}.serial", order.name)))
            .wait_more(2, TICK_LIMIT)?,
        _ => guest.serial.wait_more(2, TICK_LIMIT)?,
    };
    for pid in health::pids_with(&word)? {
        signal(pid.unsigned_abs(), "KILL")?;
        wait_gone(pid)?;
    }
    Ok(outcome)
}

/// Kills of both sides, at random moments of copies and hand-overs of small guests. Returns what came of each, and how
/// many were wrong.
pub fn strikes(stillframe: &Stillframe, count: u64, seed: u64) -> Result<(Vec<Value>, u64)> {
    let mut random = Random::new(seed);
    let boot = || Setup::small(Kind::Private, "struck").boot();
    let mut guest = boot()?;
    let (mut raw, mut wrong) = (Vec::new(), 0);
    for number in 0..count {
        let side = [Side::Sender, Side::Receiver][(number % 2) as usize];
        let mode = [Mode::HandOver, Mode::Copy][(number / 2 % 2) as usize];
        let delay = Duration::from_millis(random.below(STRIKE_WITHIN_MS));
        let order = Order::of(&guest, format!("struck-{number}"), mode);
        let struck = strike(stillframe, &mut guest, &order, side, delay);
        let outcome = match &struck {
            Ok(outcome) => format!("{outcome:?}"),
            Err(error) => format!("wrong: {error:#}"),
        };
        eprintln!("{number:3} {side:?} {mode:?} after {delay:?}: {outcome}");
        raw.push(json!({
            "side": format!("{side:?}"), "mode": format!("{mode:?}"),
            "delay_ms": delay.as_millis() as u64, "outcome": outcome,
        }));
        wrong += u64::from(struck.is_err());
        if !matches!(struck, Ok(Outcome::Here | Outcome::Both | Outcome::Paused)) {
            guest = boot()?;
        }
    }
    Ok((raw, wrong))
}
