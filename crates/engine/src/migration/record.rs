//! What must outlive an engine in a hand-over: files in the runtime directory ([`crate::runtime`]).
//!
//! ```text
//! 1234-567890.giving-up   source: prepared, and nothing yet; process and start time of its QEMU
//! 1234-567890.given-up    source: the VM may run at the destination
//! vm.qmp.received         destination: what is on record of the VM with this monitor
//! vm.qmp.received-pages   its fill bitmap (post-copy), a byte a page; locked by the process that fetches pages
//! ```
//!
//! They contain no page and no key. They are gone with the host, and so are the QEMUs that they are about.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::{Duration, SystemTime};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use stillframe_qemu::monitor::{Disk, RamBlock};
use stillframe_sys::private_dir::{Access, PrivateDir, PrivateError};
use stillframe_sys::process::{Process, ProcessError};
use stillframe_sys::system;
use thiserror::Error;

use super::handover::Mark;
use crate::capture::paused_vm::GivenUpRecord;
use crate::connection::message::Base;
use crate::connection::word::Session;
use crate::memory::BlockShape;
use crate::runtime;

/// Version of the files' format.
const VERSION: u32 = 2;
/// The ends of the names of the source's record.
const GIVING_UP: &str = ".giving-up";
const GIVEN_UP: &str = ".given-up";
/// The end of the name of the destination's record.
const RECEIVED: &str = ".received";
/// The end of the name of its fill bitmap: pages that it lacked, and has by now.
const RECEIVED_PAGES: &str = ".received-pages";
/// The record of a VM that has ended at the destination is kept for this long, for a source that may ask: a week.
const ANSWERED_FOR: Duration = Duration::from_secs(7 * 24 * 3600);
/// Upper bound on a record's length, in bytes.
const RECORD_BYTES_MAX: u64 = 4 << 20;

/// Why a record cannot be read or written.
#[derive(Debug, Error)]
pub enum RecordError {
    /// There is none of this VM.
    #[error(
        "no migration of process {pid} is undecided: {file} is not there. If the VM is paused, `cont` on its monitor resumes it"
    )]
    NotGivenUp {
        /// The process.
        pid: i32,
        /// The file that would say so.
        file: PathBuf,
    },
    /// There is none of a VM with this monitor.
    #[error("no migration to {qmp} is on record: {file} is not there")]
    NotReceived {
        /// The monitor.
        qmp: PathBuf,
        /// The file that would say so.
        file: PathBuf,
    },
    /// An earlier migration may still be asked about.
    #[error(
        "the VM that came to {qmp} before (process {pid}) still exists: end it, or name another --qmp"
    )]
    Exists {
        /// The monitor.
        qmp: PathBuf,
        /// The process.
        pid: i32,
    },
    /// Another process fetches its pages.
    #[error(
        "the pages that the VM (process {pid}) lacks are being fetched by another process, which lives; there is nothing to resume"
    )]
    Busy {
        /// The VM's process.
        pid: i32,
    },
    /// A file that is not understood.
    #[error("{file} is not understood ({what})")]
    Malformed {
        /// The file.
        file: PathBuf,
        /// Why.
        what: String,
    },
    /// The process cannot be examined.
    #[error("cannot find out whether the recorded QEMU lives")]
    Process(#[from] ProcessError),
    /// The runtime directory, or a file in it, is not ours alone or cannot be used.
    #[error(
        "migrations keep files in a runtime directory (another: {})",
        runtime::DIRECTORY_VARIABLE
    )]
    Runtime(#[from] PrivateError),
}

/// What the source's record says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GivenUp {
    version: u32,
    /// The migration.
    pub session: Session,
    /// The VM's label.
    pub vm: String,
    /// Whether it ran, so that it is resumed when it is taken back.
    pub runs: bool,
    /// Its disks as they were given up.
    pub disks: Vec<Disk>,
    /// Pages that the destination lacks.
    pub served: Served,
}

/// How the destination gets pages that it lacks when it runs the VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Served {
    /// Connections over which it fetches them; none if it has all.
    pub lanes: usize,
    /// The blocks, in the order of their numbers.
    pub blocks: Vec<BlockShape>,
}

/// The source's record.
#[derive(Debug)]
pub struct SourceRecord {
    directory: PrivateDir,
    prepared: String,
    given_up: String,
}

