//! The guard of a VM that this process has stopped: its end decides whether the VM runs on.
//!
//! ```text
//!   stop ─────────┐                 ┌── resume ────────> runs on
//!   save devices ─┴──> PausedVm ────┼── keep_paused ───> stays paused, and any client may send `cont`
//!                       │    ^   │  └── dropped ───────> runs on
//!            block_cont │    │   └───── hand_over ─────> HandedOver ──┬── end ────────> QEMU ends
//!                       v    │ unblock                                ├── take_back ──> PausedVm
//!                      BlockedVm ───── dropped ───────> stays paused, └── dropped ────> stays paused
//!                                                       and `cont` is refused
//! ```
//!
//! The guardian is informed in the same step: it resumes the VM when this process dies, or the limit passes, exactly
//! while a [`PausedVm`] lives. With `cont` blocked it does nothing, for the VM is not fit to run.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use stillframe_qemu::monitor::{Monitor, MonitorError};
use thiserror::Error;

use crate::guardian::{Guardian, GuardianError, WayBack};
use crate::inhibitor::{InhibitorError, Prepared, Purpose, ResumeInhibitor};

/// Why a VM could not be paused or resumed.
#[derive(Debug, Error)]
pub enum PausedError {
    /// The guardian is gone.
    #[error("no pause without a guardian")]
    Guardian(#[from] GuardianError),
    /// QEMU failed a command.
    #[error("QEMU failed a command")]
    Monitor(#[from] MonitorError),
    /// The watchdog resumed the VM.
    #[error("the pause overran its limit of {limit_ms} ms, and the watchdog resumed the VM")]
    Overrun {
        /// The limit.
        limit_ms: u128,
    },
}

/// Why `cont` could not be unblocked.
#[derive(Debug, Error)]
pub enum UnblockError {
    /// The guardian is gone.
    #[error("no pause without a guardian")]
    Guardian(#[from] GuardianError),
    /// The inhibitor stays.
    #[error(transparent)]
    Inhibitor(#[from] InhibitorError),
}

/// What happens to the VM where no end was chosen, after an error or a panic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OnDrop {
    Resume,
    Nothing,
}

/// The state that both guards have.
struct Held<'v> {
    monitor: &'v mut Monitor,
    guardian: &'v Guardian,
    limit: Duration,
    /// How the VM comes to run again; `None` where it was paused before, and stays so.
    way_back: Option<WayBack>,
    on_drop: OnDrop,
    /// For a `cont` that will be blocked.
    prepared: Option<Prepared>,
}

impl Held<'_> {
    /// The guardian resumes the VM from here on, if this process dies or takes too long.
    fn arm(&self) -> Result<(), GuardianError> {
        match self.way_back {
            Some(way_back) => self.guardian.pausing(self.limit, way_back),
            None => Ok(()),
        }
    }

    /// The guardian does nothing from here on. An error if it has resumed the VM already.
    fn disarm(&self) -> Result<(), PausedError> {
        match self.way_back.is_some() && self.guardian.resumed()? {
            true => Err(PausedError::Overrun {
                limit_ms: self.limit.as_millis(),
            }),
            false => Ok(()),
        }
    }

    /// The VM runs on, if it ran before.
    fn resume(&mut self) -> Result<(), PausedError> {
        let sent = match self.way_back {
            // Nothing that QEMU still writes is to keep it.
            Some(WayBack::Stream) => self.guardian.release().map_err(PausedError::from),
            Some(WayBack::Command) => self.monitor.cont().map_err(PausedError::from),
            None => Ok(()),
        };
        if let Some(prepared) = self.prepared.take() {
            prepared.discard(self.monitor);
        }
        // Also where `cont` failed: the guardian would try it again on a QEMU that refuses it.
        let disarmed = self.disarm();
        sent.and(disarmed)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if self.on_drop == OnDrop::Resume {
            // The error that led here is the one to report. If this fails, the guardian's limit passes.
            let _ = self.resume();
        }
    }
}

/// A stopped VM. Dropped, it runs on.
#[must_use]
pub struct PausedVm<'v> {
    held: Held<'v>,
}

