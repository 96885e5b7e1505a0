//! The stress runs; started by `cargo xtask bench`.

use anyhow::Result;
use clap::{Parser, Subcommand};
use stillframe_stress::{
    databases, disk_kills, disk_returns, disks, exactness, flips, hotplug, kill, lazy_disks,
    matrix, migrate, others, restore_exact, restore_kill, soak, to_and_fro, torture,
};

#[derive(Parser)]
#[command(about = "Stress runs on real QEMU and real guests")]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
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
    /// Checkpoints taken in every way, each restored eagerly and lazily, against an image of the original.
    RestoreExact {
        /// Of two checkpoints each, for every kind of guest and every way.
        #[arg(long, default_value_t = 2)]
        rounds: u64,
        /// Of the random moments.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Checkpoints that hold disks, of guests that write them in every way, compared and restored.
    DiskExactness {
        /// How many, over all machines.
        #[arg(long, default_value_t = 204)]
        checkpoints: u64,
        /// Of the lengths of the watches.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// `kill -9` of the engine, and of its guardian, while a checkpoint has its filters in QEMU, or copies disks in rounds.
    DiskKills {
        /// How many, over all machines; a third of them in rounds.
        #[arg(long, default_value_t = 320)]
        kills: u64,
        /// Of the random moments.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Rewinds with disks, some after one that was killed, and clones with disks.
    DiskReturns {
        /// Rewinds, over all machines.
        #[arg(long, default_value_t = 60)]
        rewinds: u64,
        /// Clones, over all machines.
        #[arg(long, default_value_t = 28)]
        clones: u64,
        /// Of the random moments and checkpoints.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// `kill -9` of lazy restores that fill disks, too, at random moments.
    LazyDisks {
        /// How many, over all machines.
        #[arg(long, default_value_t = 72)]
        strikes: u64,
        /// Of the random moments.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Checkpoints with the disk of a database that commits, each restored, and its disk recovered.
    Databases {
        /// Number of checkpoints of each database.
        #[arg(long, default_value_t = 50)]
        checkpoints: u64,
        /// Only this database; then nothing is recorded.
        #[arg(long)]
        database: Option<String>,
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
    /// VMs migrated to another process, every page compared; then strikes at the hand-over.
    Migrate {
        /// Migrations of each guest in each mode, besides those that are compared byte by byte.
        #[arg(long, default_value_t = 23)]
        count: u64,
        /// Kills and cuts at random moments, besides every fault at every point.
        #[arg(long, default_value_t = 200)]
        kills: u64,
        /// Only this guest; then nothing is recorded.
        #[arg(long)]
        guest: Option<String>,
    },
    /// A guest that moves between two taps of a bridge, while its TCP connection lives on.
    ToAndFro {
        /// Moves.
        #[arg(long, default_value_t = 50)]
        moves: u32,
        /// Number of the last moves that go through a relay with a delay of 20 ms.
        #[arg(long, default_value_t = 10)]
        relayed: u32,
        /// In the network namespace of this process; by default in one of its own.
        #[arg(long)]
        inside: bool,
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
        What::Exactness {
            checkpoints,
            per_mode,
            guest,
        } => exactness::run(checkpoints, per_mode, guest.as_deref()),
        What::Kill { kills, seed } => kill::run(kills, seed),
        What::Hotplug { plugs, seed } => hotplug::run(plugs, seed),
        What::Soak {
            count,
            every_ms,
            seed,
        } => soak::run(count, every_ms, seed),
        What::RestoreExact { rounds, seed } => restore_exact::run(rounds, seed),
        What::DiskExactness { checkpoints, seed } => disks::run(checkpoints, seed),
        What::DiskKills { kills, seed } => disk_kills::run(kills, seed),
        What::DiskReturns {
            rewinds,
            clones,
            seed,
        } => disk_returns::run(rewinds, clones, seed),
        What::LazyDisks { strikes, seed } => lazy_disks::run(strikes, seed),
        What::Databases {
            checkpoints,
            database,
        } => databases::run(checkpoints, database.as_deref()),
        What::RestoreKill { kills, seed } => restore_kill::run(kills, seed),
        What::Matrix { point } => matrix::run(point.as_deref()),
        What::Torture { count, seed } => torture::run(count, seed),
        What::Others {
            stops,
            migrations,
            seed,
        } => others::run(stops, migrations, seed),
        What::Migrate {
            count,
            kills,
            guest,
        } => migrate::run(count, kills, guest.as_deref()),
        What::ToAndFro {
            moves,
            relayed,
            inside,
        } => match inside {
            true => to_and_fro::inside(moves, relayed),
            false => to_and_fro::run(moves, relayed),
        },
        What::Flips { damages, seed } => flips::run(damages, seed),
    }
}
