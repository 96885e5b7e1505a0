//! Attach to a running VM, and detach from it.
//!
//! ```text
//!   find ── monitor ── suitable? ── guardian ── userfaultfd ── protect all ── attached
//!                                                                               │
//!   QEMU as it was  <── unregister, close  <── detach (or drop, or our death) <─┘
//! ```
//!
//! Until the userfaultfd exists nothing of QEMU has been changed; after it, everything that was
//! changed hangs on one descriptor, which closes with this process.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use stillframe_fault::{self as fault, Point};
use stillframe_page::PAGE_BYTES;
use stillframe_qemu::guest_agent::AgentChannels;
use stillframe_qemu::monitor::{Monitor, MonitorError, RamBlock};
use stillframe_qemu::record::VmRecord;
use stillframe_qemu::suitability::{self, Caution, Unsuitable};
use stillframe_qemu::target::{self, Selector, Target, TargetError};
use stillframe_repo::{BlockTable, CheckpointId, DiskTable, ImageId};
use stillframe_sys::process::AddressRange;
use stillframe_sys::system;
use thiserror::Error;

use crate::balloon::MemoryBalloon;
use crate::capture::device_state::StateStream;
use crate::capture::devices::Devices;
use crate::capture::schedule::{Auto, Bursts, ScheduleChoice, ScheduleKind};
use crate::capture::staging::StagingBuffer;
use crate::disks::DiskHistory;
use crate::free_pages::FreePages;
use crate::guardian::{Guardian, GuardianError};
use crate::guest_clock::GuestClock;
use crate::inhibitor::{InhibitorError, Purpose, ResumeInhibitor};
use crate::tracking::error::TrackerError;
use crate::tracking::tracker::Tracker;

/// How long a monitor may take to greet; a busy one never does.
const GREETING_LIMIT: Duration = Duration::from_secs(2);

