//! A dump of guest memory that stands still, because QEMU resumes no VM meanwhile.

use std::os::fd::BorrowedFd;

use serde::Deserialize;
use serde_json::json;

use super::{Monitor, MonitorError};

/// What QEMU has against a migration meanwhile (`dump_migration_blocker` in QEMU's dump/dump.c).
const OBSTACLE: &str = "dump-guest-memory in progress";
/// So little of guest memory is dumped, in bytes.
const LENGTH: u64 = 4096;

impl Monitor {
    /// Gives QEMU a descriptor under this name. Unlike a lent one it outlives the connection.
    pub fn give(&mut self, name: &str, fd: BorrowedFd<'_>) -> Result<(), MonitorError> {
        let arguments = json!({ "fdname": name });
        self.client.execute_with_fd("getfd", arguments, fd)?;
        Ok(())
    }

    /// Has QEMU close a descriptor that this monitor was given.
    pub fn close_given(&mut self, name: &str) -> Result<(), MonitorError> {
        self.client.execute("closefd", json!({ "fdname": name }))?;
        Ok(())
    }

    /// Begins to dump a page of guest memory into a descriptor that was given, which is QEMU's alone
    /// then. Until that is written QEMU refuses `cont`, to everybody (`qmp_cont` in QEMU's
    /// monitor/qmp-cmds.c).
    pub fn begin_dump(&mut self, name: &str) -> Result<(), MonitorError> {
        let arguments = json!({
            "paging": false, "protocol": format!("fd:{name}"), "detach": true,
            "begin": 0, "length": LENGTH,
        });
        self.client.execute("dump-guest-memory", arguments)?;
        Ok(())
    }

    /// Whether a dump is under way, whoever asked for it.
    pub fn is_dumping(&mut self) -> Result<bool, MonitorError> {
        #[derive(Deserialize)]
        struct Dump {
            status: String,
        }
        let dump: Dump = self.query("query-dump")?;
        Ok(dump.status == "active")
    }

    /// From here on a dump under way is none of QEMU's objections to a migration: it is ours.
    pub fn expect_dump(&mut self) {
        self.expects_dump = true;
    }

    /// QEMU's objections that are not expected.
    pub(crate) fn unexpected_obstacles(&self, mut reasons: Vec<String>) -> Vec<String> {
        reasons.retain(|reason| !(self.expects_dump && reason.contains(OBSTACLE)));
        reasons
    }
}
