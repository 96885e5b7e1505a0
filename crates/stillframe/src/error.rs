//! Errors of the commands themselves.

use stillframe_repo::AnnotationError;
use thiserror::Error;

use crate::table;

/// An error of a command itself.
#[derive(Debug, Error)]
pub enum CommandError {
    /// No directory is given.
    #[error("no repository: give its directory with -r DIR or STILLFRAME_REPOSITORY")]
    NoRepository,
    /// No VM is given; clap does not let this through.
    #[error("no VM: give one with --pid, --qmp or --vm")]
    NoVm,
    /// More tags than a checkpoint can have.
    #[error(transparent)]
    Tags(#[from] AnnotationError),
    /// `--disks` contradicts itself.
    #[error("--disks says two things of {0}")]
    DisksTwice(String),
    /// Neither an id nor a rule is given.
    #[error("nothing to forget: give checkpoints or a --keep rule")]
    NothingToForget,
    /// The checkpoint has no monitor socket.
    #[error(
        "the VM had no QMP monitor with a socket of its own: give one for the new VM with --qmp PATH"
    )]
    NoMonitor,
    /// Several clones would share one monitor.
    #[error(
        "each clone needs a monitor of its own: use {{}} in --qmp, for example --qmp /run/web-{{}}.qmp"
    )]
    SameMonitor,
    /// There is nothing to count.
    #[error("the repository has no such checkpoints; `stillframe list` shows all")]
    NoCheckpoints,
    /// `stats` has neither two checkpoints nor a running VM, or both.
    #[error("stats needs two checkpoints, or a running VM and --over TIME")]
    NothingToMeasure,
    /// `index --remove` of an image that is not indexed.
    #[error(
        "no image of the repository is called '{0}': give its path or its id (`stillframe index --list` shows them)"
    )]
    NoSuchImage(String),
    /// Several images were indexed at that path, one after the other.
    #[error(
        "several images were indexed at {0}: give the id of one (`stillframe index --list` shows them)"
    )]
    SeveralImages(String),
    /// The kernel or the user's rights are not sufficient.
    #[error("this machine cannot checkpoint a VM: {0} (`stillframe probe` shows details)")]
    MissingAbility(String),
    /// `probe` found missing abilities.
    #[error("{} missing here; no VM can be checkpointed", table::count(*.0, "required ability"))]
    ProbeFailed(u64),
    /// `check` or `rebuild-index` found problems.
    #[error("{} found; the repository is damaged", table::count(*.0, "problem"))]
    Problems(u64),
    /// `--verify` found differences.
    #[error(
        "the checkpoint differs from the VM's memory in {}; do not rely on it, and please report this",
        table::count(*.0, "page")
    )]
    Differs(u64),
    /// The watch ended before `--count` was reached.
    #[error("{why} after {taken} of {count} checkpoints")]
    CountNotReached {
        /// Why the watch ended.
        why: &'static str,
        /// Number of checkpoints taken.
        taken: u64,
        /// Number of checkpoints requested.
        count: u64,
    },
    /// The process that watches the VM refused or failed.
    #[error("{error}")]
    ByWatch {
        /// Its error.
        error: String,
        /// Its exit code for this error.
        exit_code: i32,
    },
    /// The process that watches the VM does not answer.
    #[error(
        "process {pid}, which watches the VM, does not answer the request to migrate it. The VM runs on here. If that process hangs, end it, and migrate the VM without it"
    )]
    WatchSilent {
        /// The process.
        pid: i32,
    },
    /// The process that watches the VM ended while it migrated it.
    #[error(
        "process {pid}, which watched the VM and was migrating it, has ended or does not answer. The VM runs on here, unless it was being handed over: if it is paused, `migrate --resume` asks the destination where it runs"
    )]
    WatchLost {
        /// The process.
        pid: i32,
    },
    /// Too many attempts failed in a row.
    #[error("{0} attempts in a row failed; giving up")]
    TooManyFailures(u32),
}
