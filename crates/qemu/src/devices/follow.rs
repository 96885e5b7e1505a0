//! From QEMU's own tree to the options that a new QEMU makes the same VM of.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::backends::{self, Network};
use super::blocks::Blocks;
use super::error::{FollowError, Lost};
use super::properties::{Description, describe, pci_address};
use super::{HotPlug, Pin, PluggedOption, UnpluggedOption, defines, id_of};
use crate::arguments::{Argument, CommandLine, Properties};
use crate::monitor::{Monitor, MonitorError, Peripheral};

/// Buses that a device is on when nothing is said.
const DEFAULT_BUSES: &[&str] = &["pci.0", "pcie.0"];
/// Properties that say where on its bus a device is.
const PLACES: &[&str] = &["addr", "scsi-id", "nr", "unit"];
/// The last slot's last function.
const PCI_PLACE_MAX: u64 = 0xff;

/// Finds how the VM differs from the command line that it was started with. It takes a few round trips, and some
/// ten more for each plugged device. The VM runs on meanwhile.
///
/// # Errors
/// A device cannot be described, or QEMU does not answer.
pub fn follow(line: &CommandLine, monitor: &mut Monitor) -> Result<HotPlug, FollowError> {
    let peripherals = monitor.peripherals()?;
    let mut plugged = Vec::new();
    let mut started = Vec::new();
    for peripheral in peripherals {
        let hot = monitor.properties(&peripheral.path(), &["hotplugged"])?;
        match hot[0] == Some(Value::Bool(true)) {
            true => plugged.push(peripheral),
            false => started.push(peripheral),
        }
    }
    let networks = backends::networks(&monitor.human("info network")?);
    let mut hot_plug = HotPlug::default();
    let gone = gone(line, &started)?;
    let user = |network: &Network| network.kind == "user" && !defines_network(line, &network.id);
    if plugged.is_empty() && gone.is_empty() && !networks.iter().any(user) {
        return Ok(hot_plug);
    }
    let mut followed = Follower {
        line,
        networks,
        blocks: Blocks::of(monitor, line)?,
        backends: Vec::new(),
        made: BTreeSet::new(),
    };
    let devices = followed.plugged(monitor, plugged)?;
    followed.unplugged(monitor, &gone, &started, &mut hot_plug)?;
    let Follower {
        blocks, backends, ..
    } = followed;
    hot_plug.plugged = backends;
    hot_plug.plugged.extend(blocks.into_options());
    hot_plug.plugged.extend(devices);
    Ok(hot_plug)
}

/// Whether the command line makes a network of this name; it has several options for that. Where they name none,
/// QEMU makes up names like `#net151` and `user.0`.
fn defines_network(line: &CommandLine, id: &str) -> bool {
    let named = ["netdev", "nic", "net"];
    named.into_iter().any(|option| defines(line, option, id))
        || id.starts_with('#')
        || (line.has("net") && id.contains('.'))
}

/// The `-device` options with an id whose device is gone, or was plugged in anew.
fn gone<'l>(
    line: &'l CommandLine,
    started: &[Peripheral],
) -> Result<Vec<(&'l Argument, String)>, FollowError> {
    let devices = || line.options.iter().filter(|option| option.is("device"));
    let unnamed = devices().filter(|option| id_of(option).is_none()).count();
    if started.iter().filter(|device| device.anonymous).count() < unnamed {
        return Err(FollowError::Unnamed);
    }
    let is_there = |id: &String| {
        let mut named = started.iter().filter(|device| !device.anonymous);
        named.any(|device| device.id == *id)
    };
    let named = devices().filter_map(|option| Some((option, id_of(option)?)));
    Ok(named.filter(|(_, id)| !is_there(id)).collect())
}

struct Follower<'l> {
    line: &'l CommandLine,
    networks: Vec<Network>,
    blocks: Blocks<'l>,
    /// Options of networks, character devices and objects.
    backends: Vec<PluggedOption>,
    made: BTreeSet<(&'static str, String)>,
}

