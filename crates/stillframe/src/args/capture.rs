//! The command lines of `checkpoint` and `watch`.

use std::num::NonZeroU64;
use std::time::Duration;

use clap::Args;
use stillframe_engine::checkpoint::ScheduleChoice;
use stillframe_repo::{Note, Tag};

use super::VmSelector;
use crate::{durations, sizes};

/// How checkpoints are taken; shared by `checkpoint` and `watch`.
#[derive(Debug, Clone, Args)]
pub struct CaptureArgs {
    /// Give the checkpoint this tag, to find and keep it by; may be given several times
    #[arg(long = "tag", value_name = "NAME")]
    pub tags: Vec<Tag>,
    /// Say this about the checkpoint
    #[arg(long, value_name = "TEXT")]
    pub note: Option<Note>,
    /// Resume the VM when a pause takes longer [default: 3s; 10m with --verify]
    #[arg(long, value_name = "TIME", value_parser = durations::parse_positive)]
    pub pause_limit: Option<Duration>,
    /// Wait at most this long for another process' lock on the repository
    #[arg(long, value_name = "TIME", value_parser = durations::parse, default_value = "10s")]
    pub lock_wait: Duration,
    /// Compare all memory, in the pause, with the checkpoint: a long pause
    #[arg(long)]
    pub verify: bool,
    /// What is copied when: auto, stop-copy, pre-copy or copy-on-write
    #[arg(long, value_name = "SCHEDULE", default_value = "auto")]
    pub schedule: ScheduleChoice,
    /// Size of the delta cache: previous contents of pages, of which only changes are stored; 0: store whole pages
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse, default_value = "256M")]
    pub delta_cache: u64,
    /// Upper bound on copies of guest memory; where more was written it is stored before the pause
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_copy_buffer, default_value = "1G")]
    pub copy_buffer: u64,
    /// Upper bound on bytes written to the repository in a second
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_positive)]
    pub limit_write: Option<NonZeroU64>,
    /// Store pages even if the repository has them already
    #[arg(long)]
    pub no_dedup: bool,
    /// Leave the guest's clock behind by what pauses take from it; else its agent sets it past half a second
    #[arg(long)]
    pub keep_guest_clock: bool,
}

impl CaptureArgs {
    /// The limit given, or the default.
    pub fn pause_limit(&self) -> Duration {
        let default_s = if self.verify { 600 } else { 3 };
        self.pause_limit.unwrap_or(Duration::from_secs(default_s))
    }
}

/// `checkpoint`
#[derive(Debug, Args)]
pub struct CheckpointArgs {
    /// Which running VM.
    #[command(flatten)]
    pub vm: VmSelector,
    /// How.
    #[command(flatten)]
    pub capture: CaptureArgs,
}

/// `watch`
#[derive(Debug, Args)]
pub struct WatchArgs {
    /// Which running VM.
    #[command(flatten)]
    pub vm: VmSelector,
    /// The interval, from the start of a checkpoint to the start of the next
    #[arg(long, value_name = "TIME", value_parser = durations::parse_positive)]
    pub every: Duration,
    /// End after K checkpoints [default: when the VM ends, or on Ctrl-C]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// How.
    #[command(flatten)]
    pub capture: CaptureArgs,
}
