//! Lazy restore: the guest runs at once, and has a supervisor until its memory is complete.
//!
//! ```text
//!   start QEMU ── inject a userfaultfd ── handle faults ── load device state ── cont ── fill ── release
//!   └─ an error, or our death: this QEMU is ended ─┘     └─ the VM is paused; `resume` continues ─┘
//! ```

use std::fs::File;
use std::num::NonZeroU64;
use std::path::Path;
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Duration;

use stillframe_fault::{self as fault, Point};
use stillframe_page::GuestPage;
use stillframe_qemu::guest_agent::AgentChannels;
use stillframe_qemu::launch::{self, Launched};
use stillframe_qemu::monitor::{Monitor, RamBlock, Reached};
use stillframe_qemu::target;
use stillframe_repo::{BlockTable, Manifest, PageMap, Reader, WorkingSet};
use stillframe_sys::process::Process;
use stillframe_sys::uffd::Uffd;

use super::disk_streams::DiskStreams;
use super::events::{LazyEvent, LazySink};
use super::job::{Done, Job, PhaseClock, known_pages, micros};
use super::supervisor::Supervisor;
use super::{LOAD_LIMIT, RestoreError, disks};
use crate::disks::lazy::LazyDisks;
use crate::guardian::{Beating, Guardian, OnDisconnect};
use crate::memory::block::Block;
use crate::populate::eager::{self, PopulateError};
use crate::populate::lazy::prefetch::Prefetched;
use crate::populate::lazy::{self, FillOrder, Lazy};
use crate::post_restore::{self, ClockReport};
use crate::restore::filling_record::{Files, FillingRecord, FillingVm};
use crate::source::repository::shapes;

/// Time for a monitor to which the guardian of a killed process may still be connected.
const MONITOR_LIMIT: Duration = Duration::from_secs(90);

/// RAM blocks.
struct Memory<'j> {
    /// The blocks that are populated lazily, and the sources of their pages.
    blocks: Vec<Block>,
    maps: Vec<PageMap<'j>>,
    /// The same for a successor: what QEMU says of them.
    described: Vec<RamBlock>,
    /// Their numbers in the manifest.
    places: Vec<usize>,
    /// The others, which are populated already.
    filled: Vec<Block>,
}

