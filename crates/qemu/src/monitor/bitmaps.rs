//! Dirty bitmaps: QEMU records in them which blocks of an image are written. They are kept in its memory only.
//!
//! Source: QEMU, `qapi/block-core.json` (`block-dirty-bitmap-*`), `docs/interop/bitmaps.rst`.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use super::disks::DiskDevice;
use super::{Monitor, MonitorError, STOP_LIMIT_SECONDS, unexpected};
use crate::qmp::QmpError;

/// How the names of our bitmaps begin.
const PREFIX: &str = "stillframe-";
/// How the names begin of those that record what is written after a checkpoint.
const SINCE: &str = "stillframe-since-";
/// The name of the bitmap that shows whether a disk was shortened since. It has one bit, for the disk's end, and records nothing:
/// if the disk is made shorter, QEMU cuts off the ends of all its bitmaps, and adds clean ones if it grows again
/// (`bdrv_dirty_bitmap_truncate` in its block/dirty-bitmap.c). What was cut off is in no bitmap then.
const END: &str = "stillframe-end";
/// A node of no content, in which that bit is set first: only a write can do it.
const MARK: &str = "stillframe-mark";
/// Bytes of a disk that one bit stands for: a page. QEMU needs 8 MiB of memory for 256 GiB of disk.
const GRANULARITY_BYTES: u64 = 4096;
/// The same of disks that are longer than [`LONG_BYTES`].
const GRANULARITY_BYTES_LONG: u64 = 65536;
const LONG_BYTES: u64 = 256 << 30;

/// The metadata context of a bitmap, for NBD clients.
pub fn bitmap_context(bitmap: &str) -> String {
    format!("qemu:dirty-bitmap:{bitmap}")
}

/// A bitmap of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskBitmap {
    /// The disk.
    pub disk: DiskDevice,
    /// The bitmap's name.
    pub name: String,
}

impl DiskBitmap {
    /// Bitmaps for these disks that record what is written after a checkpoint. `number`, which must be a random one, makes their
    /// names those of no other checkpoint, and of no other disk.
    pub fn since(disks: &[DiskDevice], number: u64) -> Vec<DiskBitmap> {
        let bitmaps = disks.iter().enumerate().map(|(at, disk)| DiskBitmap {
            disk: disk.clone(),
            name: format!("{SINCE}{number:016x}-{at}"),
        });
        bitmaps.collect()
    }

    pub(super) fn named(&self) -> Value {
        json!({ "node": self.disk.node, "name": self.name })
    }

    fn addition(&self) -> Value {
        let granularity = match self.disk.bytes > LONG_BYTES {
            true => GRANULARITY_BYTES_LONG,
            false => GRANULARITY_BYTES,
        };
        let mut data = self.named();
        data["granularity"] = granularity.into();
        json!({ "type": "block-dirty-bitmap-add", "data": data })
    }

    /// Adds what `from`, a bitmap of the same disk, has recorded.
    fn merging(&self, from: &DiskBitmap) -> Value {
        let data = json!({ "node": self.disk.node, "target": self.name, "bitmaps": [from.name] });
        json!({ "type": "block-dirty-bitmap-merge", "data": data })
    }
}

