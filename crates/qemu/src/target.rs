//! Finding the QEMU process of a VM and its monitors.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use stillframe_sys::process::{Process, ProcessError};

use crate::arguments::{
    Argument, Backend, BackendWord, CommandLine, Properties, without_own_monitor,
};
use crate::start_folder::start_folder;
use crate::unix_sockets;

/// How a user names a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Selector {
    /// Selects a VM by the pid of its QEMU process.
    Pid(i32),
    /// Selects a VM by the path of one of its QMP sockets.
    Qmp(PathBuf),
    /// Selects a VM by its `-name`.
    Name(String),
}

/// Why no VM could be found.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The process cannot be opened or queried.
    #[error("cannot examine the QEMU process")]
    Process(#[from] ProcessError),
    /// The process is something else.
    #[error("process {pid} ({exe}) is not a QEMU system emulator")]
    NotQemu {
        /// The process.
        pid: i32,
        /// Its program.
        exe: PathBuf,
    },
    /// Guest or host is not x86_64.
    #[error("process {pid} runs {exe}; only x86_64 guests on x86_64 hosts are supported")]
    OtherArchitecture {
        /// The process.
        pid: i32,
        /// Its program.
        exe: PathBuf,
    },
    /// No VM has that name.
    #[error("no running VM is named {name:?}; QEMU is given a name with -name NAME")]
    NoSuchName {
        /// The name looked for.
        name: String,
    },
    /// Several VMs have that name.
    #[error("several running VMs are named {name:?} (pids {pids:?}); name one by its pid")]
    SeveralOfName {
        /// The name looked for.
        name: String,
        /// Their processes.
        pids: Vec<i32>,
    },
    /// The VM cannot be talked to.
    #[error(
        "the VM of process {pid} has no QMP monitor on a unix socket; start it with \
         -qmp unix:PATH,server=on,wait=off"
    )]
    NoMonitor {
        /// The process.
        pid: i32,
    },
    /// No process listens on the socket that was named.
    #[error("no QEMU listens on {path}; is it the path of its -qmp option?")]
    NoListener {
        /// The socket.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// An argument or path of the process is not UTF-8.
    #[error("{what} of process {pid} is not UTF-8 ({text:?}) and cannot be recorded")]
    NotUtf8 {
        /// The process.
        pid: i32,
        /// The kind of program.
        what: &'static str,
        /// The text, made readable.
        text: String,
    },
}

/// A running VM.
#[derive(Debug, Clone)]
pub struct Target {
    /// Its QEMU process.
    pub process: Process,
    /// The program that runs.
    pub exe: PathBuf,
    /// Its arguments, `argv[0]` included; without the monitor that a restore gave it for itself.
    pub arguments: Vec<String>,
    /// The folder that relative paths in the arguments refer to: its working directory, or, after `-daemonize`, that
    /// of its start.
    pub cwd: PathBuf,
    /// Its `-name`.
    pub name: Option<String>,
    /// Its QMP sockets on this host, absolute, in the order of the command line.
    pub monitors: Vec<PathBuf>,
}

/// Finds the VM that `selector` names.
///
/// # Errors
/// [`TargetError`]; the VM itself is not touched.
pub fn find(selector: &Selector) -> Result<Target, TargetError> {
    match selector {
        Selector::Pid(pid) => with_monitor(examine(*pid)?),
        Selector::Qmp(path) => by_socket(path),
        Selector::Name(name) => by_name(name),
    }
}

fn with_monitor(target: Target) -> Result<Target, TargetError> {
    if target.monitors.is_empty() {
        let pid = target.process.pid();
        return Err(TargetError::NoMonitor { pid });
    }
    Ok(target)
}

fn by_name(name: &str) -> Result<Target, TargetError> {
    let named = running_vms().filter(|target| target.name.as_deref() == Some(name));
    let mut found: Vec<Target> = named.collect();
    match (found.pop(), found.is_empty()) {
        // A VM that may not be examined is no VM that is not there.
        (None, _) => Err(pids().find_map(|pid| hidden(pid, name)).unwrap_or_else(|| {
            TargetError::NoSuchName {
                name: name.to_owned(),
            }
        })),
        (Some(target), true) => with_monitor(target),
        (Some(last), false) => {
            found.push(last);
            Err(TargetError::SeveralOfName {
                name: name.to_owned(),
                pids: found.iter().map(|target| target.process.pid()).collect(),
            })
        }
    }
}

fn by_socket(path: &Path) -> Result<Target, TargetError> {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut target = match listener(&path) {
        Ok(pid) => match examine(pid) {
            // Under libvirt the socket was made by the manager and handed to QEMU.
            Err(TargetError::NotQemu { pid, exe }) => {
                owner(&path).ok_or(TargetError::NotQemu { pid, exe })?
            }
            other => other?,
        },
        // The queue is full of waiting clients. The command line shows which QEMU it belongs to, and there may be
        // another monitor.
        Err(source) if source.kind() == io::ErrorKind::WouldBlock => {
            owner(&path).ok_or(TargetError::NoListener {
                path: path.clone(),
                source,
            })?
        }
        Err(source) => return Err(TargetError::NoListener { path, source }),
    };
    // The socket the user named comes first, and may be one the command line does not show.
    target.monitors.retain(|monitor| !same_file(monitor, &path));
    target.monitors.insert(0, path);
    Ok(target)
}