impl Job<'_> {
    /// Restores into a QEMU that was just started, which is ended if anything fails before the guest
    /// runs. Returns when memory is complete.
    pub(super) fn run(
        &self,
        mut launched: Launched,
        guardian: Guardian,
        maps: Vec<PageMap<'_>>,
        prefetched: Prefetched,
        mut clock: PhaseClock,
        events: LazySink<'_>,
    ) -> Result<Done, RestoreError> {
        let process = launched.process.clone();
        guardian.watch(launched.monitor.client().socket())?;
        let shared = guardian.duplicate_userfaultfd(&process)?;
        if shared.user_mode_only {
            return Err(RestoreError::Unprivileged);
        }
        let uffd = Uffd::handshake_missing(shared.fd).map_err(PopulateError::from)?;
        let mut memory = self.split(&mut launched, &uffd, maps, events)?;
        let mut files = Files::of(&self.options.launch.qmp)?;
        let blocks: Vec<&Block> = memory.blocks.iter().collect();
        let maps = std::mem::take(&mut memory.maps);
        let fill_bitmap = files.create_fill_bitmap(maps.iter().map(PageMap::pages).sum())?;
        let known = known_pages(self.working_set.as_ref());
        let first = FillOrder::new(&memory.places, &maps, known, prefetched);
        let limit = self.options.limit_fill;
        let lazy = Lazy::new(uffd, &blocks, maps, first, limit, fill_bitmap)?;
        lazy.populate_used(&process, &blocks)?;
        let filling = FillingVm {
            remote_fd: shared.remote_fd,
            checkpoint: *self.id,
            vm: self.manifest.vm.clone(),
            repository: self.repository.clone(),
            running: !self.options.paused,
            agents: self.agents.clone(),
            blocks: std::mem::take(&mut memory.described),
            disks: self
                .lazy_disks
                .map_or_else(Vec::new, |disks| disks.disks().to_vec()),
        };
        let record = FillingRecord::new(&process, filling).map_err(PopulateError::from)?;
        thread::scope(|scope| {
            let _end = lazy.end_on_drop();
            lazy.serve(scope)?;
            lazy.fill(scope)?;
            clock.phases.memory = clock.lap();
            launch::load_device_state(&mut launched, self.state, LOAD_LIMIT)?;
            clock.phases.device_state = clock.lap();
            files.write(&record)?;
            fault::at(Point::RestoreLoaded)?;
            guardian.on_disconnect(OnDisconnect::Pause)?;
            let _beating = beating(&guardian)?;
            let (process, monitor) = launched.keep();
            let disks = DiskStreams::new(self.lazy_disks);
            // Dropped before the threads end: the guardian pauses the VM while pages still come.
            let supervisor = Supervisor::new(process, monitor, guardian, files, record, disks);
            self.supervise(scope, supervisor, (&lazy, &memory), clock, events)
        })
    }

    /// Lets the guest run, and supervises it until its memory is complete.
    fn supervise<'s>(
        &'s self,
        scope: &'s Scope<'s, '_>,
        mut supervisor: Supervisor<'s>,
        (lazy, memory): (&Lazy<PageMap<'_>>, &Memory<'_>),
        mut clock: PhaseClock,
        events: LazySink<'_>,
    ) -> Result<Done, RestoreError> {
        if !self.options.paused {
            supervisor.monitor.cont()?;
        }
        clock.phases.cont = clock.lap();
        let runs_after_us = micros(clock.requested_at.elapsed());
        events(LazyEvent::Runs {
            after_us: runs_after_us,
        });
        let mut suspended = false;
        if !self.options.paused {
            post_restore::announce(&mut supervisor.monitor);
            suspended = supervisor.monitor.is_suspended();
        }
        let set_clock = scope.spawn(move || self.set_clock(suspended));
        supervisor.until_complete(Some(lazy), self.options.limit_fill, events)?;
        let verify = match self.options.verify {
            true => {
                let all = memory.blocks.iter().chain(&memory.filled);
                let verified = self.verify(&all.collect::<Vec<_>>(), events);
                // As when it is compared before: a VM that is not the checkpoint does not stay.
                Some(verified.inspect_err(|_| supervisor.end_vm())?)
            }
            false => None,
        };
        let mut done = supervisor.done(Some(lazy), clock, runs_after_us, verify);
        done.clock = joined(set_clock);
        done.suspended = suspended;
        if let Some(report) = &mut done.lazy {
            report.working_set = self.working_set.as_ref().map(|set| set.pages.len());
            report.recorded = self.record(lazy, &memory.places);
            report.prefetched = lazy.prefetched();
        }
        Ok(done)
    }

    /// Records the next working set, if there was a fault; returns how many pages it has. It
    /// is a hint only: a failure to record it (a repository that is read-only, say) is no error.
    fn record(&self, lazy: &Lazy<PageMap<'_>>, places: &[usize]) -> Option<usize> {
        if self.options.paused {
            return None;
        }
        let learned = lazy.learned_working_set()?.into_iter();
        // In the numbers of the manifest.
        let numbered = |page: GuestPage| Some(GuestPage::new(*places.get(page.block)?, page.page));
        let pages = learned.filter_map(numbered).collect();
        let set = WorkingSet { pages };
        let recorded = self.reader.record_working_set(self.id, &set);
        matches!(recorded, Ok(true)).then_some(set.pages.len())
    }

    /// Registers the blocks that can be populated lazily, and populates the others.
    fn split<'m>(
        &self,
        launched: &mut Launched,
        uffd: &Uffd,
        maps: Vec<PageMap<'m>>,
        events: LazySink<'_>,
    ) -> Result<Memory<'m>, RestoreError> {
        let ram = launched.monitor.ram_blocks()?;
        let blocks = eager::open_blocks(&launched.process, &ram, &shapes(&self.manifest.ram))?;
        let mut lazily = Memory {
            blocks: Vec::new(),
            maps: Vec::new(),
            described: Vec::new(),
            places: Vec::new(),
            filled: Vec::new(),
        };
        let mut at_once = Vec::new();
        let blocks = blocks.into_iter().zip(maps);
        for (place, ((block, map), table)) in (0..).zip(blocks.zip(&self.manifest.ram)) {
            // `open_blocks` has found one for each table.
            let found = ram.iter().find(|ram| ram.name == table.name);
            match found {
                Some(ram)
                    if lazy::register(uffd, &block, ram.page_bytes)
                        .map_err(PopulateError::from)? =>
                {
                    lazily.blocks.push(block);
                    lazily.maps.push(map);
                    lazily.places.push(place);
                    lazily.described.push(ram.clone());
                }
                _ => {
                    lazily.filled.push(block);
                    at_once.push(map);
                }
            }
        }
        eager::populate(
            &launched.process,
            &lazily.filled.iter().collect::<Vec<_>>(),
            at_once,
            &mut |progress| events(LazyEvent::Progress(progress)),
        )?;
        Ok(lazily)
    }
}

