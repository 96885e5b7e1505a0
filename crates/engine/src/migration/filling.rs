//! The destination while the VM runs, and lacks pages: they are fetched from the source (post-copy), or are in a checkpoint.

use std::fs::File;
use std::sync::Arc;
use std::thread::Scope;
use std::time::{Duration, Instant};

use serde::Serialize;
use stillframe_link::Stream;
use stillframe_page::bitmap::DirtyBitmap;
use stillframe_page::{GuestPage, PAGE_BYTES};
use stillframe_qemu::monitor::{Monitor, RamBlock};
use stillframe_repo::PageMap;
use stillframe_sys::process::Process;
use stillframe_sys::uffd::{Track, Uffd};

use super::error::ReceiveError;
use super::lacking::{self, Lacking};
use super::record::LackingRecord;
use super::seed::Seed;
use super::{ANSWER_LIMIT, DEMAND_LANES, Wire};
use crate::connection::ConnectionError;
use crate::connection::message::Base;
use crate::guardian::{Beating, Guardian, OnDisconnect};
use crate::memory::BlockShape;
use crate::memory::block::Block;
use crate::populate::eager::{self, PopulateError};
use crate::populate::lazy::supervision::{self, LOOK, SupervisedSink, Supervision};
use crate::populate::lazy::{self, FillOrder, FillStatus, Filling, Lazy};
use crate::source::based::BasedBlock;
use crate::source::connection::{FetchSession, FetchedBlock, Lane};
use crate::{Progress, ProgressSink};

/// Pages of a block that are fetched first, at most: 256 MiB.
const FIRST_MAX: usize = 1 << 16;

/// Connections to the source, the checkpoint, and the memory that is populated from them.
pub(super) struct LateMemory<'c> {
    pub session: Arc<FetchSession<Stream>>,
    lazy: Lazy<BasedBlock<PageMap<'c>, Stream>>,
    remote_fd: i32,
    /// The checkpoint that has what the source has not sent and is not to send.
    base: Option<Base>,
    /// Pages that the source is to send.
    content: Vec<DirtyBitmap>,
    /// From before the VM was stopped at the source, if this engine has received it.
    _beating: Option<Beating>,
}

/// The guardian ends this engine, and pauses the VM, when this engine hangs.
///
/// # Errors
/// There is no guardian, or no thread.
pub(super) fn beat(guardian: &Guardian) -> Result<Beating, ReceiveError> {
    let beating = Beating::start(guardian.heartbeat(None)?, |_| ());
    Ok(beating.map_err(PopulateError::Threads)?)
}

/// Whether the VM can run before all its memory is there; else, why not. It is tried: the first page of each block is
/// discarded, which the source sends, or which is zero.
pub(super) fn why_not(
    process: &Process,
    guardian: &Guardian,
    (blocks, ram): (&[Block], &[RamBlock]),
) -> Option<String> {
    let page_bytes = |block: &Block| ram.iter().find(|ram| ram.name == block.name());
    let odd = |block: &&Block| {
        let known = page_bytes(block).is_some_and(|ram| ram.page_bytes == PAGE_BYTES);
        !known || !block.absent_is_zero()
    };
    if let Some(block) = blocks.iter().find(odd) {
        let name = block.name();
        return Some(format!(
            "its memory {name:?} consists of huge pages, or is a file on disk"
        ));
    }
    let injected = match guardian.inject_userfaultfd(process) {
        Ok(injected) => injected,
        Err(error) => return Some(crate::in_words(&error)),
    };
    if injected.user_mode_only {
        let why = "its QEMU may not serve page faults of the kernel (vm.unprivileged_userfaultfd)";
        return Some(why.to_owned());
    }
    let tried = Uffd::handshake_missing(injected.fd).and_then(|uffd| {
        blocks.iter().try_for_each(|block| {
            uffd.register(block.range(), Track::Missing)?;
            uffd.unregister(block.range())
        })
    });
    if let Err(error) = tried {
        return Some(crate::in_words(&error));
    }
    let qemu = (guardian, process);
    let first = std::slice::from_ref(&(0..1));
    let discarded = blocks
        .iter()
        .try_for_each(|block| lacking::discard(block, first, qemu));
    // Locked memory cannot be.
    discarded.err().map(|error| crate::in_words(&error))
}

