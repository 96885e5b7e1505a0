//! Disks of clones: what lies on the host is only read, and each clone writes to throw-away images of its own.

use std::collections::HashSet;

use super::{Argument, IMAGE_OPTIONS, IMPLIED, LaunchError, Properties, Rewriter};
use crate::launch::CloneOptions;
use crate::launch::overlays::Overlay;
use crate::monitor::Disk;

const BLOCKDEV: &str = "blockdev";
/// Options that name an image, and have no word for an overlay of their own.
const FURTHER_IMAGE_OPTIONS: &[&str] = &["mtdblock", "pflash"];

/// A `-blockdev` that the guest can write to.
struct Node {
    /// Its place in the command line.
    at: usize,
    name: String,
}

impl Rewriter<'_> {
    /// Puts a throw-away image over each disk that the clone can write to.
    pub(super) fn overlay_disks(
        &mut self,
        clone: &CloneOptions,
        disks: &[Disk],
    ) -> Result<(), LaunchError> {
        self.overlay_nodes(clone, disks)?;
        self.change_each("drive", "", |properties| {
            let change = is_writable(properties) && !properties.is_on("snapshot");
            change.then(|| properties.set("snapshot", "on"))
        });
        let mut options = self.line.options.iter();
        let images = options.any(|option| match option.name() {
            Some(name) => IMAGE_OPTIONS.contains(&name) || FURTHER_IMAGE_OPTIONS.contains(&name),
            None => true,
        });
        if images && !self.line.has("snapshot") {
            self.line
                .options
                .push(Argument::Flag("snapshot".to_owned()));
            self.note(
                "`-snapshot` added: what the clone writes to disks is its own, and goes with it"
                    .to_owned(),
            );
        }
        Ok(())
    }

    /// A node that a device writes to becomes read-only under another name, and the overlay gets its name.
    fn overlay_nodes(&mut self, clone: &CloneOptions, disks: &[Disk]) -> Result<(), LaunchError> {
        let (top, below) = self.writable_nodes();
        for node in below {
            self.set_read_only(node.at, None);
        }
        // From the end, so that the places before stay what they are.
        for (number, Node { at, name }) in top.into_iter().enumerate().rev() {
            let base = format!("clone-base-{number}");
            let Some(disk) = self.disk_at(at, disks) else {
                // No device has it, and what is plugged in later must not write to it either.
                self.set_read_only(at, None);
                continue;
            };
            self.set_read_only(at, Some(&base));
            let overlay = Overlay::new(clone.number, number, disk.bytes);
            let path = overlay.path.to_str().ok_or_else(|| LaunchError::NotUtf8 {
                path: overlay.path.clone(),
            })?;
            let mut properties = Properties::default();
            for (key, value) in [
                ("driver", "qcow2"),
                ("node-name", &name),
                ("file.driver", "file"),
                ("file.filename", path),
                ("backing", &base),
            ] {
                properties.set(key, value);
            }
            let option = Argument::new(BLOCKDEV, properties.render(""));
            self.note(format!(
                "`{}` added: what the clone writes to disk {} is its own, and goes with it",
                option.words(),
                disk.device
            ));
            self.line.options.insert(at + 1, option);
            self.overlays.push(overlay);
        }
        Ok(())
    }

    /// The disk whose image is opened by this node, or by one below it. By the image, because a snapshot by the monitor has given
    /// the disk a node of another name; by the name, where the image is no file.
    fn disk_at<'d>(&self, at: usize, disks: &'d [Disk]) -> Option<&'d Disk> {
        let node_at = |at: usize| {
            let value = self.line.options[at].value().unwrap_or_default();
            Properties::parse(value, IMPLIED)
        };
        let is_node = |option: &Argument, name: &str| {
            let properties = Properties::parse(option.value().unwrap_or_default(), IMPLIED);
            option.is(BLOCKDEV) && properties.get("node-name") == Some(name)
        };
        let mut chain = vec![at];
        // A chain is no longer than the command line, unless it is a ring, which QEMU refuses.
        while chain.len() <= self.line.options.len()
            && let Some(below) = chain
                .last()
                .and_then(|&at| node_at(at).get("file").map(str::to_owned))
            && let Some(next) = self
                .line
                .options
                .iter()
                .position(|one| is_node(one, &below))
        {
            chain.push(next);
        }
        let name = node_at(at).get("node-name").map(str::to_owned);
        let mut images = disks.iter().filter(|disk| disk.is_image());
        images.find(|disk| {
            let place = self.place_of(&disk.path);
            place.is_some_and(|place| chain.contains(&place)) || name.as_ref() == Some(&disk.node)
        })
    }

    /// The nodes that can be written to: those that no other node has below it, and the others.
    fn writable_nodes(&self) -> (Vec<Node>, Vec<Node>) {
        let options = self.line.options.iter().enumerate();
        let nodes = options.filter(|(_, option)| option.is(BLOCKDEV));
        let parsed = nodes.map(|(at, option)| {
            let value = option.value().unwrap_or_default();
            (at, Properties::parse(value, IMPLIED))
        });
        let parsed: Vec<(usize, Properties)> = parsed.collect();
        let named: HashSet<&str> = parsed
            .iter()
            .flat_map(|(_, properties)| properties.pairs())
            .filter(|(key, _)| *key != "node-name" && *key != "driver" && !key.ends_with(".driver"))
            .map(|(_, value)| value)
            .collect();
        let writable = parsed
            .iter()
            .filter(|(_, properties)| is_writable(properties));
        let nodes = writable.map(|(at, properties)| Node {
            at: *at,
            name: properties.get("node-name").unwrap_or_default().to_owned(),
        });
        nodes.partition(|node| !named.contains(&*node.name))
    }

    fn set_read_only(&mut self, at: usize, new_name: Option<&str>) {
        let old = self.line.options[at].clone();
        let mut properties = Properties::parse(old.value().unwrap_or_default(), IMPLIED);
        properties.remove("auto-read-only");
        properties.set("read-only", "on");
        if let Some(name) = new_name {
            properties.set("node-name", name);
        }
        let new = Argument::new(BLOCKDEV, properties.render(""));
        self.note(format!("`{}` became `{}`", old.words(), new.words()));
        self.line.options[at] = new;
    }
}

fn is_writable(properties: &Properties) -> bool {
    let reads_only = properties.is_on("readonly") || properties.is_on("read-only");
    !reads_only && properties.get("media") != Some("cdrom")
}
