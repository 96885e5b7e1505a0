//! The record of an unfinished lazy restore, for a successor that continues it after this process was killed. It is
//! two files in the runtime directory ([`crate::runtime`]), removed when the VM's memory is complete. They contain
//! no page and no key.
//!
//! ```text
//! vm.qmp.filling         which process, checkpoint and repository; where its RAM blocks lie
//! vm.qmp.filling-pages   the fill bitmap: populated pages, a byte each; locked by the process that populates
//! ```

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Once;

use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use stillframe_qemu::guest_agent::AgentChannels;
use stillframe_qemu::monitor::RamBlock;
use stillframe_repo::CheckpointId;
use stillframe_sys::private_dir::{Access, PrivateDir, PrivateError};
use stillframe_sys::process::{Process, ProcessError};
use stillframe_sys::system;
use thiserror::Error;

use crate::disks::lazy::LazyDisk;
use crate::runtime;

/// Version of the files' format.
const VERSION: u32 = 3;
/// The end of the record's name.
const RECORD: &str = ".filling";
/// In the name of a record that is being written; the process comes after it.
const UNFINISHED: &str = ".filling.new-";
/// The end of the fill bitmap's name.
const FILL_BITMAP: &str = ".filling-pages";
/// How often the list of all locks is read for one of them.
const LOOKS: usize = 5;
/// Upper bound on the record's length, in bytes. One of 10 000 RAM blocks has 2 MiB.
const RECORD_BYTES_MAX: u64 = 16 << 20;

/// Why no lazy restore can be continued.
#[derive(Debug, Error)]
pub enum RecordError {
    /// No lazy restore of a VM with this monitor is unfinished.
    #[error(
        "no lazy restore is in progress at {qmp}: {file} is not there. If the VM runs its memory is complete; if not, restore it again"
    )]
    None {
        /// The monitor.
        qmp: PathBuf,
        /// The file that would describe it.
        file: PathBuf,
    },
    /// Another process populates its memory.
    #[error(
        "the memory of the VM at {qmp} is being filled by another process, which lives; there is nothing to resume"
    )]
    Busy {
        /// The monitor.
        qmp: PathBuf,
    },
    /// The process that populated it cannot end.
    #[error(
        "the memory of the VM at {qmp} was being filled by process {pid}, which sleeps in the kernel and cannot end: the storage it reads does not answer. The VM waits, and nothing is lost; try again when that process is gone"
    )]
    Hanging {
        /// The monitor.
        qmp: PathBuf,
        /// The process.
        pid: i32,
    },
    /// A VM of an earlier restore with this monitor still needs its files.
    #[error(
        "a lazy restore at {qmp} is not complete, and its VM (process {pid}) still exists: continue with `restore --resume`, or end it"
    )]
    Unfinished {
        /// The monitor.
        qmp: PathBuf,
        /// The VM's process.
        pid: i32,
    },
    /// The VM of an earlier restore with this monitor has ended, and its disks lack content.
    #[error(
        "the VM that was restored lazily at {qmp} has ended, and its disk {image} is not complete: complete it with `restore --resume`, or remove it"
    )]
    DisksIncomplete {
        /// The VM's monitor.
        qmp: PathBuf,
        /// The image.
        image: PathBuf,
    },
    /// A file that is not understood.
    #[error("{file} is not understood ({what}); end the VM and restore it again")]
    Malformed {
        /// The file.
        file: PathBuf,
        /// Why.
        what: String,
    },
    /// The runtime directory, or a file in it, is not ours alone or cannot be used.
    #[error(
        "restores keep files in a runtime directory (another: {})",
        runtime::DIRECTORY_VARIABLE
    )]
    Runtime(#[from] PrivateError),
    /// A file that cannot be read or written.
    #[error("cannot {action} {file}")]
    Io {
        /// The action that failed.
        action: &'static str,
        /// The file.
        file: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A VM whose memory is being populated. The checkpoint's manifest describes the content of its pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FillingRecord {
    version: u32,
    /// The boot of this machine in which QEMU was started: pids are used again.
    boot: String,
    /// QEMU.
    pub pid: i32,
    /// When it started, in clock ticks since boot.
    pub start_time: u64,
    /// The user that it runs as.
    pub uid: u32,
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
    /// The channels through which its clock is set when it does, if it is to be.
    #[serde(default, skip_serializing_if = "AgentChannels::is_empty")]
    pub agents: AgentChannels,
    /// The RAM blocks that are being populated.
    pub blocks: Vec<RamBlock>,
    /// The disks whose images lack content, in the order of the manifest.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<LazyDisk>,
}

/// What is known of a VM when its memory begins to be populated; the fields mean what those of the record do.
#[derive(Debug)]
pub struct FillingVm {
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
    /// The channels through which its clock is set.
    pub agents: AgentChannels,
    /// The RAM blocks that are being populated.
    pub blocks: Vec<RamBlock>,
    /// The disks whose images lack content.
    pub disks: Vec<LazyDisk>,
}

impl FillingRecord {
    /// A record of the present form.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn new(process: &Process, filling: FillingVm) -> Result<FillingRecord, ProcessError> {
        Ok(FillingRecord {
            version: VERSION,
            boot: system::boot_id(),
            pid: process.pid(),
            start_time: process.start_time(),
            uid: process.uid()?,
            remote_fd: filling.remote_fd,
            checkpoint: filling.checkpoint,
            vm: filling.vm,
            repository: filling.repository,
            running: filling.running,
            agents: filling.agents,
            blocks: filling.blocks,
            disks: filling.disks,
        })
    }

    /// The process of the record; `None` when it has ended.
    ///
    /// # Errors
    /// When the process may not be examined.
    pub fn process(&self) -> Result<Option<Process>, ProcessError> {
        runtime::recorded_process(&self.boot, self.pid, self.start_time)
    }

    /// An image that lacks content and is there. What the VM has written to it is of use only when it is complete.
    fn incomplete_image(&self) -> Option<&Path> {
        let mut images = self.disks.iter().map(|disk| &*disk.image);
        images.find(|image| image.exists())
    }
}

