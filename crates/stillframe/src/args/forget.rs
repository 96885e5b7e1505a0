//! The command lines of `forget` and `prune`.

use clap::{ArgAction, Args};
use stillframe_repo::{Age, Tag};

use crate::durations::times;

/// `forget`
#[derive(Debug, Args)]
pub struct ForgetArgs {
    /// Checkpoints to forget, whatever the rules say
    #[arg(value_name = "ID")]
    pub ids: Vec<String>,
    /// Only look among the checkpoints of this VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// The rules look only at checkpoints with this tag; given several times, with all of these tags
    #[arg(long = "tag", value_name = "NAME", requires = "KeepArgs")]
    pub tags: Vec<Tag>,
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
#[derive(Debug, Clone, Default, Args)]
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
    /// Keep the last checkpoint of each of the last N months that have one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep_monthly: Option<u32>,
    /// Keep the last checkpoint of each of the last N years that have one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub keep_yearly: Option<u32>,
    /// Keep all checkpoints that are newer than AGE before the newest one of the VM
    #[arg(long, value_name = "AGE", value_parser = times::parse_age)]
    pub keep_within: Option<Age>,
    /// Keep all checkpoints with this tag; may be given several times
    #[arg(long = "keep-tag", value_name = "NAME")]
    pub keep_tags: Vec<Tag>,
}

/// `prune`
#[derive(Debug, Args)]
pub struct PruneArgs {
    /// Only tell what would be freed
    #[arg(long)]
    pub dry_run: bool,
}
