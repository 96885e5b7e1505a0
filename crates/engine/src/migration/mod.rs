//! The verb *migrate*: a running VM into a new QEMU of another host, over a connection. Exactly one of the two runs.
//!
//! ```text
//!   source       stream pages ── stop ── the rest, device state ─┐             ┌─ end
//!                                                                └─ hand-over ─┤
//!   destination  start QEMU ── populate ───── load device state ─┘             └─ cont
//! ```
//!
//! [`source`] and [`destination`] move the VM, which is [`arriving`] there. [`handover`] decides who runs it; [`commit`] and [`takeover`] carry out
//! what it says, also in an engine that comes back ([`record`]). Both hosts reach the VM's disks, or they are copied ([`disks`]).

mod announced;
mod arriving;
mod commit;
mod convergence;
mod cut;
mod destination;
mod disks;
mod error;
mod filling;
pub mod handover;
mod image_blocks;
mod image_files;
mod incoming;
mod lacking;
mod later;
mod limiter;
mod look;
mod new_qemu;
mod outgoing;
mod page_sender;
mod pages;
mod receiver;
mod record;
mod rehearsal;
mod resuming;
mod rounds;
mod seed;
mod sending;
mod sent_ids;
mod serving;
mod settle;
mod source;
mod stopped;
mod takeover;

use std::num::NonZeroU64;
use std::ops::AddAssign;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use stillframe_link::{Link, Stream};
use stillframe_repo::CheckpointId;

use crate::connection::Connection;
pub use crate::connection::compression::CompressionChoice;
pub use crate::connection::message::{Base, Mode, VERSIONS};
pub use crate::encoding::delta_cache::Contents;
pub use crate::populate::lazy::supervision::Supervised;
use crate::verify::VerifyReport;
use crate::{Progress, Round};
pub use commit::{CommitError, Wish};
pub use destination::receive;
pub use disks::{CopyDisks, DestinationError, DiskError};
pub use error::{MigrateError, ReceiveError};
pub use filling::FilledReport;
pub use image_blocks::{IMAGES_MAX, SharedImageError};
pub use image_files::LocalImage;
pub use new_qemu::{NewQemu, Rehearsal};
pub use receiver::{ReceiveEvent, ReceiveOptions, ReceiveSink, Received};
pub use record::RecordError;
pub use resuming::resume as resume_receiving;
pub use seed::SeedFrom;
pub use sent_ids::PageHash;
pub use settle::{SettleError, SettledReport, settle};

/// How long the other side may be silent, or take nothing: it starts QEMU, reads or compares all of memory meanwhile.
pub const SILENCE_MAX: Duration = Duration::from_secs(120);

/// How long it may be silent once the VM is stopped and all was sent. A side that is out of reach is noticed by both
/// within this time, so that the source can connect again.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Time for a QEMU to end that was killed, or has answered `quit`.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Lanes, at most.
const LANES_MAX: usize = DEMAND_LANES + CONNECTIONS_MAX;

/// How often a side that has no other word hears that this one lives.
const BEAT: Duration = Duration::from_secs(1);

/// A connection to the other host.
pub type Wire = Connection<Stream>;

/// Connects to the destination again.
pub type Reconnect<'r> = &'r mut dyn FnMut() -> Result<Wire, Unreachable>;

/// Why there is no new connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreachable {
    /// In words.
    pub why: String,
    /// The other host says that no program listens there.
    pub refused: bool,
}

/// What a destination waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Awaited {
    /// The connections for pages, which the source opens by and by.
    Pages,
    /// A source to which the connection was lost.
    Again,
    /// The same, while the VM runs here.
    Meanwhile,
}

/// Waits this long for the source to connect.
pub type Listen<'l> = &'l mut dyn FnMut(Awaited, Duration) -> Option<Wire>;

/// How long a connection may have no pages: its share of a round may be little, and a page may be fetched late. If the
/// other side is gone, that shows on the first connection.
const NO_PAGES_MAX: Duration = Duration::from_secs(24 * 3600);

/// Lanes for pages that a thread waits for: the first ones.
const DEMAND_LANES: usize = 2;

/// Connections for pages, at most.
pub const CONNECTIONS_MAX: usize = 16;

/// The connection over a new link.
pub fn connection(link: Link) -> Wire {
    Connection::new(link.stream)
}

/// How it is found that a page need not be sent now (D-Track).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SkipFake {
    /// Not at all: what was found written at the beginning of a round is sent.
    Off,
    /// A thread looks again and again for pages that were written again (the paper's first version).
    Thread,
    /// The same, with a pause after each look (its second version).
    ThreadDelayed,
    /// Each batch is looked at before it is read.
    Exact,
    /// The same, and pages that keep changing are sent late.
    #[default]
    Auto,
}

/// What a source reports while a VM moves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigrateEvent {
    /// How far a round is.
    Progress(Progress),
    /// A round has ended.
    Round(Round),
    /// How far the disks are copied, in bytes.
    Disks {
        /// Bytes copied.
        done: u64,
        /// Bytes to copy, as far as is known.
        total: u64,
    },
    /// The connection was lost while the VM runs here, and is made anew.
    Cut,
    /// Only what was written since the base is sent; the destination reads the rest from there when the VM runs.
    Increment,
    /// The rest moves when the VM runs at the destination: if a host or a QEMU is lost until all is there, so is the VM.
    Later,
    /// Pages are fetched, whole: shared images are of no use.
    ImagesUnused,
    /// The destination does not have this shared image, or has another one: its pages are sent.
    NoImage(String),
    /// The migration failed, and QEMU did not end the copy of a disk, for this reason.
    CopyLeft(String),
}