/// Why no VM could be attached to. It runs on as before.
#[derive(Debug, Error)]
pub enum AttachError {
    /// No such VM.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// Its monitor cannot be used.
    #[error("cannot talk to the VM's monitor")]
    Monitor(#[from] MonitorError),
    /// A VM that cannot be checkpointed right.
    #[error(transparent)]
    Unsuitable(#[from] Unsuitable),
    /// No guardian.
    #[error(transparent)]
    Guardian(#[from] GuardianError),
    /// Its memory cannot be tracked.
    #[error("cannot track the VM's memory")]
    Tracker(#[from] TrackerError),
    /// The check for an interrupted rewind failed.
    #[error("cannot find out whether a rewind or a migration of this VM was interrupted")]
    Inhibitor(#[from] InhibitorError),
    /// An earlier rewind was interrupted.
    #[error(
        "a rewind of this VM is in progress or was killed: its memory is partly of one moment and partly of another. It is paused, and QEMU does not resume it: rewind it again, or end it and `stillframe restore` a checkpoint"
    )]
    HalfRewound,
    /// A migration gave it up, and is not settled.
    #[error(
        "a migration of this VM is in progress or was interrupted: it may run on another host. It is paused, and QEMU does not resume it: ask the other host with `migrate --resume`, or take the VM back with `migrate --take-back`"
    )]
    GivenUp,
}

/// Why the detach failed. Anything that it left in QEMU goes with this process, or with the next attachment.
#[derive(Debug, Error)]
pub enum DetachError {
    /// Tracking could not be ended.
    #[error(transparent)]
    Tracker(#[from] TrackerError),
    /// A descriptor could not be taken back.
    #[error("cannot take back what was lent to QEMU")]
    Monitor(#[from] MonitorError),
}

/// Why a VM could not be attached to anew.
#[derive(Debug, Error)]
pub enum AnewError {
    /// The detach failed.
    #[error("cannot end tracking")]
    Detach(#[from] DetachError),
    /// Attaching failed.
    #[error(transparent)]
    Attach(#[from] AttachError),
}

/// The checkpoint that the next one is the increment of.
#[derive(Debug, Clone)]
pub(crate) struct Parent {
    pub id: CheckpointId,
    /// Identity of its repository.
    pub repository: String,
    /// Where the content of each block is written down.
    pub tables: Vec<BlockTable>,
    /// The same of the disks whose content it has.
    pub disks: Vec<DiskTable>,
    /// The images that may have some of its pages.
    pub images: BTreeSet<ImageId>,
    /// Packs that were missing already when it was made: it needs none of them.
    pub missing_packs: Vec<String>,
}

/// A VM with write tracking on.
#[derive(Debug)]
pub struct Vm {
    pub(crate) target: Target,
    pub(crate) tracker: Tracker,
    pub(crate) monitor: Monitor,
    pub(crate) guardian: Guardian,
    /// The staging buffers that are not in use.
    pub(crate) staging_buffers: Vec<StagingBuffer>,
    /// The schedule that writes are tracked for; with `auto`, the one that it began with.
    pub(crate) schedule: ScheduleKind,
    pub(crate) auto: Option<Auto>,
    /// Start of the writes that are tracked now: the last capture, or the attach.
    pub(crate) captured_at: Instant,
    /// The VM record of the checkpoints; made for the first one.
    pub(crate) record: Option<VmRecord>,
    /// The state in which a change of devices shows.
    pub(crate) devices: Devices,
    /// Where QEMU saves its device state; lent for the first checkpoint.
    pub(crate) state: Option<StateStream>,
    /// The time that pauses take from the guest's clock.
    pub(crate) clock: GuestClock,
    /// Queries the guest for its free pages.
    pub(crate) free_pages: FreePages,
    /// Has the guest give back memory that it does not need.
    pub(crate) balloon: MemoryBalloon,
    pub(crate) cautions: Vec<Caution>,
    /// Pages copied in the last pause, as an estimate of the space that the next one will need.
    pub(crate) pause_pages_last: u64,
    /// Past bursts of writes.
    pub(crate) bursts: Bursts,
    /// What is recorded of writes to the disks.
    pub(crate) disks: DiskHistory,
    /// Why they could not be taken away, the last time.
    pub(crate) disks_left: Option<MonitorError>,
    /// The inhibitor of an earlier rewind that was killed.
    pub(crate) inhibitor: Option<ResumeInhibitor>,
}

/// A VM with a connected monitor, before tracking starts.
struct Reached {
    target: Target,
    monitor: Monitor,
}

impl Reached {
    fn find(selector: &Selector) -> Result<Reached, AttachError> {
        let target = target::find(selector)?;
        let monitor = Monitor::connect(&target, GREETING_LIMIT)?;
        Ok(Reached { target, monitor })
    }

    /// What blocks `cont` of a VM whose rewind was interrupted.
    ///
    /// # Errors
    /// [`AttachError::GivenUp`] and others.
    fn left_behind(&mut self) -> Result<Option<ResumeInhibitor>, AttachError> {
        let left = ResumeInhibitor::left_behind(&mut self.monitor, &self.target.process)?;
        match left.as_ref().map(ResumeInhibitor::purpose) {
            Some(Purpose::HandOver) => Err(AttachError::GivenUp),
            Some(Purpose::Rewind) | None => Ok(left),
        }
    }
}

impl Vm {
    /// Finds the VM, makes sure that it can be checkpointed right, and starts tracking, in the way that
    /// the schedule of its checkpoints needs.
    pub fn attach(selector: &Selector, choice: ScheduleChoice) -> Result<Vm, AttachError> {
        match choice {
            ScheduleChoice::Always(schedule) => Vm::attach_for(selector, schedule, None),
            ScheduleChoice::Auto => {
                Vm::attach_for(selector, ScheduleKind::PreCopy, Some(Auto::default()))
            }
        }
    }

    /// With `auto`: the schedule that this VM should be attached to anew for ([`Vm::attach_anew`]).
    pub fn wants(&self) -> Option<ScheduleKind> {
        self.auto.as_ref().and_then(Auto::wants)
    }

    /// The schedule that writes are tracked for.
    pub fn tracked_for(&self) -> ScheduleKind {
        self.schedule
    }

    /// Ends tracking and begins anew, in the way that another schedule needs. The next checkpoint reads
    /// all of memory. After an error the VM is detached, and runs on.
    pub fn attach_anew(mut self, schedule: ScheduleKind) -> Result<Vm, AnewError> {
        let selector = Selector::Pid(self.pid());
        let mut auto = self.auto.take();
        if let Some(auto) = &mut auto {
            auto.attached_for(schedule);
        }
        let clock = std::mem::replace(&mut self.clock, GuestClock::new(AgentChannels::default()));
        self.detach()?;
        let mut vm = Vm::attach_for(&selector, schedule, auto)?;
        vm.clock = clock;
        Ok(vm)
    }

    /// Attaches for a rewind; accepts a VM whose last rewind was killed.
    pub fn attach_to_rewind(selector: &Selector) -> Result<Vm, AttachError> {
        let mut reached = Reached::find(selector)?;
        let inhibitor = reached.left_behind()?;
        let mut vm = Vm::attach_reached(reached, ScheduleKind::PreCopy, None)?;
        vm.inhibitor = inhibitor;
        Ok(vm)
    }

    fn attach_for(
        selector: &Selector,
        schedule: ScheduleKind,
        auto: Option<Auto>,
    ) -> Result<Vm, AttachError> {
        let mut reached = Reached::find(selector)?;
        match reached.left_behind()? {
            None => Vm::attach_reached(reached, schedule, auto),
            Some(_) => Err(AttachError::HalfRewound),
        }
    }

    fn attach_reached(
        Reached {
            target,
            mut monitor,
        }: Reached,
        schedule: ScheduleKind,
        mut auto: Option<Auto>,
    ) -> Result<Vm, AttachError> {
        suitability::check(&target, &mut monitor)?;
        let cautions = suitability::cautions(&target, &mut monitor)?;
        let guardian = Guardian::start()?;
        guardian.watch(monitor.client().socket())?;
        let ram = monitor.ram_blocks()?;
        let (tracker, user_mode_only) = track(&target, &guardian, &ram, schedule)?;
        monitor.take_back_leftovers()?;
        monitor.end_snapshots(true)?;
        let left = monitor.left_bitmaps()?;
        monitor.remove_bitmaps(&left)?;
        let shared = tracker.blocks().iter().any(|one| one.block.is_shared());
        let discards = match shared {
            true => suitability::check_shared_copy_on_write(&mut monitor),
            false => Ok(()),
        };
        if let Some(auto) = &mut auto {
            let huge_pages = ram.iter().any(|block| block.page_bytes != PAGE_BYTES);
            if huge_pages || user_mode_only || discards.is_err() || system::merges_pages() {
                auto.cannot_copy_on_write();
            }
        }
        let copy_on_write = schedule == ScheduleKind::CopyOnWrite;
        if copy_on_write {
            discards?;
        }
        let agents = AgentChannels::of(&target.arguments, &target.cwd);
        Ok(Vm {
            target,
            tracker,
            monitor,
            guardian,
            staging_buffers: Vec::new(),
            schedule,
            auto,
            captured_at: Instant::now(),
            record: None,
            devices: Devices::of(shared && copy_on_write),
            state: None,
            free_pages: FreePages::new(agents.clone()),
            balloon: MemoryBalloon::new(agents.clone()),
            clock: GuestClock::new(agents),
            cautions,
            pause_pages_last: 0,
            bursts: Bursts::default(),
            disks: DiskHistory::with_left(left),
            disks_left: None,
            inhibitor: None,
        })
    }

    /// The VM's process id.
    pub fn pid(&self) -> i32 {
        self.target.process.pid()
    }

    /// Whether the VM still exists.
    pub fn is_alive(&self) -> bool {
        self.target.process.is_alive()
    }

    /// The reasons why checkpoints of this VM may be inexact, as far as the attach shows.
    pub fn cautions(&self) -> &[Caution] {
        &self.cautions
    }

    /// All of its guest memory, in bytes: every RAM block.
    pub fn ram_bytes(&self) -> u64 {
        self.tracker.pages() * PAGE_BYTES
    }

    /// Whether the tracked RAM blocks are still the VM's: a hot-plug changes them, and a reset may
    /// resize the small ones.
    pub(crate) fn tracks(&self, ram: &[RamBlock]) -> bool {
        self.tracker.tracks(ram)
    }

    /// Ends tracking; QEMU is left as it was found.
    pub fn detach(mut self) -> Result<(), DetachError> {
        // Each whatever comes of the other.
        let disks = self.disks.end(&mut self.monitor, &self.guardian);
        let ended = self.tracker.detach();
        let taken_back = self
            .state
            .take()
            .map_or(Ok(()), |state| state.take_back(&mut self.monitor));
        ended?;
        disks?;
        Ok(taken_back?)
    }
}

/// Starts tracking; returns also whether faults of the kernel could not be handled under synchronous tracking.
fn track(
    target: &Target,
    guardian: &Guardian,
    ram: &[RamBlock],
    schedule: ScheduleKind,
) -> Result<(Tracker, bool), AttachError> {
    let injected = guardian.inject_userfaultfd(&target.process)?;
    fault::at(Point::AttachOpened).map_err(TrackerError::Injected)?;
    // Last, because heartbeats come only when faults are handled.
    let heartbeat = match schedule {
        ScheduleKind::StopCopy | ScheduleKind::PreCopy => None,
        ScheduleKind::CopyOnWrite => {
            let ranges: Vec<AddressRange> = ram
                .iter()
                .map(|block| AddressRange {
                    start: block.address,
                    end: block.address.saturating_add(block.used_bytes),
                })
                .collect();
            Some(guardian.heartbeat(Some((injected.fd.as_fd(), &ranges)))?)
        }
    };
    let user_mode_only = injected.user_mode_only;
    let tracker = Tracker::attach(&target.process, injected, ram, heartbeat)?;
    fault::at(Point::AttachProtected).map_err(TrackerError::Injected)?;
    Ok((tracker, user_mode_only))
}
