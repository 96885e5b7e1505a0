//! Copying a disk into the image of another QEMU while the VM runs: QEMU's mirror job at one side, its NBD server at the
//! other. Neither listens at an address: both are given sockets.
//!
//! Source: QEMU, `qapi/block-core.json` (`blockdev-mirror`, `block-job-change`), `qapi/block-export.json`.

use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};

use serde::Deserialize;
use serde_json::json;

use super::{Monitor, MonitorError};

/// What QEMU calls the socket at which it takes connections.
const LISTENER: &str = "stillframe-exports";

/// A mirror job, as QEMU is to start it.
#[derive(Debug, Clone, Copy)]
pub struct Mirror<'m> {
    /// The job's name, and that of the node it writes to.
    pub name: &'m str,
    /// The node of the disk.
    pub node: &'m str,
    /// The export's name at the other side.
    pub export: &'m str,
}

impl Monitor {
    /// Starts to copy a disk over a connected socket. Reads and writes of the guest are not delayed yet.
    ///
    /// # Errors
    /// QEMU refuses it. The node may be left ([`Monitor::remove_jobs_and_nodes`]).
    pub fn start_mirror(
        &mut self,
        mirror: Mirror<'_>,
        socket: &UnixStream,
    ) -> Result<(), MonitorError> {
        let Mirror { name, node, export } = mirror;
        self.give(name, socket.as_fd())?;
        let arguments = json!({
            "driver": "nbd", "node-name": name, "export": export,
            "server": { "type": "fd", "str": name },
            // What the guest has filled with zeros crosses no network.
            "discard": "unmap", "detect-zeroes": "unmap",
        });
        let added = self.client.execute("blockdev-add", arguments);
        if added.is_err() {
            // If it was not taken, it would stay open.
            let _ = self.close_given(name);
        }
        added?;
        let arguments = json!({
            "job-id": name, "device": node, "target": name,
            "sync": "full", "copy-mode": "background", "auto-dismiss": false,
            // A job that ends by itself does so beside the guest's writes ([`Monitor::remove_jobs_and_nodes`]).
            "on-target-error": "stop",
        });
        self.client.execute("blockdev-mirror", arguments)?;
        Ok(())
    }

    /// From here on each write of the guest is at the other side, too, when it ends: nothing more is left to copy, however
    /// much it writes.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn mirror_writes_at_once(&mut self, name: &str) -> Result<(), MonitorError> {
        let arguments = json!({ "id": name, "type": "mirror", "copy-mode": "write-blocking" });
        self.client.execute("block-job-change", arguments)?;
        Ok(())
    }

    /// Whether all that the guest has written is at the other side, and stays so.
    ///
    /// # Errors
    /// QEMU fails the command.
    pub fn mirrors_in_step(&mut self, name: &str) -> Result<bool, MonitorError> {
        #[derive(Deserialize)]
        struct BlockJob {
            device: String,
            #[serde(rename = "actively-synced", default)]
            in_step: bool,
        }
        let jobs: Vec<BlockJob> = self.query("query-block-jobs")?;
        Ok(jobs.iter().any(|job| job.device == name && job.in_step))
    }

    /// Starts QEMU's NBD server, of which it has one, on a listening socket, for this number of connections.
    ///
    /// # Errors
    /// It has one already, or refuses it.
    pub fn start_exports(
        &mut self,
        listener: &UnixListener,
        connections: usize,
    ) -> Result<(), MonitorError> {
        self.give(LISTENER, listener.as_fd())?;
        let address = json!({ "type": "fd", "data": { "str": LISTENER } });
        let arguments = json!({ "addr": address, "max-connections": connections });
        let started = self.client.execute("nbd-server-start", arguments);
        if started.is_err() {
            // If it was not taken, it would stay open.
            let _ = self.close_given(LISTENER);
        }
        started?;
        Ok(())
    }

    /// Lets another program write to a node under this name. QEMU takes the lock of its image, although the VM does not run.
    ///
    /// # Errors
    /// Another process has the image locked, or QEMU refuses it.
    pub fn export(&mut self, node: &str, name: &str) -> Result<(), MonitorError> {
        let arguments = json!({
            "type": "nbd", "id": name, "node-name": node, "name": name, "writable": true,
        });
        self.client.execute("block-export-add", arguments)?;
        Ok(())
    }

    /// Ends all exports, and the server.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn stop_exports(&mut self) -> Result<(), MonitorError> {
        self.client.execute("nbd-server-stop", json!({}))?;
        Ok(())
    }
}
