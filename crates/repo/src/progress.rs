//! How far a long operation has come.

/// Reported every now and then to the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub phase: Phase,
    /// How much of it is done, in the unit of the phase.
    pub done: u64,
    /// How much there is, 0 while unknown.
    pub total: u64,
}

/// The parts of `check`, `prune` and `copy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Walking from the manifests to every page; counts checkpoints.
    Checkpoints,
    /// Looking at the packs there are; counts packs.
    Packs,
    /// Reading packs from end to end; counts bytes.
    Data,
    /// Copying what is still needed out of packs with much waste; counts packs.
    Repack,
    /// Removing packs; counts packs.
    Remove,
    /// Copying a checkpoint into another repository; counts pages.
    Copy,
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Phase::Checkpoints => "walking checkpoints",
            Phase::Packs => "looking at packs",
            Phase::Data => "reading packs",
            Phase::Repack => "repacking",
            Phase::Remove => "removing packs",
            Phase::Copy => "copying pages",
        })
    }
}
