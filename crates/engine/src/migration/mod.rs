//! The verb *migrate*: a running VM into a new QEMU of another host, over a connection. Exactly one of the two runs.
//!
//! ```text
//!   source       stream pages ── stop ── the rest, device state ─┐             ┌─ end
//!                                                                └─ hand-over ─┤
//!   destination  start QEMU ── populate ───── load device state ─┘             └─ cont
//! ```
//!
//! [`source`] and [`destination`] move the VM. [`handover`] decides who runs it; [`commit`] and [`takeover`] carry out
//! what it says, also in an engine that comes back ([`record`]). Disks are not copied: both hosts reach them.

mod commit;
mod destination;
mod error;
pub mod handover;
mod pages;
mod record;
mod source;
mod takeover;

use std::time::Duration;

use serde::Serialize;
use stillframe_link::{Link, Stream};

use crate::connection::Connection;
pub use crate::connection::message::{Mode, VERSIONS};
use crate::verify::VerifyReport;
pub use commit::{CommitError, Wish};
pub use destination::{NewQemu, ReceiveError, ReceiveOptions, receive, resume as resume_receiving};
pub use error::MigrateError;
pub use record::RecordError;
pub use source::{MigrateOptions, SettleError, SettledReport, settle};

/// How long the other side may be silent, or take nothing: it starts QEMU, reads or compares all of memory meanwhile.
pub const SILENCE_MAX: Duration = Duration::from_secs(120);

/// How long it may be silent once the VM is stopped and all was sent. A side that is out of reach is noticed by both
/// within this time, so that the source can connect again.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// A connection to the other host.
pub type Wire = Connection<Stream>;

/// Connects to the destination again; an error says why not, in words.
pub type Reconnect<'r> = &'r mut dyn FnMut() -> Result<Wire, String>;

/// Waits this long for the source to connect again.
pub type Listen<'l> = &'l mut dyn FnMut(Duration) -> Option<Wire>;

/// The connection over a new link.
pub fn connection(link: Link) -> Wire {
    Connection::new(link.stream)
}

/// Pages of a migration. All but `known` were sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct MigratedPages {
    /// All that were sent, each as often as it was.
    pub sent: u64,
    /// Pages of zeros.
    pub zero: u64,
    /// Pages of which only what changed was sent.
    pub delta: u64,
    /// Pages that were written, and not sent: the destination had that content.
    pub known: u64,
    /// Sent in vain: overwritten before the hand-over, and sent again.
    pub doomed: u64,
}

/// The report of the source.
#[derive(Debug, Clone, Serialize)]
pub struct MigrateReport {
    /// The VM's name.
    pub vm: String,
    /// When its pages moved.
    pub mode: Mode,
    /// Passes over its pages, the last while it was stopped.
    pub rounds: u32,
    /// Its pages.
    pub pages: MigratedPages,
    /// Bytes sent over the connection.
    pub bytes_sent: u64,
    /// From the stop here until it was known that the VM runs there, in microseconds.
    pub downtime_us: u64,
    /// Time from the call to the running VM, in microseconds.
    pub total_us: u64,
}

/// The report of the destination.
#[derive(Debug, Clone, Serialize)]
pub struct ReceiveReport {
    /// The VM's name.
    pub vm: String,
    /// The new QEMU.
    pub pid: i32,
    /// Its monitor.
    pub qmp: std::path::PathBuf,
    /// Whether the guest runs here.
    pub running: bool,
    /// Pages with content that came, each counted once.
    pub pages: u64,
    /// The differences from the VM's command line, in words.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<String>,
    /// The comparison with the source's memory, if the source requested it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verify: Option<VerifyReport>,
}
