//! The command lines of `forget` and `prune`.

use clap::{ArgAction, Args};
use stillframe_repo::{Age, Tag};

use crate::durations::times;

/// `forget`
#[derive(Debug, Args)]
pub struct ForgetArgs {
    /// Checkpoints to forget, regardless of the rules
    #[arg(value_name = "ID")]
    pub ids: Vec<String>,
    /// Consider only checkpoints of this VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// Apply the rules only to checkpoints with this tag; given several times: with all of these tags
    #[arg(long = "tag", value_name = "NAME", requires = "KeepArgs")]
    pub tags: Vec<Tag>,
    /// The rules.
    #[command(flatten)]
    pub keep: KeepArgs,
    /// Run prune afterwards, to free the space
    #[arg(long, action = ArgAction::SetTrue)]
    pub prune: bool,
    /// Also forget checkpoints that a lazy restore still reads from; this destroys the restored VM
    #[arg(long)]
    pub break_leases: bool,
    /// Report what would be forgotten, and change nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// The checkpoints of each VM to keep: all that match at least one rule.
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
    /// Keep all checkpoints that are less than AGE older than the VM's newest one
    #[arg(long, value_name = "AGE", value_parser = times::parse_age)]
    pub keep_within: Option<Age>,
    /// Keep all checkpoints with this tag; may be given several times
    #[arg(long = "keep-tag", value_name = "NAME")]
    pub keep_tags: Vec<Tag>,
}

/// `prune`
#[derive(Debug, Args)]
pub struct PruneArgs {
    /// Report what would be freed, and change nothing
    #[arg(long)]
    pub dry_run: bool,
}
