//! The pause of a rewind: pages and devices are exchanged for the checkpoint's, or put back.

use std::time::Instant;

use stillframe_fault::{self as fault, Point};
use stillframe_qemu::device_state;
use stillframe_qemu::launch;
use stillframe_qemu::monitor::Monitor;
use stillframe_qemu::record::VmRecord;
use stillframe_qemu::reload;

use super::same::same_devices;
use super::staged::StagedBlock;
use super::{Job, LOAD_LIMIT, RewindDowntime, RewindError, RewindReport, SAVE_LIMIT};
use super::{is_to_run, rewound_disks};
use crate::capture::device_state::StateStream;
use crate::capture::downtime::us;
use crate::capture::paused_vm::PausedVm;
use crate::inhibitor::ResumeInhibitor;
use crate::tracking::tracker::Tracker;

/// The state of the VM before the exchange.
pub(super) struct Before {
    device_state: Vec<u8>,
    /// Contents of the blocks that QEMU overwrites when it loads that device state.
    firmware: Vec<Vec<u8>>,
    /// Runs of each block that were exchanged.
    exchanged: Vec<usize>,
    /// Whether the devices may be others than they were.
    devices_touched: bool,
}

/// What is queried about the stopped VM before it is changed.
pub(super) struct LastLook<'x> {
    pub(super) tracker: &'x mut Tracker,
    pub(super) stream: &'x mut StateStream,
    pub(super) now: VmRecord,
}

impl LastLook<'_> {
    /// Does everything that can fail without harm. Returns the VM's current state, to be put back if need be.
    pub(super) fn prepare(
        mut self,
        job: &mut Job<'_, '_>,
        monitor: &mut Monitor,
        downtime: &mut RewindDowntime,
    ) -> Result<Before, RewindError> {
        let save = Instant::now();
        let raw = self.stream.save(monitor, SAVE_LIMIT)?;
        let sections = device_state::validate_like(&raw, &job.state.0)?.sections;
        same_devices(&job.state.0, &sections)?;
        self.now.look_at_disks_again();
        let rewound = rewound_disks(job.manifest, job.options);
        launch::check_running_disks(job.then, &self.now, &rewound)?;
        downtime.save = us(save);
        let gather = Instant::now();
        let collected = self.tracker.collect_stopped()?;
        job.gather(&collected)?;
        job.disks.gather_stopped(monitor, &mut job.budget)?;
        downtime.gather = us(gather);
        fault::at(Point::RewindStopped)?;
        Before::take(job, &raw, &self.now.identity.machine)
    }
}

impl Before {
    /// The VM's memory and devices as they are; `raw` is its device state.
    pub(super) fn take(
        job: &Job<'_, '_>,
        raw: &[u8],
        machine: &str,
    ) -> Result<Before, RewindError> {
        let firmware = job.firmware.iter().map(StagedBlock::read_all);
        Ok(Before {
            device_state: device_state::wrap(raw, machine)?,
            firmware: firmware.collect::<Result<_, _>>()?,
            exchanged: vec![0; job.staged.len()],
            devices_touched: false,
        })
    }
}

impl Job<'_, '_> {
    /// Changes memory and devices to those of the checkpoint, or back after an error, with `cont` blocked. Returns
    /// the VM, fit to run, and the result of the change.
    ///
    /// While `cont` can be sent, the guardian sends it if this process dies. The guardian is disarmed only after
    /// `cont` is blocked, and armed again before `cont` is unblocked.
    ///
    /// # Errors
    /// `cont` stays blocked: memory was inconsistent before and the change failed, or the change could not be
    /// undone.
    pub(super) fn change_blocked<'v>(
        &mut self,
        paused: PausedVm<'v>,
        left: Option<ResumeInhibitor>,
        mut before: Before,
        running: bool,
        report: &mut RewindReport,
    ) -> Result<(PausedVm<'v>, Result<(), RewindError>), RewindError> {
        let was_consistent = left.is_none();
        let mut blocked = paused.block_cont(left)?;
        let committed = fault::at(Point::RewindInhibited)
            .map_err(RewindError::from)
            .and_then(|()| Ok(blocked.commit()?));
        let changed = committed.and_then(|()| self.change(blocked.monitor(), &mut before, report));
        let done = changed.or_else(|error| self.undo(blocked.monitor(), &before, error));
        let is_consistent = match &done {
            Ok(()) => true,
            Err(RewindError::Stuck { .. } | RewindError::ResumedByOthers) => false,
            Err(_) => was_consistent,
        };
        if is_consistent {
            self.disks.are_consistent(blocked.monitor())?;
        }
        let done = match done {
            Err(error) if !is_consistent => {
                // Paused, with `cont` refused: it is not fit to run.
                drop(blocked);
                return Err(error);
            }
            done => done,
        };
        let runs = is_to_run(running, self.options, &done);
        Ok((blocked.unblock(runs)?, done))
    }

    /// Memory and devices become the checkpoint's.
    fn change(
        &mut self,
        monitor: &mut Monitor,
        before: &mut Before,
        report: &mut RewindReport,
    ) -> Result<(), RewindError> {
        let downtime = &mut report.downtime_us;
        let disks = Instant::now();
        report.disks = self.disks.exchange(monitor)?;
        downtime.disks = us(disks);
        fault::at(Point::RewindDisksExchanged)?;
        let write = Instant::now();
        for (staged, exchanged) in self.staged.iter_mut().zip(&mut before.exchanged) {
            report.written += staged.exchange(exchanged)?;
        }
        downtime.write = us(write);
        fault::at(Point::RewindExchanged)?;
        let verify = Instant::now();
        if self.options.verify {
            report.verify = Some(self.verify()?);
            downtime.verify = us(verify);
        }
        let load = Instant::now();
        let loaded = reload::load(monitor, &self.state.1, LOAD_LIMIT);
        before.devices_touched = loaded
            .as_ref()
            .map_or_else(|error| !error.is_harmless(), |()| true);
        loaded?;
        for firmware in &mut self.firmware {
            firmware.exchange(&mut 0)?;
        }
        fault::at(Point::RewindLoaded)?;
        downtime.device_state = us(load);
        let events = monitor.client().take_events()?;
        match events.iter().any(|event| event.name == "RESUME") {
            true => {
                monitor.stop()?;
                Err(RewindError::ResumedByOthers)
            }
            false => Ok(()),
        }
    }

    /// Puts memory and devices back; returns the error that made it necessary.
    fn undo(
        &mut self,
        monitor: &mut Monitor,
        before: &Before,
        error: RewindError,
    ) -> Result<(), RewindError> {
        if matches!(error, RewindError::ResumedByOthers) {
            return Err(error);
        }
        let stuck = |why: &dyn std::error::Error| RewindError::Stuck {
            what: crate::in_words(&error),
            why: crate::in_words(why),
        };
        for (staged, &exchanged) in self.staged.iter_mut().zip(&before.exchanged) {
            staged.put_back(exchanged).map_err(|why| stuck(&why))?;
        }
        self.disks.put_back(monitor).map_err(|why| stuck(&why))?;
        if before.devices_touched {
            let loaded = reload::load(monitor, &before.device_state, LOAD_LIMIT);
            loaded.map_err(|why| stuck(&why))?;
            for (block, bytes) in self.firmware.iter().zip(&before.firmware) {
                block.block.write(0, bytes).map_err(|why| stuck(&why))?;
            }
        }
        Err(error)
    }
}