/// A lazy restore whose process was killed.
pub(super) struct Unfinished<'r> {
    pub(super) record: FillingRecord,
    pub(super) files: Files,
    /// The VM's monitor.
    pub(super) qmp: &'r Path,
    /// Rate limit of the background fill, in bytes per second.
    pub(super) limit_fill: Option<NonZeroU64>,
}

/// Continues the lazy restore of a VM whose restore process was killed.
pub(super) fn resume(
    unfinished: Unfinished<'_>,
    reader: &Reader<'_>,
    clock: PhaseClock,
    events: LazySink<'_>,
) -> Result<Done, RestoreError> {
    let Unfinished { record, files, .. } = &unfinished;
    let manifest = reader.manifest(&record.checkpoint)?;
    // This process only, until it ends.
    let fill_bitmap = files.open_fill_bitmap()?;
    let tables = disks::tables_of(&record.disks, &manifest);
    let tables = tables.ok_or_else(|| {
        files.malformed("the checkpoint does not hold a disk that it names".to_owned())
    })?;
    let vm = the_vm(&unfinished)?;
    let (id, pid) = (record.checkpoint.to_string(), record.pid);
    let socket = disks::listen(&record.disks)?;
    let open = |socket| LazyDisks::open(&id, record.disks.clone(), tables, socket, reader);
    let served = socket.map(open).transpose()?;
    thread::scope(|scope| {
        let serving = served.as_ref().map(|disks| disks.serve(scope));
        let _serving = serving.transpose().map_err(RestoreError::Thread)?;
        let mut streams = DiskStreams::new(served.as_ref());
        let Some((process, monitor)) = vm else {
            return Err(streams.complete_alone(&unfinished.files, pid, events));
        };
        let record = &unfinished.record;
        let has_memory = !process
            .has_userfaultfd(record.remote_fd)
            .map_err(PopulateError::from)?;
        let vm = (process, monitor);
        if has_memory {
            return continue_disks(vm, unfinished, streams, clock, events);
        }
        let tables = tables_of(record, &unfinished.files, &manifest)?;
        let memory = (&*tables, fill_bitmap, reader);
        continue_memory(vm, unfinished, memory, streams, clock, events)
    })
}

/// Continues with the memory of the VM, and then with its disks.
fn continue_memory(
    vm: (Process, Reached),
    unfinished: Unfinished<'_>,
    (tables, fill_bitmap, reader): (&[BlockTable], File, &Reader<'_>),
    disks: DiskStreams<'_>,
    mut clock: PhaseClock,
    events: LazySink<'_>,
) -> Result<Done, RestoreError> {
    let (process, record) = (&vm.0, &unfinished.record);
    let uffd = process.fetch_fd(record.remote_fd);
    let uffd = Uffd::adopt(uffd.map_err(PopulateError::from)?);
    let blocks = eager::open_blocks(process, &record.blocks, &shapes(tables))?;
    let blocks: Vec<&Block> = blocks.iter().collect();
    let maps = tables.iter().map(|table| PageMap::open(reader, table));
    let maps = maps.collect::<Result<_, _>>()?;
    let first = FillOrder::default();
    let limit = unfinished.limit_fill;
    let lazy = Lazy::new(uffd, &blocks, maps, first, limit, fill_bitmap)?;
    lazy.mark_present(process, &blocks)?;
    thread::scope(|scope| {
        let _end = lazy.end_on_drop();
        lazy.serve(scope)?;
        // The killed process may have received their faults and not answered.
        lazy.wake_all().map_err(PopulateError::from)?;
        let mut vm = TakenOver::new(vm, unfinished, disks, &mut clock, events)?;
        let agents = std::mem::take(&mut vm.agents);
        let set_clock = scope.spawn(move || post_restore::set_clock(&agents));
        lazy.fill(scope)?;
        let mut done = vm.complete(Some(&lazy), clock, events)?;
        done.clock = joined(set_clock);
        Ok(done)
    })
}

/// The killed process had populated all of memory, and unregistered it: there may be disks left.
fn continue_disks(
    vm: (Process, Reached),
    unfinished: Unfinished<'_>,
    disks: DiskStreams<'_>,
    mut clock: PhaseClock,
    events: LazySink<'_>,
) -> Result<Done, RestoreError> {
    let vm = TakenOver::new(vm, unfinished, disks, &mut clock, events)?;
    let set_clock = post_restore::set_clock(&vm.agents);
    let mut done = vm.complete(None::<&Lazy<PageMap<'_>>>, clock, events)?;
    done.clock = set_clock;
    Ok(done)
}

/// A VM of a killed process that runs again, under this one.
struct TakenOver<'d> {
    supervisor: Supervisor<'d>,
    _beating: Beating,
    /// The channels through which its clock is to be set: it has been stopped since the other process was killed.
    agents: AgentChannels,
    suspended: bool,
    limit_fill: Option<NonZeroU64>,
    runs_after_us: u64,
}

impl<'d> TakenOver<'d> {
    /// Lets it run. Pages and blocks are served already: QEMU's main thread may have been waiting for one itself.
    fn new(
        (process, monitor): (Process, Reached),
        unfinished: Unfinished<'_>,
        disks: DiskStreams<'d>,
        clock: &mut PhaseClock,
        events: LazySink<'_>,
    ) -> Result<TakenOver<'d>, RestoreError> {
        let Unfinished {
            record,
            files,
            limit_fill,
            ..
        } = unfinished;
        let monitor = monitor.negotiate(MONITOR_LIMIT)?;
        let guardian = Guardian::start()?;
        let agents = record.agents.clone();
        let mut supervisor = Supervisor::new(process, monitor, guardian, files, record, disks);
        supervisor.arm_guardian()?;
        let beating = beating(&supervisor.guardian)?;
        supervisor.let_run()?;
        clock.phases.cont = clock.lap();
        let runs_after_us = micros(clock.requested_at.elapsed());
        events(LazyEvent::Runs {
            after_us: runs_after_us,
        });
        let suspended = supervisor.monitor.is_suspended();
        Ok(TakenOver {
            supervisor,
            _beating: beating,
            agents: match suspended {
                true => AgentChannels::default(),
                false => agents,
            },
            suspended,
            limit_fill,
            runs_after_us,
        })
    }

    /// Supervises it until all is there.
    fn complete(
        mut self,
        lazy: Option<&Lazy<PageMap<'_>>>,
        clock: PhaseClock,
        events: LazySink<'_>,
    ) -> Result<Done, RestoreError> {
        self.supervisor
            .until_complete(lazy, self.limit_fill, events)?;
        let mut done = self.supervisor.done(lazy, clock, self.runs_after_us, None);
        done.suspended = self.suspended;
        Ok(done)
    }
}

