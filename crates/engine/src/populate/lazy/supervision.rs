//! What is done to a VM that runs while its memory is populated: it is paused while it waits for a page that cannot be
//! read, and keeps nothing when its memory is complete.

use std::time::{Duration, Instant};

use stillframe_fault::{self as fault, Point};
use stillframe_qemu::monitor::{Monitor, MonitorError};
use stillframe_qemu::qmp::Ticket;
use stillframe_sys::process::Process;
use stillframe_sys::uffd::UffdError;
use thiserror::Error;

use super::{FillError, FillStatus, Filling, Lazy};
use crate::guardian::{Guardian, GuardianError};
use crate::populate::eager::PopulateError;
use crate::source::PageSource;

/// How often a VM is looked at while its memory is populated.
pub const LOOK: Duration = Duration::from_millis(50);
/// The longest stall before the guest is paused, so that its clocks stop too.
const WAITED_MAX: Duration = Duration::from_secs(1);
/// How often the reason is reported why a page cannot be populated.
const REPORT_EVERY: Duration = Duration::from_secs(10);

/// Memory that is being populated, as its supervisor sees it. See [`Lazy`] for each method.
pub trait Populating {
    /// Waits for a change of status.
    ///
    /// # Errors
    /// A thread failed.
    fn status(&self, limit: Duration) -> Result<FillStatus, PopulateError>;
    /// How long the guest waits for a page, and why.
    fn stall(&self) -> Option<(Duration, String)>;
    /// Why a page cannot be populated that no thread waits for.
    fn take_problem(&self) -> Option<String>;
    /// How far it is.
    fn filling(&self) -> Filling;
    /// Faults in each step of 10 ms.
    fn faults_by_step(&self) -> Vec<u64>;
    /// Unregisters all memory.
    ///
    /// # Errors
    /// The kernel refuses.
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

/// What happened to the VM.
#[derive(Debug, Clone)]
pub enum Supervised {
    /// It waits for a page that cannot be read, and was paused.
    Waits {
        /// Why.
        reason: String,
    },
    /// All pages can be read again: it was resumed.
    Resumed,
    /// Pages that no thread waits for cannot be read now.
    CannotFill {
        /// Why.
        reason: String,
    },
}

/// Where that is reported.
pub type SupervisedSink<'s> = &'s mut dyn FnMut(Supervised);

/// The supervision of one VM.
#[derive(Debug)]
pub struct Supervision {
    /// The guest is to run.
    runs: bool,
    /// It was paused here, with this command.
    paused: Option<Ticket>,
    /// Another client of a monitor paused it, so this process must not resume it.
    is_stopped: bool,
    reported: Option<Instant>,
}

impl Supervision {
    /// Of a VM that is to run, or to stay paused.
    pub fn new(runs: bool) -> Supervision {
        Supervision {
            runs,
            paused: None,
            is_stopped: false,
            reported: None,
        }
    }

    /// Whether the VM is paused here.
    pub fn is_paused(&self) -> bool {
        self.paused.is_some()
    }

    /// Pauses a guest whose stall lasts too long, and resumes it when the stall is over. `stall`: how long it has been waiting,
    /// and why. `problem`: what cannot be read that it does not wait for.
    ///
    /// # Errors
    /// QEMU does not answer.
    pub fn look(
        &mut self,
        monitor: &mut Monitor,
        stall: Option<(Duration, String)>,
        problem: impl FnOnce() -> Option<String>,
        report: SupervisedSink<'_>,
    ) -> Result<(), MonitorError> {
        self.note_others(monitor);
        let may_be_paused = self.runs && !self.is_stopped;
        match (stall, self.paused.take()) {
            (Some((waited, reason)), None) if waited > WAITED_MAX && may_be_paused => {
                // Not waited for: a processor that waits for the page itself cannot stop before it is there.
                self.paused = Some(monitor.send_stop()?);
                report(Supervised::Waits { reason });
            }
            (None, Some(ticket)) => resume(monitor, ticket, report)?,
            (_, paused) => self.paused = paused,
        }
        let due = self
            .reported
            .is_none_or(|reported| reported.elapsed() >= REPORT_EVERY);
        if due && let Some(reason) = problem() {
            self.reported = Some(Instant::now());
            if self.paused.is_none() {
                report(Supervised::CannotFill { reason });
            }
        }
        Ok(())
    }

    /// Memory is complete: a guest that was paused goes on. The page that it waited for may have come with others,
    /// before its fault handler tried again: then that handler still reports a stall.
    ///
    /// # Errors
    /// QEMU does not answer.
    pub fn complete(
        &mut self,
        monitor: &mut Monitor,
        report: SupervisedSink<'_>,
    ) -> Result<(), MonitorError> {
        match self.paused.take() {
            Some(ticket) => resume(monitor, ticket, report),
            None => Ok(()),
        }
    }

    /// Notes what other clients did to the VM, while this process has not paused it. Reads the events that have come,
    /// without a query: QEMU may be waiting for a page itself.
    fn note_others(&mut self, monitor: &mut Monitor) {
        if self.paused.is_none() {
            // A monitor that is closed shows in the process, too.
            for event in monitor.client().take_events().unwrap_or_default() {
                match event.name.as_str() {
                    "STOP" => self.is_stopped = true,
                    "RESUME" => self.is_stopped = false,
                    _ => {}
                }
            }
        }
    }
}

fn resume(
    monitor: &mut Monitor,
    stopped: Ticket,
    report: SupervisedSink<'_>,
) -> Result<(), MonitorError> {
    monitor.wait_stopped(stopped)?;
    monitor.cont()?;
    report(Supervised::Resumed);
    Ok(())
}

/// Why something of this process is still in QEMU.
#[derive(Debug, Error)]
pub enum ReleaseError {
    /// Memory stays registered.
    #[error(transparent)]
    Populate(#[from] PopulateError),
    /// QEMU has the userfaultfd still.
    #[error(transparent)]
    Guardian(#[from] GuardianError),
    /// A fault that a test injected.
    #[error("letting the VM go failed")]
    Injected(#[from] std::io::Error),
}

/// Memory is complete: removes from QEMU, whose copy of the userfaultfd is `remote_fd`, what memory needed.
///
/// # Errors
/// The VM is not harmed.
pub fn release(
    memory: &impl Populating,
    guardian: &Guardian,
    (process, remote_fd): (&Process, i32),
) -> Result<(), ReleaseError> {
    fault::at(Point::LazyRelease)?;
    match memory.finish() {
        Ok(()) | Err(FillError::Uffd(UffdError::NotRegistered { .. })) => {}
        Err(error) => return Err(PopulateError::from(error).into()),
    }
    guardian.close_fd(process, remote_fd)?;
    Ok(fault::at(Point::LazyReleased)?)
}