impl<'v> PausedVm<'v> {
    /// Stops a VM that runs or is suspended (`runs`). One that is paused already stays so, whatever the end.
    ///
    /// # Errors
    /// It runs on.
    pub fn stop(
        monitor: &'v mut Monitor,
        guardian: &'v Guardian,
        limit: Duration,
        runs: bool,
    ) -> Result<PausedVm<'v>, PausedError> {
        PausedVm::stop_prepared(monitor, guardian, limit, runs, None)
    }

    /// The same for a VM that may be handed over: `prepared` will block `cont` then.
    ///
    /// # Errors
    /// It runs on.
    pub fn stop_prepared(
        monitor: &'v mut Monitor,
        guardian: &'v Guardian,
        limit: Duration,
        runs: bool,
        prepared: Option<Prepared>,
    ) -> Result<PausedVm<'v>, PausedError> {
        let way_back = runs.then_some(WayBack::Command);
        let paused = PausedVm::armed(monitor, guardian, limit, way_back, prepared)?;
        if runs {
            paused.held.monitor.stop()?;
        }
        Ok(paused)
    }

    /// Makes ready for QEMU's own stop, in which it saves its devices: see [`super::device_state`]. QEMU resumes
    /// the VM by itself, unless it was `suspended`.
    ///
    /// # Errors
    /// Nothing was stopped.
    pub fn held_by_state(
        monitor: &'v mut Monitor,
        guardian: &'v Guardian,
        limit: Duration,
        suspended: bool,
    ) -> Result<PausedVm<'v>, PausedError> {
        let way_back = match suspended {
            true => WayBack::Command,
            false => WayBack::Stream,
        };
        PausedVm::armed(monitor, guardian, limit, Some(way_back), None)
    }

    /// The guardian is informed before anything is stopped.
    fn armed(
        monitor: &'v mut Monitor,
        guardian: &'v Guardian,
        limit: Duration,
        way_back: Option<WayBack>,
        prepared: Option<Prepared>,
    ) -> Result<PausedVm<'v>, PausedError> {
        let held = Held {
            monitor,
            guardian,
            limit,
            way_back,
            on_drop: OnDrop::Resume,
            prepared,
        };
        held.arm()?;
        Ok(PausedVm { held })
    }

    /// QEMU.
    pub fn monitor(&mut self) -> &mut Monitor {
        self.held.monitor
    }

    /// The VM runs on.
    ///
    /// # Errors
    /// [`PausedError::Overrun`]: it did so before. Others: QEMU or the guardian does not answer.
    pub fn resume(mut self) -> Result<(), PausedError> {
        self.held.on_drop = OnDrop::Nothing;
        self.held.resume()
    }

    /// QEMU has resumed the VM by itself.
    ///
    /// # Errors
    /// [`PausedError::Overrun`]: the watchdog made it do so.
    pub fn resumed(mut self) -> Result<(), PausedError> {
        self.held.on_drop = OnDrop::Nothing;
        self.held.disarm()
    }

    /// Releases QEMU from the pause, whatever keeps it there.
    ///
    /// # Errors
    /// The guardian is gone.
    pub fn release(&self) -> Result<(), PausedError> {
        Ok(self.held.guardian.release()?)
    }

    /// The VM stays paused, and is fit to run: any client may send `cont`.
    ///
    /// # Errors
    /// [`PausedError::Overrun`]: the watchdog has resumed it.
    pub fn keep_paused(mut self) -> Result<(), PausedError> {
        self.held.on_drop = OnDrop::Nothing;
        self.held.disarm()
    }

    /// The VM may run in another process from here on: it stays paused, and this is on record. The guardian does not
    /// resume it, from the same moment on.
    ///
    /// # Errors
    /// Neither is so, and the guard is returned. [`PausedError::Overrun`]: the watchdog has resumed the VM.
    pub fn hand_over(
        mut self,
        record: &impl GivenUpRecord,
    ) -> Result<HandedOver<'v>, Box<(PausedVm<'v>, PausedError)>> {
        let (directory, from, to) = record.renaming();
        let error = match self.held.guardian.give_up(directory, from, to) {
            Ok(false) => {
                self.held.on_drop = OnDrop::Nothing;
                return Ok(HandedOver {
                    held: self.held,
                    inhibitor: None,
                });
            }
            Ok(true) => PausedError::Overrun {
                limit_ms: self.held.limit.as_millis(),
            },
            Err(error) => error.into(),
        };
        Err(Box::new((self, error)))
    }

    /// Blocks `cont`, for all clients and for the guardian. `left` blocks it already.
    ///
    /// # Errors
    /// The VM runs on.
    pub fn block_cont(
        mut self,
        left: Option<ResumeInhibitor>,
    ) -> Result<BlockedVm<'v>, InhibitorError> {
        let inhibitor = match left {
            Some(left) => left,
            None => ResumeInhibitor::engage(self.held.monitor, Purpose::Rewind)?,
        };
        self.held.on_drop = OnDrop::Nothing;
        Ok(BlockedVm {
            held: self.held,
            inhibitor,
        })
    }
}

