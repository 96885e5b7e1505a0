//! The content of disks that the guest goes on writing to, and what it wrote: read-only views of images, with dirty bitmaps that
//! record on; and a pause in which QEMU is held while they are read.
//!
//! ```text
//!   device ──> image <── view                      no filter: the guest's writes go straight to the image
//!                └── bitmaps, shown beside the view while they record
//! ```
//!
//! QEMU exports a bitmap that records only with a node that cannot be written to. So a view is a read-only node above the image.
//!
//! The hold: QEMU reads from an NBD export of ours, on a socket pair, and so waits for a reply. Its main thread serves block
//! requests meanwhile, and nothing else: no command of another client, no `cont`. It goes on with the reply, or when the socket is
//! closed, by an engine that died.
//!
//! Source: QEMU, `nbd_export_create` in nbd/server.c (what it demands of bitmaps), `hmp_qemu_io` in block/monitor/block-hmp-cmds.c,
//! `qapi/block-core.json`.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::bitmaps::DiskBitmap;
use super::disks::{DiskDevice, SNAPSHOT_PREFIX as PREFIX};
use super::snapshots::{EndCommands, PauseTickets, SnapshotNumber};
use super::{Monitor, MonitorError, StateFile, unexpected};

/// How long an export may take to close, once its client has left.
const END_LIMIT: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_micros(200);

/// The node that holds QEMU when it is read, and QEMU's name for its end of the socket. A name of a live view, which it goes with.
const HOLD: &str = "stillframe-live-hold";

impl SnapshotNumber {
    fn live(self) -> String {
        format!("{PREFIX}live-{}", self.0)
    }

    fn live_export(self, round: usize) -> String {
        format!("{}-{round}", self.live())
    }
}

impl EndCommands {
    /// Those for live views of this number of disks. `serving`: QEMU's NBD server was started for them, and ends.
    pub fn of_live_views(disks: usize, serving: bool) -> EndCommands {
        let mut commands = EndCommands::of(&[], serving);
        let nodes = (0..disks).map(|number| SnapshotNumber(number).live());
        let nodes = nodes.chain([HOLD.to_owned()]);
        commands.first.extend(nodes.map(|node| {
            let arguments = json!({ "node-name": node });
            ("blockdev-del".to_owned(), arguments)
        }));
        commands
    }
}

impl Monitor {
    /// Makes a view of a disk. The device does not notice.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn begin_live_view(
        &mut self,
        number: SnapshotNumber,
        disk: &DiskDevice,
    ) -> Result<(), MonitorError> {
        let arguments = json!({
            "driver": "raw", "read-only": true, "node-name": number.live(), "file": disk.node,
        });
        self.client.execute("blockdev-add", arguments)?;
        Ok(())
    }

    /// Opens the view to NBD clients, with these bitmaps, and returns its name there. QEMU's server must run
    /// ([`Monitor::start_exports`]). From here on QEMU refuses to make the disk longer or shorter.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn export_live_view(
        &mut self,
        number: SnapshotNumber,
        round: usize,
        bitmaps: &[&DiskBitmap],
    ) -> Result<String, MonitorError> {
        let name = number.live_export(round);
        let bitmaps: Vec<Value> = bitmaps.iter().map(|bitmap| bitmap.named()).collect();
        let arguments = json!({
            "type": "nbd", "id": name, "node-name": number.live(), "name": name,
            "bitmaps": bitmaps,
        });
        self.client.execute("block-export-add", arguments)?;
        Ok(name)
    }

    /// Ends an export of a view, which no client has open, and waits until it is gone.
    ///
    /// # Errors
    /// QEMU refuses it, or does not end it.
    pub fn end_live_export(
        &mut self,
        number: SnapshotNumber,
        round: usize,
    ) -> Result<(), MonitorError> {
        let name = number.live_export(round);
        let arguments = json!({ "id": name, "mode": "hard" });
        self.client.execute("block-export-del", arguments)?;
        let deadline = Instant::now() + END_LIMIT;
        while self.exports()?.contains(&name) {
            if Instant::now() > deadline {
                let left = format!("{name} is not closed");
                return Err(unexpected("query-block-exports", left));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        Ok(())
    }

    /// Has QEMU open `export` on its end of a socket pair, of which the other end serves NBD and keeps readers waiting: the hold
    /// of [`Monitor::send_held_pause`].
    ///
    /// # Errors
    /// QEMU refuses it. The node may be left ([`Monitor::end_snapshots`]).
    pub fn begin_hold(&mut self, end: BorrowedFd<'_>, export: &str) -> Result<(), MonitorError> {
        self.give(HOLD, end)?;
        let arguments = json!({
            "driver": "nbd", "read-only": true, "node-name": HOLD, "export": export,
            "server": { "type": "fd", "str": HOLD },
        });
        let opened = self.client.execute("blockdev-add", arguments);
        if opened.is_err() {
            // It has it still if it refused the command for another reason.
            let _ = self.close_given(HOLD);
        }
        opened?;
        Ok(())
    }

    /// Has QEMU stop the VM (`runs`), wait for its hold, save the device state, and resume the VM. All of it is sent in one piece,
    /// and carried out even if this process and all others that hold the connection die. To be prepared
    /// ([`Monitor::prepare_pause`]).
    ///
    /// # Errors
    /// The connection fails.
    pub fn send_held_pause(
        &mut self,
        into: &StateFile,
        runs: bool,
    ) -> Result<PauseTickets, MonitorError> {
        let line = format!("qemu-io {HOLD} \"read 0 512\"");
        let wait = json!({ "command-line": line });
        let mut tickets = self.send_pause(vec![("human-monitor-command", wait)], into, runs)?;
        tickets.hold = tickets.before.pop();
        Ok(tickets)
    }
}
