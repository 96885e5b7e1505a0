//! The command line of `transfer`, a hidden command for the project's stress runs.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use stillframe_link::Address;

use super::{LaunchArgs, VmSelector};
use crate::{durations, sizes};

/// `transfer`
#[derive(Debug, Args)]
pub struct TransferArgs {
    /// The side that this process takes.
    #[command(subcommand)]
    pub side: TransferSide,
}

/// The two sides of a transfer.
#[derive(Debug, Subcommand)]
pub enum TransferSide {
    /// Send a running VM to a receiving process
    Send(SendArgs),
    /// Wait for a VM, and start it
    Receive(ReceiveArgs),
}

/// How a connection between two hosts is protected; exactly one of these.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct SecurityArgs {
    /// Directory with this host's certificate and key, as `stillframe certs host` makes it
    #[arg(long, value_name = "DIR")]
    pub certs: Option<PathBuf>,
    /// Neither encrypt nor authenticate; the other side has to say the same
    #[arg(long)]
    pub plain_text: bool,
}

/// `transfer send`
#[derive(Debug, Args)]
pub struct SendArgs {
    /// The running VM.
    #[command(flatten)]
    pub vm: VmSelector,
    /// Address of the receiver
    #[arg(long, value_name = "HOST[:PORT]")]
    pub to: Address,
    /// How the connection is protected.
    #[command(flatten)]
    pub security: SecurityArgs,
    /// Stop the VM first, and end it when it runs at the receiver [default: both run]
    #[arg(long)]
    pub hand_over: bool,
    /// Compare all memory with the receiver's, in the pause
    #[arg(long)]
    pub verify: bool,
    /// Resume the VM here if the pause exceeds this
    #[arg(long, value_name = "TIME", value_parser = durations::parse_positive, default_value = "2m")]
    pub pause_limit: Duration,
    /// Expected speed of the connection, in bytes per second
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_positive, default_value = "500M")]
    pub bandwidth: NonZeroU64,
    /// Stream pages until the rest can be sent in this time
    #[arg(long, value_name = "TIME", value_parser = durations::parse_positive, default_value = "100ms")]
    pub downtime_limit: Duration,
    /// Upper bound on copies of guest memory
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_copy_buffer, default_value = "1G")]
    pub copy_buffer: u64,
}

/// `transfer receive`
#[derive(Debug, Args)]
pub struct ReceiveArgs {
    /// Address to listen at; port 0 is a free one
    #[arg(long, value_name = "ADDR[:PORT]")]
    pub listen: Address,
    /// How the connection is protected.
    #[command(flatten)]
    pub security: SecurityArgs,
    /// Let only a host in whose certificate has this name (repeatable)
    #[arg(long, value_name = "NAME", conflicts_with = "plain_text")]
    pub allow: Vec<String>,
    /// Unix socket for the new QEMU's QMP monitor
    #[arg(long, value_name = "PATH")]
    pub qmp: PathBuf,
    /// First serial port, as for QEMU's -serial [default: as recorded if it listens, else null]
    #[arg(long, value_name = "SPEC")]
    pub serial: Option<String>,
    /// Leave the guest paused; `cont` on its monitor runs it
    #[arg(long)]
    pub paused: bool,
    /// How QEMU is started.
    #[command(flatten)]
    pub launch: LaunchArgs,
}
