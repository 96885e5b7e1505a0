//! The errors of a repository, and the classes a caller can act on.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::format::layout::FormatError;
use crate::format::lease_record::LeaseRecord;
use crate::format::lock_record::LockRecord;
use crate::format::manifest::CheckpointId;
use stillframe_page::encoding::EncodingError;
use stillframe_page::hash::ContentId;

/// Why something could not be done with a repository.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RepoError {
    /// The directory holds no repository.
    #[error("{} is not a repository: it has no file 'config' (create one with `stillframe init`)", .dir.display())]
    NotARepository {
        /// The directory asked for.
        dir: PathBuf,
    },
    /// `init` found something where the repository should go.
    #[error("{} cannot become a repository: {what}", .dir.display())]
    NotEmpty {
        /// The directory asked for.
        dir: PathBuf,
        /// What is in the way.
        what: String,
    },
    /// Written by a newer program.
    #[error(
        "{file} has format version {found}, this program knows versions up to {known}: use a newer stillframe"
    )]
    FutureVersion {
        /// The file, relative to the repository.
        file: String,
        /// The version found.
        found: u32,
        /// The newest version this program knows.
        known: u32,
    },
    /// A file is missing or does not hold what was written.
    #[error("{file} is damaged: {what} (run `stillframe check` for the whole extent)")]
    Damaged {
        /// The file, relative to the repository.
        file: String,
        /// What is wrong with it.
        what: String,
    },
    /// No key file opens with this password.
    #[error("wrong password: it opens none of the {keys} key file(s) of {}", .dir.display())]
    WrongPassword {
        /// The repository.
        dir: PathBuf,
        /// How many key files were tried.
        keys: usize,
    },
    /// No key of that name.
    #[error("no key of the repository is called '{start}' (`stillframe key list` shows them)")]
    NoSuchKey {
        /// What was asked for.
        start: String,
    },
    /// The start of the names of several keys.
    #[error("'{start}' is the start of several keys' ids: give more digits")]
    AmbiguousKey {
        /// What was asked for.
        start: String,
    },
    /// The key that is to be removed is the one that this process was let in with.
    #[error(
        "key {name} stays: it belongs to the password given now, and a password that is known to be right must be left; add another one first (`stillframe key add`) and give that, or change this one (`stillframe key passwd`)"
    )]
    KeyInUse {
        /// The key.
        name: String,
    },
    /// There are too many key files.
    #[error(
        "the repository has {keys} or more key files, the limit is {}: remove some",
        .limit
    )]
    TooManyKeys {
        /// How many were seen.
        keys: usize,
        /// How many there may be.
        limit: usize,
    },
    /// Another process has a conflicting lock.
    #[error("the repository is locked by {by}: wait for it to finish")]
    Locked {
        /// The lock owner.
        by: Box<LockRecord>,
    },
    /// A VM that is lazily restored still reads a checkpoint.
    #[error(
        "checkpoint {checkpoint} cannot be forgotten: a VM restored from it does not have all its memory yet, {by}; let the restore finish (`stillframe restore --resume`) or end the VM; if it is gone, give --break-leases"
    )]
    Leased {
        /// The checkpoint.
        checkpoint: CheckpointId,
        /// The VM.
        by: Box<LeaseRecord>,
    },
    /// A policy that keeps only tagged checkpoints, of a VM that has none.
    #[error(
        "the rules would keep no checkpoint of VM '{vm}': none has a tag of --keep-tag; nothing was forgotten. Correct the tag, add another rule (--keep-last 1), or name the checkpoints to forget"
    )]
    NothingKept {
        /// The label of the VM.
        vm: String,
    },
    /// This process' own lock was removed, for instance because the machine slept too long.
    #[error(
        "this process' lock {file} was removed by another process; nothing was recorded: try again"
    )]
    LockLost {
        /// The lock file, relative to the repository.
        file: String,
    },
    /// No checkpoint of that name.
    #[error("no checkpoint is called '{name}'{}", of_vm(.vm.as_deref()))]
    NotFound {
        /// What was asked for.
        name: String,
        /// The VM it was looked for in.
        vm: Option<String>,
    },
    /// A checkpoint name that cannot be one.
    #[error("'{name}' is no checkpoint name: give an id, the start of one, 'latest' or 'latest~N'")]
    BadName {
        /// What was asked for.
        name: String,
    },
    /// The start of more than one id.
    #[error("'{name}' is the start of {} checkpoint ids ({}): give more digits", .candidates.len(), list(.candidates))]
    Ambiguous {
        /// What was asked for.
        name: String,
        /// The ids it could mean.
        candidates: Vec<CheckpointId>,
    },
    /// `latest` in a repository with checkpoints of several VMs.
    #[error("the repository holds checkpoints of several VMs ({}): name one with --vm NAME", .labels.join(", "))]
    SeveralVms {
        /// The labels of the VMs.
        labels: Vec<String>,
    },
    /// The index knows no blob of that id.
    #[error("blob {id} is not in the repository")]
    MissingBlob {
        /// The id asked for.
        id: ContentId,
    },
    /// The bytes handed in are not what their id says.
    #[error(
        "bytes handed in for blob {id} do not have that id; nothing was recorded (they changed after they were hashed, or the memory of this machine is faulty)"
    )]
    ContentMismatch {
        /// The id claimed.
        id: ContentId,
    },
    /// A path that names no file of the repository.
    #[error("{} is no file of this repository", .path.display())]
    NoSuchFile {
        /// What was asked for.
        path: PathBuf,
    },
    /// A blob that is empty or too large.
    #[error("a blob of {bytes} bytes cannot be stored: the limits are 1 and {max}")]
    BlobSize {
        /// Its length.
        bytes: usize,
        /// The largest length.
        max: usize,
    },
    /// A page table that is not what the caller said, or a page outside it.
    #[error("page table: {what}")]
    Table {
        /// What is wrong.
        what: String,
    },
    /// The manifest handed in contradicts itself.
    #[error("the checkpoint's manifest cannot be recorded: {what}")]
    BadManifest {
        /// What is wrong.
        what: String,
    },
    /// There are as many blobs as an index can hold.
    #[error(
        "the repository has no room for more than {max} blobs: begin another one, or have `stillframe forget` and `stillframe prune` remove old checkpoints"
    )]
    TooManyBlobs {
        /// How many it can hold.
        max: u64,
    },
    /// The file system is full, or a quota is.
    #[error("no space left to write {}: free some on that file system (with a few MiB, `stillframe forget` and `stillframe prune` can free more)", .path.display())]
    NoSpace {
        /// The file being written.
        path: PathBuf,
    },
    /// The file system is mounted read-only.
    #[error("{} is on a read-only file system: remount it writable, or copy the repository", .path.display())]
    ReadOnly {
        /// The file to be changed.
        path: PathBuf,
    },
    /// Any other refusal of the operating system.
    #[error("cannot {doing} {}", .path.display())]
    Io {
        /// What was tried, as a verb.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// Compression failed (out of memory, in practice).
    #[error("cannot encode a frame")]
    Encoding(#[from] EncodingError),
    /// The operating system gave no random bytes, or no thread.
    #[error("the operating system refused {what}")]
    System {
        /// What was asked of it.
        what: &'static str,
        /// Its answer.
        #[source]
        source: io::Error,
    },
    /// The key could not be derived from the password.
    #[error("cannot derive a key from the password: {what}")]
    KeyDerivation {
        /// The cause.
        what: String,
    },
    /// The writer already failed; its first error told why.
    #[error("this writer has failed before; start the checkpoint again")]
    WriterFailed,
}

fn of_vm(vm: Option<&str>) -> String {
    vm.map(|label| format!(" for VM '{label}'"))
        .unwrap_or_default()
}

fn list(ids: &[CheckpointId]) -> String {
    const SHOWN: usize = 4;
    let mut text: Vec<String> = ids
        .iter()
        .take(SHOWN)
        .map(|id| id.to_hex()[..16].into())
        .collect();
    if ids.len() > SHOWN {
        text.push("...".into());
    }
    text.join(", ")
}

/// What a caller can do about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorClass {
    /// There is no repository, checkpoint or blob of that name; ask for another.
    NotFound,
    /// The request itself is wrong or unclear.
    BadRequest,
    /// The password is wrong.
    WrongPassword,
    /// Stored data is not what was written.
    Damaged,
    /// Written by a newer version of the program.
    FutureVersion,
    /// Another process is at work; waiting helps.
    Locked,
    /// The file system is full.
    NoSpace,
    /// The file system cannot be written to.
    ReadOnly,
    /// The operating system refused.
    System,
}

