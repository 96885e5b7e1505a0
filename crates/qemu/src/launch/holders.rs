//! Finds the processes on this host that use a file or listen on an address, without disturbing them.

use std::fs::{self, Metadata};
use std::io;
use std::net::TcpListener;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::target::is_qemu_process;
use crate::unix_sockets;

/// A process that has a file open or mapped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Holder {
    pub(super) pid: i32,
    pub(super) program: String,
}

/// A resource of the host that one process can have at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Endpoint {
    /// A unix socket in the file system, absolute.
    Unix(PathBuf),
    /// Host (empty for all) and port.
    Tcp(String, u16),
    /// A file with the process id of the one that has it, absolute.
    PidFile(PathBuf),
}

/// The identity by which two open files are the same one. A block device is itself whatever node names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    File { device: u64, inode: u64 },
    Block { device: u64 },
}

impl Key {
    fn of(metadata: &Metadata) -> Key {
        if metadata.file_type().is_block_device() {
            Key::Block {
                device: metadata.rdev(),
            }
        } else {
            Key::File {
                device: metadata.dev(),
                inode: metadata.ino(),
            }
        }
    }
}

/// The kind of use of a file that counts, by having it open or mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// All.
    Any,
    /// Only processes that have it open for writing.
    Writing,
}

/// Some process other than this one that has the file open or mapped, or, where only writing counts, open for
/// that: a QEMU, if there is one, since an engine that is attached to it has its memory mapped too. Processes that may
/// not be examined are passed over.
pub(super) fn holder_of(file: &Metadata, counts: Use) -> Option<Holder> {
    let key = Key::of(file);
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let others = pids.filter(|pid| *pid != std::process::id());
    let mut holders = others.filter(|pid| {
        let process = Path::new("/proc").join(pid.to_string());
        has_open(&process, key, counts) || (counts == Use::Any && has_mapped(&process, key))
    });
    let is_qemu = |pid: &u32| i32::try_from(*pid).is_ok_and(is_qemu_process);
    let first = holders.next()?;
    let pid = match is_qemu(&first) {
        true => first,
        false => holders.find(is_qemu).unwrap_or(first),
    };
    let program = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Some(Holder {
        pid: i32::try_from(pid).ok()?,
        program: program.trim_end().to_owned(),
    })
}

fn has_open(process: &Path, key: Key, counts: Use) -> bool {
    let descriptors = fs::read_dir(process.join("fd")).into_iter().flatten();
    descriptors.flatten().any(|descriptor| {
        let is_it = fs::metadata(descriptor.path()).is_ok_and(|file| Key::of(&file) == key);
        let number = descriptor.file_name();
        is_it && (counts == Use::Any || writes(&process.join("fdinfo").join(number)))
    })
}

/// Whether a descriptor is open for writing, by its `flags` in `/proc/PID/fdinfo` (octal; proc(5)).
fn writes(info: &Path) -> bool {
    const ACCESS_MODE: u32 = 0o3;
    let text = fs::read_to_string(info).unwrap_or_default();
    let mut flags = text.lines().filter_map(|line| line.strip_prefix("flags:"));
    let flags = flags
        .next()
        .map(|flags| u32::from_str_radix(flags.trim(), 8));
    // A process that cannot be examined may write.
    !matches!(flags, Some(Ok(flags)) if flags & ACCESS_MODE == 0)
}

/// A mapping outlives the descriptor it was made with. `maps` is searched for the inode number first, because a
/// check of each mapped file is slow.
fn has_mapped(process: &Path, key: Key) -> bool {
    let Key::File { inode, .. } = key else {
        return false;
    };
    let maps = fs::read(process.join("maps")).unwrap_or_default();
    let maps = String::from_utf8_lossy(&maps);
    let inode = inode.to_string();
    maps.lines().any(|line| {
        let mut columns = line.split_ascii_whitespace();
        let range = columns.next().unwrap_or_default();
        columns.nth(3) == Some(inode.as_str())
            && fs::metadata(process.join("map_files").join(range))
                .is_ok_and(|file| Key::of(&file) == key)
    })
}

