//! The supervisor of a VM that runs while its memory is populated: pauses it while it waits for a page that cannot be
//! read, and leaves nothing behind when its memory is complete.

use std::time::{Duration, Instant};

use stillframe_fault::{self as fault, Point};
use stillframe_qemu::monitor::Monitor;
use stillframe_qemu::qmp::Ticket;
use stillframe_sys::process::Process;
use stillframe_sys::uffd::UffdError;

use super::RestoreError;
use super::events::{LazyEvent, LazyReport, LazySink};
use super::job::{Done, PhaseClock};
use crate::Progress;
use crate::guardian::{Guardian, OnDisconnect};
use crate::populate::eager::PopulateError;
use crate::populate::lazy::{FillError, FillStatus, Filling, Lazy};
use crate::restore::filling_record::{Files, FillingRecord};
use crate::source::PageSource;
use crate::verify::VerifyReport;

/// How often the supervisor checks the VM while its memory is populated.
const LOOK: Duration = Duration::from_millis(50);
/// The longest stall before the guest is paused, so that its clocks stop too.
const WAITED_MAX: Duration = Duration::from_secs(1);
/// How often the reason is reported why a page cannot be populated.
const REPORT_EVERY: Duration = Duration::from_secs(10);

/// Memory that is being populated, as the supervisor sees it. See [`Lazy`] for each method.
pub(super) trait Populating {
    fn status(&self, limit: Duration) -> Result<FillStatus, PopulateError>;
    fn stall(&self) -> Option<(Duration, String)>;
    fn take_problem(&self) -> Option<String>;
    fn filling(&self) -> Filling;
    fn faults_by_step(&self) -> Vec<u64>;
    fn finish(&self) -> Result<(), FillError>;
}

impl<S: PageSource> Populating for Lazy<S> {
    fn status(&self, limit: Duration) -> Result<FillStatus, PopulateError> {
        self.status(limit)
    }

    fn stall(&self) -> Option<(Duration, String)> {
        self.stall()
    }

    fn take_problem(&self) -> Option<String> {
        self.take_problem()
    }

    fn filling(&self) -> Filling {
        self.filling()
    }

    fn faults_by_step(&self) -> Vec<u64> {
        self.faults_by_step()
    }

    fn finish(&self) -> Result<(), FillError> {
        self.finish()
    }
}

/// The supervisor of a VM whose memory is being populated. Dropped before that is complete, it has the guardian
/// pause the VM.
pub(super) struct Supervisor<'l, P> {
    process: Process,
    pub(super) monitor: Monitor,
    pub(super) guardian: Guardian,
    files: Files,
    pub(super) lazy: &'l P,
    pub(super) record: FillingRecord,
    /// The guest was paused by us, with this command.
    paused: Option<Ticket>,
    /// Another client of a monitor paused it, so this process must not resume it.
    is_stopped: bool,
    reported: Option<Instant>,
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
            record,
            paused: None,
            is_stopped: false,
            reported: None,
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
            self.supervise(events)?;
            if let FillStatus::Complete = status? {
                break;
            }
            let Filling { done, total, .. } = self.lazy.filling();
            events(LazyEvent::Progress(Progress::Filling { done, total }));
        }
        // The page that the guest waited for may have come with others, before its fault handler tried
        // again: then that handler still reports a stall.
        if let Some(ticket) = self.paused.take() {
            self.resume_guest(ticket, events)?;
        }
        self.let_go()
    }

    /// Pauses a guest whose stall lasts too long, and resumes it when the stall is over.
    fn supervise(&mut self, events: LazySink<'_>) -> Result<(), RestoreError> {
        self.note_others();
        let may_be_paused = self.record.running && !self.is_stopped;
        match (self.lazy.stall(), self.paused.take()) {
            (Some((waited, reason)), None) if waited > WAITED_MAX && may_be_paused => {
                // Not waited for: a processor that waits for the page itself cannot stop before it is there.
                let ticket = self.monitor.send_stop()?;
                self.paused = Some(ticket);
                events(LazyEvent::Waits { reason });
            }
            (None, Some(ticket)) => self.resume_guest(ticket, events)?,
            (_, paused) => self.paused = paused,
        }
        let due = self
            .reported
            .is_none_or(|reported| reported.elapsed() >= REPORT_EVERY);
        if due && let Some(reason) = self.lazy.take_problem() {
            self.reported = Some(Instant::now());
            if self.paused.is_none() {
                events(LazyEvent::CannotFill { reason });
            }
        }
        Ok(())
    }

    /// Notes what other clients did to the VM, while this process has not paused it. Reads the events that have come,
    /// without a query: QEMU may be waiting for a page itself.
    fn note_others(&mut self) {
        if self.paused.is_none() {
            // A monitor that is closed shows in the process, too.
            for event in self.monitor.client().take_events().unwrap_or_default() {
                match event.name.as_str() {
                    "STOP" => self.is_stopped = true,
                    "RESUME" => self.is_stopped = false,
                    _ => {}
                }
            }
        }
    }

    fn resume_guest(&mut self, stopped: Ticket, events: LazySink<'_>) -> Result<(), RestoreError> {
        self.monitor.wait_stopped(stopped)?;
        self.monitor.cont()?;
        events(LazyEvent::Resumed);
        Ok(())
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

    /// Memory is complete: removes everything that this process left in QEMU and on the host.
    fn let_go(&mut self) -> Result<(), RestoreError> {
        fault::at(Point::LazyRelease)?;
        match self.lazy.finish() {
            Ok(()) | Err(FillError::Uffd(UffdError::NotRegistered { .. })) => {}
            Err(error) => return Err(PopulateError::from(error).into()),
        }
        self.guardian
            .close_fd(&self.process, self.record.remote_fd)?;
        fault::at(Point::LazyReleased)?;
        self.guardian.on_disconnect(OnDisconnect::Nothing)?;
        Ok(self.files.remove()?)
    }
}