impl Monitor {
    /// Marks the ends of these disks. Carried out even if this process and all others that hold the connection die.
    ///
    /// # Errors
    /// The connection fails. A disk whose end QEMU does not mark is one of [`Monitor::shortened`].
    pub fn mark_ends(&mut self, disks: &[DiskDevice]) -> Result<(), MonitorError> {
        for disk in disks {
            let end = json!({ "node": disk.node, "name": END });
            let bit = json!({ "node": MARK, "name": END });
            let write = format!(
                "qemu-io {MARK} \"write -q {} 512\"",
                disk.bytes.saturating_sub(512)
            );
            let commands = vec![
                ("block-dirty-bitmap-remove", end.clone()),
                (
                    "blockdev-add",
                    json!({ "driver": "null-co", "node-name": MARK, "size": disk.bytes }),
                ),
                ("block-dirty-bitmap-add", bit.clone()),
                ("human-monitor-command", json!({ "command-line": write })),
                (
                    "block-dirty-bitmap-add",
                    json!({ "node": disk.node, "name": END, "disabled": true }),
                ),
                (
                    "block-dirty-bitmap-merge",
                    json!({ "node": disk.node, "target": END, "bitmaps": [bit] }),
                ),
                ("blockdev-del", json!({ "node-name": MARK })),
            ];
            let limit = Duration::from_secs(STOP_LIMIT_SECONDS);
            for ticket in self.client.send_surviving(commands)? {
                match self.client.wait(ticket, limit) {
                    // There is no such bitmap yet, or QEMU does not know the command.
                    Ok(_) | Err(QmpError::Command { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(())
    }

    /// The first of these disks that was shortened since its end was marked, or is not marked.
    ///
    /// # Errors
    /// QEMU fails the query.
    pub fn shortened<'d>(
        &mut self,
        mut disks: impl Iterator<Item = &'d DiskDevice>,
    ) -> Result<Option<&'d DiskDevice>, MonitorError> {
        let bitmaps = self.bitmaps()?;
        let ends = || bitmaps.iter().filter(|bitmap| bitmap.is_whole_end());
        Ok(disks.find(|disk| !ends().any(|end| end.node == disk.node)))
    }

    /// Begins to record writes in these bitmaps.
    ///
    /// # Errors
    /// QEMU refuses it, and none is there.
    pub fn add_bitmaps(&mut self, bitmaps: &[DiskBitmap]) -> Result<(), MonitorError> {
        self.transaction(bitmaps.iter().map(DiskBitmap::addition).collect())
    }

    /// Freezes what one bitmap of a disk has recorded, and begins to record in another: each write is in one of them.
    ///
    /// # Errors
    /// QEMU refuses it, and all is as it was.
    pub fn exchange_bitmap(
        &mut self,
        old: &DiskBitmap,
        new: &DiskBitmap,
    ) -> Result<(), MonitorError> {
        self.transaction(vec![new.addition(), freezing(&old.disk.node, &old.name)])
    }

    /// Freezes what a bitmap of a disk has recorded.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn freeze_bitmap(&mut self, bitmap: &DiskBitmap) -> Result<(), MonitorError> {
        self.transaction(vec![freezing(&bitmap.disk.node, &bitmap.name)])
    }

    /// How much of these disks was written, as their bitmaps have it, in bytes.
    ///
    /// # Errors
    /// QEMU fails the query, or does not have one of the bitmaps.
    pub fn written_bytes(&mut self, bitmaps: &[DiskBitmap]) -> Result<u64, MonitorError> {
        let there = self.bitmaps()?;
        let bytes = bitmaps.iter().map(|bitmap| {
            let found = there.iter().find(|one| one.is(bitmap));
            let missing = || unexpected("query-named-block-nodes", format!("no {}", bitmap.name));
            Ok(found.ok_or_else(missing)?.bytes)
        });
        bytes.sum()
    }

    /// Adds what one bitmap of each disk has recorded to another: nothing that was written is lost.
    ///
    /// # Errors
    /// QEMU refuses it, and all are as they were.
    pub fn merge_bitmaps(
        &mut self,
        from: &[DiskBitmap],
        into: &[DiskBitmap],
    ) -> Result<(), MonitorError> {
        let both = into.iter().zip(from);
        self.transaction(both.map(|(into, from)| into.merging(from)).collect())
    }

    /// Removes the bitmaps of ours from all images, but these, and the marks of their disks.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn remove_bitmaps(&mut self, except: &[DiskBitmap]) -> Result<(), MonitorError> {
        for bitmap in self.bitmaps()? {
            let kept = |other: &DiskBitmap| {
                bitmap.is(other) || (bitmap.name == END && bitmap.node == other.disk.node)
            };
            if bitmap.name.starts_with(PREFIX) && !except.iter().any(kept) {
                let arguments = json!({ "node": bitmap.node, "name": bitmap.name });
                self.client
                    .execute("block-dirty-bitmap-remove", arguments)?;
            }
        }
        Ok(())
    }

    /// The bitmaps that record what is written after a checkpoint, of disks that were not shortened since: an engine that has
    /// ended left them to the next one. There are several of a disk where it was killed while a checkpoint began.
    ///
    /// # Errors
    /// QEMU fails the query.
    pub fn left_bitmaps(&mut self) -> Result<Vec<DiskBitmap>, MonitorError> {
        let bitmaps = self.bitmaps()?;
        let of_disk = |disk: DiskDevice| {
            let of_disk = || bitmaps.iter().filter(|one| one.node == disk.node);
            let is_whole = of_disk().any(NamedBitmap::is_whole_end);
            // One that is frozen has not all that was written.
            let left =
                of_disk().filter(|one| is_whole && one.records && one.name.starts_with(SINCE));
            let left = left.map(|one| DiskBitmap {
                disk: disk.clone(),
                name: one.name.clone(),
            });
            left.collect::<Vec<_>>()
        };
        let disks = self.disk_devices()?.into_iter();
        Ok(disks.flat_map(of_disk).collect())
    }

    /// All bitmaps.
    ///
    /// # Errors
    /// QEMU fails the query.
    pub(super) fn bitmaps(&mut self) -> Result<Vec<NamedBitmap>, MonitorError> {
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
            recording: bool,
            count: u64,
        }
        let nodes: Vec<Node> = self.run("query-named-block-nodes", json!({ "flat": true }))?;
        let bitmaps = nodes.into_iter().flat_map(|node| {
            let bitmaps = node.bitmaps.into_iter();
            bitmaps.map(move |bitmap| NamedBitmap {
                node: node.name.clone(),
                name: bitmap.name,
                records: bitmap.recording,
                bytes: bitmap.count,
            })
        });
        Ok(bitmaps.collect())
    }

