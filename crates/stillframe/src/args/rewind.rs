//! The command line of `rewind`.

use std::time::Duration;

use clap::Args;

use super::VmSelector;
use crate::{durations, sizes};

/// `rewind`
#[derive(Debug, Args)]
pub struct RewindArgs {
    /// The checkpoint: its id, the first digits of it, `latest`, or `latest~2` (two before)
    #[arg(value_name = "ID")]
    pub id: String,
    /// Which running VM.
    #[command(flatten)]
    pub vm: VmSelector,
    /// The name that the VM had when the checkpoint was taken [default: the one it has]
    #[arg(long, value_name = "NAME")]
    pub of_vm: Option<String>,
    /// Leave the guest paused, ready to run
    #[arg(long)]
    pub paused: bool,
    /// Leave the guest's clock as at the checkpoint; else guest agents are asked to set them
    #[arg(long)]
    pub keep_guest_clock: bool,
    /// Compare all memory with the checkpoint before the guest runs: a long pause
    #[arg(long)]
    pub verify: bool,
    /// Go on although a disk is no longer what the guest will remember
    #[arg(long)]
    pub disks_as_they_are: bool,
    /// Give up when the pause takes longer before anything was changed
    #[arg(long, value_name = "TIME", value_parser = durations::parse_positive, default_value = "3s")]
    pub pause_limit: Duration,
    /// Hold at most so much guest memory; where more differs from the checkpoint, it is refused
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_copy_buffer, default_value = "1G")]
    pub copy_buffer: u64,
    /// Wait so long for another process' lock on the repository
    #[arg(long, value_name = "TIME", value_parser = durations::parse, default_value = "10s")]
    pub lock_wait: Duration,
}
