//! `copy`: checkpoints into another repository.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::PasswordArgs;
use crate::durations;

/// `copy`
#[derive(Debug, Args)]
pub struct CopyArgs {
    /// Checkpoints: ids, the first digits of them, `latest`, or `latest~2` (two before)
    #[arg(value_name = "ID", required = true)]
    pub ids: Vec<String>,
    /// Only look among the checkpoints of this VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// The repository to copy into: a directory
    #[arg(long, value_name = "DIR")]
    pub to: PathBuf,
    /// Read that repository's password from this file [env: STILLFRAME_TO_PASSWORD_FILE]
    #[arg(long, value_name = "FILE", conflicts_with = "to_password_command")]
    pub to_password_file: Option<PathBuf>,
    /// What this prints is that repository's password [env: STILLFRAME_TO_PASSWORD_COMMAND]
    #[arg(long, value_name = "COMMAND")]
    pub to_password_command: Option<String>,
    /// Wait so long for another process' lock on either repository
    #[arg(long, value_name = "TIME", value_parser = durations::parse, default_value = "10s")]
    pub lock_wait: Duration,
}

impl CopyArgs {
    /// The password of the other repository, in the form that all passwords have.
    pub fn to_password(&self) -> PasswordArgs {
        PasswordArgs {
            password_file: self.to_password_file.clone(),
            password_command: self.to_password_command.clone(),
        }
    }
}
