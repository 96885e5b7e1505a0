//! The source's part: a mirror job for each disk, and the end of all of them in the pause.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use stillframe_qemu::monitor::{Disk, Mirror, Monitor, MonitorError};

use super::relay::{Relay, Role};
use super::{CONNECTIONS_A_DISK, DiskError};
use crate::connection::message::Control;
use crate::connection::word::Session;
use crate::disks::images::export_name;
use crate::guardian::{Beating, COPY, Guardian, Heartbeat, OnDisconnect, copy_name};
use crate::migration::limiter::Limiter;
use crate::migration::{Reconnect, Unreachable, Wire};

/// Pause between two checks how far the jobs are.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// So little is left to copy, in bytes, that the guest may as well wait for its writes.
const LITTLE: u64 = 16 << 20;
/// What is left has not become less for this long: the guest writes as fast as it is copied.
const NOT_LESS_FOR: Duration = Duration::from_secs(5);

/// How far the copies are, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::migration) struct Copied {
    pub done: u64,
    pub total: u64,
}

/// What is left to copy behind the guest's back: it would never end where the guest keeps writing.
#[derive(Debug, Default)]
struct Remaining {
    least: Option<(u64, Instant)>,
}

impl Remaining {
    /// Whether there is no use in waiting until less is left.
    fn is_at_its_least(&mut self, left: u64, now: Instant) -> bool {
        match self.least {
            Some((least, since)) if least <= left => {
                left <= LITTLE || now.duration_since(since) > NOT_LESS_FOR
            }
            _ => {
                self.least = Some((left, now));
                left <= LITTLE
            }
        }
    }
}

/// Disks that are being copied. Dropped, the jobs fail; [`remove_leftovers`] removes what is left of them.
pub(in crate::migration) struct Mirrors {
    jobs: Vec<Job>,
    /// If this process hangs, a write of the guest may wait for it, and the guardian kills it.
    _beating: Beating,
}

struct Job {
    device: String,
    name: String,
    relay: Relay,
}

/// Removes what a migration that failed has left in QEMU, also one of an engine that was killed.
///
/// # Errors
/// QEMU refuses it.
pub(in crate::migration) fn remove_leftovers(monitor: &mut Monitor) -> Result<(), MonitorError> {
    monitor.remove_jobs_and_nodes(COPY)
}

impl Mirrors {
    /// Starts to copy these disks. The numbers of the connections begin with `first`.
    ///
    /// # Errors
    /// QEMU or the destination does not.
    pub fn start(
        (monitor, guardian): (&mut Monitor, &Guardian),
        disks: &[&Disk],
        (session, first): (&Session, usize),
        reconnect: Reconnect<'_>,
        limiter: &Arc<Limiter>,
    ) -> Result<Mirrors, DiskError> {
        let mut jobs = Vec::with_capacity(disks.len());
        let pairs = disks.iter().map(|_| UnixStream::pair());
        let pairs: Vec<_> = pairs.collect::<Result<_, _>>().map_err(DiskError::Socket)?;
        // QEMU must not see the end of a socket before its node was yanked ([`Role::Client`]).
        let kept: Vec<_> = pairs.iter().map(|(ours, _)| ours.as_fd()).collect();
        let disk_count = disks.len();
        guardian.on_disconnect_with(OnDisconnect::EndCopies { disks: disk_count }, &kept)?;
        let beating = Beating::start(guardian.heartbeat(None)?, Heartbeat::let_go);
        let beating = beating.map_err(DiskError::Thread)?;
        for (number, (disk, (ours, theirs))) in disks.iter().zip(pairs).enumerate() {
            let mut open = |way| {
                let number = first + number * CONNECTIONS_A_DISK + way;
                open(reconnect, session, number)
            };
            let (out, back) = (open(0)?, open(1)?);
            let qemu = (ours, Role::Client);
            let relay = Relay::start(qemu, out, back, Arc::clone(limiter))?;
            let name = copy_name(number);
            let mirror = Mirror {
                name: &name,
                node: &disk.node,
                export: &export_name(number),
            };
            let started = monitor.start_mirror(mirror, &theirs);
            started.map_err(|source| DiskError::Refused {
                device: disk.device.clone(),
                source,
            })?;
            jobs.push(Job {
                device: disk.device.clone(),
                name,
                relay,
            });
        }
        Ok(Mirrors {
            jobs,
            _beating: beating,
        })
    }

