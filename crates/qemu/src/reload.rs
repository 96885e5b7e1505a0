//! Loading a device state into a QEMU whose guest has run already.
//!
//! QEMU takes a migration stream only once, before it runs. `xen-load-devices-state` would take it later, but QEMU
//! 10.0 ends in an assertion whenever it is used. The remaining command is `snapshot-load`: it resets the machine,
//! and loads the contents of an internal snapshot of some disk. So a disk is made in memory with a snapshot of the
//! device state alone ([`crate::vmstate_image`]). It is added for as long as that takes, and named as the only disk
//! that is to go back. The VM's own disks and its memory stay as they are. Loading the vCPUs' states makes TCG
//! forget all code that it has translated, which matters where memory was changed.
//!
//! Source: QEMU, `qapi/migration.json` (`snapshot-load`), `qapi/block-core.json` (`blockdev-add`).

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use serde_json::json;
use stillframe_sys::memfd::{Access, Memfd, MemfdError};
use thiserror::Error;

use crate::monitor::{Monitor, MonitorError};
use crate::vmstate_image;

/// The disk's name in QEMU, the snapshot's, and the job's.
const NODE: &str = "stillframe-device-state";
/// Pause between two checks whether it is loaded, which takes milliseconds.
const LOOK_AGAIN: Duration = Duration::from_micros(500);

/// Why a device state was not loaded.
#[derive(Debug, Error)]
pub enum ReloadError {
    /// It is no device state.
    #[error("the device state has {bytes} bytes, more than QEMU can be given at once")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// No memory file.
    #[error("cannot hand the device state to QEMU")]
    Memfd(#[from] MemfdError),
    /// QEMU refused something before the VM was touched.
    #[error("QEMU does not take the device state")]
    Refused(#[source] MonitorError),
    /// QEMU lost its way in the middle.
    #[error(
        "QEMU failed to load the device state: {reason}; the state of its devices is undefined"
    )]
    Failed {
        /// QEMU's words.
        reason: String,
    },
}

impl ReloadError {
    /// Whether the devices are as they were.
    pub fn is_harmless(&self) -> bool {
        !matches!(self, ReloadError::Failed { .. })
    }
}

/// Loads a device state made by [`crate::device_state::wrap`] into a VM that is paused, and stays so. Memory
/// must be what the device state was saved with; QEMU copies firmware tables anew, and nothing else.
pub fn load(monitor: &mut Monitor, wrapped: &[u8], limit: Duration) -> Result<(), ReloadError> {
    let image = vmstate_image::encode(wrapped, NODE).ok_or(ReloadError::TooLong {
        bytes: wrapped.len(),
    })?;
    let file = Memfd::create(NODE)?;
    file.write_all(&image)?;
    let descriptor = file.reopen(Access::ReadWrite)?;
    // An engine that was killed may have left these.
    take_away(monitor);
    let fdset = monitor
        .lend(descriptor.as_fd())
        .map_err(ReloadError::Refused)?;
    let loaded = add(monitor, fdset)
        .map_err(ReloadError::Refused)
        .and_then(|()| run(monitor, limit));
    take_away(monitor);
    // At the worst QEMU keeps some hundred KiB until the next time.
    let _ = monitor.take_back(fdset);
    loaded
}

fn add(monitor: &mut Monitor, fdset: i64) -> Result<(), MonitorError> {
    let file = json!({ "driver": "file", "filename": format!("/dev/fdset/{fdset}") });
    let arguments = json!({ "driver": "qcow2", "node-name": NODE, "file": file });
    monitor.client().execute("blockdev-add", arguments)?;
    Ok(())
}

fn run(monitor: &mut Monitor, limit: Duration) -> Result<(), ReloadError> {
    let arguments = json!({ "job-id": NODE, "tag": NODE, "vmstate": NODE, "devices": [NODE] });
    let started = monitor.client().execute("snapshot-load", arguments);
    started.map_err(|error| ReloadError::Refused(error.into()))?;
    let failed = |reason| ReloadError::Failed { reason };
    let deadline = Instant::now() + limit;
    loop {
        let ours = monitor.job(NODE);
        match ours.map_err(|error| failed(error.to_string()))? {
            Some(job) if job.has_ended() => {
                return job.error.map_or(Ok(()), |why| Err(failed(why)));
            }
            None => return Err(failed("the job is gone".to_owned())),
            Some(_) if Instant::now() >= deadline => {
                return Err(failed("it does not end".to_owned()));
            }
            Some(_) => std::thread::sleep(LOOK_AGAIN),
        }
    }
}

/// Removes the disk; one that is not there need not be removed.
fn take_away(monitor: &mut Monitor) {
    let client = monitor.client();
    let _ = client.execute("job-dismiss", json!({ "id": NODE }));
    let _ = client.execute("blockdev-del", json!({ "node-name": NODE }));
}
