//! The command line of `rewind`.

use std::time::Duration;

use clap::Args;

use super::{GuestArgs, LockArgs, VmSelector};
use crate::{durations, sizes};

/// `rewind`
#[derive(Debug, Args)]
pub struct RewindArgs {
    /// The checkpoint: its id, the first digits of it, `latest`, or `latest~2` (two before)
    #[arg(value_name = "ID")]
    pub id: String,
    /// The running VM.
    #[command(flatten)]
    pub vm: VmSelector,
    /// The VM's name when the checkpoint was taken [default: its name now]
    #[arg(long, value_name = "NAME")]
    pub of_vm: Option<String>,
    /// How the guest continues.
    #[command(flatten)]
    pub guest: GuestArgs,
    /// Leave all disks as they are, also those that the checkpoint holds, and rewind although one has changed since; this may damage the data on it [default: disks that the checkpoint holds go back, too]
    #[arg(long)]
    pub disks_as_they_are: bool,
    /// Give up, and change nothing, if the checks in the pause take longer than this
    #[arg(long, value_name = "TIME", value_parser = durations::parse_positive, default_value = "3s")]
    pub pause_limit: Duration,
    /// Upper bound on copies of memory and disks; fail if more of them differs from the checkpoint
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_copy_buffer, default_value = "1G")]
    pub copy_buffer: u64,
    /// How the repository is locked.
    #[command(flatten)]
    pub lock: LockArgs,
}
