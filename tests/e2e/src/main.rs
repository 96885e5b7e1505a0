//! The demo, the benches and the stress runs; started by `cargo xtask`.

use std::time::Duration;

use anyhow::Result;
use clap::{Parser, Subcommand};
use stillframe_e2e::{bench, demo, stress};

#[derive(Parser)]
#[command(about = "Real QEMU, real guests: demo, benches, stress runs")]
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
    /// The guests with real software: the pace of each, and every page of it compared.
    Works {
        /// Seconds over which the pace is measured.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        /// Only this one; then nothing is recorded.
        #[arg(long)]
        work: Option<String>,
    },
    /// The evaluations of two papers once more.
    Papers {
        /// Whose.
        paper: bench::papers::Paper,
        /// A minute of it, to see that it works; nothing is recorded.
        #[arg(long)]
        quick: bool,
    },
    /// Every page of every RAM block against an image of the same pause, all kinds of guest.
    Exactness {
        /// Checkpoints of each guest.
        #[arg(long, default_value_t = 27)]
        checkpoints: u64,
        /// Checkpoints of each schedule, with and without deltas and deduplication.
        #[arg(long, default_value_t = 100)]
        per_mode: u64,
        /// Only this kind of guest; then nothing is recorded.
        #[arg(long)]
        guest: Option<String>,
    },
    /// `kill -9` of the engine at random moments.
    Kill {
        /// How many.
        #[arg(long, default_value_t = 200)]
        kills: u64,
        /// Of the random moments.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Devices that come and go during a watch; every checkpoint is restored.
    Hotplug {
        /// Plugs and unplugs.
        #[arg(long, default_value_t = 200)]
        plugs: u64,
        /// Of the choice of devices and moments.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Checkpoints in quick succession, and some of them restored.
    Soak {
        /// How many.
        #[arg(long, default_value_t = 10_000)]
        count: u64,
        /// Milliseconds between two of them.
        #[arg(long, default_value_t = 100)]
        every_ms: u64,
        /// Seed of the choice of the restored ones.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// 60 000 checkpoints, one every 10 ms.
    Frequency,
    /// How soon a VM is back, against QEMU's own way.
    Restore,
    /// How soon a clone runs, and what ten of them take in memory.
    Clones,
    /// How soon a restored VM works as one that was never saved.
    Responsive {
        /// Checkpoints, each restored in every way.
        #[arg(long, default_value_t = 5)]
        turns: usize,
    },
    /// Checkpoints taken in every way, each restored eagerly and lazily, against an image of the original.
    RestoreExact {
        /// Of two checkpoints each, for every kind of guest and every way.
        #[arg(long, default_value_t = 2)]
        rounds: u64,
        /// Of the random moments.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// `kill -9` of lazy restores at random moments.
    RestoreKill {
        /// How many.
        #[arg(long, default_value_t = 150)]
        kills: u64,
        /// Of the random moments.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Every named fault point times every fault.
    Matrix {
        /// Only points whose names begin so; then nothing is recorded.
        #[arg(long)]
        point: Option<String>,
    },
    /// Everything that writes or takes memory behind an engine's back, at once.
    Torture {
        /// Checkpoints, each compared with the guest's memory.
        #[arg(long, default_value_t = 5000)]
        count: u64,
        /// Seed of the disturbances of the guest.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Another client stops a watched VM, and migrates watched VMs away.
    Others {
        /// Stops.
        #[arg(long, default_value_t = 500)]
        stops: u64,
        /// Migrations.
        #[arg(long, default_value_t = 100)]
        migrations: u64,
        /// Of the random moments.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// VMs sent to another process, copied and handed over, every page compared.
    Transfer {
        /// Copies, and hand-overs, of each guest, besides those that are compared byte by byte.
        #[arg(long, default_value_t = 3)]
        count: u64,
        /// Kills of sender and receiver.
        #[arg(long, default_value_t = 60)]
        kills: u64,
        /// Only this guest; then nothing is recorded.
        #[arg(long)]
        guest: Option<String>,
    },
    /// Random bit flips and truncations of a repository.
    Flips {
        /// How many.
        #[arg(long, default_value_t = 1000)]
        damages: u64,
        /// Of the random places.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
}

fn main() -> Result<()> {
    match Arguments::parse().what {
        What::Demo { seconds_before } => demo::run(Some(Duration::from_secs(seconds_before))),
        What::Checkpoint { turns } => bench::checkpoint::run(turns),
        What::Extremes => bench::extremes::run(),
        What::DirectIo => bench::direct_io::run(),
        What::Works { seconds, work } => bench::works::run(seconds, work.as_deref()),
        What::Papers { paper, quick } => bench::papers::run(paper, quick),
        What::Exactness {
            checkpoints,
            per_mode,
            guest,
        } => stress::exactness::run(checkpoints, per_mode, guest.as_deref()),
        What::Kill { kills, seed } => stress::kill::run(kills, seed),
        What::Hotplug { plugs, seed } => stress::hotplug::run(plugs, seed),
        What::Soak {
            count,
            every_ms,
            seed,
        } => stress::soak::run(count, every_ms, seed),
        What::Frequency => bench::frequency::run(),
        What::Restore => bench::restore::run(),
        What::Clones => bench::clones::run(),
        What::Responsive { turns } => bench::responsive::run(turns),
        What::RestoreExact { rounds, seed } => stress::restore_exact::run(rounds, seed),
        What::RestoreKill { kills, seed } => stress::restore_kill::run(kills, seed),
        What::Matrix { point } => stress::matrix::run(point.as_deref()),
        What::Torture { count, seed } => stress::torture::run(count, seed),
        What::Others {
            stops,
            migrations,
            seed,
        } => stress::others::run(stops, migrations, seed),
        What::Transfer {
            count,
            kills,
            guest,
        } => stress::transfer::run(count, kills, guest.as_deref()),
        What::Flips { damages, seed } => stress::flips::run(damages, seed),
    }
}