impl SourceRecord {
    /// The record of this VM, which is not written yet.
    ///
    /// # Errors
    /// The runtime directory cannot be used.
    pub fn of(process: &Process) -> Result<SourceRecord, RecordError> {
        let name = format!("{}-{}", process.pid(), process.start_time());
        let directory = directory()?;
        Ok(SourceRecord {
            directory,
            prepared: format!("{name}{GIVING_UP}"),
            given_up: format!("{name}{GIVEN_UP}"),
        })
    }

    /// Prepares the record of a VM that is not given up yet.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn prepare(
        &self,
        session: &Session,
        (vm, runs): (&str, bool),
        disks: &[Disk],
        served: Served,
    ) -> Result<(), RecordError> {
        let content = GivenUp {
            version: VERSION,
            session: session.clone(),
            vm: vm.to_owned(),
            runs,
            disks: disks.to_vec(),
            served,
        };
        write(&self.directory, &self.prepared, &content)
    }

    /// The record that an earlier engine left of this VM, and whether it gave the VM up.
    ///
    /// # Errors
    /// [`RecordError::NotGivenUp`] and others.
    pub fn find(process: &Process) -> Result<(SourceRecord, GivenUp, bool), RecordError> {
        let record = SourceRecord::of(process)?;
        let (mut name, mut given_up) = (&record.given_up, true);
        let mut content: Option<GivenUp> = read(&record.directory, name)?;
        if content.is_none() {
            (name, given_up) = (&record.prepared, false);
            content = read(&record.directory, name)?;
        }
        if let Some(content) = content {
            expect_version(&record.directory, name, content.version)?;
            return Ok((record, content, given_up));
        }
        Err(RecordError::NotGivenUp {
            pid: process.pid(),
            file: record.directory.path().join(&record.given_up),
        })
    }

    /// Removes it: the VM is not given up, or has ended.
    ///
    /// # Errors
    /// It is there still.
    pub fn remove(&self) -> Result<(), RecordError> {
        self.directory.remove(&self.prepared)?;
        Ok(self.directory.remove(&self.given_up)?)
    }
}

/// A record that was only prepared goes with its engine.
impl Drop for SourceRecord {
    fn drop(&mut self) {
        // One that cannot be removed goes with the VM.
        let _ = self.directory.remove(&self.prepared);
    }
}

impl GivenUpRecord for SourceRecord {
    fn renaming(&self) -> (BorrowedFd<'_>, &str, &str) {
        (self.directory.as_fd(), &self.prepared, &self.given_up)
    }
}

/// What the destination's record says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Received {
    version: u32,
    /// The boot of this machine in which QEMU was started: pids are used again.
    boot: String,
    /// QEMU.
    pub pid: i32,
    start_time: u64,
    /// The migration.
    pub session: Session,
    /// The VM's label.
    pub vm: String,
    /// Whether the guest is to run.
    pub runs: bool,
    /// What is known of it.
    pub mark: Mark,
    /// The source will not ask any more.
    #[serde(default)]
    pub settled: bool,
    /// What it lacks when it runs; none: it has all its memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lacking: Option<LackingRecord>,
}

impl Received {
    /// The process; `None` when it has ended.
    ///
    /// # Errors
    /// It may not be examined.
    pub fn process(&self) -> Result<Option<Process>, ProcessError> {
        runtime::recorded_process(&self.boot, self.pid, self.start_time)
    }
}

/// What a successor needs of a VM that lacks pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LackingRecord {
    /// QEMU's own copy of the userfaultfd.
    pub remote_fd: i32,
    /// Its RAM blocks.
    pub ram: Vec<RamBlock>,
    /// The same in the order of the source's numbers.
    pub blocks: Vec<BlockShape>,
    /// The checkpoint that has all that it lacks; none: the source has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Base>,
}

/// The destination's record.
#[derive(Debug)]
pub struct DestinationRecord {
    directory: PrivateDir,
    name: String,
    content: Received,
}

impl DestinationRecord {
    /// A record that is not written yet, of a new QEMU with this monitor.
    ///
    /// # Errors
    /// [`RecordError::Exists`] where an earlier one of a living QEMU would be lost.
    pub fn new(
        qmp: &Path,
        process: &Process,
        session: &Session,
        vm: &str,
    ) -> Result<DestinationRecord, RecordError> {
        let directory = directory()?;
        let name = runtime::file_name(qmp, RECEIVED);
        if let Some(earlier) = read::<Received>(&directory, &name)?
            && let Some(lives) = earlier.process()?
        {
            return Err(RecordError::Exists {
                qmp: qmp.to_owned(),
                pid: lives.pid(),
            });
        }
        Ok(DestinationRecord {
            directory,
            name,
            content: Received {
                version: VERSION,
                boot: system::boot_id(),
                pid: process.pid(),
                start_time: process.start_time(),
                session: session.clone(),
                vm: vm.to_owned(),
                runs: false,
                mark: Mark::Ready,
                settled: false,
                lacking: None,
            },
        })
    }