/// Adds connections that the source opened, in the order of their numbers.
pub(super) fn add_lanes(
    session: &FetchSession<Stream>,
    wires: Vec<Wire>,
    demand: usize,
) -> Result<(), ConnectionError> {
    for (number, wire) in wires.into_iter().enumerate() {
        wire.limit_silence(ANSWER_LIMIT);
        let lane = match number < demand {
            true => Lane::Demand,
            false => Lane::Bulk,
        };
        session.add(lane, wire)?;
    }
    Ok(())
}

/// Memory whose missing pages cause faults, which nothing handles yet.
pub(super) struct Missing {
    uffd: Uffd,
    remote_fd: i32,
    fill_bitmap: File,
    /// When this engine hangs, the guardian ends it, and with it the new QEMU; once the VM runs, it pauses it instead.
    beating: Beating,
}

impl Missing {
    /// From here on, what is not there causes faults. It takes time, so that it is done before the VM is stopped.
    ///
    /// # Errors
    /// Memory cannot be populated lazily, or there is no guardian.
    pub fn arm(
        (guardian, process): (&Guardian, &Process),
        blocks: &[Block],
        lacking: &Lacking,
        fill_bitmap: File,
    ) -> Result<Missing, ReceiveError> {
        let shared = guardian.duplicate_userfaultfd(process)?;
        let uffd = Uffd::handshake_missing(shared.fd).map_err(PopulateError::from)?;
        for block in blocks {
            let registered = lazy::register(&uffd, block, PAGE_BYTES);
            if !registered.map_err(PopulateError::from)? {
                let block = block.name().to_owned();
                return Err(ReceiveError::NotLazy { block });
            }
        }
        lacking.discard_others(blocks, (guardian, process))?;
        Ok(Missing {
            uffd,
            remote_fd: shared.remote_fd,
            fill_bitmap,
            beating: beat(guardian)?,
        })
    }
}

impl<'c> LateMemory<'c> {
    /// The memory of a QEMU that has not run. What the source does not have is in the base, with these page maps.
    ///
    /// # Errors
    /// There are no threads, or the base cannot be read.
    pub fn new(
        missing: Missing,
        blocks: &[Block],
        session: Arc<FetchSession<Stream>>,
        mut lacking: Lacking,
        base: Option<(&'c Seed<'_>, Vec<PageMap<'c>>)>,
    ) -> Result<LateMemory<'c>, ReceiveError> {
        let (base, maps) = base.unzip();
        let present = std::mem::take(&mut lacking.present);
        let sources = (0..blocks.len()).map(|block| {
            let content = lacking.content[block].clone();
            session.source(block, content, lacking.first(block, FIRST_MAX))
        });
        let sources = based(sources, maps);
        let (blocks, order) = (blocks.iter().collect::<Vec<_>>(), FillOrder::default());
        let fill_bitmap = missing.fill_bitmap;
        let lazy = Lazy::new(missing.uffd, &blocks, sources, order, None, fill_bitmap)?;
        lazy.mark_populated(&present);
        Ok(LateMemory {
            session,
            lazy,
            remote_fd: missing.remote_fd,
            base: base.and_then(|base| base.base.clone()),
            content: lacking.content,
            _beating: Some(missing.beating),
        })
    }

