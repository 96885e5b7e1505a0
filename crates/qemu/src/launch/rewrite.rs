//! From the command line of a recorded VM to one that starts it again while other VMs run.
//!
//! Two rules decide every change. The guest must find exactly the machine it knew: no device is
//! added or taken away, only the host's ends of them change. And nothing of the old process or of
//! a third one may be overwritten or taken over: output files, listening sockets, the terminal.

mod clone;
mod images;
mod overlay;
mod snapshots;
mod user;

use std::path::{Path, PathBuf};

use super::holders::Endpoint;
use super::overlays::Overlay;
use super::{LaunchError, LaunchOptions, replaced};
use crate::arguments::{
    Argument, Backend, BackendWord, CommandLine, MONITOR, Properties, chardev_is, is_own_monitor,
    monitor_device,
};
use crate::credentials::Credentials;
use crate::monitor::Disk;

/// Options that belong to the old process or to its start, not to the machine.
const DROPPED: &[(&str, &str)] = &[
    ("S", "the new VM is started paused anyway"),
    ("daemonize", "the new VM runs in the background anyway"),
    ("gdb", "debugger connections are not taken over"),
    ("incoming", "the state comes from the checkpoint"),
    ("loadvm", "the state comes from the checkpoint"),
    ("mon", "the new VM has a monitor of its own"),
    ("monitor", "the new VM has a monitor of its own"),
    ("pidfile", "it belongs to another process"),
    ("qmp", "the new VM has a monitor of its own"),
    ("qmp-pretty", "the new VM has a monitor of its own"),
    ("s", "debugger connections are not taken over"),
];

/// Options whose value is the backend of a character device.
const BACKEND_OPTIONS: &[&str] = &["serial", "parallel", "debugcon"];

/// Serial ports that are made with `-device`.
const SERIAL_DEVICES: &[&str] = &["isa-serial", "pci-serial", "usb-serial"];

/// Displays that need no terminal and no session.
const BACKGROUND_DISPLAYS: &[&str] = &["none", "egl-headless", "dbus", "vnc"];

/// Options that name the image of a disk and nothing else.
const IMAGE_OPTIONS: &[&str] = &["hda", "hdb", "hdc", "hdd", "sd"];
/// Keys under which a drive names its file.
const FILE_KEYS: &[&str] = &["file.filename", "filename", "file"];
/// The key of a first value without a key (only `-blockdev` has one).
const IMPLIED: &str = "driver";

/// First port of VNC display 0.
const VNC_PORT: u16 = 5900;

pub(super) use clone::memory_blocks;

/// The new command line and its changes.
#[derive(Debug)]
pub(super) struct Rewritten {
    pub(super) arguments: Vec<String>,
    /// The option that the user gave.
    pub(super) given: Option<Argument>,
    pub(super) changes: Vec<String>,
    /// Files that the command line names, and that are to be made.
    pub(super) overlays: Vec<Overlay>,
}

/// The settings of the new command line.
pub(super) struct Settings<'a> {
    pub(super) options: &'a LaunchOptions,
    /// The credentials that QEMU has from its start, if they differ from this process'.
    pub(super) run_as: Option<&'a Credentials>,
    /// The disks that the VM had.
    pub(super) disks: &'a [Disk],
}

/// Rewrites `arguments`; `busy` says where a living process listens.
pub(super) fn rewrite(
    arguments: &[String],
    cwd: &Path,
    settings: &Settings<'_>,
    busy: &dyn Fn(&Endpoint) -> bool,
) -> Result<Rewritten, LaunchError> {
    let options = settings.options;
    let mut rewriter = Rewriter::new(arguments, cwd, busy);
    if rewriter.line.has("preconfig") {
        return Err(LaunchError::Preconfig);
    }
    rewriter.follow_snapshots(settings.disks);
    rewriter.replace_words(&options.replace)?;
    rewriter.use_images(&replaced(settings.disks, &options.replace), &options.images)?;
    if let Some(clone) = &options.clone {
        rewriter.make_clone(clone, &options.disks(settings.disks))?;
    }
    rewriter.keep_pid_file(settings);
    rewriter.drop_process_options();
    if let Some(owner) = settings.run_as {
        rewriter.drop_change_of_user(owner)?;
    }
    rewriter.replace_nographic();
    rewriter.settle_display();
    let listens = options.serial.is_none() && options.clone.is_none() && rewriter.serial_listens();
    let settled = match listens {
        // Its peers connect to it, as to every other port.
        true => None,
        false => rewriter.settle_first_serial(options.serial.as_deref())?,
    };
    rewriter.settle_backends(settled);
    if let Some(error) = rewriter.inherited_descriptors().into_iter().next() {
        return Err(error);
    }
    rewriter.add_our_own(options)?;
    let given = settled.filter(|_| options.serial.is_some());
    let given = given.map(|at| rewriter.line.options[at].clone());
    Ok(Rewritten {
        arguments: rewriter.line.to_argv(),
        given,
        changes: rewriter.changes,
        overlays: rewriter.overlays,
    })
}

