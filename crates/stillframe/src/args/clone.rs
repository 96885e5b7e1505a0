//! The command line of `clone`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::StartArgs;
use crate::{durations, sizes};

/// `clone`
#[derive(Debug, Args)]
pub struct CloneArgs {
    /// The checkpoint: its id, the first digits of it, `latest`, or `latest~2` (two before)
    #[arg(value_name = "ID", required_unless_present_any = ["templates", "drop_templates"])]
    pub id: Option<String>,
    /// Only look among the checkpoints of this VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// How many VMs to start
    #[arg(short = 'n', long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub count: u32,
    /// The number of the first
    #[arg(long, value_name = "K", default_value = "1", value_parser = clap::value_parser!(u32).range(..1_000_000))]
    pub first: u32,
    /// Where each new QEMU's QMP monitor listens: a unix socket; {} stands for the clone's number
    #[arg(long, value_name = "PATH", required_unless_present_any = ["templates", "drop_templates"])]
    pub qmp: Option<String>,
    /// The first serial port of each, as for QEMU's -serial; {} stands for the number [default: null]
    #[arg(long, value_name = "SPEC")]
    pub serial: Option<String>,
    /// Have another word in each clone's command line (a tap, a port); {} in NEW stands for the number
    #[arg(long, value_name = "OLD=NEW", value_parser = parse_replacement)]
    pub replace: Vec<(String, String)>,
    /// Leave the guests paused, ready to run
    #[arg(long)]
    pub paused: bool,
    /// Leave the guests' clocks as at the checkpoint; else guest agents are asked to set them
    #[arg(long)]
    pub keep_guest_clock: bool,
    /// Compare all memory of each with the checkpoint before it runs
    #[arg(long)]
    pub verify: bool,
    /// Go on although a disk is no longer what the guests remember
    #[arg(long)]
    pub disks_as_they_are: bool,
    /// How each QEMU is started.
    #[command(flatten)]
    pub start: StartArgs,
    /// Where the memory that the clones share is kept, in the clear (memory templates) [default:
    /// /dev/shm/stillframe-UID]
    #[arg(long, value_name = "DIR")]
    pub base_dir: Option<PathBuf>,
    /// Of such memory, keep so much for the next clones; 0: none, it goes with the last clone [default: a
    /// quarter of the machine's memory]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    pub base_budget: Option<u64>,
    /// Keep such memory no longer than this after its last use; what is older goes after the clones have started
    #[arg(long, value_name = "TIME", value_parser = durations::parse)]
    pub base_age: Option<Duration>,
    /// Only list the memory templates in --base-dir
    #[arg(long, conflicts_with_all = ["id", "qmp", "drop_templates"])]
    pub templates: bool,
    /// Only remove the memory templates in --base-dir; clones that run keep their memory
    #[arg(long, conflicts_with_all = ["id", "qmp"])]
    pub drop_templates: bool,
    /// Wait so long for another process' lock on the repository
    #[arg(long, value_name = "TIME", value_parser = durations::parse, default_value = "10s")]
    pub lock_wait: Duration,
}

pub fn parse_replacement(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((old, new)) if !old.is_empty() => Ok((old.to_owned(), new.to_owned())),
        _ => Err(format!("'{text}' is not OLD=NEW")),
    }
}
