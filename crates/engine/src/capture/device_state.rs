//! Where QEMU puts its device state: a memory file of ours, lent to QEMU for as long as we are
//! attached, because lending and taking back cost a round trip each.

use std::fs::File;
use std::io::{self, Seek};
use std::os::fd::AsFd;

use stillframe_qemu::device_state::{self, DeviceStateError};
use stillframe_qemu::monitor::{Monitor, MonitorError, StateFile};
use stillframe_sys::memfd::{Access, Memfd, MemfdError};
use thiserror::Error;

/// Device state is some hundred KiB; a stream beyond this is not one. In bytes.
pub const BYTES_MAX: u64 = 1 << 30;

/// Why there is no device state.
#[derive(Debug, Error)]
pub enum StateError {
    /// No memory file.
    #[error("cannot make room for the device state")]
    Memfd(#[from] MemfdError),
    /// It cannot be emptied.
    #[error("cannot empty the room for the device state")]
    Rewind(#[source] io::Error),
    /// QEMU does not take it.
    #[error("QEMU does not take the room for its device state")]
    Monitor(#[from] MonitorError),
    /// What QEMU saved is no device state.
    #[error("QEMU saved a device state that cannot be restored")]
    Invalid(#[from] DeviceStateError),
}

/// The memory file.
#[derive(Debug)]
pub struct StateBuffer {
    memfd: Memfd,
    /// What QEMU has; its position is QEMU's too.
    lent: File,
    file: StateFile,
}

impl StateBuffer {
    /// Makes one and lends it.
    pub fn lend(monitor: &mut Monitor) -> Result<StateBuffer, StateError> {
        let memfd = Memfd::create("stillframe-device-state")?;
        let lent = File::from(memfd.reopen(Access::Write)?);
        let file = monitor.begin_device_state(lent.as_fd())?;
        Ok(StateBuffer { memfd, lent, file })
    }

    /// Has it empty, for QEMU to write from the start.
    pub fn empty(&mut self) -> Result<(), StateError> {
        self.memfd.write_all(&[])?;
        self.lent.rewind().map_err(StateError::Rewind)
    }

    /// How QEMU calls it.
    pub fn file(&self) -> &StateFile {
        &self.file
    }

    /// What QEMU has saved.
    pub fn read(&self) -> Result<Vec<u8>, StateError> {
        let saved = self.memfd.read_all(BYTES_MAX)?;
        device_state::validate(&saved)?;
        Ok(saved)
    }

    /// Takes it back from QEMU.
    pub fn take_back(self, monitor: &mut Monitor) -> Result<(), MonitorError> {
        monitor.end_device_state(self.file)
    }
}