/// The two files. A fill bitmap without a record is removed when this is dropped: no successor could
/// use it.
#[derive(Debug)]
pub struct Files {
    qmp: PathBuf,
    directory: PrivateDir,
    record: String,
    fill_bitmap: String,
    fresh: bool,
}

impl Drop for Files {
    fn drop(&mut self) {
        if self.fresh {
            // Left behind, they are taken over by the next restore.
            let _ = self.directory.remove(&self.fill_bitmap);
        }
    }
}

impl Files {
    /// The record of the VM with this monitor. The first time, the files of VMs that have ended are removed.
    ///
    /// # Errors
    /// When the runtime directory is not ours alone, or cannot be made.
    pub fn of(qmp: &Path) -> Result<Files, RecordError> {
        static SWEPT: Once = Once::new();
        let directory = runtime::open()?;
        SWEPT.call_once(|| remove_ended(&directory));
        Ok(Files::in_directory(directory, qmp))
    }

    /// The same in a directory of the caller's choice.
    pub(super) fn in_directory(directory: PrivateDir, qmp: &Path) -> Files {
        Files {
            qmp: qmp.to_owned(),
            directory,
            record: runtime::file_name(qmp, RECORD),
            fill_bitmap: runtime::file_name(qmp, FILL_BITMAP),
            fresh: false,
        }
    }

    /// Makes an empty fill bitmap with room for `pages` pages, and locks it: a full disk must show before the
    /// guest runs.
    pub fn create_fill_bitmap(&mut self, pages: u64) -> Result<File, RecordError> {
        self.expect_ended()?;
        // One that is left of a VM that has ended says nothing about this one.
        self.remove()?;
        let fill_bitmap = self.directory.lock_file(&self.fill_bitmap, false)?;
        let fill_bitmap = fill_bitmap.ok_or_else(|| self.busy())?;
        self.fresh = true;
        // Its length stays 0: bytes behind the end were never written, and need not be read.
        match fallocate(&fill_bitmap, FallocateFlags::KEEP_SIZE, 0, pages.max(1)) {
            // If space cannot be reserved in advance, the file is used as it is.
            Err(Errno::OPNOTSUPP) | Ok(()) => Ok(fill_bitmap),
            Err(errno) => Err(self.failed("make room in", &self.fill_bitmap, errno.into())),
        }
    }

    /// That no VM needs the files of an earlier restore.
    ///
    /// # Errors
    /// One does.
    pub(super) fn expect_ended(&self) -> Result<(), RecordError> {
        // A record that is not understood belongs to another version: no VM of this one.
        let Ok(record) = self.read() else {
            return Ok(());
        };
        let qmp = self.qmp.clone();
        match (record.process(), record.incomplete_image()) {
            (Ok(Some(process)), _) => Err(RecordError::Unfinished {
                qmp,
                pid: process.pid(),
            }),
            (Ok(None), Some(image)) => Err(RecordError::DisksIncomplete {
                qmp,
                image: image.to_owned(),
            }),
            _ => Ok(()),
        }
    }

    /// Opens and locks the fill bitmap that another process has left.
    pub fn open_fill_bitmap(&self) -> Result<File, RecordError> {
        let missing = || self.failed("open", &self.fill_bitmap, io::ErrorKind::NotFound.into());
        let fill_bitmap = self.directory.file(&self.fill_bitmap, Access::Write)?;
        let fill_bitmap = fill_bitmap.ok_or_else(missing)?;
        match flock(&fill_bitmap, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(fill_bitmap),
            Err(Errno::WOULDBLOCK) => Err(match hanging_holder(&fill_bitmap) {
                Some(pid) => RecordError::Hanging {
                    qmp: self.qmp.clone(),
                    pid,
                },
                None => self.busy(),
            }),
            Err(errno) => Err(self.failed("lock", &self.fill_bitmap, errno.into())),
        }
    }

