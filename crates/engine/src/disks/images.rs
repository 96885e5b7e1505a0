//! New images for disks whose content comes from elsewhere, another host or a checkpoint. They are removed again if
//! the VM does not come.
//!
//! ```text
//!   NewImages::make ── QEMU is started with them ── ExportedImages::start ── content over NBD ── stop ── the VM runs
//! ```

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use stillframe_qemu::launch::{LaunchOptions, NewFormat};
use stillframe_qemu::monitor::{Disk, Monitor, MonitorError, image_of};
use stillframe_qemu::qemu_img;
use stillframe_qemu::record::VmRecord;
use thiserror::Error;

use super::server::{self, ServerError};

/// Files made here would be lost, and take memory.
const DEVICES: &str = "/dev";
/// The format of an image that is nothing but the disk's content.
const RAW: &str = "raw";

/// What the user of a command can do where an image cannot be made, in sentences.
#[derive(Debug)]
pub struct Advice {
    /// The file is there already.
    pub exists: &'static str,
    /// It cannot be made.
    pub place: &'static str,
    /// It would be a device.
    pub device: &'static str,
    /// There is no program for its format.
    pub format: &'static str,
}

/// Why a disk has no new image.
#[derive(Debug, Error)]
pub enum ImageError {
    /// The file is there.
    #[error("disk {device} would be copied over {path}, which exists. {}", .advice.exists)]
    Exists {
        /// The disk.
        device: String,
        /// Its image.
        path: PathBuf,
        /// What can be done.
        advice: &'static Advice,
    },
    /// No file can be made.
    #[error("cannot make an image for disk {device}: {path}. {}", .advice.place)]
    NotMade {
        /// The disk.
        device: String,
        /// Its image.
        path: PathBuf,
        /// Why not.
        #[source]
        source: std::io::Error,
        /// What can be done.
        advice: &'static Advice,
    },
    /// `qemu-img` failed.
    #[error(
        "cannot make an image of {bytes} bytes for disk {device} at {path}: {why}. {}", .advice.format
    )]
    NotFormatted {
        /// The disk.
        device: String,
        /// Its image.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// Its format, and why not.
        why: String,
        /// What can be done.
        advice: &'static Advice,
    },
    /// The VM there has other disks.
    #[error("the new QEMU has no disk {device}; it has {there}")]
    NoSuchDisk {
        /// The disk.
        device: String,
        /// Those that there are.
        there: String,
    },
    /// The image has another size.
    #[error("disk {device} has {recorded} bytes, and its new image {path} has {here}")]
    OtherSize {
        /// The disk.
        device: String,
        /// Its image.
        path: PathBuf,
        /// The image's size.
        here: u64,
        /// The disk's.
        recorded: u64,
    },
    /// QEMU does not let it be written.
    #[error(
        "the new QEMU does not take the content of disks (it has one NBD server: another program may use it)"
    )]
    Refused(#[source] MonitorError),
    /// No connection.
    #[error("cannot prepare a connection for a disk")]
    Server(#[source] ServerError),
}

impl From<ServerError> for ImageError {
    fn from(error: ServerError) -> ImageError {
        match error {
            ServerError::Refused(error) => ImageError::Refused(error),
            error => ImageError::Server(error),
        }
    }
}

/// Image files that were made for a VM. Dropped, they are removed.
#[derive(Debug)]
pub(crate) struct NewImages {
    made: Vec<Made>,
    advice: &'static Advice,
}

/// One of them.
#[derive(Debug)]
struct Made {
    path: PathBuf,
    /// The file, if it is nothing but the disk's content.
    raw: Option<File>,
}

/// The same, of a VM that may have come.
#[derive(Debug)]
#[must_use]
pub(crate) struct KeptImages(Vec<Made>);

impl NewImages {
    /// None.
    pub fn none(advice: &'static Advice) -> NewImages {
        NewImages {
            made: Vec::new(),
            advice,
        }
    }

    /// Makes the images of these devices. With `overwrite`, what is there already is used as it is.
    ///
    /// # Errors
    /// A file is there, or cannot be made.
    pub fn make<'d>(
        vm: &VmRecord,
        devices: impl IntoIterator<Item = &'d String>,
        options: &LaunchOptions,
        overwrite: bool,
        advice: &'static Advice,
    ) -> Result<NewImages, ImageError> {
        let mut images = NewImages::none(advice);
        let owner = vm.credentials.as_ref().filter(|_| !options.as_root);
        let owner = owner.map(|then| (then.uid, then.gid));
        let disks = options.disks(&vm.disks);
        for device in devices {
            let Some(disk) = image_of(&disks, device) else {
                continue;
            };
            let mut named = options.images.iter();
            let format = named.find(|image| image.device == *device);
            let format = format.map(|image| &image.format);
            match fs::symlink_metadata(&disk.path) {
                Ok(_) if overwrite => continue,
                // A block device is always there, and is no mistake of the path.
                Ok(_) => {
                    return Err(ImageError::Exists {
                        device: disk.device.clone(),
                        path: disk.path.clone(),
                        advice,
                    });
                }
                Err(_) => images.add(disk, format, owner)?,
            }
        }
        Ok(images)
    }

    /// The file is the user's own until it is complete.
    fn add(
        &mut self,
        disk: &Disk,
        format: Option<&NewFormat>,
        owner: Option<(u32, u32)>,
    ) -> Result<(), ImageError> {
        let not_made = |source| ImageError::NotMade {
            device: disk.device.clone(),
            path: disk.path.clone(),
            source,
            advice: self.advice,
        };
        if disk.path.starts_with(DEVICES) {
            return Err(not_made(std::io::Error::other(self.advice.device)));
        }
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600);
        let file = file.open(&disk.path).map_err(not_made)?;
        self.made.push(Made {
            path: disk.path.clone(),
            raw: None,
        });
        match (format, &*disk.format) {
            (Some(NewFormat::Overlay(backing)), _) => {
                let made = qemu_img::create_overlay(&disk.path, backing, disk.bytes);
                made.map_err(|why| not_formatted(disk, why, self.advice))?;
            }
            (_, RAW) => {
                file.set_len(disk.bytes).map_err(not_made)?;
                if let Some(made) = self.made.last_mut() {
                    made.raw = Some(file);
                }
            }
            (_, format) => {
                let made = qemu_img::create(&disk.path, format, disk.bytes);
                let words = |why| format!("format {format}: {why}");
                made.map_err(|why| not_formatted(disk, words(why), self.advice))?;
            }
        }
        if let Some((uid, gid)) = owner.filter(|_| rustix::process::geteuid().is_root()) {
            chown(&disk.path, Some(uid), Some(gid)).map_err(not_made)?;
        }
        Ok(())
    }

    /// The file that a disk of QEMU's is in, if it was made here and is nothing but the disk's content. It is the one that was
    /// made, whatever has its path now: another user may be able to exchange it.
    pub fn raw_file(&self, disk: &Disk) -> Option<&File> {
        let mut made = self.made.iter();
        let file = made.find(|made| made.path == disk.path)?.raw.as_ref()?;
        let (ours, there) = (file.metadata().ok()?, fs::metadata(&disk.path).ok()?);
        let same = (ours.dev(), ours.ino()) == (there.dev(), there.ino());
        // What else QEMU may have there, such as a part of a file, is its own to write.
        (same && disk.format == RAW && ours.len() == disk.bytes).then_some(file)
    }

    /// They stay whatever happens, because the VM may run on them.
    pub fn keep(mut self) -> KeptImages {
        KeptImages(std::mem::take(&mut self.made))
    }
}

