//! The command line of `transfer`, which is not documented for users.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::clone::parse_replacement;
use super::{StartArgs, VmSelector};
use crate::{durations, sizes};

/// `transfer`
#[derive(Debug, Args)]
pub struct TransferArgs {
    /// Which side.
    #[command(subcommand)]
    pub side: TransferSide,
}

/// Which side.
#[derive(Debug, Subcommand)]
pub enum TransferSide {
    /// Send a running VM to a process that receives it
    Send(SendArgs),
    /// Wait for a VM, and start it
    Receive(ReceiveArgs),
}

/// `transfer send`
#[derive(Debug, Args)]
pub struct SendArgs {
    /// Which VM.
    #[command(flatten)]
    pub vm: VmSelector,
    /// The receiver's socket
    #[arg(long, value_name = "PATH")]
    pub to: PathBuf,
    /// Stop the VM first, and end it when it runs there; else both run
    #[arg(long)]
    pub hand_over: bool,
    /// Compare all memory with the receiver's, in the pause
    #[arg(long)]
    pub verify: bool,
    /// Resume the VM here when it is stopped for longer
    #[arg(long, value_name = "TIME", value_parser = durations::parse_positive, default_value = "2m")]
    pub pause_limit: Duration,
    /// What the connection carries in a second
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_positive, default_value = "500M")]
    pub bandwidth: NonZeroU64,
    /// Stream until what is left takes so long
    #[arg(long, value_name = "TIME", value_parser = durations::parse_positive, default_value = "100ms")]
    pub downtime_limit: Duration,
    /// Hold copies of at most so much guest memory
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_copy_buffer, default_value = "1G")]
    pub copy_buffer: u64,
}

/// `transfer receive`
#[derive(Debug, Args)]
pub struct ReceiveArgs {
    /// A new socket on which the sender is awaited
    #[arg(long, value_name = "PATH")]
    pub from: PathBuf,
    /// Where the new QEMU's QMP monitor listens: a unix socket
    #[arg(long, value_name = "PATH")]
    pub qmp: PathBuf,
    /// The first serial port, as for QEMU's -serial [default: null]
    #[arg(long, value_name = "SPEC")]
    pub serial: Option<String>,
    /// Have another word in the VM's command line
    #[arg(long, value_name = "OLD=NEW", value_parser = parse_replacement)]
    pub replace: Vec<(String, String)>,
    /// Leave the guest paused, ready to run
    #[arg(long)]
    pub paused: bool,
    /// Go on although a disk is no longer what the guest remembers
    #[arg(long)]
    pub disks_as_they_are: bool,
    /// How QEMU is started.
    #[command(flatten)]
    pub start: StartArgs,
}
