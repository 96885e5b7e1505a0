//! The demo, and the benches: ratios against a named peer in one run, raw data kept. Started by `cargo xtask`.

mod chart;
mod checkpoint;
mod clones;
mod demo;
mod direct_io;
mod disk_work;
mod disks;
mod extremes;
mod frequency;
mod host_memory;
mod migration;
mod migration_cost;
mod page;
mod papers;
mod peers;
mod responsive;
mod restore;
mod restore_disks;
mod slowdown;
mod workloads;

use std::time::Duration;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "Demo and benches on real QEMU and real guests")]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// The main job once: checkpoints of a working guest, and three of them restored.
    Demo {
        /// Seconds spent before, building; counted in.
        #[arg(long, default_value_t = 0)]
        seconds_before: u64,
    },
    /// The pause against QEMU's own floor, beside QEMU's own ways to save.
    Checkpoint {
        /// Turns of floors and increments.
        #[arg(long, default_value_t = 10)]
        turns: usize,
    },
    /// The pause of a large guest, and of one that writes all of its memory.
    Extremes,
    /// The pause and the reads of a guest whose disk is read past the host's page cache.
    DirectIo,
    /// The pause of a checkpoint that holds the disks.
    Disks,
    /// What a guest's work with its disk loses, and what is stored of the disk of one that compiles.
    DiskWork,
    /// The guests with real software: the pace of each, and every page of it compared.
    Workloads {
        /// Seconds over which the pace is measured.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        /// Only this one; then nothing is recorded.
        #[arg(long)]
        workload: Option<String>,
    },
    /// The evaluations of four papers once more.
    Papers {
        /// Whose.
        paper: papers::Paper,
        /// A minute of it, to see that it works; nothing is recorded.
        #[arg(long)]
        quick: bool,
        /// Of dtrack.
        #[command(flatten)]
        cells: papers::Cells,
    },
    /// What a migration costs: time of processors and memory, the pause of many, the guest's work.
    MigrationCost {
        /// Only this part.
        #[arg(long, value_enum)]
        only: Option<migration_cost::Part>,
    },
    /// 60 000 checkpoints, one every 10 ms.
    Frequency,
    /// How soon a VM is back, against QEMU's own way.
    Restore,
    /// How soon a VM is back with a large disk that the checkpoint holds.
    RestoreDisks,
    /// How soon a clone runs, and what ten of them take in memory.
    Clones,
    /// How soon a restored VM works as one that was never saved.
    Responsive {
        /// Checkpoints, each restored in every way.
        #[arg(long, default_value_t = 5)]
        turns: usize,
    },
}

fn main() -> Result<()> {
    match Arguments::parse().what {
        What::Demo { seconds_before } => demo::run(Some(Duration::from_secs(seconds_before))),
        What::Checkpoint { turns } => checkpoint::run(turns),
        What::Extremes => extremes::run(),
        What::DirectIo => direct_io::run(),
        What::Disks => disks::run(),
        What::DiskWork => disk_work::run(),
        What::Workloads { seconds, workload } => workloads::run(seconds, workload.as_deref()),
        What::Papers {
            paper,
            quick,
            cells,
        } => papers::run(paper, quick, &cells),
        What::MigrationCost { only } => migration_cost::run(only),
        What::Frequency => frequency::run(),
        What::Restore => restore::run(),
        What::RestoreDisks => restore_disks::run(),
        What::Clones => clones::run(),
        What::Responsive { turns } => responsive::run(turns),
    }
}
