//! The content of disks at one moment, while the guest goes on writing: copy-before-write filters.
//!
//! ```text
//!   device ──> filter ──> image            the guest's writes: what was there is copied into the memory first
//!                 └─────> memory
//!   view ────> filter                      reads: from the memory what was copied, else from the image
//! ```
//!
//! A filter is made before the pause, and put below the device in it (`qom-set`): that is the moment whose content the view
//! shows. If the memory fails, QEMU gives the view up, and not the guest's write (`break-snapshot`). The user's image stays
//! the user's file throughout.
//!
//! A dirty bitmap on the image records what is written between two snapshots ([`super::bitmaps`]). The one that recorded until
//! the pause is frozen soon after it, and says what is read. It does not limit the filter: it would have to be frozen, and the
//! filter made, in the pause.
//!
//! Source: QEMU, `qapi/block-core.json` (`BlockdevOptionsCbw`, `snapshot-access`), `docs/interop/live-block-operations.rst`.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::bitmaps::{bitmap_context, freezing};
use super::disks::{DiskDevice, Drive, SNAPSHOT_PREFIX as PREFIX, is_of_snapshot};
use super::{Monitor, MonitorError, StateFile, unexpected};
use crate::qmp::{HELD_CONNECTION, QmpError, Ticket};

/// Seconds after which a copy that does not end gives the view up, so that the guest's write can end.
const COPY_LIMIT_S: u32 = 10;
/// How long the exports may take to close.
const END_LIMIT: Duration = Duration::from_secs(10);
/// QEMU's error class for an object that is not there.
const NO_DEVICE: &str = "DeviceNotFound";
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// The nodes of one snapshot of one disk, by a number that distinguishes the disks of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotNumber(pub usize);

impl SnapshotNumber {
    fn filter(self) -> String {
        format!("{PREFIX}filter-{}", self.0)
    }

    fn memory(self) -> String {
        format!("{PREFIX}memory-{}", self.0)
    }

    /// The name of the view, and of its export.
    pub fn view(self) -> String {
        format!("{PREFIX}view-{}", self.0)
    }
}

/// A snapshot of one disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskSnapshot {
    /// Its nodes.
    pub number: SnapshotNumber,
    /// The disk.
    pub disk: DiskDevice,
    /// The bitmap of what was written since the last one, and perhaps a little more.
    pub since: Option<String>,
    /// The bitmap of what is written after this one, and perhaps a little before it.
    pub next: String,
}

impl DiskSnapshot {
    /// The metadata context of the view that shows what was written, if that is known.
    pub fn written(&self) -> Option<String> {
        Some(bitmap_context(self.since.as_ref()?))
    }

    fn filter(&self) -> Value {
        json!({
            "driver": "copy-before-write", "node-name": self.number.filter(),
            "file": self.disk.node, "target": self.number.memory(),
            "on-cbw-error": "break-snapshot", "cbw-timeout": COPY_LIMIT_S,
        })
    }
}

/// The commands that take snapshots away, for a process that has only a connection. One may fail: a snapshot may be incomplete.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndCommands {
    /// First.
    pub first: Vec<(String, Value)>,
    /// Where `query-block` shows a device with this filter, the command that gives it its image back. QEMU ends if a device gets
    /// the node that it has (10.0, an assertion in `bdrv_replace_child_noperm`).
    pub filters: Vec<(String, (String, Value))>,
    /// At last.
    pub last: Vec<(String, Value)>,
}

impl EndCommands {
    /// Those for these snapshots. `serving`: QEMU's NBD server was started for them, and ends.
    pub fn of(snapshots: &[DiskSnapshot], serving: bool) -> EndCommands {
        let owned = |(command, arguments): (&str, Value)| (command.to_owned(), arguments);
        let delete = |node: String| owned(("blockdev-del", json!({ "node-name": node })));
        let numbers = || snapshots.iter().map(|snapshot| snapshot.number);
        let server = serving.then(|| owned(("nbd-server-stop", json!({}))));
        let filters = snapshots.iter().map(|DiskSnapshot { number, disk, .. }| {
            let set = owned(set_drive(&disk.path, &disk.node));
            (number.filter(), set)
        });
        EndCommands {
            first: server
                .into_iter()
                .chain(numbers().map(|number| delete(number.view())))
                .collect(),
            filters: filters.collect(),
            last: numbers()
                .flat_map(|number| [delete(number.filter()), delete(number.memory())])
                .collect(),
        }
    }
}

