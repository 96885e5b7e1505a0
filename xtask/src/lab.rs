//! `demo` and `bench`: what is shown and measured on real guests. The work itself is in the binary
//! of `tests/e2e`; here everything it needs is built first.

use crate::ci::{build_faulty, build_release, step};
use crate::guests::{self, rootfs};
use crate::micro;
use crate::run::run;
use crate::setup;
use crate::workspace::Workspace;
use anyhow::Result;
use clap::ValueEnum;
use std::process::Command;
use std::time::Instant;

/// The benches and stress runs; each writes `docs/results/<name>/`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Bench {
    /// The pause against QEMU's own floor, beside QEMU's own ways to save (about 9 minutes).
    Checkpoint,
    /// Every page against an image of the same pause, all kinds of guest and all schedules (about 7
    /// minutes).
    Exactness,
    /// 200 times `kill -9` of the engine (about 6 minutes).
    Kill,
    /// Every named fault point times every fault, beside a VM (about 15 minutes).
    Matrix,
    /// 5000 checkpoints of a guest whose memory is merged, swapped, discarded, written by DMA, and whose
    /// devices come and go (about an hour).
    Torture,
    /// VMs sent to another process, as copies and handed over, every page compared; then 60 kills of one side
    /// (about 10 minutes).
    Transfer,
    /// 1000 bit flips and truncations of a repository (about 5 minutes).
    Flips,
    /// 200 plugs and unplugs during a watch, and every checkpoint restored (about 10 minutes).
    Hotplug,
    /// 500 stops and 100 migrations by another client of QEMU's during a watch (about 15 minutes).
    Others,
    /// 10 000 checkpoints, one every 100 ms, and 20 of them restored (about 19 minutes).
    Soak,
    /// An interval of 10 ms for 10 minutes (about 12 minutes).
    Frequency,
    /// The pause of a guest of 8 GiB, and of one that writes all of its memory (about 12 minutes).
    Extremes,
    /// The pause, and what a guest reads meanwhile from a disk with `cache=none` (about 9 minutes).
    DirectIo,
    /// How soon a VM of 1 to 8 GiB is back, lazily and eagerly, against QEMU's own way (about 20 minutes).
    Restore,
    /// How soon a clone runs, against QEMU's own way, and the memory of ten (about 6 minutes).
    Clones,
    /// Checkpoints taken in every way, each restored eagerly and lazily and compared with the original
    /// (about 12 minutes).
    RestoreExact,
    /// 150 times `kill -9` of a lazy restore (about 12 minutes).
    RestoreKill,
    /// How soon a restored VM works as one that was never saved (about 12 minutes; the first time some more,
    /// to build the guest).
    Responsive,
    /// The guests with real software: the pace of each, alone and watched (about 20 minutes; the first
    /// time some more, to build them).
    Works,
    /// The evaluations of two papers once more, on guests with real software: `papers fitdoc`, `papers
    /// cow` (about half an hour each; the first time some more, to build the guests).
    Papers,
    /// The two-level dirty bitmap against a scan bit by bit (seconds; no guest).
    Bitmap,
    /// Size and speed of deltas on the mixes of FITDOC's table I (seconds; no guest).
    Delta,
    /// What a repository's index takes of memory, and how fast it answers (half a minute; no guest).
    Index,
}

/// The main job once, for the user's eyes.
pub fn demo(workspace: &Workspace) -> Result<()> {
    let began = Instant::now();
    let mut lab = prepared(workspace)?;
    let seconds = began.elapsed().as_secs().to_string();
    run(lab.args(["demo", "--seconds-before", &seconds]))
}

/// One bench; `more` is handed on to it.
pub fn bench(workspace: &Workspace, bench: Bench, more: &[String]) -> Result<()> {
    let name = bench
        .to_possible_value()
        .map(|value| value.get_name().to_owned())
        .unwrap_or_default();
    match bench {
        Bench::Bitmap | Bench::Delta => micro::bench(workspace, "stillframe-page", &name),
        Bench::Index => micro::bench(workspace, "stillframe-repo", &name),
        Bench::Works | Bench::Papers | Bench::Responsive => {
            run(prepared_with_debian(workspace)?.arg(name).args(more))
        }
        Bench::Matrix => {
            let faulty = build_faulty(workspace)?;
            let mut lab = prepared(workspace)?;
            run(lab
                .env("STILLFRAME_FAULTY_BIN", faulty)
                .arg(name)
                .args(more))
        }
        _ => run(prepared(workspace)?.arg(name).args(more)),
    }
}

/// The binary of `tests/e2e`, with its surroundings.
fn prepared(workspace: &Workspace) -> Result<Command> {
    step("setup", setup::setup)?;
    let release = step("build", || {
        build_release(workspace, &["stillframe", "stillframe-e2e"])
    })?;
    let guests = step("guests", || guests::build(workspace))?;
    let mut lab = Command::new(release.join("stillframe-e2e"));
    lab.env("STILLFRAME_GUESTS", &guests.folder)
        .env("STILLFRAME_BIN", release.join("stillframe"))
        .env("STILLFRAME_COMMIT", workspace.commit()?);
    Ok(lab)
}

/// The same, for a bench whose guests have real software.
fn prepared_with_debian(workspace: &Workspace) -> Result<Command> {
    let lab = prepared(workspace)?;
    step("Debian guests", || rootfs::build(workspace))?;
    Ok(lab)
}
