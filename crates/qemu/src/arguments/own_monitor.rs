//! The monitor that Stillframe adds to the command line of a VM it starts. It is part of no plan and no record.

use super::{Argument, Backend, BackendWord, CommandLine, Properties};

/// The character device of that monitor.
const OWN_MONITOR: &str = "stillframe-monitor";

/// A monitor on a descriptor that the new QEMU inherits.
pub(crate) fn own_monitor(descriptor: i32) -> [String; 4] {
    [
        "-chardev".to_owned(),
        format!("socket,id={OWN_MONITOR},fd={descriptor}"),
        "-mon".to_owned(),
        format!("chardev={OWN_MONITOR},mode=control"),
    ]
}

/// Arguments of a VM that was started here, without the monitor of [`own_monitor`].
pub(crate) fn without_own_monitor(arguments: &[String]) -> Vec<String> {
    let mut line = CommandLine::parse(arguments);
    if !line.options.iter().any(is_own_monitor) {
        return arguments.to_vec();
    }
    line.options.retain(|option| !is_own_monitor(option));
    line.to_argv()
}

pub(crate) fn is_own_monitor(option: &Argument) -> bool {
    let value = option.value().unwrap_or_default();
    match option.name() {
        Some("mon") => monitor_device(option).as_deref() == Some(OWN_MONITOR),
        Some("chardev") => chardev_is(value, OWN_MONITOR),
        _ => false,
    }
}

/// The character device that a monitor option refers to.
pub(crate) fn monitor_device(option: &Argument) -> Option<String> {
    let value = option.value()?;
    match option.name()? {
        "mon" => {
            let properties = Properties::parse(value, "chardev");
            properties.get("chardev").map(str::to_owned)
        }
        "monitor" | "qmp" | "qmp-pretty" => match BackendWord::parse(value) {
            BackendWord::Reference(id) => Some(id),
            _ => None,
        },
        _ => None,
    }
}

pub(crate) fn chardev_is(value: &str, id: &str) -> bool {
    Backend::from_chardev(value).id() == Some(id)
}
