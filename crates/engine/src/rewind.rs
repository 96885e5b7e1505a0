//! The verb *rewind*: a running VM goes back to one of its checkpoints, in the same QEMU.
//!
//! ```text
//!   guest runs:    compare all of disks and memory ── gather pages that differ ── gather pages written meanwhile
//!   pause:         save the current device state ── the same devices? disks? ── the last pages written
//!                  ── block cont ── exchange pages of disks, of memory ── load device state ── unblock ── cont
//!                                  └─ an error: pages and device state as they were ──┘
//! ```
//!
//! Only pages that differ are written. The tracking of checkpoints finds the guest's writes during the
//! comparison. Until the first page is exchanged every way out leads to the guest
//! running on as before; after it, errors put everything back. If this process is killed
//! between the two, the VM stays paused and `cont` stays blocked (see [`crate::inhibitor`]) until the next rewind.

mod disks;
mod disks_error;
mod error;
mod exchange;
mod same;
mod staged;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use serde::Serialize;
use stillframe_fault::{self as fault, Point};
use stillframe_page::PAGE_BYTES;
use stillframe_page::hash::ContentHasher;
use stillframe_qemu::guest_agent::AgentChannels;
use stillframe_qemu::launch::{self, Unchecked};
use stillframe_qemu::record::VmRecord;
use stillframe_repo::{Manifest, PageMap, Reader, Repository};

use crate::attach::Vm;
use crate::capture::device_state::StateStream;
use crate::capture::downtime::us;
use crate::capture::paused_vm::{PausedError, PausedVm};
use crate::memory::BlockShape;
use crate::memory::block::Block;
use crate::populate::eager::{self, PopulateError};
use crate::post_restore::{self, ClockReport};
use crate::restore::{self, Checkpoint, LOAD_LIMIT};
use crate::source::repository::shapes;
use crate::tracking::tracker::Collected;
use crate::verify::{Image, VerifyReport};
use crate::{Progress, ProgressSink};
pub use disks::DiskRewound;
use disks::{Chosen, StagedDisks};
pub use disks_error::RewindDisksError;
pub use error::RewindError;
use exchange::LastLook;
use same::same_machine;
use staged::{Budget, StagedBlock};

/// Upper bound on rounds, each of which gathers the pages written in the one before.
const ROUNDS_MAX: usize = 10;
/// Pages that are few enough to be left to the pause.
const FEW_PAGES: u64 = 64;
/// Time for a QEMU that no longer answers to end.
const END_LIMIT: Duration = Duration::from_secs(1);
/// Time for QEMU to save a device state.
const SAVE_LIMIT: Duration = Duration::from_secs(30);
/// RAM blocks that QEMU fills anew when the machine is reset, which loading a device state begins with.
const FIRMWARE_PREFIX: &str = "/rom@";

/// How to go back.
#[derive(Debug, Clone)]
pub struct RewindOptions {
    /// Leave the guest paused, ready to run.
    pub paused: bool,
    /// Leave the guest's clock as it was at the checkpoint.
    pub keep_clock: bool,
    /// Compare all of memory with the checkpoint before the guest runs.
    pub verify: bool,
    /// Give up, and resume the VM, when the part of the pause in which nothing was changed yet takes longer.
    pub pause_limit: Duration,
    /// Upper bound on the bytes of memory and disks that differ, all of which are kept in memory.
    pub copy_buffer_bytes: u64,
    /// Leave all disks as they are, even those whose content the checkpoint has, and continue although a disk has changed since
    /// the checkpoint.
    pub disks_as_they_are: bool,
    /// The label of the checkpoint's VM, where that is not this VM's.
    pub of_vm: Option<String>,
    /// How long to wait for another process' exclusive lock on the repository.
    pub lock_wait: Duration,
}