impl Drop for NewImages {
    fn drop(&mut self) {
        remove(&self.made);
    }
}

impl KeptImages {
    /// The VM has never run here, and never will.
    pub fn remove(self) {
        remove(&self.0);
    }
}

fn remove(files: &[Made]) {
    for Made { path, .. } in files {
        // The user finds one that cannot be removed.
        let _ = fs::remove_file(path);
    }
}

fn not_formatted(disk: &Disk, why: String, advice: &'static Advice) -> ImageError {
    ImageError::NotFormatted {
        device: disk.device.clone(),
        path: disk.path.clone(),
        bytes: disk.bytes,
        why,
        advice,
    }
}

/// New images as QEMU exports them. It has to stop before the VM runs.
pub(crate) struct ExportedImages {
    /// Connected to QEMU, one for each disk.
    pub sockets: Vec<UnixStream>,
    /// The images, in the same order.
    pub disks: Vec<Disk>,
}

impl ExportedImages {
    /// Has a QEMU that waits for its VM export the images of these devices; each must be as long as the VM's disk was.
    ///
    /// # Errors
    /// It has other disks, or refuses.
    pub fn start<'d>(
        monitor: &mut Monitor,
        vm: &VmRecord,
        devices: impl IntoIterator<Item = &'d String>,
    ) -> Result<ExportedImages, ImageError> {
        let disks = fitting_disks(monitor, vm, devices)?;
        ExportedImages::of(monitor, disks)
    }

    /// Has it export these of its images.
    ///
    /// # Errors
    /// It refuses.
    pub fn of(monitor: &mut Monitor, disks: Vec<Disk>) -> Result<ExportedImages, ImageError> {
        let sockets = server::start(monitor, disks.len())?;
        for (number, disk) in disks.iter().enumerate() {
            let exported = monitor.export(&disk.node, &export_name(number));
            exported.map_err(ImageError::Refused)?;
        }
        Ok(ExportedImages { sockets, disks })
    }

    /// All content is there.
    ///
    /// # Errors
    /// QEMU does not end the exports.
    pub fn stop(monitor: &mut Monitor) -> Result<(), ImageError> {
        monitor.stop_exports().map_err(ImageError::Refused)
    }
}

