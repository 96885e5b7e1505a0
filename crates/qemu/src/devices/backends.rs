//! Network backends, character devices and objects of plugged devices, as the options that make the same ones. QEMU
//! reports only a part of the settings that they were made with. So the host's end of a device may differ after a
//! restore, but the guest's view does not.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::PluggedOption;
use super::error::Lost;
use crate::arguments::Properties;
use crate::monitor::{Monitor, MonitorError};

/// The address of `-netdev user` by default.
const USER_NETWORK: &str = "10.0.2.0";

/// Kinds of objects that can be made again, and their properties.
const OBJECTS: &[(&str, &[&str])] = &[
    ("iothread", IOTHREAD),
    ("memory-backend-file", MEMORY),
    ("memory-backend-memfd", MEMORY),
    ("memory-backend-ram", MEMORY),
    ("rng-builtin", &[]),
    ("rng-random", &["filename"]),
];
const IOTHREAD: &[&str] = &[
    "aio-max-batch",
    "poll-grow",
    "poll-max-ns",
    "poll-shrink",
    "thread-pool-max",
    "thread-pool-min",
];
const MEMORY: &[&str] = &[
    "align",
    "discard-data",
    "dump",
    "host-nodes",
    "hugetlb",
    "hugetlbsize",
    "mem-path",
    "merge",
    "pmem",
    "policy",
    "readonly",
    "reserve",
    "rom",
    "seal",
    "share",
    "size",
    "x-use-canonical-path-for-ramblock-id",
];

/// One line of `info network`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Network {
    /// Its id.
    pub(super) id: String,
    /// `user`, `tap`, `nic`, ...
    pub(super) kind: String,
    /// The text after the type.
    details: String,
}

/// The network backends and cards in the table of `info network`.
pub(super) fn networks(table: &str) -> Vec<Network> {
    let lines = table.lines().filter_map(|line| {
        let line = line.trim_matches(|c: char| c.is_whitespace() || c == '\\');
        let (id, rest) = line.split_once(": index=")?;
        // Before the name of what is in a hub stands its port.
        let (_, id) = id.rsplit_once(": ").unwrap_or(("", id));
        let (_, rest) = rest.split_once("type=")?;
        let (kind, details) = rest.split_once(',').unwrap_or((rest, ""));
        Some(Network {
            id: id.to_owned(),
            kind: kind.to_owned(),
            details: details.to_owned(),
        })
    });
    lines.collect()
}

impl Network {
    fn detail(&self, key: &str) -> Option<&str> {
        let mut items = self.details.split(',');
        items.find_map(|item| item.strip_prefix(key)?.strip_prefix('='))
    }

    /// The `-netdev` that makes it; `forwards` is the table of `info usernet`.
    pub(super) fn option(&self, forwards: &str) -> Result<PluggedOption, Lost> {
        let lost = |what: &str| Lost::new(format!("its network {:?} {what}", self.id));
        let mut properties = Properties::default();
        properties.set("type", &self.kind);
        properties.set("id", &self.id);
        match self.kind.as_str() {
            "user" => {
                if self.detail("net").is_some_and(|net| net != USER_NETWORK) {
                    return Err(lost(
                        "has an address of its own, whose length QEMU does not report",
                    ));
                }
                if self.detail("restrict") == Some("on") {
                    properties.set("restrict", "on");
                }
                let value = properties.render("type");
                let forwards = self.forwards(forwards).into_iter();
                let forwards = forwards.map(|forward| format!(",hostfwd={forward}"));
                return Ok(PluggedOption {
                    option: "netdev".into(),
                    value: value + &forwards.collect::<String>(),
                });
            }
            "tap" => match (
                self.detail("ifname"),
                self.detail("helper"),
                self.detail("br"),
            ) {
                (Some(name), _, _) => {
                    properties.set("ifname", name);
                    properties.set("script", self.detail("script").unwrap_or("no"));
                    properties.set("downscript", self.detail("downscript").unwrap_or("no"));
                }
                (None, Some(helper), Some(bridge)) => {
                    properties.set("type", "bridge");
                    properties.set("br", bridge);
                    properties.set("helper", helper);
                }
                _ => return Err(lost("was passed to QEMU as an open descriptor")),
            },
            kind => {
                return Err(lost(&format!(
                    "is of type {kind}, which QEMU does not describe"
                )));
            }
        }
        Ok(PluggedOption {
            option: "netdev".into(),
            value: properties.render("type"),
        })
    }

    /// Ports of the host in lines like `  TCP[HOST_FORWARD]  12  127.0.0.1 4022  10.0.2.15  22  0  0`.
    fn forwards(&self, table: &str) -> Vec<String> {
        let heading = format!("({}):", self.id);
        let lines = table
            .lines()
            .skip_while(|line| !line.trim_end().ends_with(&heading));
        let own = lines.skip(1).take_while(|line| line.starts_with(' '));
        let forward = |line: &str| {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            let (protocol, state) = words.first()?.split_once('[')?;
            let [_, _, source, port, guest, guest_port, ..] = words[..] else {
                return None;
            };
            let source = if source == "*" { "" } else { source };
            let protocol = protocol.to_ascii_lowercase();
            let forward = format!("{protocol}:{source}:{port}-{guest}:{guest_port}");
            state.starts_with("HOST_FORWARD").then_some(forward)
        };
        own.filter_map(forward).collect()
    }
}

