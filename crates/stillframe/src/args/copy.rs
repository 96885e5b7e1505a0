//! `copy`: checkpoints into another repository.

use std::path::PathBuf;

use clap::Args;

use super::{LockArgs, PasswordArgs};

/// `copy`
#[derive(Debug, Args)]
pub struct CopyArgs {
    /// Checkpoints: ids, the first digits of them, `latest`, or `latest~2` (two before)
    #[arg(value_name = "ID", required = true)]
    pub ids: Vec<String>,
    /// Consider only checkpoints of this VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// Directory of the repository to copy to
    #[arg(long, value_name = "DIR")]
    pub to: PathBuf,
    /// File with the password of the repository to copy to [env: STILLFRAME_TO_PASSWORD_FILE]
    #[arg(long, value_name = "FILE", conflicts_with = "to_password_command")]
    pub to_password_file: Option<PathBuf>,
    /// Command that prints the password of the repository to copy to [env: STILLFRAME_TO_PASSWORD_COMMAND]
    #[arg(long, value_name = "COMMAND")]
    pub to_password_command: Option<String>,
    /// How the repositories are locked.
    #[command(flatten)]
    pub lock: LockArgs,
}

impl CopyArgs {
    /// The password options of the repository to copy to.
    pub fn to_password(&self) -> PasswordArgs {
        PasswordArgs {
            password_file: self.to_password_file.clone(),
            password_command: self.to_password_command.clone(),
        }
    }
}
