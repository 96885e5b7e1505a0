//! Devices that were plugged in or unplugged after the start of a VM. [`Glance`] and [`Sections`] notice them
//! cheaply; [`HotPlug`] describes them as options that a new QEMU is started with.
//!
//! The command line of a running QEMU describes the VM as it was started. Later changes are read from QEMU's own
//! tree of objects (`qom-list`, `qom-get`), its block graph and its list of backends. A device is described by
//! every property that differs from its default. So the new device is the same: same bus, same address, same MAC
//! address, same number of queues.

mod backends;
mod blocks;
mod defaults;
mod error;
mod follow;
mod glance;
mod properties;
mod sections;

use serde::{Deserialize, Serialize};

use crate::arguments::{Argument, CommandLine, Properties};

pub use error::FollowError;
pub use follow::follow;
pub use glance::{Asked, Glance};
pub use sections::Sections;

/// How a VM differs from its command line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HotPlug {
    /// Options that make the added devices, in an order in which each finds its references.
    #[serde(default)]
    pub plugged: Vec<PluggedOption>,
    /// Options of the command line whose device or backend is gone.
    #[serde(default)]
    pub unplugged: Vec<UnpluggedOption>,
    /// Places of devices that remain, where the command line leaves the place to QEMU: without the
    /// device that is gone QEMU would choose another one.
    #[serde(default)]
    pub pinned: Vec<Pin>,
}

/// An option to be added to the command line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluggedOption {
    /// Its name, such as `device`.
    pub option: String,
    /// Its value.
    pub value: String,
}

/// An option to be left out of the command line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnpluggedOption {
    /// Its name, such as `device`.
    pub option: String,
    /// The id (of a `-blockdev` the node name) of the object that it made.
    pub id: String,
}

/// A property to be added to a `-device`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    /// The id of the device.
    pub id: String,
    /// The property, such as `addr`.
    pub property: String,
    /// Its value.
    pub value: String,
}

impl HotPlug {
    /// Whether the command line describes the VM as it is.
    pub fn is_empty(&self) -> bool {
        *self == HotPlug::default()
    }

    /// Makes of the command line that a VM was started with one of the VM as it was recorded.
    pub fn apply(&self, line: &mut CommandLine) {
        let before = line.clone();
        line.options.retain(|option| {
            let gone = |gone: &UnpluggedOption| {
                option.is(&gone.option) && id_of(option).as_deref() == Some(&*gone.id)
            };
            !self.unplugged.iter().any(gone)
        });
        for pin in &self.pinned {
            let is_it = |option: &&mut Argument| {
                option.is("device") && id_of(option).as_deref() == Some(&*pin.id)
            };
            if let Some(option) = line.options.iter_mut().find(is_it) {
                let value = option.value().unwrap_or_default();
                let mut properties = Properties::parse(value, "driver");
                properties.set(&pin.property, &pin.value);
                *option = Argument::new("device", properties.render("driver"));
            }
        }
        let plugged = self.plugged.iter();
        line.options
            .extend(plugged.map(|plugged| Argument::new(&plugged.option, &plugged.value)));
        defaults::keep(&before, line);
    }

    /// The changes that [`HotPlug::apply`] makes, in words for the user.
    pub fn changes(&self) -> Vec<String> {
        let gone = self.unplugged.iter().map(|gone| {
            let UnpluggedOption { option, id } = gone;
            format!("`-{option}` {id:?} left out: it was unplugged before the checkpoint")
        });
        let pinned = self.pinned.iter().map(|pin| {
            let Pin {
                id,
                property,
                value,
            } = pin;
            format!("device {id:?} keeps {property}={value}, its place beside what was unplugged")
        });
        let plugged = self.plugged.iter().map(|plugged| {
            let PluggedOption { option, value } = plugged;
            format!("`-{option} {value}` added: it was plugged in before the checkpoint")
        });
        gone.chain(pinned).chain(plugged).collect()
    }
}

/// The name under which other options and the monitor speak of what an option makes.
pub(crate) fn id_of(option: &Argument) -> Option<String> {
    let key = match option.name()? {
        "blockdev" => "node-name",
        _ => "id",
    };
    let properties = Properties::parse(option.value()?, "");
    properties.get(key).map(str::to_owned)
}

/// Whether the command line has an option of this name with this id.
fn defines(line: &CommandLine, name: &str, id: &str) -> bool {
    let mut options = line.options.iter();
    options.any(|option| option.is(name) && id_of(option).as_deref() == Some(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_follows_the_vm() {
        let argv = [
            "q",
            "-drive",
            "if=none,id=d0,file=/a",
            "-device",
            "virtio-blk-pci,id=gone,drive=d0",
            "-device",
            r#"{"driver":"virtio-net-pci","id":"net0"}"#,
            "-device",
            "virtio-rng-pci",
        ];
        let mut line = CommandLine::parse(&argv.map(str::to_owned));
        let removed = |option: &str, id: &str| UnpluggedOption {
            option: option.into(),
            id: id.into(),
        };
        let hot_plug = HotPlug {
            plugged: vec![PluggedOption {
                option: "device".into(),
                value: r#"{"driver":"pc-dimm"}"#.into(),
            }],
            unplugged: vec![removed("device", "gone"), removed("drive", "d0")],
            pinned: vec![Pin {
                id: "net0".into(),
                property: "addr".into(),
                value: "04.0".into(),
            }],
        };
        hot_plug.apply(&mut line);
        let expected = [
            "q",
            "-device",
            "virtio-net-pci,id=net0,addr=04.0",
            "-device",
            "virtio-rng-pci",
            "-device",
            r#"{"driver":"pc-dimm"}"#,
        ];
        assert_eq!(line.to_argv(), expected);
        assert_eq!(hot_plug.changes().len(), 4);
    }
}
