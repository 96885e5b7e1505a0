//! Migrations: a VM into a new QEMU of another process, over a connection; every page compared.
//!
//! Two oracles, as for checkpoints:
//! - `migrate --verify`: Stillframe's own, for every migration of a working guest. Source and destination each hash all
//!   of their memory by a slow way, and compare.
//! - the byte comparison: the test pauses the VM itself and reads all memory through `/proc/PID/mem`. It has the paused
//!   VM migrated, and compares the new VM's memory byte by byte.
//!
//! After each, the guest must find its memory whole. [`strikes`] has what goes wrong on the way.

pub mod strikes;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::exactness::{Tally, wait_gone, writing_all_the_time};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{COPY_OF, Guest, Kind, SHM, Setup};
use stillframe_harness::memory::{Difference, Image};
use stillframe_harness::restored::Restored;
use stillframe_harness::results::{self, Claim, Goal};
use stillframe_harness::running::{Ended, Running};
use stillframe_harness::serial::Serial;

/// Time for a guest to tick, on a busy machine.
const TICK_LIMIT: Duration = Duration::from_secs(120);

/// The ways in which pages move.
const MODES: [&str; 2] = ["pre-copy", "stop-copy"];

/// Both processes of one migration.
pub struct Migration {
    /// The source.
    pub source: Running,
    /// The destination.
    pub destination: Running,
    /// Where the destination listens.
    pub at: SocketAddr,
    qmp: PathBuf,
    serial: PathBuf,
}

/// A VM that has arrived.
pub struct Arrived {
    /// The new VM.
    pub vm: Restored,
    /// The destination's report.
    pub report: Value,
    /// The source's report.
    pub sent: Value,
}

/// Where a migration's sockets and files are, and how it is done.
#[derive(Debug, Clone)]
pub struct Order {
    /// The folder of its files.
    pub folder: PathBuf,
    /// Sets its files apart from those of others.
    pub name: String,
    /// More arguments for the source.
    pub migrate: Vec<String>,
    /// More arguments for the destination.
    pub receive: Vec<String>,
}

impl Order {
    /// A migration of this guest, with the arguments that its kind needs.
    pub fn of(guest: &Guest, name: impl Into<String>) -> Order {
        Order {
            folder: guest.folder().to_owned(),
            name: name.into(),
            migrate: Vec::new(),
            receive: needs(guest),
        }
    }

    /// The new VM's monitor, and its serial port.
    pub fn files(&self) -> (PathBuf, PathBuf) {
        let path = |what: &str| self.folder.join(format!("{}.{what}", self.name));
        (path("qmp"), path("serial"))
    }

    /// The command of a destination that listens there, without the arguments for a new VM.
    pub fn receiver(
        &self,
        stillframe: &Stillframe,
        listen: &str,
        more: &[&str],
    ) -> Result<Command> {
        let qmp = self.files().0.display().to_string();
        let mut line = vec!["receive", "--json", "--listen", listen, "--qmp", &qmp];
        let security = self.security(stillframe)?;
        line.extend(security.iter().map(String::as_str));
        line.extend(more);
        stillframe.command(&line)
    }

    /// The command of a source that connects there.
    pub fn migrator(
        &self,
        stillframe: &Stillframe,
        pid: i32,
        to: SocketAddr,
        more: &[&str],
    ) -> Result<Command> {
        let (pid, to) = (pid.to_string(), to.to_string());
        let mut line = vec!["migrate", "--json", "--pid", &pid, "--to", &to];
        let security = self.security(stillframe)?;
        line.extend(security.iter().map(String::as_str));
        line.extend(more);
        stillframe.command(&line)
    }

    /// Starts a destination. Returns where it listens, too.
    pub fn listen(&self, command: Command) -> Result<(Running, SocketAddr)> {
        let mut destination = Running::start(command)?;
        let listening = &destination.wait_results(1)?[0]["listening"];
        let at = listening.as_str().context("no address")?.parse()?;
        Ok((destination, at))
    }

    /// The arguments for a new VM.
    pub fn new_vm(&self) -> Vec<String> {
        let spec = format!("file:{}", self.files().1.display());
        let own = ["--serial".to_owned(), spec];
        [&own[..], &self.receive].concat()
    }

