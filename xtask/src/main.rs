//! The one door to everything done with this repository: `cargo xtask <command>`.
//!
//! Each command says every program it runs before it runs it.

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
    about = "The one door to the Stillframe repository"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install what the tests need and this Debian machine lacks (needs root if anything does)
    Setup,
    /// Build the test guests and print where they are
    Guests {
        /// Those with real software instead (some minutes and a gigabyte, once; needs root)
        #[arg(long)]
        debian: bool,
    },
    /// Check the rules of the source tree: layers, unsafe, sizes, words
    Tidy,
    /// Build everything the tests need and run all tests
    Test,
    /// What every commit must pass: setup, format, lints, tidy, builds, guests, fuzz targets, tests
    Ci,
    /// Take checkpoints of a real guest, kill it, restore three of them, and show it all
    Demo,
    /// Measure, and write the results under docs/results
    Bench {
        /// Which
        bench: lab::Bench,
        /// More arguments for it
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        more: Vec<String>,
    },
    /// Run the fuzz targets, and add the executions to docs/results/fuzz
    Fuzz {
        /// Which; `all` of them when none is given
        target: Option<String>,
        /// How long each is run
        #[arg(default_value_t = fuzz::SECONDS)]
        seconds: u64,
        /// Run each until all its recorded runs add up to so many executions
        #[arg(long, conflicts_with = "seconds", value_name = "EXECUTIONS")]
        until: Option<u64>,
        /// How many targets run at a time
        #[arg(long, default_value_t = 1)]
        jobs: usize,
    },
    /// Print every promised number with its last measurement; fail if one does not hold
    Claims,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.command {
        Command::Setup => setup::setup(),
        Command::Guests { debian: false } => Workspace::load().and_then(|workspace| {
            let guests = guests::build(&workspace)?;
            println!("{guests}");
            Ok(())
        }),
        Command::Guests { debian: true } => Workspace::load().and_then(|workspace| {
            let rootfs = guests::rootfs::build(&workspace)?;
            println!("{rootfs}");
            Ok(())
        }),
        Command::Tidy => Workspace::load().and_then(|workspace| tidy::tidy(&workspace)),
        Command::Test => Workspace::load().and_then(|workspace| ci::test(&workspace)),
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
