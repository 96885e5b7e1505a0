//! Migrations of QEMU's own, as it tells of them (`query-migrate`).

use serde::Deserialize;
use serde_json::json;

use super::{Monitor, MonitorError, RunState, typed};

const MIGRATION: &str = "query-migrate";
const RUN_STATE: &str = "query-status";

/// The answer to `query-migrate`; all members are missing when there is nothing to say.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct Migration {
    /// `active`, `completed`, `failed`, ...
    pub(crate) status: Option<String>,
    /// Why QEMU could not migrate this VM.
    #[serde(rename = "blocked-reasons", default)]
    pub(crate) blocked_reasons: Vec<String>,
    /// QEMU's words about a failure.
    #[serde(rename = "error-desc")]
    pub(crate) error: Option<String>,
}

impl Migration {
    /// The statuses without an active migration.
    pub(crate) const ENDS: [&str; 4] = ["none", "completed", "failed", "cancelled"];
}

impl Monitor {
    /// QEMU's word for the state of an active migration, of any client; `None` without one.
    pub fn migration_under_way(&mut self) -> Result<Option<String>, MonitorError> {
        let status = self.migration()?.status;
        Ok(status.filter(|status| !Migration::ENDS.contains(&status.as_str())))
    }

    /// `query-migrate`, without the obstacles that this engine makes.
    pub(crate) fn migration(&mut self) -> Result<Migration, MonitorError> {
        let mut migration: Migration = self.query(MIGRATION)?;
        migration.blocked_reasons = self.unexpected_obstacles(migration.blocked_reasons);
        Ok(migration)
    }

    /// How a migration fares, and the state that the VM is in after that answer, in one round trip.
    pub(crate) fn migration_and_run_state(
        &mut self,
    ) -> Result<(Migration, RunState), MonitorError> {
        let commands = [MIGRATION, RUN_STATE].map(|command| (command, json!({})));
        let mut replies = self.run_all(commands.into())?.into_iter();
        let mut next = || replies.next().unwrap_or_default();
        Ok((typed(MIGRATION, next())?, typed(RUN_STATE, next())?))
    }
}
