//! Entry point for all work on this repository: `cargo xtask <command>`.
//!
//! Each command prints the programs that it runs before it runs them.

mod ci;
mod claims;
mod fuzz;
mod guests;
mod lab;
mod micro;
mod run;
mod setup;
mod tidy;
mod workspace;

use clap::{Parser, Subcommand};
use std::process::ExitCode;
use workspace::Workspace;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Builds, tests and measures the Stillframe repository"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install what the tests need on this Debian machine (needs root if something is missing)
    Setup,
    /// Build the test guests and print their paths
    Guests {
        /// Build the guests with real software instead (once, minutes and 1 GB; needs root)
        #[arg(long)]
        debian: bool,
        /// Fetch a newer QEMU beside them, as `cargo xtask test` does (40 MB)
        #[arg(long, conflicts_with = "debian")]
        newer_qemu: bool,
    },
    /// Build the agent for Linux guests, a program that needs no libraries, and print its path
    GuestAgent,
    /// Check the rules of the source tree: imports, unsafe, sizes, words
    Tidy,
    /// Build what the tests need and run tests
    Test {
        /// Tests to run
        #[arg(value_enum, default_value = "all")]
        set: ci::TestSet,
    },
    /// Run what every commit must pass: setup, format, lints, tidy, guests, fuzz targets, tests
    Ci,
    /// Take checkpoints of a real guest, kill it, restore three of them, and print the results
    Demo,
    /// Run a bench or stress run and write its results to docs/results
    Bench {
        /// Bench to run
        bench: lab::Bench,
        /// Further arguments of the bench
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        more: Vec<String>,
    },
    /// Run the fuzz targets, and add the executions to docs/results/fuzz
    Fuzz {
        /// Fuzz target to run, or `all` [default: all]
        target: Option<String>,
        /// Time to run each target, in seconds
        #[arg(default_value_t = fuzz::SECONDS)]
        seconds: u64,
        /// Run each target until its recorded runs add up to this number of executions
        #[arg(long, conflicts_with = "seconds", value_name = "EXECUTIONS")]
        until: Option<u64>,
        /// Number of targets to run at the same time
        #[arg(long, default_value_t = 1)]
        jobs: usize,
    },
    /// Print each promised number with its last measurement; fail if one does not hold
    Claims,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.command {
        Command::Setup => setup::setup(),
        Command::Guests {
            debian: false,
            newer_qemu,
        } => Workspace::load().and_then(|workspace| {
            let guests = guests::build(&workspace)?;
            if newer_qemu {
                guests::newer_qemu::fetch(&guests.folder)?;
            }
            println!("{guests}");
            Ok(())
        }),
        Command::Guests { debian: true, .. } => Workspace::load().and_then(|workspace| {
            let rootfs = guests::rootfs::build(&workspace)?;
            println!("{rootfs}");
            Ok(())
        }),
        Command::GuestAgent => Workspace::load().and_then(|workspace| {
            println!("{}", guests::own_agent(&workspace)?.display());
            Ok(())
        }),
        Command::Tidy => Workspace::load().and_then(|workspace| tidy::tidy(&workspace)),
        Command::Test { set } => Workspace::load().and_then(|workspace| ci::test(&workspace, set)),
        Command::Ci => Workspace::load().and_then(|workspace| ci::ci(&workspace)),
        Command::Demo => Workspace::load().and_then(|workspace| lab::demo(&workspace)),
        Command::Bench { bench, more } => {
            Workspace::load().and_then(|workspace| lab::bench(&workspace, bench, &more))
        }
        Command::Fuzz {
            target,
            seconds,
            until,
            jobs,
        } => Workspace::load().and_then(|workspace| {
            let budget = until.map_or(fuzz::Budget::Seconds(seconds), fuzz::Budget::Total);
            fuzz::fuzz(&workspace, target.as_deref(), budget, jobs)
        }),
        Command::Claims => Workspace::load().and_then(|workspace| claims::claims(&workspace)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}