    /// The commands that remove these bitmaps, for a process that has only a connection.
    pub fn commands_to_forget<'b>(
        bitmaps: impl IntoIterator<Item = &'b DiskBitmap>,
    ) -> Vec<(String, Value)> {
        let forget = |bitmap: &DiskBitmap| {
            let command = "block-dirty-bitmap-remove".to_owned();
            (command, bitmap.named())
        };
        bitmaps.into_iter().map(forget).collect()
    }

    /// The same for bitmaps of disks, others of the same disks, and the marks of those.
    pub fn commands_to_forget_disks(
        bitmaps: &[DiskBitmap],
        others: &[DiskBitmap],
    ) -> Vec<(String, Value)> {
        let mut commands = Monitor::commands_to_forget(bitmaps.iter().chain(others));
        commands.extend(bitmaps.iter().map(|bitmap| {
            let end = json!({ "node": bitmap.disk.node, "name": END });
            ("block-dirty-bitmap-remove".to_owned(), end)
        }));
        commands
    }

    /// The command that adds what `next` has recorded to `since`, lets that record again, and removes `next`, for a process that has
    /// only a connection: all of it, or nothing.
    pub fn command_to_take_back(since: &[DiskBitmap], next: &[DiskBitmap]) -> (String, Value) {
        let actions = since.iter().zip(next).flat_map(|(since, next)| {
            [
                since.merging(next),
                json!({ "type": "block-dirty-bitmap-enable", "data": since.named() }),
                json!({ "type": "block-dirty-bitmap-remove", "data": next.named() }),
            ]
        });
        let actions: Vec<Value> = actions.collect();
        ("transaction".to_owned(), json!({ "actions": actions }))
    }

    fn transaction(&mut self, actions: Vec<Value>) -> Result<(), MonitorError> {
        self.client
            .execute("transaction", json!({ "actions": actions }))?;
        Ok(())
    }
}

/// A bitmap as QEMU shows it.
#[derive(Debug)]
pub(super) struct NamedBitmap {
    /// The node of its image.
    pub node: String,
    /// Its name.
    pub name: String,
    /// Whether it records.
    pub records: bool,
    /// The bytes that its bits stand for.
    pub bytes: u64,
}

impl NamedBitmap {
    fn is_whole_end(&self) -> bool {
        self.name == END && self.bytes > 0
    }

    fn is(&self, other: &DiskBitmap) -> bool {
        (&self.node, &self.name) == (&other.disk.node, &other.name)
    }
}

pub(super) fn freezing(node: &str, name: &str) -> Value {
    let bitmap = json!({ "node": node, "name": name });
    json!({ "type": "block-dirty-bitmap-disable", "data": bitmap })
}