/// All character devices: id, and how QEMU describes the host's end.
pub(super) fn character_devices(
    monitor: &mut Monitor,
) -> Result<BTreeMap<String, String>, MonitorError> {
    #[derive(Deserialize)]
    struct Device {
        label: String,
        filename: String,
    }
    let devices: Vec<Device> = monitor.query("query-chardev")?;
    let devices = devices.into_iter();
    Ok(devices
        .map(|device| (device.label, device.filename))
        .collect())
}

/// The `-chardev` that makes a character device: the same where it listens or needs nothing of the
/// host, else one that is connected to nothing.
pub(super) fn character_device(id: &str, description: &str) -> PluggedOption {
    let mut properties = Properties::default();
    let said = description
        .strip_prefix("disconnected:")
        .unwrap_or(description);
    let address = said.split_once(",server=on").map(|(address, _)| address);
    let tcp = |address: &str| {
        let (host, port) = address.strip_prefix("tcp:")?.rsplit_once(':')?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        Some((host.to_owned(), port.to_owned()))
    };
    if let Some(path) = address.and_then(|address| address.strip_prefix("unix:")) {
        properties.set("backend", "socket");
        properties.set("path", path);
    } else if let Some((host, port)) = address.and_then(tcp) {
        properties.set("backend", "socket");
        properties.set("host", &host);
        properties.set("port", &port);
    } else if said.starts_with("pty") {
        properties.set("backend", "pty");
    } else {
        properties.set("backend", "null");
    }
    properties.set("id", id);
    if properties.get("backend") == Some("socket") {
        properties.set("server", "on");
        properties.set("wait", "off");
    }
    PluggedOption {
        option: "chardev".into(),
        value: properties.render("backend"),
    }
}

/// The `-object` that makes an object.
pub(super) fn object(
    monitor: &mut Monitor,
    id: &str,
) -> Result<Result<PluggedOption, Lost>, MonitorError> {
    let path = format!("/objects/{id}");
    let kind = monitor.properties(&path, &["type"])?;
    let kind = kind[0].as_ref().and_then(Value::as_str).unwrap_or_default();
    let Some((_, names)) = OBJECTS.iter().find(|(known, _)| *known == kind) else {
        return Ok(Err(Lost::new(format!(
            "its object {id:?} is a {kind}, which is not known how to make again"
        ))));
    };
    let values = monitor.properties(&path, names)?;
    let mut options = Map::new();
    options.insert("qom-type".into(), json!(kind));
    options.insert("id".into(), json!(id));
    for (name, value) in names.iter().zip(values) {
        match value {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) if text.is_empty() => {}
            Some(Value::Array(list)) if list.is_empty() => {}
            // Not to be said where there are no huge pages.
            Some(Value::Number(number)) if *name == "hugetlbsize" && number.as_u64() == Some(0) => {
            }
            Some(value) => {
                options.insert((*name).to_owned(), value);
            }
        }
    }
    Ok(Ok(PluggedOption {
        option: "object".into(),
        value: Value::Object(options).to_string(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_that_can_be_made_again() {
        let table = "nic: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:56\r\n \
            \\ n1: index=0,type=user,net=10.0.2.0,restrict=off\r\n\
            t0: index=0,type=tap,ifname=tap0,script=/etc/qemu-ifup,downscript=no\r\n\
            b0: index=0,type=tap,helper=/usr/lib/bridge-helper,br=br0\r\n\
            u2: index=0,type=user,net=10.9.0.0,restrict=off\r\n\
            fd: index=0,type=tap,fd=31\r\nvu: index=0,type=vhost-user\r\n";
        let forwards = "Hub -1 (n0):\r\n  Protocol[State]    FD  Source Address  Port\r\n  \
            TCP[HOST_FORWARD]  9  * 1 10.0.2.15 2 0 0\r\nHub -1 (n1):\r\n  \
            Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\r\n  \
            TCP[HOST_FORWARD]  12       127.0.0.1 4022       10.0.2.15    22     0     0\r\n  \
            UDP[236 sec]  13       10.0.2.15 4022       10.0.2.3    53     0     0\r\n";
        let networks = networks(table);
        let option = |id: &str| {
            let network = networks.iter().find(|network| network.id == id);
            let option = network.expect("in the table").option(forwards);
            option.map(|option| option.value).ok()
        };
        let user = "user,id=n1,hostfwd=tcp:127.0.0.1:4022-10.0.2.15:22";
        assert_eq!(option("n1").as_deref(), Some(user));
        let tap = "tap,id=t0,ifname=tap0,script=/etc/qemu-ifup,downscript=no";
        assert_eq!(option("t0").as_deref(), Some(tap));
        let bridge = "bridge,id=b0,br=br0,helper=/usr/lib/bridge-helper";
        assert_eq!(option("b0").as_deref(), Some(bridge));
        for id in ["u2", "fd", "vu", "nic"] {
            assert_eq!(option(id), None, "{id}");
        }
    }

    #[test]
    fn host_ends_of_character_devices() {
        let table = [
            (
                "disconnected:unix:/a,b,server=on",
                "socket,path=/a,,b,id=c,server=on,wait=off",
            ),
            (
                "tcp:127.0.0.1:44,server=on <-> 127.0.0.1:5",
                "socket,host=127.0.0.1,port=44,id=c,server=on,wait=off",
            ),
            ("unix:/client", "null,id=c"),
            ("pty:/dev/pts/4", "pty,id=c"),
            ("file", "null,id=c"),
        ];
        for (description, expected) in table {
            assert_eq!(character_device("c", description).value, expected);
        }
    }
}