/// Heartbeats from a thread of its own: without them the guardian ends this process, and pauses the VM.
fn beating(guardian: &Guardian) -> Result<Beating, RestoreError> {
    let heartbeat = guardian.heartbeat(None)?;
    Beating::start(heartbeat, |_| {}).map_err(RestoreError::Thread)
}

/// The result of setting the clock.
fn joined(set_clock: ScopedJoinHandle<'_, Option<ClockReport>>) -> Option<ClockReport> {
    let report = set_clock.join();
    report.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The process of the record, and its monitor; none if it has ended and has left disks. No page is populated, and no block is
/// shown, before it is certain that this is the VM: they contain the guest's secrets.
fn the_vm(
    Unfinished {
        record, files, qmp, ..
    }: &Unfinished<'_>,
) -> Result<Option<(Process, Reached)>, RestoreError> {
    let Some(process) = record.process().map_err(PopulateError::from)? else {
        if record.disks.is_empty() {
            files.remove()?;
            return Err(RestoreError::Ended {
                qmp: (*qmp).to_owned(),
                pid: record.pid,
            });
        }
        return Ok(None);
    };
    let pid = process.pid();
    let uid = process.uid().map_err(PopulateError::from)?;
    if uid != record.uid {
        let what = format!("process {pid} runs as user {uid}, not {}", record.uid);
        return Err(files.malformed(what).into());
    }
    if !target::is_qemu_process(pid) {
        let what = format!("process {pid} is no QEMU system emulator");
        return Err(files.malformed(what).into());
    }
    // Not negotiated yet: QEMU's main thread may be waiting for a page or a block itself.
    let monitor = Monitor::reach(qmp, pid, MONITOR_LIMIT)?;
    Ok(Some((process, monitor)))
}

/// The page tables of the record's blocks, from the manifest, which is authenticated.
fn tables_of(
    record: &FillingRecord,
    files: &Files,
    manifest: &Manifest,
) -> Result<Vec<BlockTable>, RestoreError> {
    let names = record.blocks.iter().map(|block| &block.name);
    let tables = names.map(|name| {
        let table = manifest.ram.iter().find(|table| table.name == *name);
        let what = || format!("the checkpoint has no memory {name:?}");
        Ok(table
            .ok_or_else(|| files.malformed(what()))
            .map_err(RestoreError::from)?
            .clone())
    });
    tables.collect()
}

#[cfg(test)]
mod tests;
