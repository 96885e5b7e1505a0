//! The binary `stillframe`: reads the command line, calls the engine and the repository, and reports the result.
//!
//! ```text
//!   args, help      the command line             password, durations, sizes       input
//!   cmd/            one file per subcommand      output, progress, table, shell   output
//!   interrupt       Ctrl-C and SIGTERM           exit, error                      exit codes, errors
//!   unlocked        keys in the kernel
//! ```

mod args;
mod cmd;
mod durations;
mod error;
mod exit;
mod help;
mod interrupt;
mod output;
mod password;
mod picture;
mod progress;
mod quantity;
mod shell;
mod sizes;
mod table;
mod unlocked;

use std::process;

use clap::Parser;
use stillframe_engine::{guardian, launch_helper};

use crate::args::Cli;
use crate::exit::Exit;
use crate::output::{Console, OutputError};

fn main() {
    // Keeps keys and guest memory out of core dumps and away from this user's other processes. A failure is ignored:
    // every kernel that the engine supports can do this.
    let _ = stillframe_engine::forbid_dumps();
    // Before clap: guardian and launch helper use standard input, and must start even if clap refuses a value of an
    // environment variable.
    match std::env::args_os().nth(1) {
        Some(first) if first == guardian::SUBCOMMAND => process::exit(guardian::run()),
        Some(first) if first == launch_helper::SUBCOMMAND => process::exit(launch_helper::run()),
        _ => {}
    }
    interrupt::outlive_file_limit();
    let cli = Cli::try_parse().unwrap_or_else(|error| refuse(&error));
    let console = Console {
        json: cli.global.json,
        quiet: cli.global.quiet,
        verbose: cli.global.verbose,
    };
    let exit = cmd::run(cli, console).unwrap_or_else(|error| {
        let exit = Exit::of(&error);
        if !matches!(error.downcast_ref(), Some(OutputError::ReaderGone)) {
            console.error(&output::chain(error.chain()), exit.code());
        }
        exit
    });
    process::exit(exit.code());
}

/// Exits after a command line that clap did not accept, or that requests help or the version. `--json` is searched in
/// the raw arguments, because there are no parsed ones.
fn refuse(error: &clap::Error) -> ! {
    let json = std::env::args_os().any(|word| word == "--json");
    if !json || !error.use_stderr() {
        error.exit();
    }
    let console = Console {
        json,
        quiet: false,
        verbose: false,
    };
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
    console.error(text, Exit::Usage.code());
    process::exit(Exit::Usage.code());
}
