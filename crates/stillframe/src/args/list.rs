//! The command line of `list`.

use std::num::NonZeroUsize;

use clap::Args;
use stillframe_repo::Tag;

use crate::durations::times::{self, Moment};

/// `list`
#[derive(Debug, Clone, Default, Args)]
pub struct ListArgs {
    /// List only checkpoints of this VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// List only checkpoints with this tag; given several times: with all of these tags
    #[arg(long = "tag", value_name = "NAME")]
    pub tags: Vec<Tag>,
    /// List only checkpoints taken at this time or later
    #[arg(long, value_name = "TIME", value_parser = times::parse_moment)]
    pub since: Option<Moment>,
    /// List only checkpoints taken at this time or earlier
    #[arg(long, value_name = "TIME", value_parser = times::parse_moment)]
    pub until: Option<Moment>,
    /// List only the newest N checkpoints of each VM that match the other options
    #[arg(long, value_name = "N")]
    pub last: Option<NonZeroUsize>,
}
