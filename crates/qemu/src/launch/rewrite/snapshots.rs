//! External snapshots: while the VM ran its disk was exchanged for an overlay over it
//! (`blockdev-snapshot-sync`, `virsh snapshot-create --disk-only`, backup tools). The new VM begins with the
//! overlay that the VM had.

use super::{Argument, FILE_KEYS, IMPLIED, Properties, Rewriter};
use crate::monitor::Disk;

/// Block drivers that open a file of the host, below the format.
const FILE_DRIVERS: &[&str] = &["file", "host_device"];

impl Rewriter<'_> {
    /// Has each drive begin with the image that was on top at last.
    pub(super) fn follow_snapshots(&mut self, disks: &[Disk]) {
        for chain in disks.chunk_by(|one, other| one.device == other.device) {
            let [top, below @ ..] = chain else {
                continue;
            };
            let Some(path) = top.path.to_str().filter(|_| top.path.is_absolute()) else {
                continue;
            };
            if top.device.is_empty() || top.temporary || self.place_of(&top.path).is_some() {
                continue;
            }
            let places = below.iter().filter_map(|base| self.place_of(&base.path));
            let place = places.into_iter().next();
            if let Some(at) = place.filter(|at| !self.names_backing(*at)) {
                self.exchange(at, path, &top.format);
            }
        }
    }

    /// Whether the command line itself names the backing of this image. With the overlay on top, it would skip the
    /// image between.
    fn names_backing(&self, at: usize) -> bool {
        let names = |properties: &Properties| {
            let named = properties.pairs().filter(|(_, value)| !value.is_empty());
            let mut keys = named.map(|(key, _)| key);
            keys.any(|key| key == "backing" || key.starts_with("backing."))
        };
        let of = |option: &Argument| Properties::parse(option.value().unwrap_or_default(), IMPLIED);
        let this = of(&self.line.options[at]);
        let node = this.get("node-name");
        let mut over = self.line.options.iter().map(of);
        names(&this) || over.any(|over| node.is_some() && over.get("file") == node && names(&over))
    }

    fn exchange(&mut self, at: usize, path: &str, format: &str) {
        let old = self.line.options[at].clone();
        let value = old.value().unwrap_or_default();
        let new = match old.name() {
            None => Argument::Image(path.to_owned()),
            Some(name @ ("drive" | "blockdev")) => {
                let mut properties = Properties::parse(value, IMPLIED);
                let key = FILE_KEYS.iter().find(|key| properties.get(key).is_some());
                properties.set(key.unwrap_or(&"file"), path);
                let node = properties.get("node-name").map(str::to_owned);
                let is_file_node = FILE_DRIVERS
                    .iter()
                    .any(|driver| name == "blockdev" && properties.get("driver") == Some(driver));
                match (is_file_node, node) {
                    (true, Some(node)) => self.set_format_over(&node, format),
                    (true, None) => {}
                    (false, _) if name == "drive" && properties.get("driver").is_none() => {
                        properties.set("format", format);
                    }
                    (false, _) => properties.set("driver", format),
                }
                Argument::new(name, properties.render(""))
            }
            Some(name) => Argument::new(name, path),
        };
        self.note(format!(
            "`{}` became `{}`: the VM had taken a snapshot over that disk",
            old.words(),
            new.words()
        ));
        self.line.options[at] = new;
    }

    /// The `-blockdev` of the format over a `-blockdev` of a file.
    pub(super) fn set_format_over(&mut self, node: &str, format: &str) {
        for option in &mut self.line.options {
            let Some(value) = option.value().filter(|_| option.is("blockdev")) else {
                continue;
            };
            let mut properties = Properties::parse(value, IMPLIED);
            if properties.get("file") == Some(node) {
                properties.set("driver", format);
                *option = Argument::new("blockdev", properties.render(""));
            }
        }
    }
}
