//! Progress of a long operation.

/// A progress report to the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// The current phase.
    pub phase: Phase,
    /// Amount done, in the unit of the phase.
    pub done: u64,
    /// Total amount, 0 while unknown.
    pub total: u64,
}

/// The parts of `check`, `prune`, `index` and `copy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Walking from the manifests to every page; counts checkpoints.
    Checkpoints,
    /// Checking which packs exist; counts packs.
    Packs,
    /// Reading packs from end to end; counts bytes.
    Data,
    /// Copying used blobs out of packs with much waste; counts packs.
    Repack,
    /// Removing packs; counts packs.
    Remove,
    /// Reading an image; counts bytes.
    Image,
    /// Copying a checkpoint into another repository; counts pages.
    Copy,
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Phase::Checkpoints => "walking checkpoints",
            Phase::Packs => "checking packs",
            Phase::Data => "reading packs",
            Phase::Repack => "repacking",
            Phase::Remove => "removing packs",
            Phase::Image => "reading the image",
            Phase::Copy => "copying pages",
        })
    }
}
