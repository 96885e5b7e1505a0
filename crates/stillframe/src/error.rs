//! What a command itself finds wrong.

use stillframe_repo::AnnotationError;
use thiserror::Error;

use crate::table;

/// What a command itself finds wrong.
#[derive(Debug, Error)]
pub enum CommandError {
    /// No directory.
    #[error("no repository: name its directory with -r DIR or STILLFRAME_REPOSITORY")]
    NoRepository,
    /// No VM; the command line's definitions do not let this through.
    #[error("no VM: name one with --pid, --qmp or --vm")]
    NoVm,
    /// More tags than a checkpoint can have.
    #[error(transparent)]
    Tags(#[from] AnnotationError),
    /// No id and no rule.
    #[error("nothing to forget: name checkpoints, or give a --keep rule")]
    NothingToForget,
    /// The checkpoint names no socket for a monitor.
    #[error(
        "the VM had no QMP monitor with a socket of its own: name one for the new VM with --qmp PATH"
    )]
    NoMonitor,
    /// Several VMs with one monitor.
    #[error("each clone needs a monitor of its own: --qmp /run/web-{{}}.qmp, for example")]
    SameMonitor,
    /// Neither of the two things `stats` can look at, or both.
    #[error("stats of what? Name two checkpoints, or a running VM and --over TIME")]
    StatsOfWhat,
    /// The kernel, or the user's rights.
    #[error("this machine cannot checkpoint a VM: {0} (`stillframe probe` shows everything)")]
    MissingAbility(String),
    /// `probe` found something missing.
    #[error("{} missing here; no VM can be checkpointed", table::count(*.0, "required ability"))]
    ProbeFailed(u64),
    /// `check` found something.
    #[error("{} found; the repository is damaged", table::count(*.0, "problem"))]
    Problems(u64),
    /// `--verify` found something.
    #[error(
        "the checkpoint differs from the VM's memory in {}; do not rely on it, and please report this",
        table::count(*.0, "page")
    )]
    Differs(u64),
    /// The end came before the count.
    #[error("{why} after {taken} of {count} checkpoints")]
    CountNotReached {
        /// What ended the watch.
        why: &'static str,
        /// Checkpoints taken.
        taken: u64,
        /// Checkpoints requested.
        count: u64,
    },
    /// Nothing works any more.
    #[error("{0} attempts in a row failed; giving up")]
    TooManyFailures(u32),
}
