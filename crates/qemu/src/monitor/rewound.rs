//! A disk that is written while its VM is stopped, not by the guest: the image is exported for writing.
//!
//! ```text
//!   device ──> image                     reads of the image are exported, a bitmap records the guest's writes
//!   device ──> empty node    image <──── writes, while the VM cannot run
//!   device ──> image
//! ```
//!
//! QEMU refuses writes of others to an image that a device has. So the device has an empty node of the same length meanwhile.
//! QEMU closes an image that nothing uses, such as that of a `-drive` whose device has another node. So a node of ours keeps it,
//! a filter that takes no part in anything. It also shows whose image it is, by the number in its name.
//!
//! Source: QEMU, `qapi/block-core.json` (`null-co`, `copy-on-read`), `qapi/block-export.json`.

use std::time::{Duration, Instant};

use serde_json::json;

use super::disks::{DiskDevice, SNAPSHOT_PREFIX as PREFIX};
use super::snapshots::set_drive;
use super::{DiskBitmap, EndCommands, Monitor, MonitorError, unexpected};

/// How the names of the nodes begin that devices have meanwhile.
const EMPTY: &str = "stillframe-empty-";
/// How the names of the nodes begin that keep images.
const KEEPER: &str = "stillframe-keeper-";
/// The name of a bitmap of an image that is partly of one moment and partly of another. It records nothing of use, and stays
/// as long as QEMU does, whatever becomes of the engine.
const HALF_REWOUND: &str = "half-rewound-by-stillframe";
/// Bytes that one bit of that stands for: so that it takes no memory.
const HALF_REWOUND_GRANULARITY: u64 = 1 << 30;
/// How long an export may take to close.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_micros(200);

/// A disk that is to be written, by a number that distinguishes the disks of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RewoundDisk {
    /// Its number.
    pub number: usize,
    /// The disk.
    pub disk: DiskDevice,
}

impl RewoundDisk {
    /// The name of the node that its device has meanwhile.
    fn empty(&self) -> String {
        format!("{EMPTY}{}", self.number)
    }

    /// The name of the node that keeps its image.
    fn keeper(&self) -> String {
        format!("{KEEPER}{}", self.number)
    }

    /// Its bitmap with this number.
    pub fn bitmap(&self, round: usize) -> DiskBitmap {
        DiskBitmap {
            disk: self.disk.clone(),
            name: format!("{PREFIX}rewind-{}-{round}", self.number),
        }
    }

    /// The name of its export with this number.
    pub fn export(&self, round: usize) -> String {
        format!("{PREFIX}image-{}-{round}", self.number)
    }

    /// The metadata context of an export with this bitmap.
    pub fn written(&self, round: usize) -> String {
        format!("qemu:dirty-bitmap:{}", self.bitmap(round).name)
    }
}

impl EndCommands {
    /// The commands that give devices their images back, and take away what a rewind has in QEMU, with this number of bitmaps a
    /// disk. `serving`: QEMU's NBD server was started for it, and ends.
    pub fn of_rewound(disks: &[RewoundDisk], bitmaps: usize, serving: bool) -> EndCommands {
        let set = |one: &RewoundDisk| {
            let (command, arguments) = set_drive(&one.disk.path, &one.disk.node);
            (one.empty(), (command.to_owned(), arguments))
        };
        let remove = |one: &RewoundDisk| {
            let nodes = [one.empty(), one.keeper()];
            nodes.map(|name| ("blockdev-del".to_owned(), json!({ "node-name": name })))
        };
        let bitmaps = disks
            .iter()
            .flat_map(|one| (0..bitmaps).map(|number| one.bitmap(number)));
        let bitmaps: Vec<DiskBitmap> = bitmaps.collect();
        let forget = Monitor::commands_to_forget(&bitmaps);
        let server = serving.then(|| ("nbd-server-stop".to_owned(), json!({})));
        EndCommands {
            first: server.into_iter().collect(),
            filters: disks.iter().map(set).collect(),
            last: disks.iter().flat_map(remove).chain(forget).collect(),
        }
    }
}

