//! The command line of `init`.

use clap::Args;

/// `init`
#[derive(Debug, Args)]
pub struct InitArgs {
    /// The password is a random key of 128 bits or more: do not make each guess of it expensive. Every command then opens
    /// the repository in no time. A password that a person has chosen could be guessed
    #[arg(long)]
    pub random_password: bool,
}
