//! The destination's part: its QEMU exports the new images until the copies are complete.

use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use stillframe_qemu::monitor::Monitor;
use stillframe_qemu::record::VmRecord;

use super::relay::{Relay, Role};
use super::{DestinationError, DiskError};
use crate::disks::images::ExportedImages;
use crate::migration::Wire;
use crate::migration::limiter::Limiter;

/// How often what was copied is written to the disks.
const WRITE_BACK_EVERY: Duration = Duration::from_secs(1);

/// Images that the source's QEMU can be connected to.
pub(in crate::migration) struct Exports {
    /// Connected to QEMU, one for each disk.
    sockets: Vec<UnixStream>,
    relays: Vec<Relay>,
    files: Vec<File>,
    /// Dropped, no more is written back.
    written_back: Option<Sender<()>>,
}

impl Exports {
    /// Has QEMU export the images of these devices of the VM.
    ///
    /// # Errors
    /// It has others, or refuses.
    pub fn start(
        monitor: &mut Monitor,
        vm: &VmRecord,
        copied: &[String],
    ) -> Result<Exports, DestinationError> {
        let exported = ExportedImages::start(monitor, vm, copied)?;
        let files = exported.disks.iter().filter_map(|disk| open(&disk.path));
        Ok(Exports {
            sockets: exported.sockets,
            relays: Vec::new(),
            files: files.collect(),
            written_back: None,
        })
    }

    /// Connects the source, with two connections for each disk.
    ///
    /// # Errors
    /// No thread is left.
    pub fn connect(&mut self, wires: Vec<Wire>) -> Result<(), DestinationError> {
        let mut wires = wires.into_iter();
        let unlimited = Arc::new(Limiter::new(None));
        for socket in self.sockets.drain(..) {
            // The first one has what the source's QEMU says.
            if let (Some(back), Some(out)) = (wires.next(), wires.next()) {
                let qemu = (socket, Role::Server);
                let relay = Relay::start(qemu, out, back, Arc::clone(&unlimited));
                self.relays.push(relay?);
            }
        }
        let (sender, end) = mpsc::channel();
        let files = std::mem::take(&mut self.files);
        let thread = thread::Builder::new().name("write-back".to_owned());
        let thread = thread.spawn(move || {
            while end.recv_timeout(WRITE_BACK_EVERY) == Err(RecvTimeoutError::Timeout) {
                write_back(&files);
            }
        });
        thread.map_err(DiskError::Thread)?;
        self.written_back = Some(sender);
        Ok(())
    }

    /// The copies are complete.
    ///
    /// # Errors
    /// QEMU does not end the exports.
    pub fn stop(self, monitor: &mut Monitor) -> Result<(), DestinationError> {
        Ok(ExportedImages::stop(monitor)?)
    }
}

/// The content of images that is in memory only is written to them from time to time: else all of it would be written when
/// the VM is stopped. What cannot be opened is written then.
fn write_back(files: &[File]) {
    for file in files {
        // QEMU learns of an error itself.
        let _ = file.sync_data();
    }
}

/// Opens an image to be written back.
fn open(path: &Path) -> Option<File> {
    let file = File::open(path).ok()?;
    let kind = file.metadata().ok()?.file_type();
    (kind.is_file() || kind.is_block_device()).then_some(file)
}
