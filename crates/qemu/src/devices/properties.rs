//! A device of a running QEMU as the `-device` that makes the same one.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::error::FollowError;
use crate::monitor::{DeviceProperty, Monitor, Peripheral};

/// The properties that a processor is given; its features come from `-cpu`.
const PROCESSOR_PROPERTIES: &[&str] = &[
    "socket-id",
    "die-id",
    "module-id",
    "core-id",
    "thread-id",
    "node-id",
];
/// Properties without a default whose types are not those of [`is_plain`], and which can be set.
const OTHERS_SETTABLE: &[&str] = &["bootindex", "iothread-vq-mapping"];

/// Where objects are that other options made.
const OBJECTS: &str = "/objects/";
/// Where devices are.
const PERIPHERALS: [&str; 2] = ["/machine/peripheral/", "/machine/peripheral-anon/"];

/// A device, described.
#[derive(Debug, Clone)]
pub(super) struct Description {
    pub(super) peripheral: Peripheral,
    /// The value of `-device`.
    pub(super) options: Map<String, Value>,
    /// Devices that must be there before it.
    pub(super) after: BTreeSet<String>,
    /// Ids of objects it is linked to.
    pub(super) objects: BTreeSet<String>,
}

impl Description {
    /// A property that is a text.
    pub(super) fn text(&self, property: &str) -> Option<&str> {
        self.options.get(property)?.as_str()
    }
}

/// Reads every property of a device. Some ten round trips.
pub(super) fn describe(
    monitor: &mut Monitor,
    peripheral: &Peripheral,
) -> Result<Description, FollowError> {
    let path = peripheral.path();
    let mut known = monitor.device_properties(&peripheral.driver)?;
    if peripheral.driver.ends_with("-x86_64-cpu") {
        known.retain(|property| PROCESSOR_PROPERTIES.contains(&&*property.name));
    } else {
        known.retain(is_plain);
    }
    let names: Vec<&str> = known.iter().map(|property| &*property.name).collect();
    let values = monitor.properties(&path, &names)?;
    let mut description = Description {
        peripheral: peripheral.clone(),
        options: Map::new(),
        after: BTreeSet::new(),
        objects: BTreeSet::new(),
    };
    let options = &mut description.options;
    options.insert("driver".into(), json!(peripheral.driver));
    if !peripheral.anonymous {
        options.insert("id".into(), json!(peripheral.id));
    }
    let bus = monitor.properties(&path, &["parent_bus"])?;
    if let Some(bus) = bus[0].as_ref().and_then(Value::as_str) {
        description.stands_on(bus);
    }
    for (property, value) in known.iter().zip(values) {
        if let Some(value) = value.filter(|value| property.default.as_ref() != Some(value)) {
            description.set(property, value);
        }
    }
    description.find_usb_port(monitor)?;
    Ok(description)
}

/// Whether a property may be one that was given when the device was made. QEMU does not report which
/// can be set: those with a default can, texts and links can.
fn is_plain(property: &DeviceProperty) -> bool {
    let kind = property.kind.as_str();
    let basic = kind == "str" || kind.starts_with("link<");
    property.default.is_some() || basic || OTHERS_SETTABLE.contains(&&*property.name)
}

/// The id of the device that has this path, if a device has it.
fn other_device(path: &str) -> Option<&str> {
    let id = PERIPHERALS
        .iter()
        .find_map(|root| path.strip_prefix(root))?;
    (!id.contains('/')).then_some(id)
}

impl Description {
    fn stands_on(&mut self, bus: &str) {
        if let Some(name) = bus.rsplit('/').next().filter(|name| !name.is_empty()) {
            self.options.insert("bus".into(), json!(name));
        }
        self.comes_after(bus);
    }

    fn comes_after(&mut self, path: &str) {
        let rest = PERIPHERALS.iter().find_map(|root| path.strip_prefix(root));
        let id = rest.and_then(|rest| rest.split('/').next());
        self.after.extend(id.map(str::to_owned));
    }

