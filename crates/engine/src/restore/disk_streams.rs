//! The images of disks that are restored lazily on their way to being complete: QEMU copies into them what they lack. If the
//! VM ends before that, `qemu-img` does.

use std::fs::File;
use std::num::NonZeroU64;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use stillframe_qemu::monitor::{Monitor, MonitorError, Streamed};
use stillframe_qemu::qemu_img;

use super::RestoreError;
use super::events::{LazyEvent, LazySink};
use super::filling_record::Files;
use crate::disks::lazy::{LazyDisk, LazyDisks};
use crate::populate::lazy::supervision::LOOK;

/// How often QEMU is to say how far it is.
const LOOK_AGAIN: Duration = Duration::from_millis(250);
/// Pause before a copy that has failed is begun again.
const BEGIN_AGAIN: Duration = Duration::from_secs(10);

/// What `qemu-img` says, among other words, of an image that another process has open.
const LOCKED: &str = "Failed to get \"write\" lock";
/// How long that may be so.
const UNLOCKED_LIMIT: Duration = Duration::from_secs(10);

/// What came of a step.
#[derive(Debug)]
pub(super) enum Step {
    /// Nothing new.
    None,
    /// QEMU copies.
    Copying {
        /// Pages of this disk gone through.
        done: u64,
        /// All its pages.
        total: u64,
    },
    /// QEMU has given up, for now.
    Failed(String),
}

/// The images that lack content.
pub(super) struct DiskStreams<'d> {
    /// The server of what they lack; none where nothing is lacking.
    served: Option<&'d LazyDisks<'d>>,
    left: Vec<LazyDisk>,
    next_look: Instant,
}

impl<'d> DiskStreams<'d> {
    /// Of the disks of a server.
    pub(super) fn new(served: Option<&'d LazyDisks<'d>>) -> DiskStreams<'d> {
        DiskStreams {
            served,
            left: served.map_or_else(Vec::new, |served| served.disks().to_vec()),
            next_look: Instant::now(),
        }
    }

    pub(super) fn are_complete(&self) -> bool {
        self.left.is_empty()
    }

    /// All images are complete: the way to what they lacked is removed.
    pub(super) fn end(&self) {
        if let Some(served) = self.served {
            served.remove_socket();
        }
    }

    /// How long the guest, or the copy, has been waiting for a block that cannot be read, and why.
    pub(super) fn stall(&self) -> Option<(Duration, String)> {
        self.served.and_then(LazyDisks::stall)
    }

    /// Has QEMU go on, one disk after the other.
    ///
    /// # Errors
    /// QEMU fails a command.
    pub(super) fn step(
        &mut self,
        monitor: &mut Monitor,
        bytes_per_s: Option<NonZeroU64>,
    ) -> Result<Step, MonitorError> {
        let Some(disk) = self.left.first() else {
            return Ok(Step::None);
        };
        if Instant::now() < self.next_look {
            return Ok(Step::None);
        }
        self.next_look = Instant::now() + LOOK_AGAIN;
        match monitor.stream_disk(&disk.device, bytes_per_s)? {
            Streamed::Complete => {
                self.left.remove(0);
                self.next_look = Instant::now();
                Ok(Step::None)
            }
            Streamed::Copying { done, total } => {
                let pages = |bytes: u64| bytes.div_ceil(crate::PAGE_BYTES);
                let (done, total) = (pages(done), pages(total));
                Ok(Step::Copying { done, total })
            }
            Streamed::Copied => {
                self.next_look = Instant::now();
                // Most of it is written out here: QEMU does nothing else while it does that.
                let written = File::open(&disk.image).and_then(|image| image.sync_data());
                let failed = match written {
                    Ok(()) => monitor.finish_stream(&disk.device)?,
                    Err(error) => Some(error.to_string()),
                };
                let Some(words) = failed else {
                    return Ok(Step::None);
                };
                self.next_look = Instant::now() + BEGIN_AGAIN;
                Ok(Step::Failed(format!("disk {}: {words}", disk.device)))
            }
            Streamed::Failed(words) => {
                self.next_look = Instant::now() + BEGIN_AGAIN;
                Ok(Step::Failed(format!("disk {}: {words}", disk.device)))
            }
            // No device has it any more.
            Streamed::Gone => {
                let image = &disk.image;
                match qemu_img::complete(image, &mut || thread::sleep(LOOK)) {
                    Ok(()) => {
                        self.left.remove(0);
                        Ok(Step::None)
                    }
                    Err(words) => {
                        self.next_look = Instant::now() + BEGIN_AGAIN;
                        Ok(Step::Failed(format!("{}: {words}", image.display())))
                    }
                }
            }
        }
    }

    /// Completes the images of a VM that has ended: its disks have what it wrote, and are of use. Returns what is to be said
    /// of that.
    pub(super) fn complete_alone(
        &mut self,
        files: &Files,
        pid: i32,
        events: LazySink<'_>,
    ) -> RestoreError {
        let mut images = Vec::new();
        for LazyDisk { image, .. } in self.left.drain(..) {
            // Removed, it is not wanted.
            if !image.exists() {
                continue;
            }
            events(LazyEvent::Completing {
                image: image.clone(),
            });
            if let Err(why) = complete_unlocked(&image) {
                return RestoreError::Incomplete { image, why };
            }
            images.push(image.display().to_string());
        }
        self.end();
        if let Err(error) = files.remove() {
            return error.into();
        }
        match images.is_empty() {
            true => RestoreError::EndedMeanwhile { pid },
            false => RestoreError::EndedComplete {
                pid,
                images: images.join(", "),
            },
        }
    }
}

/// Completes an image. A process that has just ended, QEMU or a `qemu-img` of a killed process, may have it locked for a moment
/// more.
fn complete_unlocked(image: &Path) -> Result<(), String> {
    let deadline = Instant::now() + UNLOCKED_LIMIT;
    loop {
        match qemu_img::complete(image, &mut || thread::sleep(LOOK)) {
            Err(why) if why.contains(LOCKED) && Instant::now() < deadline => thread::sleep(LOOK),
            outcome => return outcome,
        }
    }
}
