//! A dump of guest memory, which blocks `cont` while it is active.

use std::os::fd::BorrowedFd;

use serde::Deserialize;
use serde_json::json;

use super::{Monitor, MonitorError};

/// QEMU's migration blocker during a dump (`dump_migration_blocker` in QEMU's dump/dump.c).
const OBSTACLE: &str = "dump-guest-memory in progress";
/// Length of the dump in bytes.
const LENGTH: u64 = 4096;

impl Monitor {
    /// Passes a descriptor to QEMU under this name (`getfd`). It outlives the connection, unlike one of `add-fd`.
    pub fn give(&mut self, name: &str, fd: BorrowedFd<'_>) -> Result<(), MonitorError> {
        let arguments = json!({ "fdname": name });
        self.client.execute_with_fd("getfd", arguments, fd)?;
        Ok(())
    }

    /// Closes a descriptor that this monitor was given (`closefd`).
    pub fn close_given(&mut self, name: &str) -> Result<(), MonitorError> {
        self.client.execute("closefd", json!({ "fdname": name }))?;
        Ok(())
    }

    /// Starts a dump of one page of guest memory into a descriptor of [`Monitor::give`], and passes its
    /// ownership to the dump. QEMU refuses `cont` of every client until the dump ends (`qmp_cont` in
    /// QEMU's monitor/qmp-cmds.c).
    pub fn begin_dump(&mut self, name: &str) -> Result<(), MonitorError> {
        let arguments = json!({
            "paging": false, "protocol": format!("fd:{name}"), "detach": true,
            "begin": 0, "length": LENGTH,
        });
        self.client.execute("dump-guest-memory", arguments)?;
        Ok(())
    }

    /// Whether a dump of any client is active.
    pub fn is_dumping(&mut self) -> Result<bool, MonitorError> {
        #[derive(Deserialize)]
        struct Dump {
            status: String,
        }
        let dump: Dump = self.query("query-dump")?;
        Ok(dump.status == "active")
    }

    /// Ignores the migration blocker of a dump from now on: the dump belongs to this engine.
    pub fn expect_dump(&mut self) {
        self.expects_dump = true;
    }

    /// Migration blockers except the expected one.
    pub(crate) fn unexpected_obstacles(&self, mut reasons: Vec<String>) -> Vec<String> {
        reasons.retain(|reason| !(self.expects_dump && reason.contains(OBSTACLE)));
        reasons
    }
}
