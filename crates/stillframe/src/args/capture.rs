//! The command lines of `checkpoint` and `watch`.

use std::num::NonZeroU64;
use std::time::Duration;

use clap::Args;
use stillframe_engine::checkpoint::ScheduleChoice;
use stillframe_engine::disks::DiskChoice;
use stillframe_repo::{Note, Tag};

use super::{LockArgs, VmSelector};
use crate::{durations, sizes};

/// What a checkpoint has of the VM's disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Disks {
    /// The identity of their files.
    Reference,
    /// Their content at the moment of the checkpoint.
    Capture,
}

impl From<Disks> for DiskChoice {
    fn from(disks: Disks) -> DiskChoice {
        match disks {
            Disks::Reference => DiskChoice::Reference,
            Disks::Capture => DiskChoice::Capture,
        }
    }
}

/// How checkpoints are taken; shared by `checkpoint` and `watch`.
#[derive(Debug, Clone, Args)]
pub struct CaptureArgs {
    /// Tag the checkpoint, to find it in `list` and keep it in `forget`; may be given several times
    #[arg(long = "tag", value_name = "NAME")]
    pub tags: Vec<Tag>,
    /// Store this note with the checkpoint
    #[arg(long, value_name = "TEXT")]
    pub note: Option<Note>,
    /// Resume the VM and discard the checkpoint if the pause exceeds this [default: 3s; 10m with --verify]
    #[arg(long, value_name = "TIME", value_parser = durations::parse_positive)]
    pub pause_limit: Option<Duration>,
    /// How the repository is locked.
    #[command(flatten)]
    pub lock: LockArgs,
    /// Compare all memory with the checkpoint during the pause, which is then long
    #[arg(long)]
    pub verify: bool,
    /// When pages are copied: auto, stop-copy, pre-copy or copy-on-write
    #[arg(long, value_name = "SCHEDULE", default_value = "auto")]
    pub schedule: ScheduleChoice,
    /// Memory for previous contents of pages, so that only changes are stored; 0: store whole pages
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse, default_value = "256M")]
    pub delta_cache: u64,
    /// Upper bound on copies of guest memory; pages beyond it are stored before the pause
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_copy_buffer, default_value = "1G")]
    pub copy_buffer: u64,
    /// What the checkpoint has of the disks: reference (their files must not change) or capture (their content)
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = Disks::Reference)]
    pub disks: Disks,
    /// Upper bound on writes to the repository, in bytes per second [default: none]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_positive)]
    pub limit_write: Option<NonZeroU64>,
    /// Store pages even if the repository already has them
    #[arg(long)]
    pub no_dedup: bool,
    /// Do not correct the guest's clock [default: its guest agent sets it when pauses add up to 500 ms]
    #[arg(long)]
    pub keep_guest_clock: bool,
}

impl CaptureArgs {
    /// The limit on the command line, or the default.
    pub fn pause_limit(&self) -> Duration {
        let default_s = if self.verify { 600 } else { 3 };
        self.pause_limit.unwrap_or(Duration::from_secs(default_s))
    }
}

/// `checkpoint`
#[derive(Debug, Args)]
pub struct CheckpointArgs {
    /// The running VM.
    #[command(flatten)]
    pub vm: VmSelector,
    /// How checkpoints are taken.
    #[command(flatten)]
    pub capture: CaptureArgs,
}

/// `watch`
#[derive(Debug, Args)]
pub struct WatchArgs {
    /// The running VM.
    #[command(flatten)]
    pub vm: VmSelector,
    /// Interval from the start of one checkpoint to the start of the next
    #[arg(long, value_name = "TIME", value_parser = durations::parse_positive)]
    pub every: Duration,
    /// End after K checkpoints [default: run until the VM ends or Ctrl-C]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// How checkpoints are taken.
    #[command(flatten)]
    pub capture: CaptureArgs,
}