    /// Waits until all that the guest writes is at both sides at once. `event` learns how far the copies are, and may end
    /// the wait with an error.
    ///
    /// # Errors
    /// A disk cannot be copied to the end.
    pub fn catch_up<E: From<DiskError>>(
        &mut self,
        monitor: &mut Monitor,
        mut event: impl FnMut(Copied) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut remaining, mut at_once) = (Remaining::default(), false);
        loop {
            let mut copied = Copied::default();
            let mut in_step = true;
            for job in &self.jobs {
                let state = job.state(monitor)?;
                copied.done += state.done;
                copied.total += state.total;
                in_step &= state.is_ready() && at_once && job.in_step(monitor)?;
            }
            event(copied)?;
            if in_step {
                return Ok(());
            }
            let left = copied.total.saturating_sub(copied.done);
            if !at_once && copied.total > 0 && remaining.is_at_its_least(left, Instant::now()) {
                at_once = true;
                self.copy_writes_at_once(monitor)?;
            }
            thread::sleep(LOOK_AGAIN);
        }
    }

    /// From here on each write of the guest waits until it is at both sides.
    fn copy_writes_at_once(&self, monitor: &mut Monitor) -> Result<(), DiskError> {
        self.jobs.iter().try_for_each(|job| {
            job.relay.limit_answers();
            let changed = monitor.mirror_writes_at_once(&job.name);
            changed.map_err(|source| job.refused(source))
        })
    }

    /// Makes sure that none has failed.
    ///
    /// # Errors
    /// One has.
    pub fn check(&self, monitor: &mut Monitor) -> Result<(), DiskError> {
        let mut jobs = self.jobs.iter();
        jobs.try_for_each(|job| job.state(monitor).map(drop))
    }

    /// Ends the jobs of a VM that is stopped: the copies are complete. Returns how many bytes were sent.
    ///
    /// # Errors
    /// One is not.
    pub fn finish(self, monitor: &mut Monitor, guardian: &Guardian) -> Result<u64, DiskError> {
        let mut bytes = 0;
        for job in &self.jobs {
            let ended = monitor.end_job(&job.name, false);
            if let Some(why) = ended.map_err(|source| job.refused(source))? {
                return Err(job.failed(why));
            }
            if job.relay.failure().is_some() {
                return Err(job.lost());
            }
            let removed = monitor.remove_node(&job.name);
            removed.map_err(|source| job.refused(source))?;
            bytes += job.relay.bytes();
        }
        guardian.on_disconnect(OnDisconnect::Nothing)?;
        Ok(bytes)
    }
}

impl Job {
    /// How far it is.
    fn state(&self, monitor: &mut Monitor) -> Result<stillframe_qemu::monitor::Job, DiskError> {
        let state = monitor.job(&self.name);
        let state = state.map_err(|source| self.refused(source))?;
        let gone = || self.failed("another client has ended the copy".to_owned());
        let state = state.ok_or_else(gone)?;
        let why = match (state.has_ended(), state.has_failed()) {
            (false, false) if self.relay.failure().is_some() => return Err(self.lost()),
            (false, false) => return Ok(state),
            (false, true) => "a write to the destination failed".to_owned(),
            (true, _) => state.error.unwrap_or_else(|| "it was ended".to_owned()),
        };
        Err(self.failed(why))
    }

    fn in_step(&self, monitor: &mut Monitor) -> Result<bool, DiskError> {
        self.state(monitor)?;
        let in_step = monitor.mirrors_in_step(&self.name);
        in_step.map_err(|source| self.refused(source))
    }

    fn refused(&self, source: MonitorError) -> DiskError {
        DiskError::Refused {
            device: self.device.clone(),
            source,
        }
    }

    fn lost(&self) -> DiskError {
        self.failed("its connection was lost".to_owned())
    }

    /// The connection's failure explains that of the job.
    fn failed(&self, why: String) -> DiskError {
        DiskError::Failed {
            device: self.device.clone(),
            why: match self.relay.failure() {
                Some(failure) => format!("{why} ({failure})"),
                None => why,
            },
        }
    }
}

fn open(reconnect: Reconnect<'_>, session: &Session, number: usize) -> Result<Wire, DiskError> {
    let unreachable = |Unreachable { why, .. }| DiskError::NotOpened { why };
    let mut wire = reconnect().map_err(unreachable)?;
    let session = session.clone();
    wire.send_control(&Control::Join { session, number })?;
    Ok(wire)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fakes::qemu::FakeQemu;

    /// QEMU cancels a job that is `aborting` no more; it is there still for a moment.
    #[test]
    fn a_job_that_is_coming_to_its_end_is_waited_for() {
        let mut looks = 0;
        let (qemu, mut monitor) = FakeQemu::observed(move |command, state| {
            looks += usize::from(command == "query-jobs");
            if let Some(job) = &mut state.job {
                let status = if looks < 5 { "aborting" } else { "concluded" };
                job["status"] = json!(status);
            }
        });
        qemu.state().refused.push("block-job-cancel");
        qemu.state().job = Some(json!({ "id": copy_name(0), "status": "aborting" }));
        remove_leftovers(&mut monitor).unwrap();
        assert!(qemu.state().job.is_none());
    }

    #[test]
    fn a_copy_is_waited_for_as_long_as_less_is_left() {
        let (mut remaining, begin) = (Remaining::default(), Instant::now());
        let mut at = |seconds, left: u64| {
            remaining.is_at_its_least(left << 20, begin + Duration::from_secs(seconds))
        };
        assert!(!at(0, 900) && !at(4, 800) && !at(8, 800) && !at(9, 850));
        // Less again, in time.
        assert!(!at(9, 700) && !at(14, 701));
        assert!(at(15, 750));
        let mut small = Remaining::default();
        assert!(!small.is_at_its_least(LITTLE + 1, begin) && small.is_at_its_least(LITTLE, begin));
    }
}
