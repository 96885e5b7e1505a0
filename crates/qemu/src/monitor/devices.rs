//! Commands about devices: several at once, and QEMU's tree of objects.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use super::{Monitor, MonitorError};
use crate::qmp::{QmpError, REPLY_LIMIT_SECONDS, Ticket};

/// Commands in flight at a time. QEMU queues eight (`monitor/qmp.c`, `QMP_REQ_QUEUE_LEN_MAX`).
const IN_FLIGHT: usize = 8;

/// A property that a type of device can be given.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(crate) struct DeviceProperty {
    /// Its name.
    pub(crate) name: String,
    /// QEMU's word for its type, such as `bool`, `str` or `link<iothread>`.
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// The default value; many have none.
    #[serde(rename = "default-value")]
    pub(crate) default: Option<Value>,
}

/// A node of QEMU's block layer: an image format, a file, a filter.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct BlockNode {
    /// Its name.
    #[serde(rename = "node-name", default)]
    pub(crate) name: String,
    /// Its driver, such as `qcow2`.
    #[serde(rename = "drv")]
    pub(crate) driver: String,
}

impl Monitor {
    /// All nodes of the block layer.
    pub(crate) fn block_nodes(&mut self) -> Result<Vec<BlockNode>, MonitorError> {
        self.run("query-named-block-nodes", json!({ "flat": true }))
    }

    /// Runs commands without a wait between them. The first that fails decides.
    pub(crate) fn run_all(
        &mut self,
        commands: Vec<(&'static str, Value)>,
    ) -> Result<Vec<Value>, MonitorError> {
        let replies = self.try_all(commands)?;
        Ok(replies.into_iter().collect::<Result<Vec<Value>, _>>()?)
    }

    /// Sends commands, whose answers are awaited later ([`Monitor::wait_all`]). QEMU carries them out after all others that
    /// were sent before.
    pub(crate) fn send_all(
        &mut self,
        commands: Vec<(&'static str, Value)>,
    ) -> Result<Vec<Ticket>, MonitorError> {
        let mut tickets = Vec::with_capacity(commands.len());
        for (command, arguments) in commands {
            tickets.push(self.client.send(command, arguments)?);
        }
        Ok(tickets)
    }

    /// The answers to these. The first that is an error decides.
    pub(crate) fn wait_all(&mut self, tickets: Vec<Ticket>) -> Result<Vec<Value>, MonitorError> {
        let limit = Duration::from_secs(REPLY_LIMIT_SECONDS);
        let mut replies = Vec::with_capacity(tickets.len());
        for ticket in tickets {
            replies.push(self.client.wait(ticket, limit)?);
        }
        Ok(replies)
    }

    /// The values of properties of one object, in the order of their names; nothing for those that
    /// cannot be read.
    pub(crate) fn properties(
        &mut self,
        path: &str,
        names: &[&str],
    ) -> Result<Vec<Option<Value>>, MonitorError> {
        let get = |name: &&str| ("qom-get", json!({ "path": path, "property": name }));
        let replies = self.try_all(names.iter().map(get).collect())?;
        Ok(replies.into_iter().map(Result::ok).collect())
    }

    /// The properties that a type of device has (`device-list-properties`).
    pub(crate) fn device_properties(
        &mut self,
        driver: &str,
    ) -> Result<Vec<DeviceProperty>, MonitorError> {
        self.run("device-list-properties", json!({ "typename": driver }))
    }

    /// Replies, and errors of single commands; fails when the connection does.
    fn try_all(
        &mut self,
        commands: Vec<(&'static str, Value)>,
    ) -> Result<Vec<Result<Value, QmpError>>, MonitorError> {
        let limit = Duration::from_secs(REPLY_LIMIT_SECONDS);
        let mut replies = Vec::with_capacity(commands.len());
        let mut commands = commands.into_iter().peekable();
        while commands.peek().is_some() {
            let some = commands.by_ref().take(IN_FLIGHT).collect();
            for ticket in self.send_all(some)? {
                match self.client.wait(ticket, limit) {
                    Err(error @ QmpError::Command { .. }) => replies.push(Err(error)),
                    other => replies.push(Ok(other?)),
                }
            }
        }
        Ok(replies)
    }
}
