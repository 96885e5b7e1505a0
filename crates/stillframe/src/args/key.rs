//! The command line of `key`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::PasswordArgs;

/// `key`
#[derive(Debug, Args)]
pub struct KeyArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub command: KeyCommand,
}

/// The subcommands of `key`.
#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// List the keys, who created each, and which one the password opened
    #[command(visible_alias = "ls")]
    List,
    /// Add a password that opens the repository
    Add(NewPasswordArgs),
    /// Remove a key, so that its password no longer opens the repository
    Remove(KeyName),
    /// Replace the password that opened the repository with a new one
    Passwd(NewPasswordArgs),
}

/// One key.
#[derive(Debug, Args)]
pub struct KeyName {
    /// The key: its id, or the first digits of it
    #[arg(value_name = "KEY")]
    pub key: String,
}

/// The source of a new password.
#[derive(Debug, Clone, Args)]
pub struct NewPasswordArgs {
    /// File with the new password [env: STILLFRAME_NEW_PASSWORD_FILE]
    #[arg(long, value_name = "FILE", conflicts_with = "new_password_command")]
    pub new_password_file: Option<PathBuf>,
    /// Command that prints the new password [env: STILLFRAME_NEW_PASSWORD_COMMAND]
    #[arg(long, value_name = "COMMAND")]
    pub new_password_command: Option<String>,
}

impl NewPasswordArgs {
    /// The same options as [`PasswordArgs`].
    pub fn password(&self) -> PasswordArgs {
        PasswordArgs {
            password_file: self.new_password_file.clone(),
            password_command: self.new_password_command.clone(),
        }
    }
}
