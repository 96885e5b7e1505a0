//! Disks that get another image: what the recorded command line says of the disk stays, except its file.

use std::path::Path;

use super::{Argument, FILE_KEYS, IMPLIED, LaunchError, Properties, Rewriter};
use crate::launch::{NewFormat, NewImage, QCOW2, RAW};
use crate::monitor::{Disk, image_of};

/// A block driver that opens devices only, and the one that opens files.
const HOST_DEVICE: &str = "host_device";
const FILE: &str = "file";
/// Keys under which a drive names the driver that opens its file.
const DRIVER_KEYS: &[&str] = &["file.driver", "driver"];
/// How the names of properties begin that only some formats have, not raw.
const OF_FORMATS: &[&str] = &[
    "backing",
    "cache-clean-interval",
    "cache-size",
    "data-file",
    "discard-no-unref",
    "encrypt",
    "l2-cache",
    "lazy-refcounts",
    "overlap-check",
    "pass-discard",
    "refcount-cache",
];
/// Of these, what says where content lies that the image does not have.
const BELOW: &[&str] = &["backing", "data-file", "encrypt"];
/// How the names of properties begin that a node of any driver has (`BlockdevOptions` in QEMU's qapi/block-core.json).
const OF_NODES: &[&str] = &[
    "node-name",
    "discard",
    "cache.",
    "read-only",
    "detect-zeroes",
];

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
            let new = with_file(&self.line.options[at], &image.path)?;
            let was = &*disk.format;
            match image.format {
                NewFormat::Recorded => self.put(at, new),
                NewFormat::Raw => self.set_format(at, &new, RAW, OF_FORMATS),
                NewFormat::Overlay(_) if was == QCOW2 => self.set_format(at, &new, QCOW2, BELOW),
                NewFormat::Overlay(_) => self.set_format(at, &new, QCOW2, OF_FORMATS),
            }
        }
        Ok(())
    }

    /// Puts another option into this place.
    fn put(&mut self, at: usize, new: Argument) {
        let old = std::mem::replace(&mut self.line.options[at], new);
        let new = self.line.options[at].words();
        self.note(format!("`{}` became `{new}`", old.words()));
    }

    /// Has QEMU open the image in this format: it must not guess it by what the guest has written. Properties whose names
    /// begin like `without` are left out.
    fn set_format(&mut self, at: usize, option: &Argument, format: &str, without: &[&str]) {
        let value = option.value().unwrap_or_default();
        let place = match option.name() {
            Some("blockdev") => return self.set_format_of_node(at, option, format, without),
            Some("drive") => {
                let mut properties = Properties::parse(value, IMPLIED);
                remove(&mut properties, without);
                properties.remove("driver");
                properties.set("format", format);
                return self.put(at, Argument::new("drive", properties.render("")));
            }
            Some("sd") => ("if", "sd"),
            Some("hdb") => ("index", "1"),
            Some("hdc") => ("index", "2"),
            Some("hdd") => ("index", "3"),
            _ => ("index", "0"),
        };
        let mut properties = Properties::default();
        for (key, value) in [
            ("file", value),
            ("format", format),
            ("media", "disk"),
            place,
        ] {
            properties.set(key, value);
        }
        self.put(at, Argument::new("drive", properties.render("")));
    }

    /// The node of the format is this one, or that above it.
    fn set_format_of_node(&mut self, at: usize, option: &Argument, format: &str, without: &[&str]) {
        let of = |option: &Argument| Properties::parse(option.value().unwrap_or_default(), IMPLIED);
        let this = of(option);
        let node = match this.get("file.filename") {
            Some(_) => Some(at),
            None => {
                let is_above = |option: &Argument| {
                    let node = this.get("node-name");
                    option.is("blockdev") && node.is_some() && of(option).get("file") == node
                };
                self.line.options.iter().position(is_above)
            }
        };
        let Some(node) = node else {
            // A device that has the file itself takes it as raw.
            let file = match format {
                RAW => this,
                format => with_format_above(&this, format),
            };
            return self.put(at, Argument::new("blockdev", file.render("")));
        };
        if node != at {
            self.put(at, option.clone());
        }
        let mut properties = match node == at {
            true => this,
            false => of(&self.line.options[node]),
        };
        let backing = properties.get("backing").map(str::to_owned);
        remove(&mut properties, without);
        properties.set("driver", format);
        self.put(node, Argument::new("blockdev", properties.render("")));
        if let Some(backing) = backing {
            self.drop_node(&backing);
        }
    }

    /// Leaves out a node, and those below it, unless another has it below, too.
    fn drop_node(&mut self, name: &str) {
        let of = |option: &Argument| Properties::parse(option.value().unwrap_or_default(), IMPLIED);
        let nodes = self.line.options.iter().filter(|one| one.is("blockdev"));
        let below = |properties: &Properties| {
            let below = ["file", "backing"].map(|key| properties.get(key).map(str::to_owned));
            below.into_iter().flatten().collect::<Vec<String>>()
        };
        let is_used = nodes
            .clone()
            .any(|one| below(&of(one)).iter().any(|other| other == name));
        let is_it = |one: &Argument| {
            one.is("blockdev") && of(one).get("node-name").is_some_and(|node| node == name)
        };
        let Some(at) = self
            .line
            .options
            .iter()
            .position(is_it)
            .filter(|_| !is_used)
        else {
            return;
        };
        let gone = self.line.options.remove(at);
        self.note(format!(
            "`{}` left out: the new image is whole",
            gone.words()
        ));
        for name in below(&of(&gone)) {
            self.drop_node(&name);
        }
    }
}

/// Leaves out the properties whose names begin like one of these.
fn remove(properties: &mut Properties, without: &[&str]) {
    let keys = properties.pairs().map(|(key, _)| key.to_owned());
    let keys: Vec<String> = keys.collect();
    let is_one = |key: &&String| without.iter().any(|of| key.starts_with(of));
    for key in keys.iter().filter(is_one) {
        properties.remove(key);
    }
}

/// The node of a file as one of a format with this file below it: what is said of every node stays with it.
fn with_format_above(file: &Properties, format: &str) -> Properties {
    let mut above = Properties::default();
    above.set("driver", format);
    for (key, value) in file.pairs() {
        let stays = OF_NODES.iter().any(|of| key.starts_with(of));
        match stays {
            true => above.set(key, value),
            false => above.set(&format!("file.{key}"), value),
        }
    }
    above
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