    /// An empty fill bitmap, which is locked.
    ///
    /// # Errors
    /// It cannot be made, or another process has it.
    pub fn create_fill_bitmap(&self) -> Result<File, RecordError> {
        // One that is left of a VM that has ended says nothing about this one.
        self.directory.remove(&self.fill_bitmap())?;
        self.open_fill_bitmap()
    }

    /// The fill bitmap of an engine that was killed.
    ///
    /// # Errors
    /// The same.
    pub fn open_fill_bitmap(&self) -> Result<File, RecordError> {
        let file = self.directory.lock_file(&self.fill_bitmap(), false)?;
        file.ok_or(RecordError::Busy {
            pid: self.content.pid,
        })
    }

    fn fill_bitmap(&self) -> String {
        let stem = self.name.strip_suffix(RECEIVED);
        format!("{}{RECEIVED_PAGES}", stem.unwrap_or(&self.name))
    }

    /// The VM will lack pages when it runs. To be called before anything is written.
    pub fn expect_to_lack(&mut self, lacking: LackingRecord) {
        self.content.lacking = Some(lacking);
    }

    /// The record that an earlier engine left.
    ///
    /// # Errors
    /// [`RecordError::NotReceived`] and others.
    pub fn find(qmp: &Path) -> Result<DestinationRecord, RecordError> {
        let directory = runtime::open()?;
        let name = runtime::file_name(qmp, RECEIVED);
        let content: Option<Received> = read(&directory, &name)?;
        let content = content.ok_or_else(|| RecordError::NotReceived {
            qmp: qmp.to_owned(),
            file: directory.path().join(&name),
        })?;
        expect_version(&directory, &name, content.version)?;
        Ok(DestinationRecord {
            directory,
            name,
            content,
        })
    }

    /// What it says.
    pub fn content(&self) -> &Received {
        &self.content
    }

    /// Whether the guest is to run. To be called before anything is written.
    pub fn expect_to_run(&mut self, runs: bool) {
        self.content.runs = runs;
    }

    /// Writes what is known of the VM.
    ///
    /// # Errors
    /// It may be written or not.
    pub fn mark(&mut self, mark: Mark) -> Result<(), RecordError> {
        self.content.mark = mark;
        write(&self.directory, &self.name, &self.content)
    }

    /// All that the VM lacks is in this checkpoint.
    ///
    /// # Errors
    /// As [`DestinationRecord::mark`].
    pub fn only_lacks(&mut self, base: &Base) -> Result<(), RecordError> {
        if let Some(lacking) = &mut self.content.lacking {
            lacking.base = Some(base.clone());
        }
        write(&self.directory, &self.name, &self.content)
    }

    /// The hand-over is over, and the VM lacks pages still.
    ///
    /// # Errors
    /// As [`DestinationRecord::mark`].
    pub fn settle(&mut self) -> Result<(), RecordError> {
        self.content.settled = true;
        write(&self.directory, &self.name, &self.content)
    }

    /// Removes it.
    ///
    /// # Errors
    /// It is there still.
    pub fn remove(&self) -> Result<(), RecordError> {
        self.directory.remove(&self.name)?;
        Ok(self.directory.remove(&self.fill_bitmap())?)
    }
}

fn write(directory: &PrivateDir, name: &str, content: &impl Serialize) -> Result<(), RecordError> {
    let bytes = serde_json::to_vec(content).map_err(|error| malformed(directory, name, error))?;
    Ok(directory.write(name, &bytes)?)
}

fn malformed(directory: &PrivateDir, name: &str, what: impl fmt::Display) -> RecordError {
    RecordError::Malformed {
        file: directory.path().join(name),
        what: what.to_string(),
    }
}

