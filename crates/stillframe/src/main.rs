//! The binary `stillframe`: reads the command line, lets the engine and the repository work, tells
//! what came of it.
//!
//! ```text
//!   args, help      what can be asked for        password, durations   what is read
//!   cmd/            one file a subcommand        output, progress, table, shell   what is written
//!   interrupt       Ctrl-C and SIGTERM           exit, error           how it ends
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
    // Keys and guest memory are to be in no core dump, nor in reach of this user's other processes. Going on
    // without helps more than refusing: no kernel that the engine works on lacks it.
    let _ = stillframe_engine::forbid_dumps();
    // Before anything else: guardian and launch helper talk over standard input, and must start even where the
    // environment holds something that the command line's definitions refuse.
    match std::env::args_os().nth(1) {
        Some(first) if first == guardian::SUBCOMMAND => process::exit(guardian::run()),
        Some(first) if first == launch_helper::SUBCOMMAND => process::exit(launch_helper::run()),
        _ => {}
    }
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

/// The command line is not understood, or it asks for help or the version. What cannot be parsed is searched for
/// `--json` as it stands.
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