    /// Writes the record: from here on another process can continue.
    pub fn write(&mut self, record: &FillingRecord) -> Result<(), RecordError> {
        let json = serde_json::to_vec_pretty(record)
            .map_err(|error| self.failed("write", &self.record, error.into()))?;
        self.directory.write(&self.record, &json)?;
        self.fresh = false;
        Ok(())
    }

    /// Reads the record.
    pub fn read(&self) -> Result<FillingRecord, RecordError> {
        match read(&self.directory, &self.record)? {
            Some(record) => Ok(record),
            None => Err(RecordError::None {
                qmp: self.qmp.clone(),
                file: self.directory.path().join(&self.record),
            }),
        }
    }

    /// Why the record cannot be relied on.
    pub fn malformed(&self, what: String) -> RecordError {
        malformed(&self.directory, &self.record, what)
    }

    /// Removes both: the record first, so that there is never one without a fill bitmap.
    pub fn remove(&self) -> Result<(), RecordError> {
        self.directory.remove(&self.record)?;
        Ok(self.directory.remove(&self.fill_bitmap)?)
    }

    fn busy(&self) -> RecordError {
        RecordError::Busy {
            qmp: self.qmp.clone(),
        }
    }

    fn failed(&self, action: &'static str, name: &str, source: io::Error) -> RecordError {
        RecordError::Io {
            action,
            file: self.directory.path().join(name),
            source,
        }
    }
}

/// The process that has a file locked, if it was killed and cannot end, or sleeps uninterruptibly.
fn hanging_holder(file: &File) -> Option<i32> {
    let pid = holder_now(file)?;
    let state = Process::open(pid).ok()?.run_state().ok()?;
    // The main thread of a killed process is a zombie for as long as another thread sleeps.
    matches!(state, 'Z' | 'D').then_some(pid)
}

/// The process that has a file locked. Locks that come and go while the kernel's list is read, a page at a time, hide
/// others of the list.
fn holder_now(file: &File) -> Option<i32> {
    let inode = file.metadata().ok()?.ino();
    (0..LOOKS).find_map(|_| holder(&fs::read_to_string("/proc/locks").ok()?, inode))
}

/// The process that has locked an inode whole, by proc_locks(5): `1: FLOCK  ADVISORY  WRITE 708 08:01:1234 0 EOF`.
fn holder(locks: &str, inode: u64) -> Option<i32> {
    let suffix = format!(":{inode}");
    locks.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [_, "FLOCK", _, _, pid, place, ..] if place.ends_with(&suffix) => pid.parse().ok(),
            _ => None,
        }
    })
}

fn read(directory: &PrivateDir, name: &str) -> Result<Option<FillingRecord>, RecordError> {
    let Some(file) = directory.file(name, Access::Read)? else {
        return Ok(None);
    };
    let mut json = Vec::new();
    let read = file.take(RECORD_BYTES_MAX).read_to_end(&mut json);
    read.map_err(|source| RecordError::Io {
        action: "read",
        file: directory.path().join(name),
        source,
    })?;
    let malformed = |what| malformed(directory, name, what);
    let record: FillingRecord =
        serde_json::from_slice(&json).map_err(|error| malformed(error.to_string()))?;
    match record.version {
        VERSION => Ok(Some(record)),
        other => Err(malformed(format!("it has version {other}"))),
    }
}

fn malformed(directory: &PrivateDir, name: &str, what: String) -> RecordError {
    RecordError::Malformed {
        file: directory.path().join(name),
        what,
    }
}

/// Removes the files of VMs that have ended.
fn remove_ended(directory: &PrivateDir) {
    for name in directory.names().unwrap_or_default() {
        // A file that cannot be removed now is removed another time.
        if let Some(vm) = name.strip_suffix(FILL_BITMAP) {
            let _ = remove_if_ended(directory, vm);
        }
        // A record that a killed process has not finished (`PrivateDir::write`).
        let unfinished = name.split_once(UNFINISHED).map(|(_, pid)| pid.parse());
        if let Some(Ok(pid)) = unfinished
            && Process::open(pid).is_err()
        {
            let _ = directory.remove(&name);
        }
    }
}

