//! Migrations by the command line: both sides, and the VM that arrives.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::cli::Stillframe;
use crate::guest::{COPY_OF, Guest, Kind, SHM};
use crate::health;
use crate::relay::Relay;
use crate::restored::Restored;
use crate::running::{Ended, Running, signal};
use crate::serial::Serial;

/// Both processes of one migration.
pub struct Migration {
    /// The source.
    pub source: Running,
    /// The destination.
    pub destination: Running,
    /// Where the destination listens.
    pub at: SocketAddr,
    /// The new VM's monitor.
    pub qmp: PathBuf,
    /// Its serial port.
    pub serial: PathBuf,
    /// A test that fails may leave a VM there.
    new: Started,
}

/// Most tests do not wait for a source that was killed.
const SOON: &str = "--reconnect=1s";

/// Ends the QEMU with this monitor when it is dropped.
struct Started(Option<PathBuf>);

impl Drop for Started {
    fn drop(&mut self) {
        let qmp = self.0.take().map(|qmp| qmp.display().to_string());
        let pids = qmp.map(|qmp| health::pids_with(&qmp).unwrap_or_default());
        for pid in pids.into_iter().flatten() {
            // One that has ended needs no signal.
            let _ = signal(pid as u32, "KILL");
        }
    }
}

/// A VM that has arrived.
pub struct Arrived {
    /// The new VM.
    pub vm: Restored,
    /// The destination's report.
    pub report: Value,
    /// The same of a VM that ran before all its memory was there, when that is complete.
    pub filled: Option<Value>,
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
        if !more.iter().any(|word| word.starts_with("--reconnect")) {
            line.push(SOON);
        }
        let security = self.security(stillframe)?;
        line.extend(security.iter().map(String::as_str));
        line.extend(more);
        stillframe.command(&line)
    }

    /// The command of a destination that receives into the QEMU with this monitor.
    pub fn receiver_into(&self, stillframe: &Stillframe, qmp: &Path) -> Result<Command> {
        let qmp = qmp.display().to_string();
        let mut line = vec![
            "receive",
            "--json",
            "--listen",
            "127.0.0.1:0",
            "--into",
            &qmp,
            SOON,
        ];
        let security = self.security(stillframe)?;
        line.extend(security.iter().map(String::as_str));
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
        let (destination, at) = self.start_destination(stillframe)?;
        self.start_source(stillframe, pid, (destination, at), at)
    }

    fn start_destination(&self, stillframe: &Stillframe) -> Result<(Running, SocketAddr)> {
        let words = self.new_vm();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        self.listen(self.receiver(stillframe, "127.0.0.1:0", &words)?)
    }

    /// Starts a source that connects there, beside a destination that listens.
    pub fn start_source(
        &self,
        stillframe: &Stillframe,
        pid: i32,
        (destination, at): (Running, SocketAddr),
        to: SocketAddr,
    ) -> Result<Migration> {
        let words: Vec<&str> = self.migrate.iter().map(String::as_str).collect();
        let source = Running::start(self.migrator(stillframe, pid, to, &words)?)?;
        let (qmp, serial) = self.files();
        Ok(Migration {
            source,
            destination,
            at,
            new: Started(Some(qmp.clone())),
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

    /// Migrates the VM over a link that delays each byte, both ways.
    pub fn perform_delayed(
        &self,
        stillframe: &Stillframe,
        pid: i32,
        delay: Duration,
    ) -> Result<Arrived> {
        let (destination, at) = self.start_destination(stillframe)?;
        let relay = Relay::delayed(at, delay)?;
        let started = self.start_source(stillframe, pid, (destination, at), relay.address());
        started?.arrive()
    }

    /// Migrates the VM over a link that is cut as often as this, each time a while after the last.
    pub fn perform_cut(
        &self,
        stillframe: &Stillframe,
        pid: i32,
        after: &[Duration],
    ) -> Result<Arrived> {
        let (destination, at) = self.start_destination(stillframe)?;
        let relay = Relay::start(at)?;
        let started = self.start_source(stillframe, pid, (destination, at), relay.address())?;
        for (number, &after) in after.iter().enumerate() {
            thread::sleep(after);
            ensure!(relay.cut() > 0, "cut {number}: it was over before");
        }
        started.arrive()
    }

    /// Migrates the VM.
    pub fn perform(&self, stillframe: &Stillframe, pid: i32) -> Result<Arrived> {
        self.start(stillframe, pid)?.arrive()
    }
}

impl Migration {
    /// Waits for both ends.
    pub fn arrive(mut self) -> Result<Arrived> {
        let sent = self.source.end()?;
        let received = self.destination.end();
        let received = received.with_context(|| format!("source: {sent:?}"))?;
        let results = |ended: &Ended| match ended.code {
            Some(0) => ended.results().unwrap_or_default(),
            _ => Vec::new(),
        };
        let (sent_line, report) = (results(&sent).pop(), results(&received).pop());
        let (Some(sent), Some(report)) = (sent_line, report) else {
            bail!("source: {sent:?}; destination: {received:?}");
        };
        let pid = report["pid"].as_i64().context("no pid")? as i32;
        // From here on it ends with what is returned.
        self.new.0 = None;
        Ok(Arrived {
            vm: Restored {
                pid,
                qmp: self.qmp,
                serial: Serial::new(&self.serial),
            },
            report,
            filled: received.event("complete"),
            sent,
        })
    }
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