/// The report on a rewind.
#[derive(Debug, Clone, Serialize)]
pub struct RewindReport {
    /// The checkpoint.
    pub checkpoint: String,
    /// The VM's name.
    pub vm: String,
    /// Its QEMU.
    pub pid: i32,
    /// Whether the guest runs now; one that was paused before stays so.
    pub running: bool,
    /// Whether it is suspended to RAM, as it was at the checkpoint.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub suspended: bool,
    /// Pages compared: all of memory.
    pub compared: u64,
    /// The pages among them that differed and were written.
    pub written: u64,
    /// The disks that went back, too.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskRewound>,
    /// The pause.
    pub downtime_us: RewindDowntime,
    /// Time from the call to the running guest, in microseconds.
    pub total_us: u64,
    /// The result of setting the guest's clock, if the VM has a channel for an agent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clock: Option<ClockReport>,
    /// The comparison, with `--verify`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verify: Option<VerifyReport>,
}

/// The phases of the pause, one after the other, in microseconds.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct RewindDowntime {
    /// All of it.
    pub total: u64,
    /// `stop`.
    pub stop: u64,
    /// Saving the present device state, and inspecting the disks.
    pub save: u64,
    /// Reading the pages that were written last.
    pub gather: u64,
    /// Writing what differs on disks.
    pub disks: u64,
    /// Writing the pages that differ.
    pub write: u64,
    /// Comparing, with `--verify`.
    pub verify: u64,
    /// Loading the device state.
    pub device_state: u64,
    /// `cont`.
    pub resume: u64,
}

/// The data at hand in the pause.
struct Job<'j, 'a> {
    then: &'j VmRecord,
    options: &'j RewindOptions,
    reader: &'a Reader<'j>,
    manifest: &'j Manifest,
    hasher: ContentHasher,
    /// The checkpoint's device state, as saved and as it is loaded.
    state: (Vec<String>, Vec<u8>),
    /// The pages that differ, in the order of the tracked blocks.
    staged: Vec<StagedBlock<'a>>,
    firmware: Vec<StagedBlock<'a>>,
    disks: StagedDisks<'a>,
    budget: Budget,
}

impl Vm {
    /// Takes the VM back to a checkpoint. It stays attached; the next checkpoint is a first one.
    ///
    /// # Errors
    /// Unless the error says otherwise, the VM continues as if nothing had been.
    pub fn rewind(
        &mut self,
        repository: &mut Repository,
        checkpoint: Checkpoint<'_>,
        options: &RewindOptions,
        progress: ProgressSink<'_>,
    ) -> Result<RewindReport, RewindError> {
        let rewound = self.rewind_to(repository, checkpoint, options, progress);
        // Any failure then followed from that.
        let is_gone = || self.target.process.wait_exit(END_LIMIT);
        match rewound {
            Err(_) if self.monitor.run_state().is_err() && is_gone() => {
                Err(RewindError::VmGone { pid: self.pid() })
            }
            other => other,
        }
    }

    fn rewind_to(
        &mut self,
        repository: &mut Repository,
        Checkpoint { id, manifest }: Checkpoint<'_>,
        options: &RewindOptions,
        progress: ProgressSink<'_>,
    ) -> Result<RewindReport, RewindError> {
        let begin = Instant::now();
        let then = restore::vm_record(id, manifest)?;
        let now = self.record()?;
        same_machine(id, manifest, &then, &now, options)?;
        let chosen = disks::choose(&mut self.monitor, manifest, options.disks_as_they_are)?;
        launch::check_running_disks(&then, &now, &rewound_disks(manifest, options))?;
        self.can_be_reset()?;
        repository.require_images(manifest)?;
        let hasher = repository.hasher();
        let reader = repository.reader(options.lock_wait)?;
        let blocks = self.writable_blocks(manifest)?;
        let (staged, firmware) = stages(&blocks, &self.tracker.shape(), manifest, &reader)?;
        let mut job = Job {
            then: &then,
            options,
            reader: &reader,
            manifest,
            hasher,
            state: (
                restore::device_sections(id, manifest, &reader)?,
                restore::device_state(id, manifest, &then, &reader)?,
            ),
            staged,
            firmware,
            disks: StagedDisks::default(),
            budget: Budget {
                taken_bytes: 0,
                limit_bytes: options.copy_buffer_bytes,
            },
        };
        let mut report = RewindReport {
            checkpoint: id.to_string(),
            vm: now.label.clone(),
            pid: self.pid(),
            running: false,
            suspended: false,
            compared: self.tracker.pages(),
            written: 0,
            disks: Vec::new(),
            downtime_us: RewindDowntime::default(),
            total_us: 0,
            clock: None,
            verify: None,
        };
        let agents = AgentChannels::of(&now.arguments, &now.cwd);
        let done = self
            .gather(&mut job, &chosen, progress)
            .and_then(|()| self.turn_back(&mut job, now, &mut report));
        let ended = disks::end(&mut self.monitor, &self.guardian);
        done?;
        ended?;
        report.total_us = us(begin);
        if report.running && !options.keep_clock {
            report.clock = post_restore::set_clock(&agents);
        }
        Ok(report)
    }