/// The images of these devices as a QEMU has them; each must be as long as the VM's disk was.
///
/// # Errors
/// It has other disks.
pub(crate) fn fitting_disks<'d>(
    monitor: &mut Monitor,
    vm: &VmRecord,
    devices: impl IntoIterator<Item = &'d String>,
) -> Result<Vec<Disk>, ImageError> {
    let here = monitor.disks().map_err(ImageError::Refused)?;
    let devices = devices.into_iter();
    devices
        .map(|device| fitting(vm, &here, device).cloned())
        .collect()
}

/// The disk of this device, which must be as large as the VM's.
fn fitting<'d>(vm: &VmRecord, disks: &'d [Disk], device: &str) -> Result<&'d Disk, ImageError> {
    let (here, recorded) = (image_of(disks, device), image_of(&vm.disks, device));
    let (Some(here), Some(recorded)) = (here, recorded) else {
        let names: Vec<&str> = disks.iter().map(|disk| &*disk.device).collect();
        return Err(ImageError::NoSuchDisk {
            device: device.to_owned(),
            there: match names.is_empty() {
                true => "none".to_owned(),
                false => names.join(", "),
            },
        });
    };
    match here.bytes == recorded.bytes {
        true => Ok(here),
        false => Err(ImageError::OtherSize {
            device: device.to_owned(),
            path: here.path.clone(),
            here: here.bytes,
            recorded: recorded.bytes,
        }),
    }
}

/// The name of an export, by its number.
pub(crate) fn export_name(number: usize) -> String {
    format!("disk-{number}")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const ADVICE: Advice = Advice {
        exists: "Remove it",
        place: "Make its directory",
        device: "no device",
        format: "Make it yourself",
    };

    fn disk(path: &Path, format: &str) -> Disk {
        Disk {
            path: path.to_owned(),
            format: format.to_owned(),
            device: "d0".to_owned(),
            node: "n0".to_owned(),
            read_only: false,
            temporary: false,
            flash: false,
            unchecked: false,
            bytes: 1 << 20,
            identity: None,
        }
    }

    #[test]
    fn images_are_removed_unless_the_vm_may_have_come() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new");
        let mut images = NewImages::none(&ADVICE);
        images.add(&disk(&path, RAW), None, None).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
        assert!(images.raw_file(&disk(&path, RAW)).is_some());
        assert!(images.raw_file(&disk(&path, "qcow2")).is_none());
        let half = Disk {
            bytes: 1 << 19,
            ..disk(&path, RAW)
        };
        assert!(images.raw_file(&half).is_none());
        let other = folder.path().join("other");
        fs::write(&other, "another program's").unwrap();
        assert!(images.raw_file(&disk(&other, RAW)).is_none());
        // Exchanged for a file of the same length.
        let moved = folder.path().join("moved");
        fs::rename(&path, &moved).unwrap();
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        assert!(images.raw_file(&disk(&path, RAW)).is_none());
        fs::rename(&moved, &path).unwrap();
        let device =
            NewImages::none(&ADVICE).add(&disk(Path::new("/dev/stillframe-test"), RAW), None, None);
        assert!(matches!(device, Err(ImageError::NotMade { .. })));
        assert!(!Path::new("/dev/stillframe-test").exists());
        // The file of another program is never taken.
        let again = NewImages::none(&ADVICE).add(&disk(&path, RAW), None, None);
        assert!(matches!(again, Err(ImageError::NotMade { .. })));
        assert!(path.exists());
        drop(images);
        assert!(!path.exists());
        let mut images = NewImages::none(&ADVICE);
        images.add(&disk(&path, RAW), None, None).unwrap();
        let kept = images.keep();
        assert!(path.exists());
        kept.remove();
        assert!(!path.exists());
    }

    #[test]
    fn a_format_that_cannot_be_made_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new");
        let mut images = NewImages::none(&ADVICE);
        let refused = images.add(&disk(&path, "no-such-format"), None, None);
        assert!(matches!(refused, Err(ImageError::NotFormatted { .. })));
        drop(images);
        assert!(!path.exists());
    }
}
