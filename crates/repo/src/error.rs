//! The errors of a repository, and the classes a caller can act on.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use thiserror::Error;

use crate::format::layout::FormatError;
use crate::format::lease_record::LeaseRecord;
use crate::format::lock_record::LockRecord;
use crate::format::manifest::CheckpointId;
use stillframe_page::encoding::EncodingError;
use stillframe_page::hash::ContentId;

/// An error of a repository operation.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RepoError {
    /// The directory holds no repository.
    #[error("{} is not a repository: it has no file 'config' (create one with `stillframe init`)", .dir.display())]
    NotARepository {
        /// The directory.
        dir: PathBuf,
    },
    /// `init` found other contents in the directory.
    #[error("{} cannot become a repository: {what}", .dir.display())]
    NotEmpty {
        /// The directory.
        dir: PathBuf,
        /// What the directory contains.
        what: String,
    },
    /// A newer program wrote the file.
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
    /// A file is missing, or its contents are damaged.
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
        /// The given start of a name.
        start: String,
    },
    /// The start of the names of several keys.
    #[error("'{start}' is the start of several keys' ids: give more digits")]
    AmbiguousKey {
        /// The given start of a name.
        start: String,
    },
    /// The key to remove is the one that opened the repository for this process.
    #[error(
        "key {name} stays: it belongs to the password given now, and one password that is known to work must remain; add another one first (`stillframe key add`) and give that one, or change this one (`stillframe key passwd`)"
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
        /// Number of key files found.
        keys: usize,
        /// Maximum number of key files.
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
    /// A keep policy of tags alone would keep no checkpoint of a VM.
    #[error(
        "the rules would keep no checkpoint of VM '{vm}': none has a tag of --keep-tag; nothing was forgotten. Correct the tag, add another rule (--keep-last 1), or name the checkpoints to forget"
    )]
    NothingKept {
        /// The label of the VM.
        vm: String,
    },
    /// Another process removed this process' lock, for instance after the machine was suspended.
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
        /// The given name.
        name: String,
        /// The label of the VM whose checkpoints were searched.
        vm: Option<String>,
    },
    /// A text that cannot be a checkpoint name.
    #[error("'{name}' is no checkpoint name: give an id, the start of one, 'latest' or 'latest~N'")]
    BadName {
        /// The given name.
        name: String,
    },
    /// The start of more than one id.
    #[error("'{name}' is the start of {} checkpoint ids ({}): give more digits", .candidates.len(), list(.candidates))]
    Ambiguous {
        /// The given name.
        name: String,
        /// The ids that begin with it.
        candidates: Vec<CheckpointId>,
    },
    /// `latest` in a repository with checkpoints of several VMs.
    #[error("the repository holds checkpoints of several VMs ({}): name one with --vm NAME", .labels.join(", "))]
    SeveralVms {
        /// The labels of the VMs.
        labels: Vec<String>,
    },
    /// The index has no blob of this id.
    #[error("blob {id} is not in the repository")]
    MissingBlob {
        /// The id.
        id: ContentId,
    },
    /// The given bytes do not match their id.
    #[error(
        "the bytes given for blob {id} do not match its id; nothing was recorded (they changed after they were hashed, or the memory of this machine is faulty): try again"
    )]
    ContentMismatch {
        /// The given id.
        id: ContentId,
    },
    /// A path that does not name a file of the repository.
    #[error("{} is not a file of this repository", .path.display())]
    NoSuchFile {
        /// The given path.
        path: PathBuf,
    },
    /// An image that has blobs of the repository cannot be read.
    #[error(
        "image {path} cannot be used: {what}; checkpoints that need it (`stillframe show` names it) cannot be read without: put it back as it was, or run `stillframe index` on it where it is now"
    )]
    Image {
        /// Its path.
        path: String,
        /// What is wrong with it.
        what: String,
    },
    /// A file that cannot be indexed.
    #[error("{path} cannot be indexed: {what}")]
    ImageRefused {
        /// Its path.
        path: String,
        /// The reason.
        what: String,
    },
    /// Checkpoints may need the image.
    #[error(
        "image {path} stays: {} checkpoint(s) may need it ({}): forget them first",
        .checkpoints.len(), list(.checkpoints)
    )]
    ImageNeeded {
        /// Its path.
        path: String,
        /// The checkpoints.
        checkpoints: Vec<CheckpointId>,
    },
    /// A blob that is empty or too large.
    #[error("a blob of {bytes} bytes cannot be stored: the limits are 1 and {max}")]
    BlobSize {
        /// Its length.
        bytes: usize,
        /// The largest length.
        max: usize,
    },
    /// A page table contradicts the caller, or a page is outside it.
    #[error("page table: {what}")]
    Table {
        /// What is wrong.
        what: String,
    },
    /// The given manifest is inconsistent.
    #[error("the checkpoint's manifest cannot be recorded: {what}")]
    BadManifest {
        /// What is wrong.
        what: String,
    },
    /// The index is full.
    #[error(
        "the repository has no room for more than {max} blobs: create another repository, or remove old checkpoints with `stillframe forget` and `stillframe prune`"
    )]
    TooManyBlobs {
        /// Maximum number of blobs.
        max: u64,
    },
    /// The process may not write files of that size.
    #[error("{} would be longer than this process may make a file (`ulimit -f`, `LimitFSIZE=` of a service): raise the limit", .path.display())]
    FileLimit {
        /// The file.
        path: PathBuf,
    },
    /// The file system is full, or a quota is exhausted.
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
    /// Any other error of the operating system.
    #[error("cannot {doing} {}", .path.display())]
    Io {
        /// The attempted operation, as a verb.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// Compression failed (out of memory, in practice).
    #[error("cannot encode a frame")]
    Encoding(#[from] EncodingError),
    /// The operating system provides no random bytes, or no thread.
    #[error("the operating system does not provide {what}")]
    System {
        /// The requested resource.
        what: &'static str,
        /// Its error.
        #[source]
        source: io::Error,
    },
    /// The key could not be derived from the password.
    #[error("cannot derive a key from the password: {what}")]
    KeyDerivation {
        /// The cause.
        what: String,
    },
    /// The writer has failed before; its first error names the cause.
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
    /// There is no repository, checkpoint or blob of that name; give another one.
    NotFound,
    /// The request itself is invalid or ambiguous.
    BadRequest,
    /// The password is wrong.
    WrongPassword,
    /// Stored data is not what was written.
    Damaged,
    /// Written by a newer version of the program.
    FutureVersion,
    /// Another process holds a lock; waiting helps.
    Locked,
    /// The file system is full.
    NoSpace,
    /// The file system cannot be written to.
    ReadOnly,
    /// The operating system reports an error.
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
            | RepoError::ImageRefused { .. }
            | RepoError::ImageNeeded { .. }
            | RepoError::AmbiguousKey { .. }
            | RepoError::KeyInUse { .. }
            | RepoError::TooManyKeys { .. }
            | RepoError::BadManifest { .. } => ErrorClass::BadRequest,
            RepoError::WrongPassword { .. } => ErrorClass::WrongPassword,
            RepoError::Damaged { .. } | RepoError::Image { .. } => ErrorClass::Damaged,
            RepoError::FutureVersion { .. } => ErrorClass::FutureVersion,
            RepoError::Locked { .. } | RepoError::Leased { .. } | RepoError::LockLost { .. } => {
                ErrorClass::Locked
            }
            RepoError::NoSpace { .. } => ErrorClass::NoSpace,
            RepoError::ReadOnly { .. } => ErrorClass::ReadOnly,
            RepoError::ContentMismatch { .. }
            | RepoError::FileLimit { .. }
            | RepoError::Io { .. }
            | RepoError::Encoding(_)
            | RepoError::System { .. }
            | RepoError::KeyDerivation { .. }
            | RepoError::WriterFailed => ErrorClass::System,
        }
    }

    /// Classifies an error of the operating system.
    pub(crate) fn io(doing: &'static str, path: &Path, source: io::Error) -> RepoError {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                RepoError::NoSpace { path }
            }
            io::ErrorKind::ReadOnlyFilesystem => RepoError::ReadOnly { path },
            _ if source.raw_os_error() == Some(Errno::FBIG.raw_os_error()) => {
                RepoError::FileLimit { path }
            }
            _ => RepoError::Io {
                doing,
                path,
                source,
            },
        }
    }

    /// Adds the file to a format error.
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

    /// Whether the error is that a file does not exist.
    pub(crate) fn is_absent(&self) -> bool {
        matches!(self, RepoError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}