impl Monitor {
    /// Makes the nodes for a device whose image is to be written: the one that keeps the image, and the one that the device has.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn add_empty(&mut self, disk: &RewoundDisk) -> Result<(), MonitorError> {
        let arguments = json!({
            "driver": "copy-on-read", "node-name": disk.keeper(), "file": disk.disk.node,
        });
        self.client.execute("blockdev-add", arguments)?;
        let arguments = json!({
            "driver": "null-co", "node-name": disk.empty(), "size": disk.disk.bytes, "read-zeroes": true,
        });
        self.client.execute("blockdev-add", arguments)?;
        Ok(())
    }

    /// Takes the image away from its device, of a VM that is stopped and cannot be resumed.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn take_image(&mut self, disk: &RewoundDisk) -> Result<(), MonitorError> {
        let (command, arguments) = set_drive(&disk.disk.path, &disk.empty());
        self.client.execute(command, arguments)?;
        Ok(())
    }

    /// Gives the image back to its device, if that has the empty node. No export for writing may be left.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn give_image(&mut self, disk: &RewoundDisk) -> Result<(), MonitorError> {
        let has_empty = |one: &DiskDevice| one.path == disk.disk.path && one.node == disk.empty();
        // QEMU ends if a device gets the node that it has (10.0).
        if !self.disk_devices()?.iter().any(has_empty) {
            return Ok(());
        }
        let (command, arguments) = set_drive(&disk.disk.path, &disk.disk.node);
        self.client.execute(command, arguments)?;
        Ok(())
    }

    /// Exports the image for reading, under the name of its export with this number, with a bitmap that is frozen.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn export_to_read(
        &mut self,
        disk: &RewoundDisk,
        round: usize,
        bitmap: Option<usize>,
    ) -> Result<(), MonitorError> {
        let (node, name) = (&disk.disk.node, disk.export(round));
        let mut arguments = json!({ "type": "nbd", "id": name, "node-name": node, "name": name });
        if let Some(bitmap) = bitmap {
            let bitmap = disk.bitmap(bitmap).name;
            arguments["bitmaps"] = json!([{ "node": node, "name": bitmap }]);
        }
        self.client.execute("block-export-add", arguments)?;
        Ok(())
    }

    /// Ends an export, if it is there, and waits until it is closed.
    ///
    /// # Errors
    /// QEMU refuses it, or does not close it in time.
    pub fn close_export(&mut self, name: &str) -> Result<(), MonitorError> {
        let deadline = Instant::now() + CLOSE_LIMIT;
        if !self.exports()?.iter().any(|id| id == name) {
            return Ok(());
        }
        let arguments = json!({ "id": name, "mode": "hard" });
        self.client.execute("block-export-del", arguments)?;
        while self.exports()?.iter().any(|id| id == name) {
            if Instant::now() > deadline {
                let left = format!("{name} is not closed");
                return Err(unexpected("query-block-exports", left));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }

    /// Marks the image of a device as being partly of one moment and partly of another, if it is not marked.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn mark_half_rewound(&mut self, disk: &DiskDevice) -> Result<(), MonitorError> {
        if self.half_rewound()?.contains(&disk.node) {
            return Ok(());
        }
        let arguments = json!({
            "node": disk.node, "name": HALF_REWOUND, "granularity": HALF_REWOUND_GRANULARITY,
        });
        self.client.execute("block-dirty-bitmap-add", arguments)?;
        Ok(())
    }

    /// The image is of one moment again.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn unmark_half_rewound(&mut self, disk: &DiskDevice) -> Result<(), MonitorError> {
        let arguments = json!({ "node": disk.node, "name": HALF_REWOUND });
        self.client
            .execute("block-dirty-bitmap-remove", arguments)?;
        Ok(())
    }

    /// The nodes of images that are marked.
    ///
    /// # Errors
    /// QEMU fails the query.
    pub fn half_rewound(&mut self) -> Result<Vec<String>, MonitorError> {
        let bitmaps = self.bitmaps()?.into_iter();
        let marked = bitmaps.filter(|bitmap| bitmap.name == HALF_REWOUND);
        Ok(marked.map(|bitmap| bitmap.node).collect())
    }

    /// Devices that have an empty node get their images back, and our nodes are removed: what a rewind has left that was
    /// killed with its guardian.
    pub(super) fn end_empty(&mut self, nodes: &[String]) -> Result<(), MonitorError> {
        for disk in self.disk_devices()? {
            let Some(number) = disk.node.strip_prefix(EMPTY) else {
                continue;
            };
            let image = self.image_below(&format!("{KEEPER}{number}"))?;
            let (command, arguments) = set_drive(&disk.path, &image);
            self.client.execute(command, arguments)?;
        }
        for begin in [EMPTY, KEEPER] {
            let nodes = nodes.iter().filter(|node| node.starts_with(begin));
            for node in nodes {
                self.remove_node(node)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::disks::is_of_snapshot;
    use super::*;

    #[test]
    fn names_fit_and_are_known_as_ours() {
        let disk = RewoundDisk {
            number: 999,
            disk: DiskDevice {
                device: "d".to_owned(),
                node: "n".to_owned(),
                path: "/d".to_owned(),
                bytes: 512,
                is_incomplete: false,
            },
        };
        for name in [disk.empty(), disk.keeper(), disk.export(9)] {
            assert!(is_of_snapshot(&name));
            // QEMU's limit for names of nodes.
            assert!(name.len() <= 31);
        }
    }
}
