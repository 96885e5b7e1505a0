//! The destination's part: its QEMU exports the new images until the copies are complete.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use stillframe_qemu::monitor::{Disk, Monitor};
use stillframe_qemu::record::VmRecord;

use super::relay::Relay;
use super::{DiskError, ImageError, export_name, image_of, images, names_of};
use crate::disks::server;
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
    ) -> Result<Exports, ImageError> {
        let disks = monitor.disks().map_err(ImageError::Refused)?;
        let nodes = copied
            .iter()
            .map(|device| fitting(vm, &disks, device))
            .collect::<Result<Vec<&Disk>, _>>()?;
        let sockets = server::start(monitor, copied.len())?;
        for (number, disk) in nodes.iter().enumerate() {
            let exported = monitor.export(&disk.node, &export_name(number));
            exported.map_err(ImageError::Refused)?;
        }
        let files = nodes.iter().filter_map(|disk| images::open(&disk.path));
        Ok(Exports {
            sockets,
            relays: Vec::new(),
            files: files.collect(),
            written_back: None,
        })
    }

    /// Connects the source, with two connections for each disk.
    ///
    /// # Errors
    /// No thread is left.
    pub fn connect(&mut self, wires: Vec<Wire>) -> Result<(), ImageError> {
        let mut wires = wires.into_iter();
        let unlimited = Arc::new(Limiter::new(None));
        for socket in self.sockets.drain(..) {
            // The first one has what the source's QEMU says.
            if let (Some(back), Some(out)) = (wires.next(), wires.next()) {
                self.relays
                    .push(Relay::start(socket, out, back, Arc::clone(&unlimited))?);
            }
        }
        let (sender, end) = mpsc::channel();
        let files = std::mem::take(&mut self.files);
        let thread = thread::Builder::new().name("write-back".to_owned());
        let thread = thread.spawn(move || {
            while end.recv_timeout(WRITE_BACK_EVERY) == Err(RecvTimeoutError::Timeout) {
                images::write_back(&files);
            }
        });
        thread.map_err(|source| ImageError::Disk(DiskError::Thread(source)))?;
        self.written_back = Some(sender);
        Ok(())
    }

    /// The copies are complete.
    ///
    /// # Errors
    /// QEMU does not end the exports.
    pub fn stop(self, monitor: &mut Monitor) -> Result<(), ImageError> {
        monitor.stop_exports().map_err(ImageError::Refused)
    }
}

/// The disk of this device, which must be as large as the source's.
fn fitting<'d>(vm: &VmRecord, disks: &'d [Disk], device: &str) -> Result<&'d Disk, ImageError> {
    let here = image_of(disks, device);
    let (Some(here), Some(there)) = (here, image_of(&vm.disks, device)) else {
        return Err(ImageError::NoSuchDisk {
            device: device.to_owned(),
            there: names_of(&disks.iter().collect::<Vec<_>>()),
        });
    };
    match here.bytes == there.bytes {
        true => Ok(here),
        false => Err(ImageError::OtherSize {
            device: device.to_owned(),
            path: here.path.clone(),
            here: here.bytes,
            there: there.bytes,
        }),
    }
}