/// The VM whose command line names this socket.
fn owner(path: &Path) -> Option<Target> {
    running_vms().find(|vm| vm.monitors.iter().any(|monitor| same_file(monitor, path)))
}

/// The reason why the process cannot be examined, if it is a VM of this name by its command line, which all users
/// may read.
fn hidden(pid: i32, name: &str) -> Option<TargetError> {
    let error = examine(pid).err()?;
    let arguments = Process::open(pid).ok()?.command_line().ok()?;
    let arguments: Vec<String> = arguments
        .into_iter()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let program = Path::new(arguments.first()?);
    let is_it = is_qemu_system(program)
        && CommandLine::parse(&arguments).guest_name().as_deref() == Some(name);
    is_it.then_some(error)
}

fn same_file(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).map(|meta| (meta.dev(), meta.ino()));
    one == other || matches!((identity(one), identity(other)), (Ok(a), Ok(b)) if a == b)
}

/// The pid of the process that listens on `path` (SO_PEERCRED, unix(7)).
fn listener(path: &Path) -> io::Result<i32> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let peer = rustix::net::sockopt::socket_peercred(&socket)?;
    Ok(peer.pid.as_raw_nonzero().get())
}

/// Every QEMU of this host that can be examined; others are passed over.
fn running_vms() -> impl Iterator<Item = Target> {
    pids().filter_map(|pid| examine(pid).ok())
}

fn pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The kind of program of an executable, by its name.
fn is_qemu_system(exe: &Path) -> bool {
    let name = file_name(exe);
    name.contains("qemu-system-") || name == "qemu-kvm" || name == "kvm"
}

/// Whether a process is a QEMU system emulator; one that cannot be examined counts as none.
pub fn is_qemu_process(pid: i32) -> bool {
    let exe = Process::open(pid).and_then(|process| process.exe());
    exe.is_ok_and(|exe| is_qemu_system(&replaced_file(exe)))
}

fn emulates_x86_64(exe: &Path) -> bool {
    let name = file_name(exe);
    !name.contains("qemu-system-") || name.contains("qemu-system-x86_64")
}

fn file_name(path: &Path) -> &str {
    path.file_name()
        .and_then(|name| name.to_str())
        .unwrap_or("")
}

fn examine(pid: i32) -> Result<Target, TargetError> {
    let process = Process::open(pid)?;
    let exe = replaced_file(process.exe()?);
    if !is_qemu_system(&exe) {
        return Err(TargetError::NotQemu { pid, exe });
    }
    if !emulates_x86_64(&exe) || std::env::consts::ARCH != "x86_64" {
        return Err(TargetError::OtherArchitecture { pid, exe });
    }
    let cwd = process.cwd()?;
    for (what, path) in [("the program path", &exe), ("the working directory", &cwd)] {
        if path.to_str().is_none() {
            return Err(not_utf8(pid, what, path.as_os_str().to_owned()));
        }
    }
    let arguments = process.command_line()?.into_iter().map(|word| {
        word.into_string()
            .map_err(|word| not_utf8(pid, "an argument", word))
    });
    let arguments = arguments.collect::<Result<Vec<String>, _>>()?;
    let arguments = without_own_monitor(&arguments);
    let command_line = CommandLine::parse(&arguments);
    let cwd = start_folder(pid, &command_line, cwd);
    Ok(Target {
        name: command_line.guest_name(),
        monitors: monitors(&command_line)
            .into_iter()
            .filter_map(|monitor| monitor.path_on_host(pid, &cwd))
            .collect(),
        process,
        exe,
        arguments,
        cwd,
    })
}

fn not_utf8(pid: i32, what: &'static str, text: OsString) -> TargetError {
    TargetError::NotUtf8 {
        pid,
        what,
        text: text.to_string_lossy().into_owned(),
    }
}

/// The path a program was started from, also after an upgrade has replaced the file (proc(5)
/// appends " (deleted)" then).
fn replaced_file(exe: PathBuf) -> PathBuf {
    match exe
        .to_str()
        .and_then(|text| text.strip_suffix(" (deleted)"))
    {
        Some(path) => PathBuf::from(path),
        None => exe,
    }
}

/// Where the command line says a QMP monitor listens.
#[derive(Debug, PartialEq, Eq)]
enum MonitorSocket {
    Path(PathBuf),
    /// A listening socket QEMU inherited (libvirt's way).
    Inherited(i32),
}