impl RepoError {
    /// The class, for exit codes and for deciding whether to try again.
    pub fn class(&self) -> ErrorClass {
        match self {
            RepoError::NotARepository { .. }
            | RepoError::NotFound { .. }
            | RepoError::NoSuchFile { .. }
            | RepoError::NoSuchKey { .. }
            | RepoError::MissingBlob { .. } => ErrorClass::NotFound,
            RepoError::NotEmpty { .. }
            | RepoError::BadName { .. }
            | RepoError::Ambiguous { .. }
            | RepoError::SeveralVms { .. }
            | RepoError::NothingKept { .. }
            | RepoError::BlobSize { .. }
            | RepoError::Table { .. }
            | RepoError::TooManyBlobs { .. }
            | RepoError::AmbiguousKey { .. }
            | RepoError::KeyInUse { .. }
            | RepoError::TooManyKeys { .. }
            | RepoError::BadManifest { .. } => ErrorClass::BadRequest,
            RepoError::WrongPassword { .. } => ErrorClass::WrongPassword,
            RepoError::Damaged { .. } => ErrorClass::Damaged,
            RepoError::FutureVersion { .. } => ErrorClass::FutureVersion,
            RepoError::Locked { .. } | RepoError::Leased { .. } | RepoError::LockLost { .. } => {
                ErrorClass::Locked
            }
            RepoError::NoSpace { .. } => ErrorClass::NoSpace,
            RepoError::ReadOnly { .. } => ErrorClass::ReadOnly,
            RepoError::ContentMismatch { .. }
            | RepoError::Io { .. }
            | RepoError::Encoding(_)
            | RepoError::System { .. }
            | RepoError::KeyDerivation { .. }
            | RepoError::WriterFailed => ErrorClass::System,
        }
    }

    /// Gives an error of the operating system its meaning.
    pub(crate) fn io(doing: &'static str, path: &Path, source: io::Error) -> RepoError {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                RepoError::NoSpace { path }
            }
            io::ErrorKind::ReadOnlyFilesystem => RepoError::ReadOnly { path },
            _ => RepoError::Io {
                doing,
                path,
                source,
            },
        }
    }

    /// Gives a format error the file it is about.
    pub(crate) fn format(file: impl Into<String>, error: &FormatError) -> RepoError {
        let file = file.into();
        match *error {
            FormatError::FutureVersion { found, known } => {
                RepoError::FutureVersion { file, found, known }
            }
            _ => RepoError::Damaged {
                file,
                what: error.to_string(),
            },
        }
    }

    /// Whether the file asked for does not exist.
    pub(crate) fn is_absent(&self) -> bool {
        matches!(self, RepoError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}
