//! The source's part: a mirror job for each disk, and the end of all of them in the pause.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use stillframe_qemu::monitor::{Disk, Mirror, Monitor, MonitorError};

use super::relay::Relay;
use super::{CONNECTIONS_A_DISK, DiskError, export_name};
use crate::connection::message::Control;
use crate::connection::word::Session;
use crate::guardian::{COPY, Guardian, HEARTBEAT, Heartbeat, OnDisconnect, copy_name};
use crate::migration::limiter::Limiter;
use crate::migration::{Reconnect, Wire};

/// Pause between two checks how far the jobs are.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// Time for a job to have each write of the guest copied at once, after which it is stopped anyhow.
const STEP_LIMIT: Duration = Duration::from_secs(60);

/// How far the copies are, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::migration) struct Copied {
    pub done: u64,
    pub total: u64,
}

/// Disks that are being copied. Dropped, the jobs fail; [`remove_leftovers`] removes what is left of them.
pub(in crate::migration) struct Mirrors {
    jobs: Vec<Job>,
    _beating: Beating,
}

/// Says that this process lives: if it hangs, a write of the guest may wait for it, and the guardian kills it. Dropped, it
/// says that none waits any more.
struct Beating {
    _end: Sender<()>,
}

impl Beating {
    fn start(heartbeat: Heartbeat) -> Result<Beating, DiskError> {
        let (sender, end) = mpsc::channel();
        let thread = thread::Builder::new().name("heartbeat".to_owned());
        let thread = thread.spawn(move || {
            heartbeat.beat();
            while end.recv_timeout(HEARTBEAT) == Err(RecvTimeoutError::Timeout) {
                heartbeat.beat();
            }
            heartbeat.let_go();
        });
        thread.map_err(DiskError::Thread)?;
        Ok(Beating { _end: sender })
    }
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
        let disk_count = disks.len();
        guardian.on_disconnect(OnDisconnect::EndCopies { disks: disk_count })?;
        let beating = Beating::start(guardian.heartbeat(None)?)?;
        for (number, disk) in disks.iter().enumerate() {
            let mut open = |way| {
                let number = first + number * CONNECTIONS_A_DISK + way;
                open(reconnect, session, number)
            };
            let (out, back) = (open(0)?, open(1)?);
            let (ours, theirs) = UnixStream::pair().map_err(DiskError::Socket)?;
            let relay = Relay::start(ours, out, back, Arc::clone(limiter))?;
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
        loop {
            let mut copied = Copied::default();
            let mut ready = 0;
            for job in &self.jobs {
                let state = job.state(monitor)?;
                copied.done += state.done;
                copied.total += state.total;
                ready += usize::from(state.is_ready());
            }
            event(copied)?;
            if ready == self.jobs.len() {
                break;
            }
            thread::sleep(LOOK_AGAIN);
        }
        for job in &self.jobs {
            job.relay.limit_answers();
            let changed = monitor.mirror_writes_at_once(&job.name);
            changed.map_err(|source| job.refused(source))?;
        }
        let deadline = Instant::now() + STEP_LIMIT;
        for job in &self.jobs {
            while !job.in_step(monitor)? && Instant::now() < deadline {
                event(Copied::default())?;
                thread::sleep(LOOK_AGAIN);
            }
        }
        Ok(())
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
        match state.has_ended() {
            true => Err(self.failed(state.error.unwrap_or_else(|| "it was ended".to_owned()))),
            false => Ok(state),
        }
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
    let mut wire = reconnect().map_err(|why| DiskError::NotOpened { why })?;
    let session = session.clone();
    wire.send_control(&Control::Join { session, number })?;
    Ok(wire)
}
