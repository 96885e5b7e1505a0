//! `demo` and `bench`: build the binary that does it, from `tests/bench` or `tests/stress`, and run it.

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
    /// Pause of a checkpoint, against the minimum of QEMU and its own ways to save (about 9 minutes)
    Checkpoint,
    /// Comparison of every page with an image of the same pause, for all guests and schedules (about 7 minutes)
    Exactness,
    /// 200 times `kill -9` of the engine (about 6 minutes)
    Kill,
    /// Every fault at every fault point, with a VM (about 15 minutes)
    Matrix,
    /// 5000 checkpoints of a guest with merged, swapped, discarded and DMA-written memory, and with hotplug
    /// (about an hour)
    Torture,
    /// VMs migrated to another process, every page compared; then faults, kills and cuts at the hand-over
    /// (about 40 minutes)
    Migrate,
    /// Time of processors and memory of a migration, its pause over and over, and the guest's work meanwhile (about 20
    /// minutes)
    MigrationCost,
    /// 50 moves of a guest between two taps of a bridge, with a TCP connection (about 3 minutes)
    ToAndFro,
    /// 1000 bit flips and truncations of a repository (about 5 minutes)
    Flips,
    /// 200 plugs and unplugs during a watch, with a restore of every checkpoint (about 10 minutes)
    Hotplug,
    /// 500 stops and 100 migrations by another QMP client during a watch (about 15 minutes)
    Others,
    /// 10 000 checkpoints, one every 100 ms, and 20 restores (about 19 minutes)
    Soak,
    /// Checkpoints every 10 ms for 10 minutes (about 12 minutes)
    Frequency,
    /// Pause of a guest of 8 GiB, and of one that writes all of its memory (about 12 minutes)
    Extremes,
    /// Pause and disk throughput of a guest that reads a disk with `cache=none` (about 9 minutes)
    DirectIo,
    /// Pause of a checkpoint that holds the disks (about 8 minutes)
    Disks,
    /// What a guest's work with its disk loses while it is checkpointed with the disk, and what is stored of a disk (about
    /// 14 minutes; the first time longer, to build the guests)
    DiskWork,
    /// 200 checkpoints with disks, compared byte by byte, and 50 VMs restored from them with disks written anew (about 15 minutes)
    DiskExactness,
    /// 200 `kill -9` of the engine while a checkpoint has its filters in QEMU (about 25 minutes)
    DiskKills,
    /// 60 rewinds with disks, every third after one that was killed, and 28 clones with disks (about 20 minutes)
    DiskReturns,
    /// 72 times `kill -9` of a lazy restore that fills disks, too, and `restore --resume` (about 15 minutes)
    LazyDisks,
    /// 50 checkpoints each with the disk of SQLite and of PostgreSQL while it commits, restored, and the disk alone recovered
    /// (about 40 minutes; the first time longer, to build the guest)
    Databases,
    /// Time of a lazy and an eager restore, 1 to 8 GiB, against QEMU (about 20 minutes)
    Restore,
    /// Time of a restore with a disk of 20 GB, lazily against without the disk, eagerly against `qemu-img convert` (about 8 minutes)
    RestoreDisks,
    /// Time until a clone runs, against QEMU, and the memory of ten clones (about 6 minutes)
    Clones,
    /// Checkpoints of every schedule, restored eagerly and lazily and compared with the original
    /// (about 12 minutes)
    RestoreExact,
    /// 150 times `kill -9` of a lazy restore (about 12 minutes)
    RestoreKill,
    /// Time until a restored VM is as fast as one that was never saved (about 12 minutes; the first time longer, to
    /// build the guest)
    Responsive,
    /// Speed of guests with real software, alone and watched (about 20 minutes; the first time longer, to build them)
    Workloads,
    /// The evaluations of five papers: `papers fitdoc`, `papers cow` and `papers vm-me`, on guests with real software (about
    /// half an hour each; the first time longer, to build the guests), `papers dtrack` (about 30 minutes) and `papers
    /// page-cache` (about 20 minutes)
    Papers,
    /// The two-level dirty bitmap against a scan of all bits (seconds; no guest)
    Bitmap,
    /// Size and speed of deltas on the mixes of FITDOC's table I (seconds; no guest)
    Delta,
    /// Memory and lookup time of a repository's index (half a minute; no guest)
    Index,
}

/// The packages with the demo and the benches, and with the stress runs.
const BENCHES: &str = "stillframe-bench";
const STRESS_RUNS: &str = "stillframe-stress";

/// Runs the demo.
pub fn demo(workspace: &Workspace) -> Result<()> {
    let began = Instant::now();
    let mut lab = prepared(workspace, BENCHES)?;
    let seconds = began.elapsed().as_secs().to_string();
    run(lab.args(["demo", "--seconds-before", &seconds]))
}

/// Runs one bench with further arguments.
pub fn bench(workspace: &Workspace, bench: Bench, more: &[String]) -> Result<()> {
    let name = bench
        .to_possible_value()
        .map(|value| value.get_name().to_owned())
        .unwrap_or_default();
    match bench {
        Bench::Bitmap | Bench::Delta => micro::bench(workspace, "stillframe-page", &name),
        Bench::Index => micro::bench(workspace, "stillframe-repo", &name),
        Bench::Workloads | Bench::Papers | Bench::Responsive | Bench::DiskWork => {
            run(prepared_with_debian(workspace, BENCHES)?
                .arg(name)
                .args(more))
        }
        Bench::Databases => run(prepared_with_debian(workspace, STRESS_RUNS)?
            .arg(name)
            .args(more)),
        Bench::Matrix | Bench::Migrate | Bench::DiskExactness | Bench::DiskKills => {
            let faulty = build_faulty(workspace)?;
            let mut lab = prepared(workspace, STRESS_RUNS)?;
            run(lab
                .env("STILLFRAME_FAULTY_BIN", faulty)
                .arg(name)
                .args(more))
        }
        Bench::Checkpoint
        | Bench::Frequency
        | Bench::Extremes
        | Bench::DirectIo
        | Bench::Disks
        | Bench::MigrationCost
        | Bench::Restore
        | Bench::RestoreDisks
        | Bench::Clones => run(prepared(workspace, BENCHES)?.arg(name).args(more)),
        Bench::Exactness
        | Bench::Kill
        | Bench::DiskReturns
        | Bench::LazyDisks
        | Bench::Torture
        | Bench::ToAndFro
        | Bench::Flips
        | Bench::Hotplug
        | Bench::Others
        | Bench::Soak
        | Bench::RestoreExact
        | Bench::RestoreKill => run(prepared(workspace, STRESS_RUNS)?.arg(name).args(more)),
    }
}

/// The binary of this package, which runs benches or stress runs, and its environment.
fn prepared(workspace: &Workspace, package: &str) -> Result<Command> {
    step("setup", setup::setup)?;
    let release = step("build", || {
        build_release(workspace, &["stillframe", package])
    })?;
    let guests = step("guests", || guests::build(workspace))?;
    let mut lab = Command::new(release.join(package));
    lab.env("STILLFRAME_GUESTS", &guests.folder)
        .env("STILLFRAME_BIN", release.join("stillframe"))
        .env("STILLFRAME_COMMIT", workspace.commit()?);
    Ok(lab)
}

/// The same for a bench whose guests have real software.
fn prepared_with_debian(workspace: &Workspace, package: &str) -> Result<Command> {
    let lab = prepared(workspace, package)?;
    step("Debian guests", || rootfs::build(workspace))?;
    Ok(lab)
}
