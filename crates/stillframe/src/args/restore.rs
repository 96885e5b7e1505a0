//! The command line of `restore`.

use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::Args;

use super::{GuestArgs, LaunchArgs, LockArgs, RestoreDisks};
use crate::sizes;

/// `restore`
#[derive(Debug, Args)]
pub struct RestoreArgs {
    /// The checkpoint: its id, the first digits of it, `latest`, or `latest~2` (two before)
    #[arg(value_name = "ID", required_unless_present = "resume")]
    pub id: Option<String>,
    /// Consider only checkpoints of this VM
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// Unix socket for the new QEMU's QMP monitor [default: where the VM had its first one]
    #[arg(long, value_name = "PATH")]
    pub qmp: Option<PathBuf>,
    /// First serial port, as for QEMU's -serial [default: as recorded if it listens, else null]
    #[arg(long, value_name = "SPEC")]
    pub serial: Option<String>,
    /// How the guest continues.
    #[command(flatten)]
    pub guest: GuestArgs,
    /// Run the guest at once, and fill its memory meanwhile
    #[arg(long)]
    pub lazy: bool,
    /// With --lazy: upper bound on the background fill of memory, then of disks, in bytes per second [default: none]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_positive)]
    pub limit_fill: Option<NonZeroU64>,
    /// Where the disks come from: new=DIR (images written anew, as the checkpoint holds them), lazy=DIR (the same, with --lazy: qcow2 images that are filled while the guest runs), as-they-are, or none (empty ones, to look at memory) [default: the recorded files, unchanged since]
    #[arg(long, value_name = "WHERE", conflicts_with = "disks_as_they_are")]
    pub disks: Option<RestoreDisks>,
    /// Continue a lazy restore that was killed, of the VM with this --qmp; if the VM has ended, complete its disks
    #[arg(
        long,
        requires = "qmp",
        conflicts_with_all = ["id", "vm", "serial", "GuestArgs", "lazy", "disks", "LaunchArgs", "pidfile", "log", "print_command"]
    )]
    pub resume: bool,
    /// How QEMU is started.
    #[command(flatten)]
    pub launch: LaunchArgs,
    /// File for the new QEMU's standard error [default: one in the runtime directory]
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// File for the new QEMU's process id [default: where the VM had it, if that file is free]
    #[arg(long, value_name = "FILE")]
    pub pidfile: Option<PathBuf>,
    /// Print the command that would start QEMU, and do nothing else
    #[arg(long)]
    pub print_command: bool,
    /// How the repository is locked.
    #[command(flatten)]
    pub lock: LockArgs,
}