/// Every reason for which [`rewrite`] would refuse a command line, and its result.
pub(super) fn obstacles(
    arguments: &[String],
    cwd: &Path,
    settings: &Settings<'_>,
) -> (Vec<String>, Vec<LaunchError>) {
    let mut rewriter = Rewriter::new(arguments, cwd, &|_| false);
    let preconfig = rewriter.line.has("preconfig");
    let mut found: Vec<LaunchError> = preconfig
        .then_some(LaunchError::Preconfig)
        .into_iter()
        .collect();
    rewriter.follow_snapshots(settings.disks);
    rewriter.drop_process_options();
    if let Some(owner) = settings.run_as {
        found.extend(rewriter.drop_change_of_user(owner).err());
    }
    found.extend(rewriter.settle_first_serial(None).err());
    rewriter.settle_backends(None);
    found.extend(rewriter.inherited_descriptors());
    (rewriter.line.to_argv(), found)
}

struct Rewriter<'a> {
    line: CommandLine,
    changes: Vec<String>,
    overlays: Vec<Overlay>,
    cwd: &'a Path,
    busy: &'a dyn Fn(&Endpoint) -> bool,
    /// The recorded file for QEMU's process id, where the new VM uses it.
    pid_file: Option<PathBuf>,
}

/// Where the first serial port stands in the command line.
enum SerialPort {
    /// The `-serial` option at this place.
    Option(usize),
    /// The `-chardev` option at this place, used by a `-device`.
    CharacterDevice(usize),
    /// The port QEMU makes when nothing is said.
    Default,
}

impl<'a> Rewriter<'a> {
    fn new(
        arguments: &[String],
        cwd: &'a Path,
        busy: &'a dyn Fn(&Endpoint) -> bool,
    ) -> Rewriter<'a> {
        Rewriter {
            line: CommandLine::parse(arguments),
            changes: Vec::new(),
            overlays: Vec::new(),
            cwd,
            busy,
            pid_file: None,
        }
    }
}

