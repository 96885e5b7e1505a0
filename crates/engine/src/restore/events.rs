//! Events of a lazy restore while it runs, and its report at the end.

use std::path::PathBuf;

use serde::Serialize;

use crate::Progress;
use crate::populate::lazy::supervision::Supervised;

/// An event while memory is populated.
#[derive(Debug, Clone)]
pub enum LazyEvent {
    /// How far it is.
    Progress(Progress),
    /// The guest runs (or is ready, paused).
    Runs {
        /// Microseconds after the call.
        after_us: u64,
    },
    /// The repository takes no lease: `forget` and `prune` on another host may remove blobs that are not read yet.
    NotLeased {
        /// Why.
        reason: String,
    },
    /// Memory is complete; the disks follow.
    FillsDisks,
    /// The VM has ended before this image was complete; it is completed without it.
    Completing {
        /// The image.
        image: PathBuf,
    },
    /// How the VM fares until its memory is complete.
    Supervised(Supervised),
}

/// Where [`LazyEvent`]s go.
pub type LazySink<'a> = &'a mut dyn FnMut(LazyEvent);

/// The report on a lazy restore.
#[derive(Debug, Clone, Default, Serialize)]
pub struct LazyReport {
    /// Time from the call to the running guest, in microseconds.
    pub runs_after_us: u64,
    /// How often the guest had to wait for a page.
    pub faults: u64,
    /// The same in each of the first steps of 10 ms, up to the last in which it had to.
    pub faults_each_10_ms: Vec<u64>,
    /// Pages of the working set that was populated first, if one was recorded when the checkpoint was last
    /// restored.
    pub working_set: Option<usize>,
    /// Pages of the working set that was recorded now. The guest faulted on pages that were not in the one before,
    /// or that came too late.
    pub recorded: Option<usize>,
    /// Pages that were read while QEMU started.
    pub prefetched: u64,
}
