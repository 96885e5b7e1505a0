//! The command line of `clone`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::{GuestArgs, LaunchArgs, LockArgs, RestoreDisks};
use crate::{durations, sizes};

/// `clone`
#[derive(Debug, Args)]
pub struct CloneArgs {
    /// The checkpoint: its id, the first digits of it, `latest`, or `latest~2` (two before)
    #[arg(value_name = "ID", required_unless_present_any = ["templates", "drop_templates"])]
    pub id: Option<String>,
    /// Consider only checkpoints of this VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// Number of VMs to start
    #[arg(short = 'n', long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub count: u32,
    /// Number of the first clone; the others follow
    #[arg(long, value_name = "K", default_value = "1", value_parser = clap::value_parser!(u32).range(..1_000_000))]
    pub first: u32,
    /// Unix socket for each QMP monitor; here, in --serial and in NEW of --replace, {} is the clone's number
    #[arg(long, value_name = "PATH", required_unless_present_any = ["templates", "drop_templates"])]
    pub qmp: Option<String>,
    /// First serial port of each clone, as for QEMU's -serial [default: null]
    #[arg(long, value_name = "SPEC")]
    pub serial: Option<String>,
    /// How each guest continues.
    #[command(flatten)]
    pub guest: GuestArgs,
    /// Where the disks come from: new=DIR (images as the checkpoint holds them, which all clones read) or as-they-are
    /// [default: the recorded files, unchanged since, which no other VM writes to]
    #[arg(long, value_name = "WHERE", conflicts_with = "disks_as_they_are")]
    pub disks: Option<RestoreDisks>,
    /// How each QEMU is started.
    #[command(flatten)]
    pub launch: LaunchArgs,
    /// Directory for memory templates (unencrypted) [default: /dev/shm/stillframe-UID]
    #[arg(long, value_name = "DIR")]
    pub template_dir: Option<PathBuf>,
    /// Size of the memory templates to keep for later clones; 0: none [default: a quarter of the machine's memory]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    pub template_budget: Option<u64>,
    /// Remove memory templates that were last used longer ago than this [default: never]
    #[arg(long, value_name = "TIME", value_parser = durations::parse)]
    pub template_age: Option<Duration>,
    /// List the memory templates in --template-dir, and do nothing else
    #[arg(long, conflicts_with_all = ["id", "qmp", "drop_templates"])]
    pub templates: bool,
    /// Remove the memory templates in --template-dir, and do nothing else; running clones keep their memory
    #[arg(long, conflicts_with_all = ["id", "qmp"])]
    pub drop_templates: bool,
    /// How the repository is locked.
    #[command(flatten)]
    pub lock: LockArgs,
}
