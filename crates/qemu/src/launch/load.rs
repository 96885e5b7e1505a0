//! Handing the device state to a new QEMU, which waits for it at the end of a pipe.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use serde_json::json;

use super::LaunchError;
use super::start::Launched;
use crate::monitor::{Monitor, MonitorError, RunState};

const DOING: &str = "loading the device state";
/// QEMU's word for a migration that has arrived.
const COMPLETED: &str = "completed";
/// What QEMU calls the end of the pipe that it is given.
const NAME: &str = "stillframe-device-state";
/// The largest pipe that any user may have (`pipe-max-size`), in bytes: most states fit.
const PIPE_MAX: usize = 1 << 20;
/// Pause between two checks whether the device state is loaded. Loading takes 2 ms, and delays the VM's return.
const LOOK_AGAIN: Duration = Duration::from_micros(200);
/// Pause between two checks whether a QEMU that does not read has failed.
const WRITE_AGAIN: Duration = Duration::from_millis(20);

/// The pipe at whose end QEMU waits for a device state. Dropped, the load fails.
#[derive(Debug)]
#[must_use]
pub struct ArmedLoad {
    pipe: OwnedFd,
}

/// Has QEMU wait for a device state. It answers its monitor meanwhile, and its RAM may still be written.
///
/// # Errors
/// [`LaunchError::Monitor`] and others, with QEMU's own words. The new QEMU has been ended then.
pub fn arm(launched: &mut Launched) -> Result<ArmedLoad, LaunchError> {
    let flags = PipeFlags::CLOEXEC | PipeFlags::NONBLOCK;
    let (read, pipe) = rustix::pipe::pipe_with(flags).map_err(pipe_failed)?;
    // A smaller pipe does, too.
    let _ = rustix::pipe::fcntl_setpipe_size(&pipe, PIPE_MAX);
    let Launched { monitor, owned, .. } = launched;
    let armed = monitor.give(NAME, read.as_fd()).and_then(|()| {
        let arguments = json!({ "uri": format!("fd:{NAME}") });
        Ok(monitor.client().execute("migrate-incoming", arguments)?)
    });
    armed.map_err(|error| owned.fail(DOING, error))?;
    Ok(ArmedLoad { pipe })
}

/// Loads the device state made by [`crate::device_state::wrap`] into a QEMU that does not wait for it yet.
///
/// # Errors
/// As [`arm`] and [`ArmedLoad::load`].
pub fn load_device_state(
    launched: &mut Launched,
    wrapped: &[u8],
    timeout: Duration,
) -> Result<(), LaunchError> {
    arm(launched)?.load(launched, wrapped, timeout)
}

impl ArmedLoad {
    /// Loads the device state made by [`crate::device_state::wrap`]. All RAM blocks must have been written before,
    /// because devices look into guest memory while they load. The VM is paused afterwards; `cont` sets it going.
    ///
    /// # Errors
    /// [`LaunchError::Load`] and others, with QEMU's own words. The new QEMU has been ended then.
    pub fn load(
        self,
        launched: &mut Launched,
        wrapped: &[u8],
        timeout: Duration,
    ) -> Result<(), LaunchError> {
        self.write(launched, wrapped, timeout)?;
        self.finish(launched, timeout)
    }

    /// Waits until QEMU has loaded the device state, of which it has all.
    ///
    /// # Errors
    /// As [`ArmedLoad::load`].
    pub fn finish(self, launched: &mut Launched, timeout: Duration) -> Result<(), LaunchError> {
        let deadline = Instant::now() + timeout;
        // QEMU waits for no more of it.
        drop(self.pipe);
        let Launched { monitor, owned, .. } = launched;
        let loaded = await_load(monitor, deadline);
        let problem = match loaded.map_err(|error| owned.fail(DOING, error))? {
            Some((status, state)) if status == COMPLETED => {
                if !state.running && state.status != "inmigrate" {
                    return Ok(());
                }
                format!("the VM is {}", state.status)
            }
            Some((status, _)) => status,
            None => return Err(owned.timed_out(DOING, timeout)),
        };
        owned.end();
        Err(LaunchError::Load {
            status: problem,
            log: owned.last_words(),
        })
    }

    /// Writes a part of it. It is no error if QEMU wants no more of it: how the load ends, [`ArmedLoad::finish`] says.
    ///
    /// # Errors
    /// QEMU does not answer. It has been ended then.
    pub fn write(
        &self,
        launched: &mut Launched,
        part: &[u8],
        timeout: Duration,
    ) -> Result<(), LaunchError> {
        let Launched { monitor, owned, .. } = launched;
        let written = self.write_until(monitor, part, Instant::now() + timeout);
        written.map_err(|error| owned.fail(DOING, error))
    }

    /// Writes until QEMU has all, has failed, or takes too long; which of them, its status says.
    fn write_until(
        &self,
        monitor: &mut Monitor,
        mut bytes: &[u8],
        deadline: Instant,
    ) -> Result<(), MonitorError> {
        while !bytes.is_empty() && Instant::now() < deadline {
            match rustix::io::write(&self.pipe, bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(Errno::AGAIN) => {
                    if has_ended(monitor.migration()?.status.as_deref()) {
                        break;
                    }
                    self.wait_for_room();
                }
                Err(Errno::INTR) => {}
                // QEMU has closed its end: it does not want more.
                Err(_) => break,
            }
        }
        Ok(())
    }

    fn wait_for_room(&self) {
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: i64::from(WRITE_AGAIN.subsec_nanos()),
        };
        // Whatever comes of it, writing is tried again.
        let _ = poll(
            &mut [PollFd::new(&self.pipe, PollFlags::OUT)],
            Some(&timeout),
        );
    }
}

fn pipe_failed(errno: Errno) -> LaunchError {
    LaunchError::Pipe(io::Error::from(errno))
}

fn has_ended(status: Option<&str>) -> bool {
    matches!(status, Some(COMPLETED | "failed" | "cancelled"))
}

/// Waits until the load has ended one way or the other, and returns QEMU's word for it, and the state that the VM is in
/// then; `None` when it has not in time.
fn await_load(
    monitor: &mut Monitor,
    deadline: Instant,
) -> Result<Option<(String, RunState)>, MonitorError> {
    loop {
        let (migration, state) = monitor.migration_and_run_state()?;
        match migration.status {
            Some(status) if status == COMPLETED => return Ok(Some((status, state))),
            status if has_ended(status.as_deref()) => {
                let words = migration.error.unwrap_or_else(|| "failed".to_owned());
                return Ok(Some((words, state)));
            }
            _ if Instant::now() >= deadline => return Ok(None),
            _ => std::thread::sleep(LOOK_AGAIN),
        }
    }
}
