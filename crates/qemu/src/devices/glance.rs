//! A cheap check whether the devices of a VM have changed since a moment ago.

use std::collections::BTreeSet;

use serde_json::json;

use crate::monitor::{Monitor, MonitorError};
use crate::qmp::Ticket;

/// Ids and types of all devices, network backends and objects, and QEMU's objections to a migration. Two glances
/// are equal when none of these came or went between them. A device that was replaced by another of its id and type
/// does not show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glance {
    devices: BTreeSet<(String, String)>,
    objects: BTreeSet<(String, String)>,
    networks: BTreeSet<(String, String)>,
    obstacles: Vec<String>,
}

/// A glance that QEMU was asked for.
#[derive(Debug)]
#[must_use]
pub struct Asked(Vec<Ticket>);

impl Glance {
    /// One round trip of five commands.
    pub fn take(monitor: &mut Monitor) -> Result<Glance, MonitorError> {
        let asked = Glance::ask(monitor)?;
        Glance::answered(monitor, asked)
    }

    /// Asks for it. QEMU answers when it has done all that it was told before.
    pub fn ask(monitor: &mut Monitor) -> Result<Asked, MonitorError> {
        let list = |path: &str| ("qom-list", json!({ "path": path }));
        let human = json!({ "command-line": "info network" });
        Ok(Asked(monitor.send_all(vec![
            list("/machine/peripheral"),
            list("/machine/peripheral-anon"),
            list("/objects"),
            ("human-monitor-command", human),
            ("query-migrate", json!({})),
        ])?))
    }

    /// What QEMU has answered.
    pub fn answered(monitor: &mut Monitor, asked: Asked) -> Result<Glance, MonitorError> {
        let replies = monitor.wait_all(asked.0)?;
        let member = |reply: &serde_json::Value| {
            let text = |key: &str| reply[key].as_str().unwrap_or_default().to_owned();
            (text("name"), text("type"))
        };
        let members = |at: usize| replies[at].as_array().into_iter().flatten().map(member);
        let blocked = replies[4]["blocked-reasons"].as_array();
        let reasons = blocked.into_iter().flatten();
        Ok(Glance {
            devices: members(0).chain(members(1)).collect(),
            objects: members(2).collect(),
            networks: networks(replies[3].as_str().unwrap_or_default()),
            obstacles: reasons.map(ToString::to_string).collect(),
        })
    }

    /// Whether there is a device of this id.
    pub fn has(&self, device: &str) -> bool {
        self.devices.iter().any(|(id, _)| id == device)
    }

    /// The devices of this glance that a later one does not have, by their ids.
    pub fn without(&self, later: &Glance) -> impl Iterator<Item = &str> {
        let ids = self.devices.iter().map(|(id, _)| &**id);
        ids.filter(|id| !later.has(id))
    }
}

/// Names and types in lines like ` \ net0: index=0,type=user,net=10.0.2.0`. The text after the type may change by
/// itself, as with the peer of a socket.
fn networks(table: &str) -> BTreeSet<(String, String)> {
    let lines = table.lines().filter_map(|line| {
        let line = line.trim_start_matches([' ', '\\']);
        let (name, rest) = line.split_once(": ")?;
        let kind = rest
            .split(',')
            .find_map(|item| item.trim().strip_prefix("type="))?;
        Some((name.to_owned(), kind.to_owned()))
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_tables() {
        let table = "nic: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:56\r\n \
            \\ n1: index=0,type=user,net=10.9.0.0,restrict=off\r\nhub 0\r\n";
        let owned = |(a, b): (&str, &str)| (a.to_owned(), b.to_owned());
        let expected = [("nic", "nic"), ("n1", "user")].map(owned);
        assert_eq!(networks(table), BTreeSet::from(expected));
    }
}
