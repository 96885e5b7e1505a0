//! `key`: the passwords of a repository.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::PasswordArgs;

/// `key`
#[derive(Debug, Args)]
pub struct KeyArgs {
    /// What is to be done.
    #[command(subcommand)]
    pub command: KeyCommand,
}

/// What is to be done with the passwords.
#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// List the keys: who made each, and which one the password opened
    #[command(visible_alias = "ls")]
    List,
    /// Let another password open the repository, too
    Add(NewPasswordArgs),
    /// Take a password away: that of a key
    Remove(KeyName),
    /// Put a new password in the place of the one given
    Passwd(NewPasswordArgs),
}

/// One key.
#[derive(Debug, Args)]
pub struct KeyName {
    /// The key: its id, or the first digits of it
    #[arg(value_name = "KEY")]
    pub key: String,
}

/// Where a new password comes from.
#[derive(Debug, Clone, Args)]
pub struct NewPasswordArgs {
    /// Read the new password from this file [env: STILLFRAME_NEW_PASSWORD_FILE]
    #[arg(long, value_name = "FILE", conflicts_with = "new_password_command")]
    pub new_password_file: Option<PathBuf>,
    /// What this prints is the new password [env: STILLFRAME_NEW_PASSWORD_COMMAND]
    #[arg(long, value_name = "COMMAND")]
    pub new_password_command: Option<String>,
}

impl NewPasswordArgs {
    /// In the form that all passwords have.
    pub fn password(&self) -> PasswordArgs {
        PasswordArgs {
            password_file: self.new_password_file.clone(),
            password_command: self.new_password_command.clone(),
        }
    }
}