    fn set(&mut self, property: &DeviceProperty, value: Value) {
        let name = property.name.as_str();
        let value = match &value {
            Value::Null => return,
            Value::String(text) if text.is_empty() => return,
            Value::Array(list) if list.is_empty() => return,
            Value::String(path) if property.kind.starts_with("link<") => {
                if let Some(id) = path.strip_prefix(OBJECTS) {
                    self.objects.insert(id.to_owned());
                    json!(id)
                } else if let Some(id) = other_device(path) {
                    self.after.insert(id.to_owned());
                    json!(id)
                } else {
                    // A part of a device, as the backend that `virtio-rng-pci` makes for itself.
                    return;
                }
            }
            // A property of a PCI device that is given as a text is a number when it is queried.
            Value::Number(number) if name == "addr" && property.kind == "str" => {
                match number.as_u64() {
                    Some(place) => json!(pci_address(place)),
                    None => return,
                }
            }
            Value::Number(number) if name == "bootindex" && number.as_i64() == Some(-1) => return,
            Value::Array(mapping) if name == "iothread-vq-mapping" => {
                let threads = mapping.iter().filter_map(|item| item["iothread"].as_str());
                self.objects.extend(threads.map(str::to_owned));
                value
            }
            _ => value,
        };
        self.options.insert(name.to_owned(), value);
    }

    /// The port of a USB device that was given none. QEMU shows it in a table only.
    fn find_usb_port(&mut self, monitor: &mut Monitor) -> Result<(), FollowError> {
        let on_usb = self.text("bus").is_some_and(|bus| bus.contains("usb"));
        if on_usb && self.text("port").is_none() && !self.peripheral.anonymous {
            let table = monitor.human("info usb")?;
            if let Some(port) = usb_port(&table, &self.peripheral.id) {
                self.options.insert("port".into(), json!(port));
            }
        }
        Ok(())
    }
}

/// `05.0`: slot and function.
pub(super) fn pci_address(place: u64) -> String {
    format!("{:02x}.{:x}", place >> 3, place & 7)
}

/// In lines like `  Device 0.1, Port 1, Speed 480 Mb/s, Product QEMU USB Tablet, ID: tablet`.
fn usb_port<'t>(table: &'t str, id: &str) -> Option<&'t str> {
    let mut lines = table.lines();
    let line = lines.find(|line| {
        let found = line.rsplit_once("ID: ");
        found.is_some_and(|(_, found)| found.trim() == id)
    })?;
    let (_, rest) = line.split_once("Port ")?;
    Some(rest.split(',').next()?.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places() {
        assert_eq!(pci_address(0), "00.0");
        assert_eq!(pci_address(5 << 3 | 1), "05.1");
        let table = "  Device 0.1, Port 1, Speed 480 Mb/s, Product QEMU USB Tablet, ID: tab\r\n  \
            Device 0.2, Port 2.1, Speed 12 Mb/s, Product QEMU USB Keyboard, ID: key\r\n";
        assert_eq!(usb_port(table, "key"), Some("2.1"));
        assert_eq!(usb_port(table, "ke"), None);
    }

    #[test]
    fn values_that_say_something() {
        let property = |name: &str, kind: &str| DeviceProperty {
            name: name.into(),
            kind: kind.into(),
            default: None,
        };
        let mut description = Description {
            peripheral: Peripheral {
                id: "hot".into(),
                driver: "x".into(),
                anonymous: false,
            },
            options: Map::new(),
            after: BTreeSet::new(),
            objects: BTreeSet::new(),
        };
        description.stands_on("/machine/peripheral/vs/virtio-backend/vs.0");
        description.set(&property("addr", "str"), json!(40));
        description.set(&property("romfile", "str"), json!(""));
        description.set(&property("bootindex", "int32"), json!(-1));
        description.set(
            &property("memdev", "link<memory-backend>"),
            json!("/objects/m"),
        );
        description.set(&property("rng", "link<rng-backend>"), json!("/machine/x"));
        let own = "/machine/peripheral/hot/default-backend";
        description.set(&property("rng", "link<rng-backend>"), json!(own));
        let other = json!("/machine/peripheral/other");
        description.set(&property("port", "link<device>"), other);
        let expected = json!({ "bus": "vs.0", "addr": "05.0", "memdev": "m", "port": "other" });
        assert_eq!(Value::Object(description.options), expected);
        let after = ["other", "vs"].map(str::to_owned);
        assert_eq!(description.after, BTreeSet::from(after));
        assert_eq!(description.objects, BTreeSet::from(["m".to_owned()]));
    }
}
