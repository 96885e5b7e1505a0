//! The images that disks are copied into: new files, which are removed again if the VM does not come.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use stillframe_qemu::launch::{self, LaunchOptions};
use stillframe_qemu::monitor::Disk;
use stillframe_qemu::record::VmRecord;

use super::{ImageError, image_of};

/// The program that makes images; it comes with QEMU.
const QEMU_IMG: &str = "qemu-img";
/// Files made here would be lost, and take memory.
const DEVICES: &str = "/dev";
/// The format of an image that is nothing but the disk's content.
const RAW: &str = "raw";

/// Image files that were made for a VM. Dropped, they are removed.
#[derive(Debug, Default)]
pub(in crate::migration) struct NewImages {
    made: Vec<PathBuf>,
}

/// The same, of a VM that may have come.
#[derive(Debug)]
#[must_use]
pub(in crate::migration) struct KeptImages(Vec<PathBuf>);

impl NewImages {
    /// Makes the images of these disks. With `overwrite`, what is there already is used as it is.
    ///
    /// # Errors
    /// A file is there, or cannot be made.
    pub fn make(
        vm: &VmRecord,
        copied: &[String],
        options: &LaunchOptions,
        overwrite: bool,
    ) -> Result<NewImages, ImageError> {
        let mut images = NewImages::default();
        let owner = vm.credentials.as_ref().filter(|_| !options.as_root);
        let owner = owner.map(|then| (then.uid, then.gid));
        let disks = launch::replaced(&vm.disks, &options.replace);
        for device in copied {
            let Some(disk) = image_of(&disks, device) else {
                continue;
            };
            match fs::symlink_metadata(&disk.path) {
                Ok(_) if overwrite => continue,
                // A block device is always there, and is no mistake of the path.
                Ok(_) => return Err(exists(disk)),
                Err(_) => images.add(disk, owner)?,
            }
        }
        Ok(images)
    }

    /// The file is the user's own until it is complete.
    fn add(&mut self, disk: &Disk, owner: Option<(u32, u32)>) -> Result<(), ImageError> {
        let not_made = |source| ImageError::NotMade {
            device: disk.device.clone(),
            path: disk.path.clone(),
            source,
        };
        if disk.path.starts_with(DEVICES) {
            let what = "a device that is not here; name one with --map, and use --overwrite-disks";
            return Err(not_made(std::io::Error::other(what)));
        }
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600);
        let file = file.open(&disk.path).map_err(not_made)?;
        self.made.push(disk.path.clone());
        match &*disk.format {
            RAW => file.set_len(disk.bytes).map_err(not_made)?,
            format => formatted(disk, format)?,
        }
        if let Some((uid, gid)) = owner.filter(|_| rustix::process::geteuid().is_root()) {
            chown(&disk.path, Some(uid), Some(gid)).map_err(not_made)?;
        }
        Ok(())
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

fn remove(files: &[PathBuf]) {
    for file in files {
        // The user finds one that cannot be removed.
        let _ = fs::remove_file(file);
    }
}

fn exists(disk: &Disk) -> ImageError {
    ImageError::Exists {
        device: disk.device.clone(),
        path: disk.path.clone(),
    }
}

/// Makes it an image of this format.
fn formatted(disk: &Disk, format: &str) -> Result<(), ImageError> {
    let failed = |why: String| ImageError::NotFormatted {
        device: disk.device.clone(),
        path: disk.path.clone(),
        format: format.to_owned(),
        bytes: disk.bytes,
        why,
    };
    let made = Command::new(QEMU_IMG)
        .args(["create", "-q", "-f", format, "--"])
        .arg(&disk.path)
        .arg(disk.bytes.to_string())
        .output();
    let made = made.map_err(|error| failed(format!("{QEMU_IMG}: {error}")))?;
    match made.status.success() {
        true => Ok(()),
        false => {
            let words = String::from_utf8_lossy(&made.stderr);
            Err(failed(words.trim().to_owned()))
        }
    }
}

/// The content of images that is in memory only is written to them from time to time: else all of it would be written when
/// the VM is stopped. What cannot be opened is written then.
pub(super) fn write_back(files: &[File]) {
    for file in files {
        // QEMU learns of an error itself.
        let _ = file.sync_data();
    }
}

/// Opens an image to be written back.
pub(super) fn open(path: &Path) -> Option<File> {
    let file = File::open(path).ok()?;
    let kind = file.metadata().ok()?.file_type();
    (kind.is_file() || kind.is_block_device()).then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(path: &Path, format: &str) -> Disk {
        Disk {
            path: path.to_owned(),
            format: format.to_owned(),
            ..super::super::tests::disk("d0", "n0")
        }
    }

    #[test]
    fn images_are_removed_unless_the_vm_may_have_come() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new");
        let mut images = NewImages::default();
        images.add(&disk(&path, RAW), None).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
        let device = NewImages::default().add(&disk(Path::new("/dev/stillframe-test"), RAW), None);
        assert!(matches!(device, Err(ImageError::NotMade { .. })));
        assert!(!Path::new("/dev/stillframe-test").exists());
        // The file of another program is never taken.
        let again = NewImages::default().add(&disk(&path, RAW), None);
        assert!(matches!(again, Err(ImageError::NotMade { .. })));
        assert!(path.exists());
        drop(images);
        assert!(!path.exists());
        let mut images = NewImages::default();
        images.add(&disk(&path, RAW), None).unwrap();
        let kept = images.keep();
        assert!(path.exists());
        kept.remove();
        assert!(!path.exists());
    }

    #[test]
    fn a_format_that_cannot_be_made_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new");
        let mut images = NewImages::default();
        let refused = images.add(&disk(&path, "no-such-format"), None);
        assert!(matches!(refused, Err(ImageError::NotFormatted { .. })));
        drop(images);
        assert!(!path.exists());
    }
}