fn remove_if_ended(directory: &PrivateDir, vm: &str) -> Result<(), RecordError> {
    let (record, fill_bitmap) = (format!("{vm}{RECORD}"), format!("{vm}{FILL_BITMAP}"));
    // Without a record yet, the process that made the fill bitmap has it locked.
    let Some(_locked) = directory.lock_file(&fill_bitmap, false)? else {
        return Ok(());
    };
    let is_needed = read(directory, &record)?.is_some_and(|record| {
        // One that may not be examined may live.
        !matches!(record.process(), Ok(None)) || record.incomplete_image().is_some()
    });
    if !is_needed {
        directory.remove(&record)?;
        directory.remove(&fill_bitmap)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(process: &Process) -> FillingRecord {
        let filling = FillingVm {
            remote_fd: 7,
            checkpoint: CheckpointId([1; 32]),
            vm: "vm".to_owned(),
            repository: "repo".to_owned(),
            running: true,
            agents: AgentChannels::default(),
            blocks: Vec::new(),
            disks: Vec::new(),
        };
        FillingRecord::new(process, filling).unwrap()
    }

    fn files(root: &Path) -> Files {
        let directory = PrivateDir::create(&root.join("run")).unwrap();
        Files::in_directory(directory, &root.join("x.qmp"))
    }

    #[test]
    fn what_was_written_is_read_and_only_once_there() {
        let root = tempfile::tempdir().unwrap();
        let mut files = files(root.path());
        assert!(matches!(files.read(), Err(RecordError::None { .. })));
        let fill_bitmap = files.create_fill_bitmap(10).unwrap();
        assert!(matches!(
            files.open_fill_bitmap(),
            Err(RecordError::Busy { .. })
        ));
        let process = Process::open(std::process::id() as i32).unwrap();
        files.write(&record(&process)).unwrap();
        assert_eq!(files.read().unwrap(), record(&process));
        drop(fill_bitmap);
        files.open_fill_bitmap().unwrap();
        // The process lives: its files are not for another restore.
        let again = files.create_fill_bitmap(10);
        assert!(matches!(again, Err(RecordError::Unfinished { .. })));
        remove_ended(&files.directory);
        assert!(files.read().is_ok());
    }

    #[test]
    fn the_holder_of_a_lock_is_found() {
        let file = tempfile::tempfile().unwrap();
        let inode = file.metadata().unwrap().ino();
        let locked = |locks: &str| holder(locks, inode);
        flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert_eq!(holder_now(&file), Some(std::process::id() as i32));
        // This process lives.
        assert_eq!(hanging_holder(&file), None);
        let waiter = format!("1: -> FLOCK ADVISORY WRITE 7 08:01:{inode} 0 EOF");
        for other in ["", &waiter, "1: POSIX ADVISORY WRITE 7 08:01:1 0 EOF"] {
            assert_eq!(locked(other), None, "{other}");
        }
    }

    #[test]
    fn files_of_ended_vms_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let mut files = files(root.path());
        let process = Process::open(std::process::id() as i32).unwrap();
        for ended in [
            FillingRecord {
                start_time: process.start_time() + 1,
                ..record(&process)
            },
            FillingRecord {
                boot: "another".to_owned(),
                ..record(&process)
            },
        ] {
            let fill_bitmap = files.create_fill_bitmap(10).unwrap();
            files.write(&ended).unwrap();
            remove_ended(&files.directory);
            assert!(files.read().is_ok(), "the marks are in use");
            drop(fill_bitmap);
            remove_ended(&files.directory);
            assert!(files.directory.names().unwrap().is_empty());
        }
    }

    #[test]
    fn an_unfinished_record_of_an_ended_process_is_removed() {
        let root = tempfile::tempdir().unwrap();
        let files = files(root.path());
        let of = |pid: u32| format!("x.qmp{UNFINISHED}{pid}");
        let (ours, ended) = (of(std::process::id()), of(i32::MAX as u32));
        for name in [&ours, &ended] {
            files.directory.write(name, b"").unwrap();
        }
        remove_ended(&files.directory);
        assert_eq!(files.directory.names().unwrap(), [ours]);
    }

    #[test]
    fn the_record_of_an_ended_vm_stays_while_an_image_lacks_content() {
        let root = tempfile::tempdir().unwrap();
        let mut files = files(root.path());
        let image = root.path().join("image");
        fs::write(&image, "").unwrap();
        let process = Process::open(std::process::id() as i32).unwrap();
        let ended = FillingRecord {
            start_time: process.start_time() + 1,
            disks: vec![LazyDisk {
                device: "d0".to_owned(),
                image: image.clone(),
            }],
            ..record(&process)
        };
        drop(files.create_fill_bitmap(10).unwrap());
        files.write(&ended).unwrap();
        remove_ended(&files.directory);
        assert_eq!(files.read().unwrap(), ended);
        let again = files.create_fill_bitmap(10);
        assert!(matches!(again, Err(RecordError::DisksIncomplete { .. })));
        fs::remove_file(image).unwrap();
        files.create_fill_bitmap(10).unwrap();
    }
}
