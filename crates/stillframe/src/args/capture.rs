//! The command lines of `checkpoint` and `watch`.

use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use stillframe_engine::checkpoint::ScheduleChoice;
use stillframe_engine::disks::{DiskChoice, DiskMode, DiskSchedule};
use stillframe_repo::{Note, Tag};

use super::{LockArgs, VmSelector};
use crate::{durations, sizes};

/// What a checkpoint has of all disks, or of one (`vda=reference`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskArg {
    device: Option<String>,
    mode: DiskMode,
}

impl FromStr for DiskArg {
    type Err = String;

    fn from_str(text: &str) -> Result<DiskArg, String> {
        let (device, mode) = match text.rsplit_once('=') {
            Some(("", _)) => return Err("the disk's name is missing before `=`".to_owned()),
            Some((device, mode)) => (Some(device.to_owned()), mode),
            None => (None, text),
        };
        let mode = match mode {
            "auto" => DiskMode::Auto,
            "capture" => DiskMode::Capture,
            "reference" => DiskMode::Reference,
            "none" => DiskMode::None,
            _ => {
                return Err(
                    "expected auto, capture, reference or none, or DISK= and one of these"
                        .to_owned(),
                );
            }
        };
        Ok(DiskArg { device, mode })
    }
}

/// How disks are captured; `None`: the engine chooses.
pub type DiskScheduleArg = std::option::Option<DiskSchedule>;

fn parse_disk_schedule(name: &str) -> Result<Option<DiskSchedule>, String> {
    match name {
        "auto" => Ok(None),
        "rounds" => Ok(Some(DiskSchedule::Rounds)),
        "filter" => Ok(Some(DiskSchedule::Filter)),
        _ => Err("expected auto, rounds or filter".to_owned()),
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
    /// Of a watch: memory for previous contents of pages, so that only changes are stored; 0: store whole pages
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse, default_value = "256M")]
    pub delta_cache: u64,
    /// Upper bound on copies of guest memory; pages beyond it are stored before the pause
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_copy_buffer, default_value = "1G")]
    pub copy_buffer: u64,
    /// What the checkpoint has of the disks: capture (their content), reference (their files must not change), none, or
    /// auto (capture where it is possible); DISK=WHAT says it of one disk; may be given several times [default: auto]
    #[arg(long, value_name = "[DISK=]WHAT", value_delimiter = ',')]
    pub disks: Vec<DiskArg>,
    /// How disks are captured: filter (read after the pause; the guest's first write to a block waits until that is copied), rounds
    /// (copied before the pause, and the rest in it; no write waits), or auto (rounds where little was written)
    #[arg(long, value_name = "SCHEDULE", value_parser = parse_disk_schedule, default_value = "auto")]
    pub disk_schedule: DiskScheduleArg,
    /// Have QEMU go on recording which blocks of the disks are written when this ends, so that the next checkpoint reads only
    /// these (dirty bitmaps, 32 KiB of QEMU's memory for 1 GiB of disk) [default: leave nothing in QEMU]
    #[arg(long)]
    pub keep_bitmaps: bool,
    /// Query the agent of a Linux guest (stillframe-guest-agent, or qemu-guest-agent for up to 4 GiB) for its free pages, and
    /// keep those as zeros if they were not written since
    #[arg(long)]
    pub free_pages: bool,
    /// Before a checkpoint of all memory, have the guest give back memory that it does not need (virtio-balloon; its agent or
    /// the balloon's statistics say how much), for up to TIME [default: 350ms], and let it have it again
    #[arg(long, value_name = "TIME", value_parser = durations::parse_positive, num_args = 0..=1, require_equals = true,
        default_missing_value = "350ms")]
    pub balloon: Option<Duration>,
    /// Upper bound on writes to the repository, in bytes per second [default: none]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_positive)]
    pub limit_write: Option<NonZeroU64>,
    /// Store pages even if the repository already has them
    #[arg(long)]
    pub no_dedup: bool,
    /// Store pages even if an indexed image has them: a checkpoint that follows none then needs no image
    #[arg(long)]
    pub no_images: bool,
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

    /// What `--disks` says.
    ///
    /// # Errors
    /// It says two things of one disk, or of all; they are named.
    pub fn disks(&self) -> Result<DiskChoice, String> {
        let mut choice = DiskChoice {
            schedule: self.disk_schedule,
            keep_bitmaps: self.keep_bitmaps,
            ..DiskChoice::default()
        };
        let mut others = None;
        for DiskArg { device, mode } in &self.disks {
            let earlier = match device {
                None => others.replace(*mode).is_some(),
                Some(device) => {
                    let is_there = choice.each.iter().any(|(name, _)| name == device);
                    choice.each.push((device.clone(), *mode));
                    is_there
                }
            };
            if earlier {
                return Err(device
                    .clone()
                    .map_or("all disks".to_owned(), |name| format!("disk {name}")));
            }
        }
        choice.others = others.unwrap_or_default();
        Ok(choice)
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