/// The commands of a pause with disks in it, which QEMU carries out one after the other.
#[derive(Debug)]
#[must_use = "the replies have to be awaited"]
pub struct PauseTickets {
    /// The device state, saved.
    pub saving: Ticket,
    /// Those before it: an error of one means that the disks are not of the moment of the pause.
    pub before: Vec<Ticket>,
    /// The one that holds QEMU ([`Monitor::send_held_pause`]).
    pub hold: Option<Ticket>,
    /// The VM resumed, if it was stopped.
    pub resuming: Option<Ticket>,
}

impl Monitor {
    /// The disks of the devices that the guest can write to. Flash and removable media are not among them.
    ///
    /// # Errors
    /// QEMU fails the query.
    pub fn disk_devices(&mut self) -> Result<Vec<DiskDevice>, MonitorError> {
        let drives = self.drives()?;
        Ok(drives.into_iter().filter_map(Drive::writable).collect())
    }

    /// Makes the filter of a snapshot, with its memory, a file as long as the disk. The device does not use it yet.
    ///
    /// # Errors
    /// QEMU refuses it. Nodes may be left ([`Monitor::end_snapshots`]).
    pub fn begin_snapshot(
        &mut self,
        snapshot: &DiskSnapshot,
        memory: BorrowedFd<'_>,
    ) -> Result<(), MonitorError> {
        let set = self.lend(memory)?;
        let arguments = json!({
            "driver": "file", "node-name": snapshot.number.memory(),
            "filename": format!("/dev/fdset/{set}"),
        });
        let added = self.client.execute("blockdev-add", arguments);
        // The node has a copy of its own.
        let taken_back = self.take_back(set);
        added?;
        taken_back?;
        self.client.execute("blockdev-add", snapshot.filter())?;
        Ok(())
    }

    /// Makes ready for [`Monitor::send_pause_with_disks`] or [`Monitor::send_held_pause`], which does not wait for QEMU then.
    ///
    /// # Errors
    /// The connection fails.
    pub fn prepare_pause(&mut self) -> Result<(), MonitorError> {
        Ok(self.client.keep_connection()?)
    }

    /// A pause that was prepared does not come.
    pub fn forget_pause(&mut self) {
        // There is nothing to take back if it came.
        let _ = self.close_given(HELD_CONNECTION);
    }

    /// Has QEMU stop the VM (`runs`), put the filters below the devices, save the device state, and resume the VM. All of it is
    /// sent in one piece, and carried out even if this process and all others that hold the connection die. To be prepared
    /// ([`Monitor::prepare_pause`]).
    ///
    /// # Errors
    /// The connection fails.
    pub fn send_pause_with_disks(
        &mut self,
        disks: &[DiskSnapshot],
        into: &StateFile,
        runs: bool,
    ) -> Result<PauseTickets, MonitorError> {
        let filters = disks.iter();
        let filters = filters
            .map(|DiskSnapshot { number, disk, .. }| set_drive(&disk.path, &number.filter()));
        self.send_pause(filters.collect(), into, runs)
    }