impl Rewriter<'_> {
    fn note(&mut self, change: String) {
        self.changes.push(change);
    }

    /// The option that opens this file.
    fn place_of(&self, file: &Path) -> Option<usize> {
        let opens = |option: &Argument| {
            let Some(value) = option.value() else {
                return false;
            };
            let named = match option.name() {
                None => Some(value.to_owned()),
                Some(name) if IMAGE_OPTIONS.contains(&name) => Some(value.to_owned()),
                Some("drive" | "blockdev") => {
                    let properties = Properties::parse(value, IMPLIED);
                    FILE_KEYS
                        .iter()
                        .find_map(|key| properties.get(key))
                        .map(str::to_owned)
                }
                _ => None,
            };
            named.is_some_and(|named| self.cwd.join(named) == file)
        };
        self.line.options.iter().position(opens)
    }

    /// The words that the user wants replaced.
    fn replace_words(&mut self, replace: &[(String, String)]) -> Result<(), LaunchError> {
        for (old, new) in replace {
            let mut found = false;
            for option in &mut self.line.options {
                let Argument::Valued { value, .. } = option else {
                    continue;
                };
                if value.contains(old) {
                    *value = value.replace(old, new);
                    found = true;
                }
            }
            if !found {
                return Err(LaunchError::NothingToReplace { word: old.clone() });
            }
            self.note(format!("`{old}` became `{new}`, as requested"));
        }
        Ok(())
    }

    /// The new VM gets the file in which supervisors look for QEMU's process id, unless a living process is named
    /// there. It does not get the file if the user names another, if there are several VMs, or if QEMU does not run
    /// as it did when it made the file.
    fn keep_pid_file(&mut self, settings: &Settings<'_>) {
        let options = settings.options;
        let Some(path) = self
            .line
            .values("pidfile")
            .last()
            .map(|path| self.cwd.join(path))
        else {
            return;
        };
        // With more rights than the VM had, QEMU writes nothing that the record names.
        let as_it_was = settings.run_as.is_none() && !options.as_root;
        let is_ours = options.pidfile.is_none() && options.clone.is_none() && as_it_was;
        if is_ours && !(self.busy)(&Endpoint::PidFile(path.clone())) {
            self.note(format!(
                "`-pidfile {}` kept: QEMU writes its process id there",
                path.display()
            ));
            self.pid_file = Some(path);
        }
    }

    fn drop_process_options(&mut self) {
        let mut monitor_devices: Vec<String> = Vec::new();
        let mut kept = Vec::new();
        self.line.options.retain(|option| !is_own_monitor(option));
        for option in std::mem::take(&mut self.line.options) {
            // It is put back with our own options.
            if option.is("pidfile") && self.pid_file.is_some() {
                continue;
            }
            let reason = DROPPED.iter().find(|(name, _)| option.is(name));
            let Some((_, reason)) = reason else {
                kept.push(option);
                continue;
            };
            monitor_devices.extend(monitor_device(&option));
            self.note(format!("`{}` left out: {reason}", option.words()));
        }
        self.line.options = kept;
        for id in monitor_devices {
            let used = self
                .line
                .options
                .iter()
                .any(|option| refers_to(option, &id));
            let is_it = |option: &Argument| {
                option.is("chardev") && option.value().is_some_and(|value| chardev_is(value, &id))
            };
            if !used && self.line.options.iter().any(is_it) {
                self.line.options.retain(|option| !is_it(option));
                self.note(format!(
                    "character device {id:?} left out: only the old monitor used it"
                ));
            }
        }
    }

    /// `-nographic` means four things; the guest notices one of them (`graphics=off`, which the
    /// firmware reads), the others would use the terminal.
    fn replace_nographic(&mut self) {
        if !self.line.has("nographic") {
            return;
        }
        self.line.options.retain(|option| !option.is("nographic"));
        self.push("machine", "graphics=off");
        self.note("`-nographic` became `-machine graphics=off -display none`: the VM runs in the background".to_owned());
    }

    fn settle_display(&mut self) {
        let mut kept = Vec::new();
        for option in std::mem::take(&mut self.line.options) {
            let reason = match option.name() {
                Some("curses" | "sdl") => Some("the VM runs in the background"),
                Some("display") => self.display_obstacle(option.value().unwrap_or_default()),
                Some("vnc") => self.vnc_obstacle(option.value().unwrap_or_default()),
                _ => None,
            };
            match reason {
                Some(reason) => self.note(format!("`{}` left out: {reason}", option.words())),
                None => kept.push(option),
            }
        }
        self.line.options = kept;
        // Without it QEMU opens a window, or a VNC port of its own choice.
        if !self.line.has("display") {
            self.push("display", "none");
        }
    }

    fn display_obstacle(&self, value: &str) -> Option<&'static str> {
        let properties = Properties::parse(value, "type");
        if let Some(address) = properties.get("vnc") {
            return self.vnc_obstacle(address);
        }
        let kind = properties.get("type").unwrap_or_default();
        (!BACKGROUND_DISPLAYS.contains(&kind)).then_some("the VM runs in the background")
    }

    fn vnc_obstacle(&self, value: &str) -> Option<&'static str> {
        let properties = Properties::parse(value, "vnc");
        let address = properties.get("vnc").unwrap_or_default();
        let endpoint = if let Some(path) = address.strip_prefix("unix:") {
            Some(Endpoint::Unix(self.cwd.join(path)))
        } else {
            let (host, display) = address.rsplit_once(':')?;
            let port = display.parse::<u16>().ok()?.checked_add(VNC_PORT)?;
            Some(Endpoint::Tcp(host.to_owned(), port))
        };
        let taken = endpoint.is_some_and(|endpoint| (self.busy)(&endpoint));
        taken.then_some("a living process listens there")
    }

    /// Connects the first serial port; returns the place of the option that says so.
    fn settle_first_serial(&mut self, spec: Option<&str>) -> Result<Option<usize>, LaunchError> {
        let wanted = spec.map(serial_backend).transpose()?;
        let Some(port) = self.first_serial() else {
            return match spec {
                Some(spec) => Err(LaunchError::NoSerialPort {
                    spec: spec.to_owned(),
                }),
                None => Ok(None),
            };
        };
        let word = spec.unwrap_or("null");
        let reason = if spec.is_some() {
            "as requested"
        } else {
            "so that nothing of the old VM is overwritten"
        };
        let (place, new) = match port {
            SerialPort::Default => {
                // QEMU connects an unmentioned port to this in a VM without display.
                self.push("serial", "null");
                let last = self.line.options.len() - 1;
                (last, Argument::new("serial", word))
            }
            SerialPort::Option(at) => (at, Argument::new("serial", word)),
            SerialPort::CharacterDevice(at) => {
                let value = self.line.options[at].value().unwrap_or_default();
                let old = Backend::from_chardev(value);
                let new = old.replaced_by(&wanted.unwrap_or_else(Backend::null));
                (at, Argument::new("chardev", new.to_chardev()))
            }
        };
        let old = std::mem::replace(&mut self.line.options[place], new.clone());
        if old != new {
            let (old, new) = (old.words(), new.words());
            self.note(format!(
                "first serial port: `{old}` became `{new}`, {reason}"
            ));
        }
        Ok(Some(place))
    }

    /// Whether the first serial port is a socket on which QEMU waits for others: nothing of the old VM is
    /// overwritten there.
    fn serial_listens(&self) -> bool {
        let value = |at: usize| self.line.options[at].value().unwrap_or_default();
        match self.first_serial() {
            Some(SerialPort::CharacterDevice(at)) => Backend::from_chardev(value(at)).is_server(),
            Some(SerialPort::Option(at)) => match BackendWord::parse(value(at)) {
                BackendWord::Own { backend, .. } => backend.is_server(),
                BackendWord::Reference(id) => self
                    .line
                    .character_device(&id)
                    .is_some_and(|backend| backend.is_server()),
                BackendWord::Absent => false,
            },
            Some(SerialPort::Default) | None => false,
        }
    }

    fn first_serial(&self) -> Option<SerialPort> {
        let options = &self.line.options;
        let present = |option: &Argument| option.is("serial") && option.value() != Some("none");
        if let Some(at) = options.iter().position(present) {
            return Some(SerialPort::Option(at));
        }
        let mut has_device = false;
        for value in self.line.values("device") {
            let properties = Properties::parse(value, "driver");
            let driver = properties.get("driver").unwrap_or_default();
            if !SERIAL_DEVICES.contains(&driver) {
                continue;
            }
            has_device |= driver == "isa-serial";
            let Some(id) = properties.get("chardev") else {
                continue;
            };
            let defines = |option: &Argument| {
                option.is("chardev") && option.value().is_some_and(|value| chardev_is(value, id))
            };
            if let Some(at) = options.iter().position(defines) {
                return Some(SerialPort::CharacterDevice(at));
            }
        }
        // QEMU makes a port of its own unless anything is said about serial ports (`system/vl.c`).
        let said = has_device || self.line.has("serial") || self.line.has("nodefaults");
        (!said).then_some(SerialPort::Default)
    }

    /// The host's ends of all character devices but the one that is connected already.
    fn settle_backends(&mut self, settled: Option<usize>) {
        for at in (0..self.line.options.len()).filter(|at| Some(*at) != settled) {
            let option = self.line.options[at].clone();
            let (Some(name), Some(value)) = (option.name(), option.value()) else {
                continue;
            };
            let changed = if name == "chardev" {
                let backend = Backend::from_chardev(value);
                self.harmless(&backend)
                    .map(|(new, reason)| (new.to_chardev(), reason))
            } else if BACKEND_OPTIONS.contains(&name) {
                self.harmless_word(value)
            } else {
                None
            };
            if let Some((new, reason)) = changed {
                self.line.options[at] = Argument::new(name, new);
                let (old, new) = (option.words(), self.line.options[at].words());
                self.note(format!("`{old}` became `{new}`: {reason}"));
            }
        }
    }

    fn harmless_word(&self, word: &str) -> Option<(String, &'static str)> {
        let BackendWord::Own {
            backend,
            with_monitor,
        } = BackendWord::parse(word)
        else {
            return None;
        };
        if let Some((_, reason)) = self.harmless(&backend) {
            return Some(("null".to_owned(), reason));
        }
        with_monitor.then(|| {
            let without_monitor = word.trim_start_matches(MONITOR).to_owned();
            (without_monitor, "the new VM has a monitor of its own")
        })
    }

    /// The backend to connect instead, when this one would disturb something; `None` when it is fine.
    fn harmless(&self, backend: &Backend) -> Option<(Backend, &'static str)> {
        let null = backend.replaced_by(&Backend::null());
        match backend.kind() {
            "stdio" => return Some((null, "the VM runs in the background")),
            "file" | "pipe" => {
                return Some((null, "so that nothing of the old VM is overwritten"));
            }
            _ => {}
        }
        if backend.is_server() && self.endpoint(backend).is_some_and(|at| (self.busy)(&at)) {
            return Some((null, "a living process listens there"));
        }
        let overwrites_log =
            backend.property("logfile").is_some() && backend.property("logappend") != Some("on");
        overwrites_log.then(|| {
            let without = backend.without("logfile");
            (without, "so that nothing of the old VM is overwritten")
        })
    }

    fn endpoint(&self, backend: &Backend) -> Option<Endpoint> {
        if let Some(path) = backend.unix_path() {
            return Some(Endpoint::Unix(self.cwd.join(path)));
        }
        let (host, port) = backend.tcp_address()?;
        Some(Endpoint::Tcp(host.to_owned(), port.parse().ok()?))
    }

    fn inherited_descriptors(&self) -> Vec<LaunchError> {
        let options = self.line.options.iter();
        options
            .filter(|option| is_inherited(option))
            .map(|option| LaunchError::InheritedDescriptor {
                option: option.words(),
            })
            .collect()
    }

    fn add_our_own(&mut self, options: &LaunchOptions) -> Result<(), LaunchError> {
        let path = options.qmp.to_str().ok_or_else(|| LaunchError::NotUtf8 {
            path: options.qmp.clone(),
        })?;
        let path = path.replace(',', ",,");
        self.push("monitor", "none");
        self.push("qmp", &format!("unix:{path},server=on,wait=off"));
        let pid_file = options.pidfile.clone().or_else(|| self.pid_file.take());
        if let Some(pidfile) = pid_file {
            let text = pidfile.to_str().ok_or_else(|| LaunchError::NotUtf8 {
                path: pidfile.clone(),
            })?;
            self.push("pidfile", text);
        }
        self.line.options.push(Argument::Flag("S".to_owned()));
        self.push("incoming", "defer");
        Ok(())
    }

    fn push(&mut self, name: &str, value: &str) {
        self.line.options.push(Argument::new(name, value));
    }
}