    /// Starts both sides.
    pub fn start(&self, stillframe: &Stillframe, pid: i32) -> Result<Migration> {
        let words = self.new_vm();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let (destination, at) = self.listen(self.receiver(stillframe, "127.0.0.1:0", &words)?)?;
        let words: Vec<&str> = self.migrate.iter().map(String::as_str).collect();
        let source = Running::start(self.migrator(stillframe, pid, at, &words)?)?;
        let (qmp, serial) = self.files();
        Ok(Migration {
            source,
            destination,
            at,
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

    /// Migrates the VM.
    pub fn perform(&self, stillframe: &Stillframe, pid: i32) -> Result<Arrived> {
        self.start(stillframe, pid)?.arrive()
    }
}

impl Migration {
    /// Waits for both ends.
    pub fn arrive(self) -> Result<Arrived> {
        let sent = self.source.end()?;
        let received = self.destination.end();
        let received = received.with_context(|| format!("source: {sent:?}"))?;
        let report = |ended: &Ended| {
            let mut reports = ended.results().unwrap_or_default();
            (ended.code == Some(0)).then(|| reports.pop()).flatten()
        };
        let (Some(sent), Some(report)) = (report(&sent), report(&received)) else {
            bail!("source: {sent:?}; destination: {received:?}");
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

/// Migrates a working guest. Both its memories are compared in the pause, and it finds its memory whole afterwards.
pub fn verified(
    stillframe: &Stillframe,
    pid: i32,
    mut order: Order,
    mode: &str,
) -> Result<(Arrived, Tally)> {
    let words = ["--verify", "--mode", mode].map(str::to_owned);
    order.migrate.extend(words);
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

/// Pauses the guest, migrates it, and compares both memories byte by byte. The new VM runs then.
pub fn byte_by_byte(
    stillframe: &Stillframe,
    guest: &Guest,
    order: &Order,
) -> Result<(Arrived, Tally)> {
    let mut monitor = guest.second_monitor()?;
    monitor.execute("stop", json!({}))?;
    let original = Image::take(guest.pid(), &mut monitor)?;
    let arrived = order.perform(stillframe, guest.pid())?;
    let runs = arrived.report["running"].as_bool();
    ensure!(runs == Some(false), "a paused VM did not stay so");
    wait_gone(guest.pid())?;
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

/// Arguments of the destination without which this kind of guest cannot run beside its original.
fn needs(guest: &Guest) -> Vec<String> {
    let words = match guest.kind {
        Kind::KvmBootSector => "--disks-as-they-are".to_owned(),
        // Each migration gives the memory another file than the one before.
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
    let migration = order.start(stillframe, guest.pid())?;
    let (sent, received) = (migration.source.end()?, migration.destination.end()?);
    ensure!(sent.code != Some(0), "two VMs with one memory: {sent:?}");
    let why = format!("is in use by process {}", guest.pid());
    ensure!(received.err.contains(&why), "{received:?}");
    ensure!(
        sent.err.contains(&why),
        "the source does not say why: {sent:?}"
    );
    guest.serial.wait_more(2, TICK_LIMIT)?;
    Ok(())
}

/// Migrations of one guest: one that is compared byte by byte, and `count` in each mode. It has ended afterwards.
pub fn one_guest(
    stillframe: &Stillframe,
    guest: &Guest,
    count: u64,
    mut note: impl FnMut(&str, &Arrived, Tally),
) -> Result<()> {
    let order = |name: String| Order::of(guest, name);
    if guest.kind == Kind::FileShared {
        refused_with_the_same_file(stillframe, guest, order("refused".into()))?;
    }
    let (mut arrived, tally) = byte_by_byte(stillframe, guest, &order("bytes".into()))?;
    note("byte by byte", &arrived, tally);
    for number in 0..count {
        for mode in MODES {
            let before = arrived.vm.pid;
            let order = order(format!("{mode}-{number}"));
            let (next, tally) = verified(stillframe, before, order, mode)?;
            wait_gone(before)?;
            arrived = next;
            note(mode, &arrived, tally);
        }
    }
    Ok(())
}

/// All kinds of guest, and one that writes all the time, or `only` one; all of them write `docs/results/migrate/`.
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
        let command = "cargo xtask bench migrate";
        let struck = strikes::run(&stillframe, kills, 1)?;
        println!("{struck}");
        results::write_raw("migrate", "migrations.jsonl", &raw)?;
        results::write_raw("migrate", "strikes.jsonl", &struck.raw)?;
        let pages = total.differing as f64;
        let pages = Claim::new("migrate-pages", Goal::Zero, pages, "pages", command);
        let wrong = struck.wrong as f64;
        let cases = Claim::new("migrate-strikes", Goal::Zero, wrong, "cases", command);
        let claims = [
            pages.if_enough(total.checkpoints >= 200),
            cases.if_enough(kills >= 200),
        ];
        results::write_summary("migrate", &claims)?;
        ensure!(struck.wrong == 0, "{} strikes ended wrong", struck.wrong);
    }
    match total.differing {
        0 => Ok(()),
        differing => bail!("{differing} pages differ"),
    }
}