    /// Has QEMU stop the VM (`runs`), carry out commands, save the device state, and resume the VM.
    pub(super) fn send_pause(
        &mut self,
        stopped: Vec<(&'static str, Value)>,
        into: &StateFile,
        runs: bool,
    ) -> Result<PauseTickets, MonitorError> {
        let mut commands = Vec::new();
        if runs {
            commands.push(("stop", Value::Null));
        }
        commands.extend(stopped);
        let before = commands.len();
        commands.push(into.save());
        if runs {
            commands.push(("cont", Value::Null));
        }
        let mut tickets = self.client.send_kept(commands)?.into_iter();
        let before = tickets.by_ref().take(before).collect();
        let mut next = || {
            tickets
                .next()
                .ok_or_else(|| unexpected("cont", "no ticket".to_owned()))
        };
        Ok(PauseTickets {
            before,
            hold: None,
            saving: next()?,
            resuming: runs.then(next).transpose()?,
        })
    }

    /// Whether the VM has threads of its own for disks. With another node below a device of such a thread, guests came to a
    /// standstill after a kill, and QEMU 10.0.2 ended in a rewind.
    ///
    /// # Errors
    /// QEMU fails the query.
    pub fn has_io_threads(&mut self) -> Result<bool, MonitorError> {
        let threads: Vec<Value> = self.query("query-iothreads")?;
        Ok(!threads.is_empty())
    }

    /// Freezes the bitmaps of these snapshots, after the pause. They may have a little that was written after it.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn freeze_bitmaps(&mut self, snapshots: &[DiskSnapshot]) -> Result<(), MonitorError> {
        let bitmaps = snapshots.iter().filter_map(|snapshot| {
            let since = snapshot.since.as_ref()?;
            Some(freezing(&snapshot.disk.node, since))
        });
        let actions: Vec<Value> = bitmaps.collect();
        if !actions.is_empty() {
            let actions = json!({ "actions": actions });
            self.client.execute("transaction", actions)?;
        }
        Ok(())
    }

    /// Has QEMU refuse to make a disk longer or shorter from here on, until its snapshot is taken away: a filter does not copy what
    /// is cut off, and QEMU ends if an image is resized while one of its bitmaps is exported (10.0, an assertion in
    /// `bdrv_dirty_bitmap_truncate`). QEMU's server must run ([`Monitor::start_exports`]).
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn forbid_resize(&mut self, snapshot: &DiskSnapshot) -> Result<(), MonitorError> {
        // No node that is exported is resized.
        let filter = snapshot.number.filter();
        let arguments = json!({ "type": "nbd", "id": filter, "node-name": filter, "name": filter });
        self.client.execute("block-export-add", arguments)?;
        Ok(())
    }

    /// Opens the view of a snapshot to NBD clients, under the name of the view. QEMU's server must run
    /// ([`Monitor::start_exports`]).
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn export_snapshot(&mut self, snapshot: &DiskSnapshot) -> Result<(), MonitorError> {
        let number = snapshot.number;
        let arguments = json!({
            "driver": "snapshot-access", "node-name": number.view(), "file": number.filter(),
        });
        self.client.execute("blockdev-add", arguments)?;
        let view = number.view();
        let mut arguments = json!({ "type": "nbd", "id": view, "node-name": view, "name": view });
        if let Some(since) = &snapshot.since {
            arguments["bitmaps"] = json!([{ "node": snapshot.disk.node, "name": since }]);
        }
        self.client.execute("block-export-add", arguments)?;
        Ok(())
    }

