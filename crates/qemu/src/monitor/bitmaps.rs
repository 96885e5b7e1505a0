//! Dirty bitmaps: QEMU records in them which blocks of an image are written. They are kept in its memory only.
//!
//! Source: QEMU, `qapi/block-core.json` (`block-dirty-bitmap-*`), `docs/interop/bitmaps.rst`.

use serde::Deserialize;
use serde_json::{Value, json};

use super::disks::DiskDevice;
use super::{Monitor, MonitorError};

/// How the names of our bitmaps begin.
const PREFIX: &str = "stillframe-";
/// Bytes of a disk that one bit stands for: a page. QEMU needs 8 MiB of memory for 256 GiB of disk.
const GRANULARITY_BYTES: u64 = 4096;
/// The same of disks that are longer than [`LONG_BYTES`].
const GRANULARITY_BYTES_LONG: u64 = 65536;
const LONG_BYTES: u64 = 256 << 30;

impl Monitor {
    /// Begins to record writes to each of these disks in a bitmap of this name.
    ///
    /// # Errors
    /// QEMU refuses it, and none is there.
    pub fn add_bitmaps(&mut self, disks: &[DiskDevice], name: &str) -> Result<(), MonitorError> {
        self.transaction(disks.iter().map(|disk| addition(disk, name)).collect())
    }

    /// Freezes what one bitmap of a disk has recorded, and begins to record in another: each write is in one of them.
    ///
    /// # Errors
    /// QEMU refuses it, and all is as it was.
    pub fn exchange_bitmap(
        &mut self,
        disk: &DiskDevice,
        old: &str,
        new: &str,
    ) -> Result<(), MonitorError> {
        self.transaction(vec![addition(disk, new), freezing(&disk.node, old)])
    }

    /// Freezes what a bitmap of a disk has recorded.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn freeze_bitmap(&mut self, disk: &DiskDevice, name: &str) -> Result<(), MonitorError> {
        self.transaction(vec![freezing(&disk.node, name)])
    }

    /// Adds what one bitmap of each disk has recorded to another: nothing that was written is lost.
    ///
    /// # Errors
    /// QEMU refuses it, and all are as they were.
    pub fn merge_bitmaps(
        &mut self,
        disks: &[DiskDevice],
        from: &str,
        into: &str,
    ) -> Result<(), MonitorError> {
        let merge = |disk: &DiskDevice| {
            let data = json!({ "node": disk.node, "target": into, "bitmaps": [from] });
            json!({ "type": "block-dirty-bitmap-merge", "data": data })
        };
        self.transaction(disks.iter().map(merge).collect())
    }

    /// Removes the bitmaps of ours from all images, but those of this name.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn remove_bitmaps(&mut self, except: Option<&str>) -> Result<(), MonitorError> {
        for (node, name) in self.bitmaps()? {
            if name.starts_with(PREFIX) && Some(&*name) != except {
                let arguments = json!({ "node": node, "name": name });
                self.client
                    .execute("block-dirty-bitmap-remove", arguments)?;
            }
        }
        Ok(())
    }

    /// All bitmaps, each with the node of its image before it.
    ///
    /// # Errors
    /// QEMU fails the query.
    pub(super) fn bitmaps(&mut self) -> Result<Vec<(String, String)>, MonitorError> {
        #[derive(Deserialize)]
        struct Node {
            #[serde(rename = "node-name", default)]
            name: String,
            #[serde(rename = "dirty-bitmaps", default)]
            bitmaps: Vec<Bitmap>,
        }
        #[derive(Deserialize)]
        struct Bitmap {
            #[serde(default)]
            name: String,
        }
        let nodes: Vec<Node> = self.run("query-named-block-nodes", json!({ "flat": true }))?;
        let bitmaps = nodes.into_iter().flat_map(|node| {
            let names = node.bitmaps.into_iter().map(|bitmap| bitmap.name);
            names.map(move |name| (node.name.clone(), name))
        });
        Ok(bitmaps.collect())
    }

    /// The commands that remove these bitmaps, for a process that has only a connection.
    pub fn commands_to_forget(disks: &[DiskDevice], bitmaps: &[&str]) -> Vec<(String, Value)> {
        let each = disks.iter().flat_map(|disk| {
            bitmaps.iter().map(|name| {
                let bitmap = json!({ "node": disk.node, "name": name });
                ("block-dirty-bitmap-remove".to_owned(), bitmap)
            })
        });
        each.collect()
    }

    fn transaction(&mut self, actions: Vec<Value>) -> Result<(), MonitorError> {
        self.client
            .execute("transaction", json!({ "actions": actions }))?;
        Ok(())
    }
}

fn addition(disk: &DiskDevice, name: &str) -> Value {
    let granularity = match disk.bytes > LONG_BYTES {
        true => GRANULARITY_BYTES_LONG,
        false => GRANULARITY_BYTES,
    };
    let data = json!({ "node": disk.node, "name": name, "granularity": granularity });
    json!({ "type": "block-dirty-bitmap-add", "data": data })
}

pub(super) fn freezing(node: &str, name: &str) -> Value {
    let bitmap = json!({ "node": node, "name": name });
    json!({ "type": "block-dirty-bitmap-disable", "data": bitmap })
}
