//! The engine: one capture half and one populate half, and the verbs made of them.
//!
//! ```text
//!   running VM --> attach, tracker, rounds, pause, staging --> encoding --> sink | source --> populate --> new QEMU
//!                  (tracking/, capture/)                       (encoding/)                    (populate/)
//! ```
//!
//! The engine works on QEMU from outside and may die at any instant; the guest must not notice.
//! [`guardian`] describes what resumes a paused guest, and when.

pub mod attach;
pub mod balloon;
pub mod capture;
pub mod checkpoint;
pub mod clones;
pub mod connection;
pub mod control_socket;
pub mod disks;
pub mod encoding;
pub mod export;
#[cfg(test)]
mod fakes;
pub mod free_pages;
pub mod guardian;
mod guest_clock;
pub mod import;
pub mod inhibitor;
pub mod memory;
pub mod migration;
pub mod page_classes;
pub mod pipeline;
pub mod placement;
pub mod populate;
pub mod post_restore;
pub mod restore;
pub mod rewind;
pub mod runtime;
pub mod sink;
pub mod source;
pub mod statistics;
mod streaming;
pub mod template;
pub mod tracking;
pub mod verify;

use serde::{Deserialize, Serialize};

/// Types of lower crates that the verbs take and give, so that a user of the engine needs only `repo` besides.
pub use stillframe_page::PAGE_BYTES;
pub use stillframe_page::hash::ContentHasher;
pub use stillframe_qemu::launch::{
    CloneOptions, LaunchError, LaunchOptions, LaunchPlan, helper as launch_helper,
};
pub use stillframe_qemu::record::VmRecord;
pub use stillframe_qemu::target::{Selector, TargetError};
pub use stillframe_sys::probe;
pub use stillframe_sys::process::Process;
pub use stillframe_sys::security_label::SecurityLabel;
pub use stillframe_sys::system::{forbid_dumps, memory_bytes};

/// The current activity of a long-running verb, for a progress line. Counts are in the named unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Progress {
    /// An iteration of streaming pre-copy: pages done, pages in all.
    FullPass {
        /// Pages read so far.
        done: u64,
        /// Pages to read.
        total: u64,
    },
    /// The disks of a checkpoint on their way into the repository.
    StoringDisks {
        /// Pages gone through so far.
        done: u64,
        /// Pages of all disks.
        total: u64,
    },
    /// Captured pages on their way into the repository.
    Storing {
        /// Pages handed to the repository so far.
        done: u64,
        /// Pages captured.
        total: u64,
    },
    /// The disks of a checkpoint on their way into new images.
    FillingDisks {
        /// Pages gone through so far.
        done: u64,
        /// Pages of all disks.
        total: u64,
    },
    /// The disks of a lazily restored VM on their way into its images, one after the other.
    StreamingDisks {
        /// Pages of this disk gone through so far.
        done: u64,
        /// Its pages.
        total: u64,
    },
    /// Pages written into the memory of a restored VM.
    Populating {
        /// Pages written so far.
        done: u64,
        /// Pages to write.
        total: u64,
    },
    /// Pages that the background fill of a lazy restore has gone through.
    Filling {
        /// Pages gone through so far.
        done: u64,
        /// Pages to go through.
        total: u64,
    },
    /// RAM compared with a checkpoint that the VM goes back to, while the guest runs.
    Rewinding {
        /// Pages compared so far.
        done: u64,
        /// Pages to compare.
        total: u64,
    },
    /// Pages compared by `stats`, and by `show --contents`.
    Comparing {
        /// Pages compared so far.
        done: u64,
        /// Pages to compare.
        total: u64,
    },
    /// Pages written by `export`.
    Exporting {
        /// Pages written so far.
        done: u64,
        /// Pages to write.
        total: u64,
    },
    /// Pages of a file gone through by `import`.
    Importing {
        /// Pages gone through so far.
        done: u64,
        /// Pages that the file is as long as.
        total: u64,
    },
    /// Pages compared by `--verify`.
    Verifying {
        /// Pages compared so far.
        done: u64,
        /// Pages to compare.
        total: u64,
    },
}

/// Where a verb reports its progress.
pub type ProgressSink<'a> = &'a mut dyn FnMut(Progress);

/// A round of a migration that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Round {
    /// The rounds so far.
    pub number: u32,
    /// Pages that were written meanwhile, and are left.
    pub left: u64,
    /// How long the guest would be stopped for these, in microseconds; `None` while no page was sent.
    pub expected_us: Option<u64>,
    /// Pages a second that the guest has written.
    pub written_per_s: u64,
    /// Pages a second that were sent, in all rounds.
    pub streamed_per_s: u64,
}

/// An error and its sources in one line.
pub(crate) fn in_words(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    text
}
