//! The supervisor of a VM that runs while its memory and its disks are restored: pauses it while it waits for a page or a
//! block that cannot be read, and leaves nothing behind when all is there.

use std::num::NonZeroU64;
use std::thread;

use stillframe_qemu::monitor::Monitor;
use stillframe_sys::process::Process;

use super::RestoreError;
use super::disk_streams::{DiskStreams, Step};
use super::events::{LazyEvent, LazyReport, LazySink};
use super::job::{Done, PhaseClock};
use crate::Progress;
use crate::guardian::{Guardian, OnDisconnect};
use crate::populate::lazy::supervision::{self, LOOK, Populating, Supervised, Supervision};
use crate::populate::lazy::{FillStatus, Filling};
use crate::restore::filling_record::{Files, FillingRecord};
use crate::verify::VerifyReport;

/// The supervisor of a VM whose memory and disks are being restored. Dropped before that is complete, it has the guardian
/// pause the VM.
pub(super) struct Supervisor<'d> {
    process: Process,
    pub(super) monitor: Monitor,
    pub(super) guardian: Guardian,
    files: Files,
    pub(super) record: FillingRecord,
    supervision: Supervision,
    disks: DiskStreams<'d>,
}

impl<'d> Supervisor<'d> {
    pub(super) fn new(
        process: Process,
        monitor: Monitor,
        guardian: Guardian,
        files: Files,
        record: FillingRecord,
        disks: DiskStreams<'d>,
    ) -> Supervisor<'d> {
        Supervisor {
            process,
            monitor,
            guardian,
            files,
            supervision: Supervision::new(record.running),
            record,
            disks,
        }
    }

    /// From here on the guardian pauses the VM if this process dies.
    pub(super) fn arm_guardian(&mut self) -> Result<(), RestoreError> {
        self.guardian.watch(self.monitor.client().socket())?;
        Ok(self.guardian.on_disconnect(OnDisconnect::Pause)?)
    }

    /// Resumes the VM, which the guardian of a killed process has paused.
    pub(super) fn let_run(&mut self) -> Result<(), RestoreError> {
        if self.record.running && self.monitor.run_state()?.status == "paused" {
            self.monitor.cont()?;
        }
        Ok(())
    }

    /// Supervises the VM until all its memory is populated and all its images are complete, and lets it go. Without `lazy` its
    /// memory is there.
    pub(super) fn until_complete(
        &mut self,
        lazy: Option<&impl Populating>,
        bytes_per_s: Option<NonZeroU64>,
        events: LazySink<'_>,
    ) -> Result<(), RestoreError> {
        let populated = lazy.map_or(Ok(()), |lazy| self.populate(lazy, events));
        let complete = populated.and_then(|()| self.stream(bytes_per_s, events));
        if let Err(error) = complete {
            // Its end may show in the monitor, or in a page that cannot be populated, before it shows in the process.
            return Err(match self.has_ended() {
                true => self
                    .disks
                    .complete_alone(&self.files, self.record.pid, events),
                false => error,
            });
        }
        self.disks.end();
        self.guardian.on_disconnect(OnDisconnect::Nothing)?;
        Ok(self.files.remove()?)
    }

    /// Whether the process has ended. Its monitor closes a moment before.
    fn has_ended(&self) -> bool {
        (0..20).any(|_| {
            let alive = self.process.is_alive();
            if alive {
                thread::sleep(LOOK / 5);
            }
            !alive
        })
    }

    fn populate(
        &mut self,
        lazy: &impl Populating,
        events: LazySink<'_>,
    ) -> Result<(), RestoreError> {
        loop {
            let status = lazy.status(LOOK);
            self.expect_alive()?;
            let report = &mut |supervised: Supervised| events(LazyEvent::Supervised(supervised));
            let stall = lazy.stall().or_else(|| self.disks.stall());
            let problem = || lazy.take_problem();
            self.supervision
                .look(&mut self.monitor, stall, problem, report)?;
            if let FillStatus::Complete = status? {
                // It may be paused for a disk, too.
                if self.disks.stall().is_none() {
                    self.supervision.complete(&mut self.monitor, report)?;
                }
                break;
            }
            let Filling { done, total, .. } = lazy.filling();
            events(LazyEvent::Progress(Progress::Filling { done, total }));
        }
        let qemu = (&self.process, self.record.remote_fd);
        Ok(supervision::release(lazy, &self.guardian, qemu)?)
    }

    fn stream(
        &mut self,
        bytes_per_s: Option<NonZeroU64>,
        events: LazySink<'_>,
    ) -> Result<(), RestoreError> {
        let mut problem = None;
        if !self.disks.are_complete() {
            events(LazyEvent::FillsDisks);
        }
        while !self.disks.are_complete() {
            thread::sleep(LOOK);
            self.expect_alive()?;
            let report = &mut |supervised: Supervised| events(LazyEvent::Supervised(supervised));
            let stall = self.disks.stall();
            let waits = stall.is_some();
            self.supervision
                .look(&mut self.monitor, stall, || problem.take(), report)?;
            // QEMU may not answer before the read is answered that it waits for.
            if waits || self.supervision.is_paused() {
                continue;
            }
            match self.disks.step(&mut self.monitor, bytes_per_s)? {
                Step::Failed(words) => problem = Some(words),
                Step::Copying { done, total } => {
                    events(LazyEvent::Progress(Progress::StreamingDisks {
                        done,
                        total,
                    }));
                }
                Step::None => {}
            }
        }
        let report = &mut |supervised: Supervised| events(LazyEvent::Supervised(supervised));
        Ok(self.supervision.complete(&mut self.monitor, report)?)
    }

    fn expect_alive(&self) -> Result<(), RestoreError> {
        match self.process.is_alive() {
            true => Ok(()),
            false => Err(RestoreError::EndedMeanwhile {
                pid: self.process.pid(),
            }),
        }
    }

    /// The outcome.
    pub(super) fn done(
        self,
        lazy: Option<&impl Populating>,
        clock: PhaseClock,
        runs_after_us: u64,
        verify: Option<VerifyReport>,
    ) -> Done {
        let filling = lazy.map(Populating::filling).unwrap_or_default();
        let Filling { faults, filled, .. } = filling;
        Done {
            process: self.process,
            pages: filled,
            phases: clock.phases,
            lazy: Some(LazyReport {
                runs_after_us,
                faults,
                faults_each_10_ms: lazy.map(Populating::faults_by_step).unwrap_or_default(),
                ..LazyReport::default()
            }),
            suspended: false,
            clock: None,
            verify,
        }
    }

    /// Ends the VM, which has not run.
    pub(super) fn end_vm(&self) {
        // A process that has ended needs no signal.
        let _ = self.process.signal(signal_hook::consts::SIGKILL);
    }
}