    /// Takes away all exports, views, filters, memory and empty nodes, whatever is there of them, also those of an engine that
    /// died: each device gets its image back. `serving`: QEMU's NBD server was started for them, and ends, unless it has other
    /// exports by now.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn end_snapshots(&mut self, serving: bool) -> Result<(), MonitorError> {
        let nodes = self.block_nodes()?.into_iter().map(|node| node.name);
        let ours: Vec<String> = nodes.filter(|name| is_of_snapshot(name)).collect();
        if ours.is_empty() {
            return Ok(());
        }
        if serving {
            self.end_exports()?;
        }
        let of_kind = |kind: &str| {
            let begin = format!("{PREFIX}{kind}-");
            let named = ours.iter().filter(move |name| name.starts_with(&begin));
            named.cloned().collect::<Vec<_>>()
        };
        let filters = of_kind("filter");
        for view in of_kind("view").into_iter().chain(of_kind("live")) {
            self.remove_node(&view)?;
        }
        if !filters.is_empty() {
            self.take_out(&filters)?;
        }
        for memory in of_kind("memory") {
            self.remove_node(&memory)?;
        }
        self.end_empty(&ours)
    }

    /// Gives each device its image back, and removes the filters.
    fn take_out(&mut self, filters: &[String]) -> Result<(), MonitorError> {
        let deadline = Instant::now() + END_LIMIT;
        let mut is_leaving = false;
        for disk in self.disk_devices()? {
            if !filters.contains(&disk.node) {
                continue;
            }
            let image = self.image_below(&disk.node)?;
            let (command, arguments) = set_drive(&disk.path, &image);
            match self.client.execute(command, arguments) {
                // Unplugged: QEMU shows it until its memory is freed, and it has its filter until then.
                Err(QmpError::Command { class, .. }) if class == NO_DEVICE => is_leaving = true,
                set => drop(set?),
            }
        }
        for filter in filters {
            loop {
                match self.remove_node(filter) {
                    Err(_) if is_leaving && Instant::now() < deadline => {
                        std::thread::sleep(LOOK_AGAIN);
                    }
                    removed => break removed?,
                }
            }
        }
        Ok(())
    }

    /// Whether QEMU exports something that is not a snapshot: its NBD server is another client's.
    ///
    /// # Errors
    /// QEMU fails the query.
    pub fn has_other_exports(&mut self) -> Result<bool, MonitorError> {
        let mut exports = self.exports()?.into_iter();
        Ok(exports.any(|id| !is_of_snapshot(&id)))
    }

    /// The names of all exports.
    pub(super) fn exports(&mut self) -> Result<Vec<String>, MonitorError> {
        #[derive(Deserialize)]
        struct Export {
            id: String,
        }
        let exports: Vec<Export> = self.query("query-block-exports")?;
        Ok(exports.into_iter().map(|export| export.id).collect())
    }

    fn end_exports(&mut self) -> Result<(), MonitorError> {
        let deadline = Instant::now() + END_LIMIT;
        loop {
            let exports = self.exports()?.into_iter();
            let (ours, others): (Vec<String>, Vec<String>) =
                exports.partition(|id| is_of_snapshot(id));
            if others.is_empty() {
                // It waits for the exports. An engine that died may not have started it.
                return match self.stop_exports() {
                    Err(MonitorError::Qmp(QmpError::Command { .. })) => Ok(()),
                    stopped => stopped,
                };
            }
            if ours.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                let left = format!("{} is not closed", ours[0]);
                return Err(unexpected("query-block-exports", left));
            }
            for id in ours {
                let arguments = json!({ "id": id, "mode": "hard" });
                // Refused while it is being closed.
                let _ = self.client.execute("block-export-del", arguments);
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// The node that a filter passes requests on to.
    pub(super) fn image_below(&mut self, filter: &str) -> Result<String, MonitorError> {
        const GRAPH: &str = "x-debug-query-block-graph";
        #[derive(Deserialize)]
        struct Graph {
            nodes: Vec<Node>,
            edges: Vec<Edge>,
        }
        #[derive(Deserialize)]
        struct Node {
            id: u64,
            #[serde(default)]
            name: String,
        }
        #[derive(Deserialize)]
        struct Edge {
            parent: u64,
            child: u64,
            name: String,
        }
        let graph: Graph = self.query(GRAPH)?;
        let node = |name: &str| graph.nodes.iter().find(|node| node.name == name);
        let below = node(filter).and_then(|filter| {
            let mut edges = graph.edges.iter();
            let edge = edges.find(|edge| edge.parent == filter.id && edge.name == "file")?;
            graph.nodes.iter().find(|node| node.id == edge.child)
        });
        below
            .map(|node| node.name.clone())
            .ok_or_else(|| unexpected(GRAPH, format!("nothing below {filter}")))
    }
}

pub(super) fn set_drive(path: &str, node: &str) -> (&'static str, Value) {
    let arguments = json!({ "path": path, "property": "drive", "value": node });
    ("qom-set", arguments)
}