impl Follower<'_> {
    /// The `-device` options of plugged devices; the backends and objects that they refer to are gathered.
    fn plugged(
        &mut self,
        monitor: &mut Monitor,
        plugged: Vec<Peripheral>,
    ) -> Result<Vec<PluggedOption>, FollowError> {
        let forwards = monitor.human("info usernet")?;
        let character_devices = backends::character_devices(monitor)?;
        let mut descriptions = Vec::new();
        for peripheral in &plugged {
            let mut description = describe(monitor, peripheral)?;
            let lost = |lost: Lost| lost.of(peripheral);
            if let Some(drive) = description.text("drive").map(str::to_owned) {
                let drive = self.blocks.follow(&drive, &peripheral.id).map_err(lost)?;
                description.options.insert("drive".into(), json!(drive));
            }
            if let Some(id) = description.text("netdev").map(str::to_owned) {
                self.network(&id, &forwards).map_err(lost)?;
            }
            if let Some(id) = description.text("chardev").map(str::to_owned) {
                self.character_device(&id, &character_devices);
            }
            for id in &description.objects {
                if self.is_new("object", id) {
                    let object = backends::object(monitor, id)?;
                    self.backends.push(object.map_err(lost)?);
                }
            }
            descriptions.push(description);
        }
        // A network without a card has a section of its own in the device state, too.
        let unused: Vec<Network> = self.networks.clone();
        for network in unused.iter().filter(|network| network.kind == "user") {
            if !defines_network(self.line, &network.id) {
                let device = Peripheral {
                    id: network.id.clone(),
                    driver: "netdev".into(),
                    anonymous: false,
                };
                let made = self.network(&network.id, &forwards);
                made.map_err(|lost| lost.of(&device))?;
            }
        }
        Ok(in_order(descriptions))
    }

    fn is_new(&mut self, option: &'static str, id: &str) -> bool {
        !defines(self.line, option, id) && self.made.insert((option, id.to_owned()))
    }

    fn network(&mut self, id: &str, forwards: &str) -> Result<(), Lost> {
        if defines_network(self.line, id) || !self.is_new("netdev", id) {
            return Ok(());
        }
        let network = self.networks.iter().find(|network| network.id == id);
        let missing = || Lost::new(format!("its network {id:?} is not in QEMU's table"));
        let option = network.ok_or_else(missing)?.option(forwards)?;
        self.backends.push(option);
        Ok(())
    }

    fn character_device(&mut self, id: &str, known: &BTreeMap<String, String>) {
        if self.is_new("chardev", id) {
            let description = known.get(id).map(String::as_str).unwrap_or_default();
            self.backends
                .push(backends::character_device(id, description));
        }
    }

    /// The parts of the command line that are gone, and the addresses to be reserved for them.
    fn unplugged(
        &self,
        monitor: &mut Monitor,
        gone: &[(&Argument, String)],
        started: &[Peripheral],
        hot_plug: &mut HotPlug,
    ) -> Result<(), FollowError> {
        if gone.is_empty() {
            return Ok(());
        }
        let character_devices = backends::character_devices(monitor)?;
        for (option, id) in gone {
            hot_plug.unplugged.push(UnpluggedOption {
                option: "device".into(),
                id: id.clone(),
            });
            let device = properties_of(option);
            self.stay_in_place(&device, id)?;
            let backends = [
                ("drive", "drive"),
                ("drive", "blockdev"),
                ("netdev", "netdev"),
            ];
            for (property, option) in backends.into_iter().chain([("chardev", "chardev")]) {
                let Some(backend) = device.get(property) else {
                    continue;
                };
                let is_there = match property {
                    "drive" => self.blocks.has(backend),
                    "netdev" => self.networks.iter().any(|network| network.id == backend),
                    _ => character_devices.contains_key(backend),
                };
                if !is_there && defines(self.line, option, backend) {
                    hot_plug.unplugged.push(UnpluggedOption {
                        option: option.into(),
                        id: backend.to_owned(),
                    });
                }
            }
        }
        hot_plug.pinned = self.pins(monitor, started)?;
        Ok(())
    }

    /// Where the devices that remain are, if the command line does not say it.
    fn pins(
        &self,
        monitor: &mut Monitor,
        started: &[Peripheral],
    ) -> Result<Vec<Pin>, MonitorError> {
        let mut pins = Vec::new();
        for option in self
            .line
            .options
            .iter()
            .filter(|option| option.is("device"))
        {
            let Some(id) = id_of(option) else { continue };
            let same = |device: &&Peripheral| !device.anonymous && device.id == id;
            let Some(device) = started.iter().find(same) else {
                continue;
            };
            let said = properties_of(option);
            let values = monitor.properties(&device.path(), PLACES)?;
            for (&property, value) in PLACES.iter().zip(values) {
                let Some(value) = value.as_ref().and_then(Value::as_u64) else {
                    continue;
                };
                // That of memory is no place on a bus.
                let is_place = property != "addr" || value <= PCI_PLACE_MAX;
                if said.get(property).is_some() || !is_place {
                    continue;
                }
                pins.push(Pin {
                    id: id.clone(),
                    property: property.to_owned(),
                    value: match property {
                        "addr" => pci_address(value),
                        _ => value.to_string(),
                    },
                });
            }
        }
        Ok(pins)
    }

    /// A device without an id cannot be given its address. So none may be left to QEMU beside a removed device.
    fn stay_in_place(&self, gone: &Properties, id: &str) -> Result<(), FollowError> {
        let on_default = |bus: Option<&str>| bus.is_none_or(|bus| DEFAULT_BUSES.contains(&bus));
        let bus = gone.get("bus");
        let moves = |option: &&Argument| {
            let said = properties_of(option);
            if option.is("drive") {
                return said.get("if") == Some("virtio") && on_default(bus);
            }
            let beside = said.get("bus") == bus || (on_default(bus) && on_default(said.get("bus")));
            let placed = PLACES.iter().any(|place| said.get(place).is_some());
            option.is("device") && id_of(option).is_none() && beside && !placed
        };
        match self.line.options.iter().find(moves) {
            Some(other) => Err(FollowError::WouldMove {
                device: id.to_owned(),
                other: other.words(),
            }),
            None => Ok(()),
        }
    }
}

fn properties_of(option: &Argument) -> Properties {
    Properties::parse(option.value().unwrap_or_default(), "driver")
}

/// As `-device` options, each behind those that it needs; else by id, so that the order is always the
/// same.
fn in_order(mut descriptions: Vec<Description>) -> Vec<PluggedOption> {
    descriptions.sort_by(|a, b| a.peripheral.id.cmp(&b.peripheral.id));
    let mut options = Vec::with_capacity(descriptions.len());
    while !descriptions.is_empty() {
        let waits = |description: &Description| {
            let mut others = descriptions.iter();
            others.any(|other| description.after.contains(&other.peripheral.id))
        };
        let at = descriptions.iter().position(|one| !waits(one)).unwrap_or(0);
        let next = descriptions.remove(at);
        options.push(PluggedOption {
            option: "device".into(),
            value: Value::Object(next.options).to_string(),
        });
    }
    options
}