/// Whether an option other than its definition speaks of character device `id`. Any value equal to
/// the id counts, because many kinds of options refer to one.
fn refers_to(option: &Argument, id: &str) -> bool {
    let Some(value) = option.value().filter(|_| !option.is("chardev")) else {
        return false;
    };
    let properties = Properties::parse(value, "");
    value.strip_prefix("chardev:") == Some(id) || properties.pairs().any(|(_, value)| value == id)
}

/// The backend that the user wants for the serial port. A terminal is not available in the background, and a
/// reference would be to a device of the old command line.
fn serial_backend(spec: &str) -> Result<Backend, LaunchError> {
    match BackendWord::parse(spec) {
        BackendWord::Own {
            backend,
            with_monitor: false,
        } if !spec.is_empty() && backend.kind() != "stdio" => Ok(backend),
        _ => Err(LaunchError::Serial {
            spec: spec.to_owned(),
        }),
    }
}

/// Whether the option names a descriptor that the old process was given by its parent.
fn is_inherited(option: &Argument) -> bool {
    const KEYS: &[&str] = &["fd", "fds", "vhostfd", "vhostfds"];
    // Free text for the guest, which may look like anything.
    const FREE_TEXT: &[&str] = &["append", "fw_cfg", "smbios", "name"];
    const PATHS: &[&str] = &["/dev/fdset/", "/dev/fd/", "/proc/self/fd/"];
    let Some(value) = option.value() else {
        return false;
    };
    if option.name().is_some_and(|name| FREE_TEXT.contains(&name)) {
        return false;
    }
    if option.is("add-fd") || PATHS.iter().any(|path| value.contains(path)) {
        return true;
    }
    Properties::parse(value, "").pairs().any(|(key, value)| {
        let last = key.rsplit('.').next().unwrap_or(key);
        KEYS.contains(&last) || (last == "type" && key.contains('.') && value == "fd")
    })
}

#[cfg(test)]
mod tests;
