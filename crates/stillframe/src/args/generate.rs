//! The command lines of `completions` and `man`.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;

/// `completions`
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// Shell to print completions for
    #[arg(value_name = "SHELL")]
    pub shell: Shell,
}

/// `man`
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Directory to write to, such as /usr/local/share/man/man1
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
}