/// A file that says that a VM was given up: it does so as soon as it has its final name.
pub trait GivenUpRecord {
    /// Its directory, its name, and its final name.
    fn renaming(&self) -> (BorrowedFd<'_>, &str, &str);
}

/// A stopped VM that may run in another process by now. Dropped, it stays paused: two of it must never run.
#[must_use]
pub struct HandedOver<'v> {
    held: Held<'v>,
    inhibitor: Option<ResumeInhibitor>,
}

impl<'v> HandedOver<'v> {
    /// A VM that an earlier engine gave up: it is paused. `runs`: it is resumed when it is taken back. `left` blocks
    /// `cont` already.
    pub fn found(
        monitor: &'v mut Monitor,
        guardian: &'v Guardian,
        limit: Duration,
        runs: bool,
        left: Option<ResumeInhibitor>,
    ) -> HandedOver<'v> {
        let held = Held {
            monitor,
            guardian,
            limit,
            way_back: runs.then_some(WayBack::Command),
            on_drop: OnDrop::Nothing,
            prepared: None,
        };
        HandedOver {
            held,
            inhibitor: left,
        }
    }

    /// Blocks `cont` for all clients, until the VM is taken back.
    ///
    /// # Errors
    /// Another client may resume it.
    pub fn block_cont(&mut self) -> Result<(), InhibitorError> {
        if self.inhibitor.is_none() {
            let monitor = &mut *self.held.monitor;
            self.inhibitor = Some(match self.held.prepared.take() {
                Some(prepared) => prepared.engage(monitor)?,
                None => ResumeInhibitor::engage(monitor, Purpose::HandOver)?,
            });
        }
        Ok(())
    }

    /// QEMU.
    pub fn monitor(&mut self) -> &mut Monitor {
        self.held.monitor
    }

    /// It runs in the other process: ends this QEMU.
    ///
    /// # Errors
    /// QEMU does not answer. It stays paused.
    pub fn end(&mut self) -> Result<(), MonitorError> {
        self.held.monitor.quit()
    }

    /// It does not run in the other process, and never will.
    ///
    /// # Errors
    /// It stays paused; `cont` may be blocked still.
    pub fn take_back(mut self) -> Result<PausedVm<'v>, UnblockError> {
        // A guardian that is armed too early only tries in vain.
        self.held.arm()?;
        if let Some(inhibitor) = self.inhibitor {
            inhibitor.release(self.held.monitor)?;
        }
        self.held.on_drop = OnDrop::Resume;
        Ok(PausedVm { held: self.held })
    }
}

/// A stopped VM whose `cont` is refused, that of the guardian too. Dropped, it stays as it is.
#[must_use]
pub struct BlockedVm<'v> {
    held: Held<'v>,
    inhibitor: ResumeInhibitor,
}

impl<'v> BlockedVm<'v> {
    /// QEMU.
    pub fn monitor(&mut self) -> &mut Monitor {
        self.held.monitor
    }

    /// From here on the guardian does not resume the VM: it may become unfit to run.
    ///
    /// # Errors
    /// [`PausedError::Overrun`]: the guardian has tried to already.
    pub fn commit(&self) -> Result<(), PausedError> {
        self.held.disarm()
    }

    /// The VM is fit to run again. `runs`: it will be resumed, and the guardian is armed before `cont` is unblocked.
    ///
    /// # Errors
    /// It stays paused; `cont` may be blocked still.
    pub fn unblock(mut self, runs: bool) -> Result<PausedVm<'v>, UnblockError> {
        let armed = match runs {
            true => self.held.arm(),
            false => Ok(()),
        };
        self.inhibitor.release(self.held.monitor)?;
        armed?;
        self.held.on_drop = OnDrop::Resume;
        if !runs {
            self.held.way_back = None;
        }
        Ok(PausedVm { held: self.held })
    }
}