    /// The memory of a QEMU whose engine was killed. `None`: it is complete.
    ///
    /// # Errors
    /// Its userfaultfd, or what is on record of its pages, cannot be had.
    pub fn found(
        process: &Process,
        record: &LackingRecord,
        base: Option<&'c Seed<'_>>,
        fill_bitmap: File,
    ) -> Result<Option<LateMemory<'c>>, ReceiveError> {
        let lacks = process.has_userfaultfd(record.remote_fd);
        if !lacks.map_err(PopulateError::from)? {
            return Ok(None);
        }
        let fd = process.fetch_fd(record.remote_fd);
        let uffd = Uffd::adopt(fd.map_err(PopulateError::from)?);
        let blocks = eager::open_blocks(process, &record.ram, &record.blocks)?;
        let session = Arc::new(FetchSession::new(&record.blocks));
        let content = blocks.iter().map(|block| {
            let mut content = DirtyBitmap::new(block.pages());
            if base.is_none() {
                // Which pages are zero was known to the other engine only.
                content.set_range(0..block.pages());
            }
            content
        });
        let content: Vec<DirtyBitmap> = content.collect();
        let numbered = content.iter().cloned().enumerate();
        let sources = numbered.map(|(number, content)| session.source(number, content, Vec::new()));
        let maps = base.map(|base| base.maps(&blocks)).transpose()?;
        let sources = based(sources, maps);
        let (blocks, order) = (blocks.iter().collect::<Vec<_>>(), FillOrder::default());
        let lazy = Lazy::new(uffd, &blocks, sources, order, None, fill_bitmap)?;
        lazy.mark_present(process, &blocks)?;
        Ok(Some(LateMemory {
            session,
            lazy,
            remote_fd: record.remote_fd,
            base: record.base.clone(),
            content,
            _beating: None,
        }))
    }

    /// What a successor would need.
    pub fn record(&self, ram: Vec<RamBlock>, blocks: Vec<BlockShape>) -> LackingRecord {
        LackingRecord {
            remote_fd: self.remote_fd,
            ram,
            blocks,
            base: self.base.clone().filter(|_| !self.needs_source()),
        }
    }

    /// Whether the source is to send any more.
    pub fn needs_source(&self) -> bool {
        self.base.is_none() || self.content.iter().any(|pages| !pages.is_empty())
    }

    /// Answers faults from here on, until this is dropped.
    ///
    /// # Errors
    /// There are no threads.
    pub fn begin<'s>(&'s self, scope: &'s Scope<'s, '_>) -> Result<impl Drop + 's, ReceiveError> {
        let end = self.lazy.end_on_drop();
        self.lazy.serve(scope)?;
        self.lazy.wake_all().map_err(PopulateError::from)?;
        Ok(end)
    }

    /// The VM when it runs. What causes no fault is fetched only then: before, that would take time from the pause.
    pub fn running<'s>(&'s self, scope: &'s Scope<'s, '_>, runs: bool) -> RunningLate<'s> {
        let now = Instant::now();
        RunningLate {
            memory: self,
            fill: Some(Box::new(move || self.lazy.fill(scope))),
            supervision: Supervision::new(runs),
            since: now,
            no_lane: None,
            beat: now,
            complete: false,
            needs_source: self.needs_source(),
            first_missing: GuestPage::new(0, 0),
        }
    }

    /// How far it is.
    pub fn filling(&self) -> Filling {
        self.lazy.filling()
    }

    /// Faults in each of the first steps of 10 ms.
    pub fn faults_by_step(&self) -> Vec<u64> {
        self.lazy.faults_by_step()
    }
}

/// Where the pages of each block are.
fn based<'c>(
    fetched: impl Iterator<Item = FetchedBlock<Stream>>,
    maps: Option<Vec<PageMap<'c>>>,
) -> Vec<BasedBlock<PageMap<'c>, Stream>> {
    let mut maps = maps.into_iter().flatten();
    fetched
        .map(|fetched| BasedBlock::new(fetched, maps.next()))
        .collect()
}

/// A VM that runs while it lacks pages.
pub(super) struct RunningLate<'l> {
    memory: &'l LateMemory<'l>,
    /// Starts the background fill; gone when it is started.
    fill: Option<Box<dyn FnOnce() -> Result<(), PopulateError> + 'l>>,
    supervision: Supervision,
    since: Instant,
    /// Since when there has been no lane.
    no_lane: Option<Instant>,
    /// When the source last heard of this side.
    beat: Instant,
    complete: bool,
    /// The source is to send pages still; those before the first one that is missing have come.
    needs_source: bool,
    first_missing: GuestPage,
}