    /// The memory of the VM, to be written; in the order of the checkpoint's tables.
    fn writable_blocks(&mut self, manifest: &Manifest) -> Result<Vec<Block>, RewindError> {
        let ram = self.monitor.ram_blocks()?;
        Ok(eager::open_blocks(
            &self.target.process,
            &ram,
            &shapes(&manifest.ram),
        )?)
    }

    /// Whether QEMU, which resets the machine before it loads a state, leaves memory alone, and can resume
    /// the VM afterwards.
    fn can_be_reset(&mut self) -> Result<(), RewindError> {
        const HALTED: [&str; 4] = ["shutdown", "internal-error", "guest-panicked", "io-error"];
        let state = self.monitor.run_state()?;
        if HALTED.contains(&state.status.as_str()) {
            return Err(RewindError::Halted {
                status: state.status,
            });
        }
        match self.monitor.roms_in_ram()?.pop() {
            Some(name) => Err(RewindError::RomInRam { name }),
            None => Ok(()),
        }
    }

    /// While the guest runs: all pages that differ, and then the pages written meanwhile, until they are few.
    fn gather(
        &mut self,
        job: &mut Job<'_, '_>,
        disks: &[Chosen<'_>],
        progress: ProgressSink<'_>,
    ) -> Result<(), RewindError> {
        let Vm {
            monitor, guardian, ..
        } = self;
        job.disks = StagedDisks::begin(monitor, guardian, disks, job.reader)?;
        let total = self.tracker.pages() + job.disks.pages();
        job.disks.compare(
            &mut self.monitor,
            &job.hasher,
            &mut job.budget,
            &mut |done| {
                progress(Progress::Rewinding { done, total });
            },
        )?;
        let populated = self
            .tracker
            .populated()?
            .drained(&mut self.monitor)?
            .written;
        self.tracker.expect_content(&populated);
        let mut done = job.disks.pages();
        for (staged, populated) in job.staged.iter_mut().zip(&populated) {
            staged.compare(populated, &job.hasher, &mut job.budget)?;
            done += staged.gathered.map.pages();
            progress(Progress::Rewinding { done, total });
        }
        for _ in 0..ROUNDS_MAX {
            let found = self.tracker.collect_running()?;
            let collected = found.drained(&mut self.monitor)?;
            let before = job.budget.taken_bytes;
            job.gather(&collected)?;
            let pages = (job.budget.taken_bytes - before) / PAGE_BYTES;
            if pages <= FEW_PAGES {
                break;
            }
        }
        job.disks.gather_running(&mut self.monitor, &mut job.budget)
    }

    /// The pause.
    fn turn_back(
        &mut self,
        job: &mut Job<'_, '_>,
        now: VmRecord,
        report: &mut RewindReport,
    ) -> Result<(), RewindError> {
        let options = job.options;
        let state = self.monitor.run_state()?;
        // A suspended guest may wake at any time; and QEMU leaves it in `save-vm` when it saves its devices. Stopped
        // first, it is paused, and `cont` makes it suspended again.
        let running = state.running || state.is_suspended();
        let begin = Instant::now();
        let Vm {
            monitor,
            guardian,
            tracker,
            state,
            target,
            inhibitor,
            ..
        } = self;
        let mut paused = PausedVm::stop(monitor, guardian, options.pause_limit, running)?;
        report.downtime_us.stop = us(begin);
        paused.monitor().client().take_events()?;
        let look = LastLook {
            tracker,
            stream: StateStream::lent(state, paused.monitor(), &target.process, guardian)?,
            now,
        };
        let before = look.prepare(job, paused.monitor(), &mut report.downtime_us)?;
        let (paused, done) =
            job.change_blocked(paused, inhibitor.take(), before, running, report)?;
        let resume = Instant::now();
        report.running = is_to_run(running, options, &done);
        let passed = match report.running {
            true => fault::at(Point::RewindBeforeCont),
            false => Ok(()),
        };
        if report.running {
            match paused.resume() {
                // The watchdog was quicker: the VM runs, as it should.
                Ok(()) | Err(PausedError::Overrun { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            report.suspended = self.monitor.is_suspended();
            report.running = !report.suspended;
        } else {
            paused.keep_paused()?;
        }
        report.downtime_us.resume = us(resume);
        report.downtime_us.total = us(begin);
        done.and(passed.map_err(RewindError::from))
    }
}

impl Job<'_, '_> {
    /// Gathers the pages among the collected that differ.
    fn gather(&mut self, collected: &Collected) -> Result<(), RewindError> {
        let found = collected.written.iter().zip(&collected.discarded);
        for (staged, (written, discarded)) in self.staged.iter_mut().zip(found) {
            let pages = written.iter().chain(discarded).cloned().flatten();
            staged.gather(pages, &mut self.budget)?;
        }
        Ok(())
    }

    /// Compares all of memory with the checkpoint.
    fn verify(&self) -> Result<VerifyReport, RewindError> {
        let blocks = self.staged.iter().map(|staged| staged.block);
        let image = Image::take(blocks, &self.hasher)?;
        let report = image.compare(self.reader, &self.manifest.ram, &mut |_| ())?;
        match report.differing {
            0 => Ok(report),
            differing => Err(RewindError::Differs {
                differing,
                first: report.first.join(", "),
            }),
        }
    }
}

/// The disks of the VM that need not be those of the checkpoint.
fn rewound_disks<'m>(manifest: &'m Manifest, options: &RewindOptions) -> Unchecked<'m> {
    match options.disks_as_they_are {
        true => Unchecked::All,
        false => Unchecked::Devices(
            manifest
                .disks
                .iter()
                .map(|disk| &*disk.table.name)
                .collect(),
        ),
    }
}

/// Whether the VM runs after the rewind.
fn is_to_run(was_running: bool, options: &RewindOptions, done: &Result<(), RewindError>) -> bool {
    was_running && (done.is_err() || !options.paused)
}

/// The pages to exchange, for each of the tracked blocks; and for those that QEMU overwrites, once more.
fn stages<'a>(
    blocks: &'a [Block],
    tracked: &[BlockShape],
    manifest: &Manifest,
    reader: &'a Reader<'_>,
) -> Result<(Vec<StagedBlock<'a>>, Vec<StagedBlock<'a>>), RewindError> {
    let (mut staged, mut firmware) = (Vec::new(), Vec::new());
    for shape in tracked {
        // They are those of the tables; `open_blocks` has made sure.
        let both = blocks.iter().zip(&manifest.ram);
        let found = both
            .clone()
            .find(|(block, _)| block.name() == shape.name && block.pages() == shape.pages);
        let Some((block, table)) = found else {
            return Err(PopulateError::Blocks {
                difference: format!("{} was resized since", shape.name),
            }
            .into());
        };
        staged.push(StagedBlock::new(block, PageMap::read(reader, table)?));
        if shape.name.starts_with(FIRMWARE_PREFIX) {
            let mut copy = StagedBlock::new(block, PageMap::read(reader, table)?);
            copy.gather_all()?;
            firmware.push(copy);
        }
    }
    Ok((staged, firmware))
}
