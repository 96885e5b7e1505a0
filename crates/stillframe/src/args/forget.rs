//! The command lines of `forget` and `prune`.

use clap::{ArgAction, Args};

/// `forget`
#[derive(Debug, Args)]
pub struct ForgetArgs {
    /// Checkpoints to forget, whatever the rules say
    #[arg(value_name = "ID")]
    pub ids: Vec<String>,
    /// Only look among the checkpoints of this VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// The rules.
    #[command(flatten)]
    pub keep: KeepArgs,
    /// Free the space afterwards, like prune
    #[arg(long, action = ArgAction::SetTrue)]
    pub prune: bool,
    /// Also forget what VMs that are being restored lazily still need: each of them is lost
    #[arg(long)]
    pub break_leases: bool,
    /// Only tell what would be forgotten
    #[arg(long)]
    pub dry_run: bool,
}

/// Which checkpoints of each VM stay; one that any rule keeps stays.
#[derive(Debug, Clone, Args)]
pub struct KeepArgs {
    /// Keep the last N checkpoints of each VM
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep_last: Option<u32>,
    /// Keep the last checkpoint of each of the last N hours that have one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep_hourly: Option<u32>,
    /// Keep the last checkpoint of each of the last N days that have one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep_daily: Option<u32>,
    /// Keep the last checkpoint of each of the last N weeks that have one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep_weekly: Option<u32>,
}

/// `prune`
#[derive(Debug, Args)]
pub struct PruneArgs {
    /// Only tell what would be freed
    #[arg(long)]
    pub dry_run: bool,
}