/// The QMP monitors of a command line: `-qmp`, `-qmp-pretty`, and `-mon` with `mode=control`
/// together with its `-chardev`.
fn monitors(command_line: &CommandLine) -> Vec<MonitorSocket> {
    let socket = |backend: Backend| -> Option<MonitorSocket> {
        if let Some(fd) = backend.property("fd") {
            return fd.parse().ok().map(MonitorSocket::Inherited);
        }
        let path = backend.is_server().then(|| backend.unix_path())??;
        Some(MonitorSocket::Path(path.to_owned()))
    };
    let backend = |option: &Argument| -> Option<Backend> {
        let value = option.value()?;
        match option.name()? {
            "qmp" | "qmp-pretty" => match BackendWord::parse(value) {
                BackendWord::Own { backend, .. } => Some(backend),
                BackendWord::Reference(id) => command_line.character_device(&id),
                BackendWord::Absent => None,
            },
            "mon" => {
                let properties = Properties::parse(value, "chardev");
                (properties.get("mode") == Some("control"))
                    .then(|| command_line.character_device(properties.get("chardev")?))?
            }
            _ => None,
        }
    };
    let options = command_line.options.iter();
    options.filter_map(backend).filter_map(socket).collect()
}

/// Unix sockets that the QMP monitors of a command line listen on, as written there.
pub(crate) fn monitor_paths(command_line: &CommandLine) -> impl Iterator<Item = PathBuf> {
    let sockets = monitors(command_line).into_iter();
    sockets.filter_map(|socket| match socket {
        MonitorSocket::Path(path) => Some(path),
        MonitorSocket::Inherited(_) => None,
    })
}

impl MonitorSocket {
    fn path_on_host(&self, pid: i32, cwd: &Path) -> Option<PathBuf> {
        match self {
            MonitorSocket::Path(path) => {
                let path = cwd.join(path);
                // A QEMU in a mount namespace or chroot sees other files than we do.
                let below_root = Path::new("/proc")
                    .join(pid.to_string())
                    .join("root")
                    .join(path.strip_prefix("/").unwrap_or(&path));
                Some(if !path.exists() && below_root.exists() {
                    below_root
                } else {
                    path
                })
            }
            MonitorSocket::Inherited(fd) => {
                let link = fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok()?;
                let inode = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
                unix_sockets::bound_path(&unix_sockets::table(), inode)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn monitors_of(words: &str) -> Vec<MonitorSocket> {
        let argv: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
        monitors(&CommandLine::parse(&argv))
    }

    #[test]
    fn monitors_of_command_lines() {
        let path = |text: &str| MonitorSocket::Path(PathBuf::from(text));
        let table = [
            ("q -qmp unix:/a,server=on,wait=off", vec![path("/a")]),
            (
                "q -qmp unix:a,server,nowait --qmp-pretty unix:/b,server=on",
                vec![path("a"), path("/b")],
            ),
            ("q -monitor unix:/hmp,server=on", vec![]),
            ("q -qmp tcp:localhost:4444,server=on", vec![]),
            ("q -qmp none -qmp stdio", vec![]),
            (
                "q -chardev socket,id=c,path=/p,,q,server=on -mon chardev=c,mode=control",
                vec![path("/p,q")],
            ),
            (
                "q -chardev socket,id=c,path=/p,server=on -mon c,mode=control,pretty=on",
                vec![path("/p")],
            ),
            (
                "q -chardev socket,id=c,path=/p,server=on -mon chardev=c",
                vec![],
            ),
            (
                "q -chardev socket,id=c,path=/p,server=on -qmp chardev:c",
                vec![path("/p")],
            ),
            (
                "q -chardev socket,id=charmonitor,fd=30,server=on,wait=off -mon chardev=charmonitor,id=monitor,mode=control",
                vec![MonitorSocket::Inherited(30)],
            ),
            ("q -mon chardev=missing,mode=control", vec![]),
        ];
        for (words, expected) in table {
            assert_eq!(monitors_of(words), expected, "{words}");
        }
    }

    #[test]
    fn programs_are_told_by_name() {
        let table = [
            ("/usr/bin/qemu-system-x86_64", true, true),
            ("/nix/store/x/bin/.qemu-system-x86_64-wrapped", true, true),
            ("/usr/libexec/qemu-kvm", true, true),
            ("/usr/bin/kvm", true, true),
            ("/usr/bin/qemu-system-aarch64", true, false),
            ("/usr/bin/qemu-system-i386", true, false),
            ("/usr/bin/qemu-img", false, true),
            ("/usr/bin/bash", false, true),
        ];
        for (exe, is_qemu, x86_64) in table {
            assert_eq!(is_qemu_system(Path::new(exe)), is_qemu, "{exe}");
            if is_qemu {
                assert_eq!(emulates_x86_64(Path::new(exe)), x86_64, "{exe}");
            }
        }
    }

    #[test]
    fn ourselves_is_no_vm() {
        let pid = i32::try_from(std::process::id()).expect("pids are small");
        assert!(matches!(
            find(&Selector::Pid(pid)),
            Err(TargetError::NotQemu { .. })
        ));
        assert!(matches!(
            find(&Selector::Name("surely nobody's name".into())),
            Err(TargetError::NoSuchName { .. })
        ));
        assert!(matches!(
            find(&Selector::Qmp("/nowhere/socket".into())),
            Err(TargetError::NoListener { .. })
        ));
    }
}
