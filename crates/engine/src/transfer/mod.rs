//! The verb *transfer*: a VM into a new QEMU that another process starts, over a connection.
//!
//! ```text
//!   copy:       guest runs ── stream pages ── capture (pause) ── send the rest ── both run
//!   hand-over:  stop ── serve pages ── send the device state ── hand over ── the other runs ── end this QEMU
//! ```
//!
//! This is the second user of page sink and page source, and the user of [`PausedVm::hand_over`]. Migration will be
//! made of it. The stress runs use it to show that both seams are exact. It moves no disks, and is not part of the
//! documented command line.
//!
//! [`PausedVm::hand_over`]: crate::capture::paused_vm::PausedVm::hand_over

mod receiver;
mod sender;

use std::time::Duration;

use serde::Serialize;
use stillframe_link::{Link, Stream};

use crate::verify::VerifyReport;

use crate::connection::Connection;
pub use crate::connection::message::{Mode, VERSIONS};
pub use receiver::{ReceiveError, ReceiveOptions, receive};
pub use sender::{SendError, SendOptions};

/// How long the other side may be silent, or take nothing: it starts QEMU, reads or compares all of memory meanwhile.
pub const SILENCE_MAX: Duration = Duration::from_secs(120);

/// The connection over a new link.
pub fn connection(link: Link) -> Connection<Stream> {
    Connection::new(link.stream)
}

/// The report of the sender.
#[derive(Debug, Clone, Serialize)]
pub struct SendReport {
    /// The VM's name.
    pub vm: String,
    /// What happened to the VM here.
    pub mode: Mode,
    /// Pages of an iteration, while the guest ran.
    pub streamed: u64,
    /// Pages sent of the VM while it was stopped, or captured in the pause.
    pub last: u64,
    /// Bytes sent over the connection.
    pub bytes_sent: u64,
    /// How long the VM was stopped here, in microseconds; with a hand-over, until it ran there.
    pub downtime_us: u64,
    /// Time from the call to the running VM, in microseconds.
    pub total_us: u64,
}

/// The report of the receiver.
#[derive(Debug, Clone, Serialize)]
pub struct ReceiveReport {
    /// The VM's name.
    pub vm: String,
    /// What happened to the VM at the sender.
    pub mode: Mode,
    /// The new QEMU.
    pub pid: i32,
    /// Whether the guest runs here.
    pub running: bool,
    /// Pages with content that came, each counted once.
    pub pages: u64,
    /// The differences from the VM's command line, in words.
    pub changes: Vec<String>,
    /// The comparison with the sender's memory, if the sender requested it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verify: Option<VerifyReport>,
}