/// Where that is reported.
pub type MigrateSink<'s> = &'s mut dyn FnMut(MigrateEvent);

/// How to migrate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrateOptions {
    /// When the pages move; `None` chooses: while the VM runs, if it does.
    pub mode: Option<Mode>,
    /// Send the content ids of all pages too, made in the pause; the destination compares them.
    pub verify: bool,
    /// The watchdog resumes the VM here when it is stopped for longer and not given up; the migration fails then.
    pub pause_limit: Duration,
    /// Bytes a second that may be sent while the VM runs; `None`: as many as possible.
    pub bytes_per_s: Option<NonZeroU64>,
    /// How long the VM may be stopped for its remaining pages.
    pub downtime: Duration,
    /// Upper bound on the delta cache, in bytes.
    pub cache_bytes: u64,
    /// Connections for pages, at most [`CONNECTIONS_MAX`].
    pub connections: usize,
    /// How fake dirty pages are left out.
    pub skip_fake: SkipFake,
    /// Do not send a page again that has the id of its last version; `None`: such pages are counted only.
    pub page_ids: Option<PageHash>,
    /// How pages are compressed. Changes of pages always are, by Zstandard, level 1.
    pub compression: CompressionChoice,
    /// The disks that the destination does not reach.
    pub copy_disks: CopyDisks,
    /// Files that both hosts may reach: of pages that are in them, only the place is sent. Their paths are absolute.
    #[serde(default)]
    pub shared_images: Vec<PathBuf>,
    /// How long it is tried to connect again, once the VM is given up.
    pub patience: Duration,
    /// The last checkpoint of this attachment. With pre-copy and hybrid, a destination that can read it has the pages from
    /// there that were not written since. Only this process knows it.
    #[serde(skip)]
    pub base: Option<LastCheckpoint>,
}

/// The last checkpoint of an attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastCheckpoint {
    /// Where it is.
    pub base: Base,
    /// What is known of its pages: of one that was written since, only what changed is sent.
    pub contents: Contents,
}

/// Pages of a migration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigratedPages {
    /// All that were sent, each as often as it was.
    pub sent: u64,
    /// Pages of zeros.
    pub zero: u64,
    /// Pages of which only what changed was sent.
    pub delta: u64,
    /// Pages that were written, and not sent: the destination had that content.
    pub known: u64,
    /// Pages of which only the place in a shared image was sent.
    #[serde(default)]
    pub in_image: u64,
    /// Of these, those that the destination did not find there: they were sent.
    #[serde(default)]
    pub not_in_image: u64,
    /// Pages that were not sent: they are as in the destination's checkpoint, by their ids or the source's copy.
    pub seeded: u64,
    /// Found written, and not sent in that round: the guest had written them again, or kept writing them.
    pub postponed: u64,
    /// Sent in vain: the destination had that content.
    pub fake: u64,
    /// Sent in vain: overwritten before the hand-over, and sent again.
    pub doomed: u64,
    /// Bytes that the fake ones took. Here and below, each page of a batch is taken for as long as the others of its kind.
    pub fake_bytes: u64,
    /// Bytes that the doomed ones took.
    pub doomed_bytes: u64,
}

impl AddAssign for MigratedPages {
    fn add_assign(&mut self, more: MigratedPages) {
        self.sent += more.sent;
        self.zero += more.zero;
        self.delta += more.delta;
        self.known += more.known;
        self.in_image += more.in_image;
        self.not_in_image += more.not_in_image;
        self.seeded += more.seeded;
        self.postponed += more.postponed;
        self.fake += more.fake;
        self.doomed += more.doomed;
        self.fake_bytes += more.fake_bytes;
        self.doomed_bytes += more.doomed_bytes;
    }
}

/// The report of the source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrateReport {
    /// The VM's name.
    pub vm: String,
    /// When its pages moved.
    pub mode: Mode,
    /// Passes over its pages, the last while it was stopped.
    pub rounds: u32,
    /// Its pages.
    pub pages: MigratedPages,
    /// Pages that the destination fetched when it ran there.
    pub fetched: u64,
    /// The checkpoint from which the destination reads what was not sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<CheckpointId>,
    /// Bytes sent for disks.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub disk_bytes: u64,
    /// How pages were compressed in the end, over one of the connections, where they were sent while the VM ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<CompressionChoice>,
    /// Bytes sent over all connections.
    pub bytes_sent: u64,
    /// From the stop here until it was known that the VM runs there, in microseconds.
    pub downtime_us: u64,
    /// Time from the call until the VM runs there and its QEMU here has answered `quit`, in microseconds.
    pub total_us: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The report of the destination.
#[derive(Debug, Clone, Serialize)]
pub struct ReceiveReport {
    /// The VM's name.
    pub vm: String,
    /// The new QEMU.
    pub pid: i32,
    /// Its monitor.
    pub qmp: PathBuf,
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