fn read<T: DeserializeOwned>(directory: &PrivateDir, name: &str) -> Result<Option<T>, RecordError> {
    let Some(file) = directory.file(name, Access::Read)? else {
        return Ok(None);
    };
    let mut bytes = Vec::new();
    let content = match file.take(RECORD_BYTES_MAX).read_to_end(&mut bytes) {
        Ok(_) => serde_json::from_slice(&bytes).map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    content
        .map(Some)
        .map_err(|what: String| malformed(directory, name, what))
}

fn expect_version(directory: &PrivateDir, name: &str, version: u32) -> Result<(), RecordError> {
    match version {
        VERSION => Ok(()),
        other => Err(malformed(
            directory,
            name,
            format!("it has version {other}"),
        )),
    }
}

/// Opens the runtime directory. The first time, records of VMs that have ended are removed.
fn directory() -> Result<PrivateDir, RecordError> {
    static SWEPT: Once = Once::new();
    let directory = runtime::open()?;
    SWEPT.call_once(|| remove_ended(&directory));
    Ok(directory)
}

/// Removes records of VMs that have ended. A file that cannot be removed now is removed another time.
fn remove_ended(directory: &PrivateDir) {
    for name in directory.names().unwrap_or_default() {
        let is_ended = is_of_ended_source(&name)
            || is_of_ended_destination(directory, &name)
            || is_left_of_destination(directory, &name);
        if is_ended {
            let _ = directory.remove(&name);
        }
    }
}

/// A source may ask for a VM that has ended, so its record stays for a while.
fn is_of_ended_destination(directory: &PrivateDir, name: &str) -> bool {
    let file = || directory.file(name, Access::Read).ok().flatten();
    let Some(file) = file().filter(|_| name.ends_with(RECEIVED)) else {
        return false;
    };
    let modified = file.metadata().and_then(|metadata| metadata.modified());
    let is_old = modified.is_ok_and(|modified| {
        let age = SystemTime::now().duration_since(modified);
        age.unwrap_or_default() > ANSWERED_FOR
    });
    let content = read::<Received>(directory, name).ok().flatten();
    is_old && content.is_some_and(|content| matches!(content.process(), Ok(None)))
}

/// A fill bitmap without a record, which no process fills.
fn is_left_of_destination(directory: &PrivateDir, name: &str) -> bool {
    let stem = name.strip_suffix(RECEIVED_PAGES);
    let record = stem.map(|stem| directory.file(&format!("{stem}{RECEIVED}"), Access::Read));
    matches!(record, Some(Ok(None))) && matches!(directory.lock_file(name, false), Ok(Some(_)))
}

fn is_of_ended_source(name: &str) -> bool {
    let stem = [GIVEN_UP, GIVING_UP]
        .iter()
        .find_map(|end| name.strip_suffix(end));
    let Some((pid, start_time)) = stem.and_then(|stem| stem.split_once('-')) else {
        return false;
    };
    let (Ok(pid), Ok(start_time)) = (pid.parse(), start_time.parse::<u64>()) else {
        return false;
    };
    match Process::open(pid) {
        Ok(process) => process.start_time() != start_time,
        Err(error) => matches!(error, ProcessError::NotFound { .. }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_living_sources_stay() {
        let own = Process::open(std::process::id() as i32).unwrap();
        let (pid, start) = (own.pid(), own.start_time());
        for end in [GIVING_UP, GIVEN_UP] {
            assert!(!is_of_ended_source(&format!("{pid}-{start}{end}")));
            // The process id was used again.
            assert!(is_of_ended_source(&format!("{pid}-{}{end}", start + 1)));
            assert!(is_of_ended_source(&format!("{}-1{end}", i32::MAX)));
        }
        for other in ["x.log", "x.given-up", "1-x.given-up", "1-1.received", ""] {
            assert!(!is_of_ended_source(other), "{other}");
        }
    }

    #[test]
    fn records_of_ended_destinations_are_kept_for_a_while() {
        let folder = tempfile::tempdir().unwrap();
        let directory = PrivateDir::create(&folder.path().join("run")).unwrap();
        let own = Process::open(std::process::id() as i32).unwrap();
        let record = |name: &str, start_time| {
            let content = Received {
                version: VERSION,
                boot: system::boot_id(),
                pid: own.pid(),
                start_time,
                session: Session::random().unwrap(),
                vm: "vm".to_owned(),
                runs: true,
                mark: Mark::Committed,
                settled: false,
                lacking: None,
            };
            write(&directory, name, &content).unwrap();
            let file = directory.file(name, Access::Write).unwrap().unwrap();
            (file, content)
        };
        let (old, content) = record("old.received", own.start_time() + 1);
        assert_eq!(read(&directory, "old.received").unwrap(), Some(content));
        let (lives, _) = record("lives.received", own.start_time());
        record("new.received", own.start_time() + 1);
        let long_ago = SystemTime::now() - ANSWERED_FOR - Duration::from_secs(60);
        for file in [old, lives] {
            file.set_modified(long_ago).unwrap();
        }
        remove_ended(&directory);
        let mut left = directory.names().unwrap();
        left.sort();
        assert_eq!(left, ["lives.received", "new.received"]);
    }
}