/// Whether a living process has it, or listens there. For unix sockets the kernel's list is read, because
/// connecting would disturb the process that listens.
pub(super) fn is_in_use(endpoint: &Endpoint) -> bool {
    match endpoint {
        Endpoint::PidFile(path) => {
            let text = fs::read_to_string(path).unwrap_or_default();
            // A file that names no process is not in use. QEMU itself ends where another one has it locked.
            let pid = text.trim().parse::<i32>();
            pid.is_ok_and(is_qemu_process)
        }
        Endpoint::Unix(path) => unix_sockets::is_listening(&unix_sockets::table(), path),
        Endpoint::Tcp(host, port) => {
            let host = if host.is_empty() { "0.0.0.0" } else { host };
            let bound = TcpListener::bind((host, *port));
            bound.is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::process::{Command, Stdio};
    use std::time::Duration;

    #[test]
    fn a_reader_of_a_file_is_found_and_gone_after_its_end() {
        let file = tempfile::NamedTempFile::new().expect("temporary file");
        let metadata = file.as_file().metadata().expect("metadata");
        assert!(soon(|| holder_of(&metadata, Use::Any).is_none()));
        let mut reader = Command::new("sleep")
            .arg("60")
            .stdin(Stdio::from(file.reopen().expect("reopened")))
            .spawn()
            .expect("sleep");
        let holder = holder_of(&metadata, Use::Any).expect("the reader");
        assert_eq!(u32::try_from(holder.pid).expect("positive"), reader.id());
        // It has its standard input for reading and writing, as a reopened temporary file is.
        assert!(holder_of(&metadata, Use::Writing).is_some());
        reader.kill().expect("killed");
        reader.wait().expect("reaped");
        assert!(soon(|| holder_of(&metadata, Use::Any).is_none()));
    }

    /// The QEMU is named, whatever the order of the process ids.
    #[test]
    fn of_several_holders_a_qemu_is_named() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let file = tempfile::NamedTempFile::new().expect("temporary file");
        let metadata = file.as_file().metadata().expect("metadata");
        let qemu = folder.path().join("qemu-system-x86_64");
        let sleep = fs::canonicalize("/usr/bin/sleep").expect("sleep");
        fs::copy(sleep, &qemu).expect("copied");
        let start = |program: &Path| {
            let mut command = Command::new(program);
            let command = command.arg("60").stdin(file.reopen().expect("reopened"));
            command.spawn().expect("started")
        };
        let mut all = [
            start(Path::new("sleep")),
            start(&qemu),
            start(Path::new("sleep")),
        ];
        let expected = i32::try_from(all[1].id()).expect("positive");
        assert!(soon(|| {
            holder_of(&metadata, Use::Any).is_some_and(|holder| holder.pid == expected)
        }));
        for child in &mut all {
            child.kill().expect("killed");
            child.wait().expect("reaped");
        }
    }

    #[test]
    fn who_only_reads_does_not_write() {
        let file = tempfile::NamedTempFile::new().expect("temporary file");
        let metadata = file.as_file().metadata().expect("metadata");
        let mut reader = Command::new("sleep")
            .arg("60")
            .stdin(Stdio::from(fs::File::open(file.path()).expect("opened")))
            .spawn()
            .expect("sleep");
        assert!(holder_of(&metadata, Use::Any).is_some());
        // A child that another test starts has our files too, until it becomes its program.
        assert!(soon(|| holder_of(&metadata, Use::Writing).is_none()));
        reader.kill().expect("killed");
        reader.wait().expect("reaped");
    }

    #[test]
    fn a_running_program_counts_as_mapped() {
        let me = fs::metadata("/proc/self/exe").expect("ourselves");
        assert!(has_mapped(Path::new("/proc/self"), Key::of(&me)));
        let file = tempfile::NamedTempFile::new().expect("temporary file");
        let other = file.as_file().metadata().expect("metadata");
        assert!(!has_mapped(Path::new("/proc/self"), Key::of(&other)));
    }

    #[test]
    fn listeners() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let path = directory.path().join("socket");
        let unix = Endpoint::Unix(path.clone());
        assert!(!is_in_use(&unix));
        let listener = UnixListener::bind(&path).expect("bound");
        assert!(is_in_use(&unix));
        drop(listener);
        assert!(path.exists());
        assert!(soon(|| !is_in_use(&unix)));

        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let port = listener.local_addr().expect("address").port();
        let tcp = Endpoint::Tcp("127.0.0.1".into(), port);
        assert!(is_in_use(&tcp));
        drop(listener);
        assert!(soon(|| !is_in_use(&tcp)));
    }

    /// A child that another test starts has our files too, until it becomes its program.
    fn soon(condition: impl Fn() -> bool) -> bool {
        (0..1000).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            condition()
        })
    }
}
