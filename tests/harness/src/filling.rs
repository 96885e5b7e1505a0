//! A lazy restore that runs beside the test: disturbed, killed, continued, and inspected from outside.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::cli::Stillframe;
use crate::health::expect_nothing_left;
use crate::random::Random;
use crate::restored::Restored;
use crate::running::{PATIENCE, Running};
use crate::serial::Serial;

/// The message when the guest runs, or is ready to.
const RUNS: &str = "filling its memory";
/// Upper bounds on the time between two stops, and on each stop, in milliseconds.
const BETWEEN_STOPS_MS: u64 = 120;
const STOP_MS: u64 = 200;

/// A lazy restore, or one that continues with it.
#[derive(Debug)]
pub struct Filling {
    /// The process, which is the source of all pages.
    pub running: Running,
    /// The monitor of its VM.
    pub qmp: PathBuf,
    /// The serial port of its VM.
    pub serial: Serial,
}

/// How it was stopped and continued.
#[derive(Debug, Default, Clone, Copy)]
pub struct Stops {
    /// How often.
    pub count: u64,
    /// Its total length.
    pub ms: u64,
}

impl Filling {
    /// Starts to restore `checkpoint` lazily, with monitor and serial port in `folder`.
    pub fn start(
        stillframe: &Stillframe,
        checkpoint: &str,
        folder: &Path,
        more: &[&str],
    ) -> Result<Filling> {
        Filling::begin(
            stillframe,
            checkpoint,
            folder,
            &[&["--lazy"], more].concat(),
        )
    }

    /// The same, lazily or not.
    pub fn begin(
        stillframe: &Stillframe,
        checkpoint: &str,
        folder: &Path,
        more: &[&str],
    ) -> Result<Filling> {
        let command = Filling::command(stillframe, checkpoint, folder, more)?;
        Filling::run(command, folder)
    }

    /// The command alone.
    pub fn command(
        stillframe: &Stillframe,
        checkpoint: &str,
        folder: &Path,
        more: &[&str],
    ) -> Result<Command> {
        let qmp = folder.join("restored.qmp").display().to_string();
        let serial = format!("file:{}", folder.join("restored.serial").display());
        let mut line = vec!["restore", checkpoint, "--json"];
        line.extend(["--qmp", &qmp, "--serial", &serial]);
        line.extend(more);
        stillframe.command(&line)
    }

    /// Runs what [`Filling::command`] made.
    pub fn run(command: Command, folder: &Path) -> Result<Filling> {
        let (qmp, serial) = (folder.join("restored.qmp"), folder.join("restored.serial"));
        // Output of a VM that was restored here before is not for this one.
        let _ = std::fs::remove_file(&serial);
        Ok(Filling {
            running: Running::start(command)?,
            qmp,
            serial: Serial::new(&serial),
        })
    }

    /// Starts to continue where another process was killed, with the VM of this monitor and serial port.
    pub fn resume(
        stillframe: &Stillframe,
        qmp: &Path,
        serial: &Serial,
        more: &[&str],
    ) -> Result<Filling> {
        let qmp_text = qmp.display().to_string();
        let mut line = vec!["restore", "--resume", "--json", "--qmp", &qmp_text];
        line.extend(more);
        Ok(Filling {
            running: Running::start(stillframe.command(&line)?)?,
            qmp: qmp.to_owned(),
            serial: serial.clone(),
        })
    }

    /// Waits until the guest runs, or is ready to.
    pub fn wait_runs(&mut self) -> Result<()> {
        self.running.wait_words(RUNS)
    }

    /// Whether it has said so.
    pub fn runs(&self) -> bool {
        self.running.err().contains(RUNS)
    }

    /// Stops it at random moments, until it has ended.
    pub fn disturb(&mut self, random: &mut Random) -> Result<Stops> {
        let mut stops = Stops::default();
        let deadline = Instant::now() + 2 * PATIENCE;
        while !self.running.has_ended()? {
            ensure!(Instant::now() < deadline, "it does not end");
            std::thread::sleep(Duration::from_millis(random.below(BETWEEN_STOPS_MS)));
            if self.running.has_ended()? {
                break;
            }
            let ms = 1 + random.below(STOP_MS);
            self.running.signal("STOP")?;
            std::thread::sleep(Duration::from_millis(ms));
            self.running.signal("CONT")?;
            stops.count += 1;
            stops.ms += ms;
        }
        Ok(stops)
    }

    /// Waits for its end, which must be a good one: the VM, and its report.
    pub fn complete(self) -> Result<(Restored, Value)> {
        let Filling {
            running,
            qmp,
            serial,
        } = self;
        let ended = running.end()?;
        ensure!(ended.code == Some(0), "it failed: {ended:?}");
        let report = ended.results()?.pop().context("it reported nothing")?;
        let pid = report["pid"].as_i64().context("no pid")? as i32;
        Ok((Restored { pid, qmp, serial }, report))
    }
}

/// A file that the engine keeps for the VM with this monitor, when root runs it.
pub fn runtime_file(qmp: &Path, suffix: &str) -> Result<PathBuf> {
    let folder = qmp.parent().context("no folder")?.canonicalize()?;
    let path = folder.join(qmp.file_name().context("no name")?);
    let name = path.to_str().context("not UTF-8")?;
    let name = name.trim_start_matches('/').replace('/', "!");
    Ok(Path::new("/run/stillframe").join(name + suffix))
}

/// How many files a lazy restore keeps for the VM with this monitor; none once memory is complete.
pub fn files_kept(qmp: &Path) -> Result<usize> {
    let start = runtime_file(qmp, ".filling")?;
    let start = start.to_str().context("not UTF-8")?;
    let entries = std::fs::read_dir("/run/stillframe")?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    Ok(paths
        .by_ref()
        .filter(|path| path.to_string_lossy().starts_with(start))
        .count())
}

/// Its memory is complete, and QEMU is alone again.
pub fn expect_alone(restored: &Restored) -> Result<()> {
    expect_nothing_left(restored.pid, &mut restored.monitor()?)?;
    ensure!(files_kept(&restored.qmp)? == 0, "files are left");
    Ok(())
}
