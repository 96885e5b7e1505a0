//! The supervisor of a VM that runs while its memory is restored: pauses it while it waits for a page that cannot be
//! read, and leaves nothing behind when its memory is complete.

use stillframe_qemu::monitor::Monitor;
use stillframe_sys::process::Process;

use super::RestoreError;
use super::events::{LazyEvent, LazyReport, LazySink};
use super::job::{Done, PhaseClock};
use crate::Progress;
use crate::guardian::{Guardian, OnDisconnect};
use crate::populate::lazy::supervision::{self, LOOK, Populating, Supervised, Supervision};
use crate::populate::lazy::{FillStatus, Filling};
use crate::restore::filling_record::{Files, FillingRecord};
use crate::verify::VerifyReport;

/// The supervisor of a VM whose memory is being populated. Dropped before that is complete, it has the guardian
/// pause the VM.
pub(super) struct Supervisor<'l, P> {
    process: Process,
    pub(super) monitor: Monitor,
    pub(super) guardian: Guardian,
    files: Files,
    pub(super) lazy: &'l P,
    pub(super) record: FillingRecord,
    supervision: Supervision,
}

impl<'l, P: Populating> Supervisor<'l, P> {
    pub(super) fn new(
        process: Process,
        monitor: Monitor,
        guardian: Guardian,
        files: Files,
        lazy: &'l P,
        record: FillingRecord,
    ) -> Supervisor<'l, P> {
        Supervisor {
            process,
            monitor,
            guardian,
            files,
            lazy,
            supervision: Supervision::new(record.running),
            record,
        }
    }

    /// From here on the guardian pauses the VM if this process dies.
    pub(super) fn arm_guardian(&mut self) -> Result<(), RestoreError> {
        self.guardian.watch(self.monitor.client().socket())?;
        Ok(self.guardian.on_disconnect(OnDisconnect::Pause)?)
    }

    /// Supervises the VM until all its memory is populated, and lets it go.
    pub(super) fn until_complete(&mut self, events: LazySink<'_>) -> Result<(), RestoreError> {
        loop {
            let status = self.lazy.status(LOOK);
            if !self.process.is_alive() {
                self.files.remove()?;
                return Err(RestoreError::EndedMeanwhile {
                    pid: self.process.pid(),
                });
            }
            let report = &mut |supervised: Supervised| events(LazyEvent::Supervised(supervised));
            self.supervision
                .look(&mut self.monitor, self.lazy, report)?;
            if let FillStatus::Complete = status? {
                self.supervision.complete(&mut self.monitor, report)?;
                break;
            }
            let Filling { done, total, .. } = self.lazy.filling();
            events(LazyEvent::Progress(Progress::Filling { done, total }));
        }
        let qemu = (&self.process, self.record.remote_fd);
        supervision::release(self.lazy, &self.guardian, qemu)?;
        Ok(self.files.remove()?)
    }

    /// The outcome.
    pub(super) fn done(
        self,
        clock: PhaseClock,
        runs_after_us: u64,
        verify: Option<VerifyReport>,
    ) -> Done {
        let Filling { faults, filled, .. } = self.lazy.filling();
        Done {
            process: self.process,
            pages: filled,
            phases: clock.phases,
            lazy: Some(LazyReport {
                runs_after_us,
                faults,
                faults_each_10_ms: self.lazy.faults_by_step(),
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
