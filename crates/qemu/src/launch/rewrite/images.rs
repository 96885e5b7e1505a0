//! Disks that get another image: what the recorded command line says of the disk stays, except its file.

use std::path::Path;

use super::{Argument, FILE_KEYS, IMPLIED, LaunchError, Properties, Rewriter};
use crate::launch::NewImage;
use crate::monitor::{Disk, image_of};

/// A block driver that opens devices only, and the one that opens files.
const HOST_DEVICE: &str = "host_device";
const FILE: &str = "file";
/// Keys under which a drive names the driver that opens its file.
const DRIVER_KEYS: &[&str] = &["file.driver", "driver"];

impl Rewriter<'_> {
    /// Has each of these disks begin with its new image.
    pub(super) fn use_images(
        &mut self,
        disks: &[Disk],
        images: &[NewImage],
    ) -> Result<(), LaunchError> {
        for image in images {
            let Some(disk) = image_of(disks, &image.device) else {
                continue;
            };
            if disk.path == image.path {
                continue;
            }
            let at = self
                .place_of(&disk.path)
                .ok_or_else(|| LaunchError::ImageNotInArguments {
                    device: disk.device.clone(),
                    path: disk.path.clone(),
                })?;
            let old = self.line.options[at].clone();
            let new = with_file(&old, &image.path)?;
            self.note(format!("`{}` became `{}`", old.words(), new.words()));
            self.line.options[at] = new;
        }
        Ok(())
    }
}

/// The same option with another file.
fn with_file(option: &Argument, file: &Path) -> Result<Argument, LaunchError> {
    let path = file.to_str().ok_or_else(|| LaunchError::NotUtf8 {
        path: file.to_owned(),
    })?;
    let value = option.value().unwrap_or_default();
    Ok(match option.name() {
        None => Argument::Image(path.to_owned()),
        Some(name @ ("drive" | "blockdev")) => {
            let mut properties = Properties::parse(value, IMPLIED);
            let key = FILE_KEYS.iter().find(|key| properties.get(key).is_some());
            properties.set(key.unwrap_or(&FILE), path);
            for key in DRIVER_KEYS {
                if properties.get(key) == Some(HOST_DEVICE) {
                    properties.set(key, FILE);
                }
            }
            Argument::new(name, properties.render(""))
        }
        Some(name) => Argument::new(name, path),
    })
}
