//! Throw-away images that a clone writes to: they lie over images that it shares with others.
//!
//! QEMU makes such an image by itself for `-drive snapshot=on`, and has no such word for `-blockdev`. As with that, the file
//! has no name any more when QEMU has opened it, so its space is free again when QEMU ends.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use super::LaunchError;
use crate::qemu_img;

/// Where QEMU makes its own, unless `TMPDIR` names another directory (`create_tmp_file` in its block.c).
const FOLDER: &str = "/var/tmp";

/// A throw-away image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overlay {
    /// The file.
    pub path: PathBuf,
    /// The length of the disk, in bytes.
    pub bytes: u64,
}

impl Overlay {
    /// The overlay of one disk of a clone, by their numbers.
    pub(super) fn new(clone: u32, disk: usize, bytes: u64) -> Overlay {
        let folder = std::env::var_os("TMPDIR").map_or_else(|| FOLDER.into(), PathBuf::from);
        let process = std::process::id();
        Overlay {
            path: folder.join(format!("stillframe-clone-{process}-{clone}-{disk}")),
            bytes,
        }
    }
}

/// Overlays until QEMU has opened them. Dropped, their names are gone.
#[derive(Debug)]
pub(super) struct MadeOverlays(Vec<PathBuf>);

impl MadeOverlays {
    /// Makes the files. One that is there was left by a process that had the same number.
    pub(super) fn make(overlays: &[Overlay]) -> Result<MadeOverlays, LaunchError> {
        let mut made = MadeOverlays(Vec::new());
        for Overlay { path, bytes } in overlays {
            let failed = |why: String| LaunchError::Overlay {
                path: path.clone(),
                why,
            };
            // It would be another's file only if this one cannot be removed, and then none is made.
            let _ = fs::remove_file(path);
            let mut options = OpenOptions::new();
            let file = options.write(true).create_new(true).mode(0o600).open(path);
            file.map_err(|error| failed(error.to_string()))?;
            made.0.push(path.clone());
            qemu_img::create(path, "qcow2", *bytes).map_err(failed)?;
        }
        Ok(made)
    }
}

impl Drop for MadeOverlays {
    fn drop(&mut self) {
        for path in &self.0 {
            // It is in the directory of temporary files, and only takes space.
            let _ = fs::remove_file(path);
        }
    }
}
