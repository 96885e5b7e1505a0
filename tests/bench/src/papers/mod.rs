//! `cargo xtask bench papers fitdoc | cow | dtrack | page-cache | vm-me`: the evaluations of five papers once more, on real guests. The baselines
//! of the paper are measured in the same run.

mod cow;
mod dtrack;
mod fitdoc;
mod numbers;
mod page_cache;
mod vm_me;

use anyhow::Result;
use clap::ValueEnum;

pub use dtrack::Cells;

/// Whose evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Paper {
    /// Fast Incremental Checkpointing with Delta Memory Compression.
    Fitdoc,
    /// Copy-on-write checkpointing, a thesis.
    Cow,
    /// D-Track, fake dirty pages of live migration, a thesis.
    Dtrack,
    /// Exclusion of the page cache from checkpoints.
    PageCache,
    /// Memory exclusion by a balloon.
    VmMe,
}

/// Runs one and writes `docs/results/papers-<name>/` (of `page-cache` `docs/results/exclusion/`): a page with the paper's figures, ours and pictures,
/// and raw data. `quick`: so little of everything that it shows only that it works, and nothing is
/// written under `docs`.
pub fn run(paper: Paper, quick: bool, cells: &Cells) -> Result<()> {
    match paper {
        Paper::Fitdoc => fitdoc::run(quick),
        Paper::Cow => cow::run(quick),
        Paper::Dtrack => dtrack::run(quick, cells),
        Paper::PageCache => page_cache::run(quick),
        Paper::VmMe => vm_me::run(quick),
    }
}
