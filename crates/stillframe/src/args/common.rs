//! Options that several commands share.

use std::time::Duration;

use clap::Args;

use crate::durations;

/// How a command waits for the repository.
#[derive(Debug, Clone, Args)]
pub struct LockArgs {
    /// How long to wait for another process's lock on the repository
    #[arg(long, value_name = "TIME", value_parser = durations::parse, default_value = "10s")]
    pub lock_wait: Duration,
}

/// How a guest continues from a checkpoint; shared by `restore`, `clone` and `rewind`.
#[derive(Debug, Clone, Default, Args)]
pub struct GuestArgs {
    /// Leave the guest paused; `cont` on its monitor runs it
    #[arg(long)]
    pub paused: bool,
    /// Leave the guest's clock as at the checkpoint [default: its guest agent sets the clock]
    #[arg(long)]
    pub keep_guest_clock: bool,
    /// Compare all memory with the checkpoint before the guest runs
    #[arg(long)]
    pub verify: bool,
}