impl RunningLate<'_> {
    /// Looks at the VM for a moment. Returns whether all its pages are here.
    ///
    /// # Errors
    /// QEMU does not answer, or its memory cannot be populated.
    pub fn look(
        &mut self,
        monitor: &mut Monitor,
        report: SupervisedSink<'_>,
        progress: ProgressSink<'_>,
    ) -> Result<bool, ReceiveError> {
        if let Some(fill) = self.fill.take() {
            self.since = Instant::now();
            fill()?;
        }
        let status = self.memory.lazy.status(LOOK)?;
        let lazy = &self.memory.lazy;
        let problem = || lazy.take_problem();
        self.supervision
            .look(monitor, lazy.stall(), problem, report)?;
        if let FillStatus::Complete = status {
            self.supervision.complete(monitor, report)?;
            self.complete = true;
        }
        let Filling { done, total, .. } = self.memory.filling();
        progress(Progress::Filling { done, total });
        Ok(self.complete)
    }

    /// Removes what this process left in QEMU.
    ///
    /// # Errors
    /// Something is there still.
    pub fn release(&self, guardian: &Guardian, process: &Process) -> Result<(), ReceiveError> {
        let qemu = (process, self.memory.remote_fd);
        supervision::release(&self.memory.lazy, guardian, qemu)?;
        Ok(guardian.on_disconnect(OnDisconnect::Nothing)?)
    }

    /// Whether the source is to hear that this side lives.
    pub fn is_beat_due(&mut self) -> bool {
        let due = self.beat.elapsed() >= super::BEAT;
        if due {
            self.beat = Instant::now();
        }
        due
    }

    /// Whether the source is to send pages still.
    pub fn needs_source(&self) -> bool {
        self.needs_source
    }

    /// The checkpoint that has all that is lacking, once no page of the source is.
    pub fn only_lacks(&mut self) -> Option<&Base> {
        let base = self.memory.base.as_ref()?;
        let LateMemory { lazy, content, .. } = self.memory;
        match lazy.first_missing(content, self.first_missing) {
            Some(page) => {
                self.first_missing = page;
                None
            }
            None => Some(base),
        }
    }

    /// That is on record.
    pub fn release_source(&mut self) {
        self.needs_source = false;
    }

    /// Whether the connection is to be made anew, because there has been no lane for [`ANSWER_LIMIT`].
    pub fn is_cut_off(&mut self) -> bool {
        match self.memory.session.count() {
            0 if self.needs_source() => {
                self.no_lane.get_or_insert_with(Instant::now).elapsed() > ANSWER_LIMIT
            }
            _ => {
                self.no_lane = None;
                false
            }
        }
    }

    /// The source has opened these connections anew.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn connected(&mut self, wires: Vec<Wire>) -> Result<(), ConnectionError> {
        self.no_lane = None;
        self.memory.session.drop_idle();
        add_lanes(&self.memory.session, wires, DEMAND_LANES)
    }

    /// What it came to.
    pub fn report(&self) -> FilledReport {
        let Filling { faults, filled, .. } = self.memory.filling();
        FilledReport {
            after_us: self.since.elapsed().as_micros() as u64,
            pages: filled,
            faults,
            faults_each_10_ms: self.memory.faults_by_step(),
        }
    }
}

/// The report of a destination that has all pages.
#[derive(Debug, Clone, Serialize)]
pub struct FilledReport {
    /// Time since the VM runs here, in microseconds.
    pub after_us: u64,
    /// Pages that were fetched, or read from the checkpoint.
    pub pages: u64,
    /// How often the guest had to wait for a page.
    pub faults: u64,
    /// The same in each of the first steps of 10 ms, up to the last in which it had to.
    pub faults_each_10_ms: Vec<u64>,
}

/// The limit of a wait for the source while the VM runs here.
pub(super) const MEANWHILE: Duration = Duration::from_millis(20);
