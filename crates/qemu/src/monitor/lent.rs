//! Descriptors lent to QEMU, and their use: saving the device state, and waiting for disks.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use super::{LENDER, Monitor, MonitorError, typed, unexpected};
use crate::qmp::Ticket;

/// A descriptor lent to QEMU as the file that device state is saved into.
#[derive(Debug)]
#[must_use = "end_device_state takes the descriptor back from QEMU"]
pub struct StateFile {
    fdset: i64,
    /// Its number inside QEMU.
    fd: i32,
}

impl StateFile {
    /// The command that saves the state of all devices into it.
    pub(super) fn save(&self) -> (&'static str, Value) {
        let arguments = json!({
            // Not `/dev/fdset`, which QEMU truncates: that fails for a pipe.
            "filename": format!("/proc/self/fd/{}", self.fd),
            // The default, true, gives up the locks of the disk images of a stopped VM.
            "live": false,
        });
        ("xen-save-devices-state", arguments)
    }
}

/// `add-fd`.
#[derive(Deserialize)]
struct Added {
    #[serde(rename = "fdset-id")]
    fdset: i64,
    fd: i32,
}

impl Monitor {
    /// Lends QEMU the file, or the end of a pipe, that device state is to be saved into. QEMU opens it
    /// anew through its own `/proc/self/fd`, so its user must be allowed to write to it. Done before
    /// the pause, because it takes a round trip.
    pub fn begin_device_state(&mut self, into: BorrowedFd<'_>) -> Result<StateFile, MonitorError> {
        let Added { fdset, fd } = self.add_fd(into)?;
        Ok(StateFile { fdset, fd })
    }

    /// Adds a descriptor to a new set of QEMU's; QEMU opens it as `/dev/fdset/NUMBER`.
    pub(crate) fn lend(&mut self, fd: BorrowedFd<'_>) -> Result<i64, MonitorError> {
        Ok(self.add_fd(fd)?.fdset)
    }

    fn add_fd(&mut self, fd: BorrowedFd<'_>) -> Result<Added, MonitorError> {
        let arguments = json!({ "opaque": LENDER });
        let reply = self.client.execute_with_fd("add-fd", arguments, fd)?;
        typed("add-fd", reply)
    }

    /// Takes back what an engine that died has lent: QEMU gives such descriptors up by itself only
    /// when no monitor at all is connected any more. To be called by an engine that is attached,
    /// because then no other one is.
    pub fn take_back_leftovers(&mut self) -> Result<(), MonitorError> {
        #[derive(Deserialize)]
        struct Set {
            #[serde(rename = "fdset-id")]
            fdset: i64,
            fds: Vec<Lent>,
        }
        #[derive(Deserialize)]
        struct Lent {
            opaque: Option<String>,
        }
        let sets: Vec<Set> = self.query("query-fdsets")?;
        let ours = |set: &Set| {
            set.fds
                .iter()
                .any(|fd| fd.opaque.as_deref() == Some(LENDER))
        };
        for set in sets.iter().filter(|set| ours(set)) {
            self.take_back(set.fdset)?;
        }
        Ok(())
    }

    /// Takes a lent descriptor back.
    pub(crate) fn take_back(&mut self, fdset: i64) -> Result<(), MonitorError> {
        let arguments = json!({ "fdset-id": fdset });
        self.client.execute("remove-fd", arguments)?;
        Ok(())
    }

    /// Starts saving the state of all devices, without RAM. QEMU stops a running VM for it, with its disks drained,
    /// and resumes the VM in the same command (`qmp_xen_save_devices_state` in QEMU's migration/savevm.c). No other
    /// command and no migration can come in between. A VM that was paused stays paused; a suspended VM is left in
    /// `save-vm`, which `cont` ends.
    pub fn send_save_device_state(&mut self, file: &StateFile) -> Result<Ticket, MonitorError> {
        let (command, arguments) = file.save();
        Ok(self.client.send(command, arguments)?)
    }

    /// Waits until the device state is saved.
    pub fn wait_device_state(
        &mut self,
        ticket: Ticket,
        timeout: Duration,
    ) -> Result<(), MonitorError> {
        self.client.wait(ticket, timeout)?;
        Ok(())
    }

    /// Takes the descriptor back from QEMU.
    pub fn end_device_state(&mut self, file: StateFile) -> Result<(), MonitorError> {
        self.take_back(file.fdset)
    }

    /// Waits until every disk request that was in progress at the call is done. New ones may be in
    /// progress when it returns. The vCPUs run on, but wait where they need QEMU's main loop.
    ///
    /// A request with O_DIRECT, native AIO or io_uring writes without a fault into pages that a scan protects
    /// meanwhile, because they are pinned. After this call such pages keep their content until their next fault.
    pub fn drain_disks(&mut self) -> Result<(), MonitorError> {
        // Twice, because the node may have gone with its disk.
        for attempt in 0..2 {
            let node = match self.drain_node.take() {
                Some(node) => node,
                None => match self.any_block_node()? {
                    Some(node) => node,
                    None => return Ok(()),
                },
            };
            // `aio_flush` "completes all outstanding aio requests", of all disks (qemu-io-cmds.c).
            let command = format!("qemu-io {node} aio_flush");
            let arguments = json!({ "command-line": command });
            let said: String = self.run("human-monitor-command", arguments)?;
            if said.trim().is_empty() {
                self.drain_node = Some(node);
                return Ok(());
            }
            if attempt == 1 {
                return Err(unexpected("qemu-io", said));
            }
        }
        Ok(())
    }

    /// The name of a node that has requests, if there is any disk.
    fn any_block_node(&mut self) -> Result<Option<String>, MonitorError> {
        #[derive(Deserialize)]
        struct Node {
            #[serde(rename = "node-name")]
            name: String,
        }
        let arguments = json!({ "flat": true });
        let nodes: Vec<Node> = self.run("query-named-block-nodes", arguments)?;
        Ok(nodes.into_iter().next().map(|node| node.name))
    }
}
