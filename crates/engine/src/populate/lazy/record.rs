//! What is left for whoever goes on filling a VM's memory after this process was killed: two files
//! beside the VM's monitor, gone when its memory is complete. They hold no content and no key.
//!
//! ```text
//! vm.qmp.filling         which process, checkpoint and repository; where its RAM blocks lie
//! vm.qmp.filling-pages   which pages were filled, a byte each; locked by who fills
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use stillframe_qemu::monitor::RamBlock;
use stillframe_repo::{CheckpointId, RamTable};
use thiserror::Error;

/// Of the files' form.
const VERSION: u32 = 1;

/// Why there is nothing to go on with.
#[derive(Debug, Error)]
pub enum RecordError {
    /// No VM with this monitor is being filled.
    #[error(
        "no lazy restore is under way at {qmp}: {file} is not there. If the VM runs its memory is complete; if not, restore it again"
    )]
    None {
        /// The monitor.
        qmp: PathBuf,
        /// Where it would be told.
        file: PathBuf,
    },
    /// Another process fills it.
    #[error(
        "the memory of the VM at {qmp} is being filled by another process, which lives; there is nothing to resume"
    )]
    Busy {
        /// The monitor.
        qmp: PathBuf,
    },
    /// A file that is not understood.
    #[error("{file} is not understood ({what}); end the VM and restore it again")]
    Malformed {
        /// The file.
        file: PathBuf,
        /// Why.
        what: String,
    },
    /// A file that cannot be read or written.
    #[error("cannot {action} {file}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        file: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A VM whose memory is being filled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FillingRecord {
    version: u32,
    /// QEMU.
    pub pid: i32,
    /// When it started: pids are used again.
    pub start_time: u64,
    /// QEMU's own copy of the userfaultfd.
    pub remote_fd: i32,
    /// The checkpoint.
    pub checkpoint: CheckpointId,
    /// The VM's label.
    pub vm: String,
    /// The repository's id.
    pub repository: String,
    /// Whether the guest is to run.
    pub running: bool,
    /// The channel through which its clock is set when it does, if it is to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<PathBuf>,
    /// The RAM blocks that are being filled.
    pub blocks: Vec<RamBlock>,
    /// What they hold, in the same order.
    pub tables: Vec<RamTable>,
}

impl FillingRecord {
    /// A record of the present form.
    pub fn new(
        [pid, remote_fd]: [i32; 2],
        start_time: u64,
        (checkpoint, vm, repository): (CheckpointId, String, String),
        (running, agent): (bool, Option<PathBuf>),
        (blocks, tables): (Vec<RamBlock>, Vec<RamTable>),
    ) -> FillingRecord {
        FillingRecord {
            version: VERSION,
            pid,
            start_time,
            remote_fd,
            checkpoint,
            vm,
            repository,
            running,
            agent,
            blocks,
            tables,
        }
    }
}

/// The two files. Marks that were made and have no record yet are removed when this is dropped: nobody could
/// go on with them.
#[derive(Debug)]
pub struct Files {
    qmp: PathBuf,
    record: PathBuf,
    marks: PathBuf,
    fresh: bool,
}

impl Drop for Files {
    fn drop(&mut self) {
        if self.fresh {
            // Left behind, they are taken over by the next restore.
            let _ = fs::remove_file(&self.marks);
        }
    }
}

impl Files {
    /// Of the VM with this monitor.
    pub fn beside(qmp: &Path) -> Files {
        let with = |suffix: &str| {
            let mut name = qmp.to_owned().into_os_string();
            name.push(suffix);
            PathBuf::from(name)
        };
        Files {
            qmp: qmp.to_owned(),
            record: with(".filling"),
            marks: with(".filling-pages"),
            fresh: false,
        }
    }

    /// Makes an empty file of marks with room for so many pages, and locks it: a full disk must show before the
    /// guest runs.
    pub fn create_marks(&mut self, pages: u64) -> Result<File, RecordError> {
        // One that is left of a VM that has ended says nothing about this one.
        self.remove()?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).mode(0o600);
        let marks = options
            .open(&self.marks)
            .map_err(|source| failed("create", &self.marks, source))?;
        self.lock(&marks)?;
        self.fresh = true;
        // Its length stays 0: what lies behind the end was never marked, and need not be read.
        match fallocate(&marks, FallocateFlags::KEEP_SIZE, 0, pages.max(1)) {
            // Where room cannot be had in advance it is as well.
            Err(Errno::OPNOTSUPP) | Ok(()) => Ok(marks),
            Err(errno) => Err(failed("make room in", &self.marks, errno.into())),
        }
    }

    /// Opens and locks the marks that another process has left.
    pub fn open_marks(&self) -> Result<File, RecordError> {
        let mut options = OpenOptions::new();
        let marks = options
            .read(true)
            .write(true)
            .open(&self.marks)
            .map_err(|source| failed("open", &self.marks, source))?;
        self.lock(&marks)?;
        Ok(marks)
    }

    fn lock(&self, marks: &File) -> Result<(), RecordError> {
        match flock(marks, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(()),
            Err(Errno::WOULDBLOCK) => Err(RecordError::Busy {
                qmp: self.qmp.clone(),
            }),
            Err(errno) => Err(failed("lock", &self.marks, errno.into())),
        }
    }

    /// Writes the record: from here on somebody else can go on.
    pub fn write(&mut self, record: &FillingRecord) -> Result<(), RecordError> {
        let json = serde_json::to_vec_pretty(record)
            .map_err(|error| failed("write", &self.record, error.into()))?;
        // Under its name it is whole.
        let mut new = self.record.clone().into_os_string();
        new.push(".new");
        let new = PathBuf::from(new);
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let written = options
            .open(&new)
            .and_then(|mut file| file.write_all(&json))
            .and_then(|()| fs::rename(&new, &self.record));
        if let Err(source) = written {
            // Half of it helps nobody.
            let _ = fs::remove_file(&new);
            return Err(failed("write", &self.record, source));
        }
        self.fresh = false;
        Ok(())
    }

    /// Reads the record.
    pub fn read(&self) -> Result<FillingRecord, RecordError> {
        let malformed = |what: String| RecordError::Malformed {
            file: self.record.clone(),
            what,
        };
        let json = match fs::read(&self.record) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(RecordError::None {
                    qmp: self.qmp.clone(),
                    file: self.record.clone(),
                });
            }
            other => other.map_err(|source| failed("read", &self.record, source))?,
        };
        let record: FillingRecord =
            serde_json::from_slice(&json).map_err(|error| malformed(error.to_string()))?;
        if record.version != VERSION {
            return Err(malformed(format!("it has version {}", record.version)));
        }
        if record.blocks.len() != record.tables.len() {
            return Err(malformed("a block has no table".to_owned()));
        }
        Ok(record)
    }

    /// Removes both: the record first, so that there is never one without marks.
    pub fn remove(&self) -> Result<(), RecordError> {
        for file in [&self.record, &self.marks] {
            match fs::remove_file(file) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(failed("remove", file, error));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn failed(action: &'static str, file: &Path, source: io::Error) -> RecordError {
    RecordError::Io {
        action,
        file: file.to_owned(),
        source,
    }
}
