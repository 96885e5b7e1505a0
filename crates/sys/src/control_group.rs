//! Control groups of the unified hierarchy (cgroups(7), version 2), for a process that is about to join one.
//!
//! The path of a group comes from a record, so it is checked before use: absolute, without `.` and `..`. The
//! group is opened below the root of the hierarchy, and no link is followed. A group is never created.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// The file of a group into which the ids of its processes are written.
const PROCESSES: &str = "cgroup.procs";
/// The file of a group that reports whether it is frozen.
const EVENTS: &str = "cgroup.events";
/// The line of [`EVENTS`] of a frozen group.
const FROZEN: &str = "frozen 1";

/// Why a process cannot be in a control group. Each is the end of "because".
#[derive(Debug, thiserror::Error)]
pub enum ControlGroupError {
    /// The recorded path names no group below the root.
    #[error("its path is not an absolute one without . and ..")]
    Path,
    /// The hierarchy, or its root, is not mounted.
    #[error("no cgroup v2 hierarchy is mounted here")]
    NotMounted,
    /// There is no such group.
    #[error("this host has no such group")]
    Missing,
    /// A process that joins a frozen group stops.
    #[error("the group is frozen")]
    Frozen,
    /// The kernel refused.
    #[error("the kernel does not let us {action}")]
    Io {
        /// The action that failed, as the end of "does not let us".
        action: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// An existing control group.
#[derive(Debug)]
pub struct ControlGroup {
    directory: OwnedFd,
    path: PathBuf,
}

impl ControlGroup {
    /// Opens the group with this path in the hierarchy, such as `/machine.slice/vm.scope`.
    ///
    /// # Errors
    /// All of [`ControlGroupError`] but [`ControlGroupError::Frozen`].
    pub fn open(path: &str) -> Result<ControlGroup, ControlGroupError> {
        let below = below_root(path).ok_or(ControlGroupError::Path)?;
        let mounts = fs::read("/proc/self/mountinfo");
        let mounts = mounts.map_err(|source| failed("read /proc/self/mountinfo", source))?;
        let root = mount_point(&mounts).ok_or(ControlGroupError::NotMounted)?;
        ControlGroup::open_below(&root, below)
    }

    fn open_below(root: &Path, below: &str) -> Result<ControlGroup, ControlGroupError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let hierarchy = rustix::fs::open(root, flags, Mode::empty())
            .map_err(|errno| failed("open the hierarchy", errno.into()))?;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let directory = rustix::fs::openat2(&hierarchy, below, flags, Mode::empty(), resolve)
            .map_err(|errno| match errno {
                // A file or a link is no group either.
                Errno::NOENT | Errno::NOTDIR | Errno::LOOP => ControlGroupError::Missing,
                errno => failed("open the group", errno.into()),
            })?;
        Ok(ControlGroup {
            directory,
            path: root.join(below),
        })
    }

    /// Fails where a process that joins the group would stop.
    ///
    /// # Errors
    /// [`ControlGroupError::Frozen`], [`ControlGroupError::Io`].
    pub fn expect_thawed(&self) -> Result<(), ControlGroupError> {
        let cannot = |source| failed("read cgroup.events", source);
        let file = self.file(EVENTS, OFlags::RDONLY).map_err(cannot)?;
        let events = io::read_to_string(fs::File::from(file)).map_err(cannot)?;
        match events.lines().any(|line| line == FROZEN) {
            true => Err(ControlGroupError::Frozen),
            false => Ok(()),
        }
    }

    /// Moves this process, with all its threads, into the group.
    ///
    /// # Errors
    /// [`ControlGroupError::Io`]: the group is gone, has groups of its own with controllers, or belongs to others.
    pub fn join(&self) -> Result<(), ControlGroupError> {
        let cannot = |source| failed("write to cgroup.procs", source);
        let file = self.file(PROCESSES, OFlags::WRONLY).map_err(cannot)?;
        // 0 is the process that writes.
        let written = rustix::io::write(&file, b"0").map_err(|errno| cannot(errno.into()))?;
        match written {
            1 => Ok(()),
            _ => Err(cannot(io::ErrorKind::WriteZero.into())),
        }
    }

    /// The file that lists the processes of the group.
    pub fn processes_file(&self) -> PathBuf {
        self.path.join(PROCESSES)
    }

    fn file(&self, name: &str, flags: OFlags) -> io::Result<OwnedFd> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(self.directory.as_fd(), name, flags, Mode::empty())?;
        Ok(file)
    }
}

fn failed(action: &'static str, source: io::Error) -> ControlGroupError {
    ControlGroupError::Io { action, source }
}

/// The path of a group relative to the root; none when it is the root, or leads elsewhere.
fn below_root(path: &str) -> Option<&str> {
    let below = path.strip_prefix('/')?;
    let is_name = |name: &str| !matches!(name, "" | "." | "..") && !name.contains('\0');
    below.split('/').all(is_name).then_some(below)
}

/// Where the root of the unified hierarchy is mounted: a line of mountinfo such as
/// `41 31 0:38 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw`.
fn mount_point(mounts: &[u8]) -> Option<PathBuf> {
    mounts.split(|byte| *byte == b'\n').find_map(|line| {
        let mut words = line.split(|byte| *byte == b' ');
        let (root, point) = (words.nth(3)?, words.next()?);
        let kind = words.skip_while(|word| *word != b"-").nth(1)?;
        (root == b"/" && kind == b"cgroup2").then(|| unescaped(point))
    })
}

/// A path of mountinfo, in which `\040` and the like stand for bytes (proc_pid_mountinfo(5)).
fn unescaped(escaped: &[u8]) -> PathBuf {
    let mut bytes = Vec::new();
    let mut rest = escaped;
    while let [first, after @ ..] = rest {
        let digits = after.get(..3).filter(|_| *first == b'\\');
        let code = digits
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(code.unwrap_or(*first));
        rest = code.map_or(after, |_| &after[3..]);
    }
    std::ffi::OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_lead_elsewhere_are_refused() {
        assert_eq!(below_root("/machine.slice/a b"), Some("machine.slice/a b"));
        for path in [
            "", "/", "a", "a/b", "//a", "/a//b", "/a/", "/..", "/../a", "/a/../b", "/a/..", "/./a",
            "/a\0b",
        ] {
            assert_eq!(below_root(path), None, "{path:?}");
            let opened = ControlGroup::open(path);
            assert!(matches!(opened, Err(ControlGroupError::Path)), "{path:?}");
        }
    }

    #[test]
    fn the_mount_of_the_root_is_found() {
        let other = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
                     32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                     33 31 0:38 /a /mnt/part rw shared:1 - cgroup2 cgroup2 rw\n";
        assert_eq!(mount_point(other.as_bytes()), None);
        for (line, expected) in [
            (
                "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
                "/sys/fs/cgroup/unified",
            ),
            (
                "41 31 0:38 / /a\\040b\\134 rw shared:9 master:1 - cgroup2 none rw\n",
                "/a b\\",
            ),
        ] {
            let mounts = format!("{other}{line}");
            assert_eq!(mount_point(mounts.as_bytes()), Some(expected.into()));
        }
        assert_eq!(mount_point(b"cgroup2\n\n- cgroup2"), None);
    }

    #[test]
    fn no_link_is_followed_out_of_the_hierarchy() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let root = folder.path().join("root");
        fs::create_dir_all(root.join("a/b")).expect("made");
        fs::create_dir(folder.path().join("outside")).expect("made");
        std::os::unix::fs::symlink("../outside", root.join("out")).expect("linked");
        std::os::unix::fs::symlink("a", root.join("in")).expect("linked");
        fs::write(root.join("file"), "").expect("written");
        let open = |path| ControlGroup::open_below(&root, path);
        let group = open("a/b").expect("a folder");
        assert_eq!(group.processes_file(), root.join("a/b/cgroup.procs"));
        for path in ["out", "in", "in/b", "file", "missing", "a/missing"] {
            let opened = open(path);
            assert!(matches!(opened, Err(ControlGroupError::Missing)), "{path}");
        }
        // Refused also if the check of the path has let it through.
        let opened = open("../outside");
        assert!(matches!(opened, Err(ControlGroupError::Io { .. })));
    }

    #[test]
    fn a_frozen_group_is_found_out() {
        let folder = tempfile::tempdir().expect("temporary folder");
        fs::create_dir(folder.path().join("a")).expect("made");
        let group = ControlGroup::open_below(folder.path(), "a").expect("a folder");
        assert!(matches!(group.join(), Err(ControlGroupError::Io { .. })));
        let events = |text| fs::write(folder.path().join("a/cgroup.events"), text);
        events("populated 1\nfrozen 0\n").expect("written");
        assert!(group.expect_thawed().is_ok());
        events("populated 1\nfrozen 1\n").expect("written");
        let thawed = group.expect_thawed();
        assert!(matches!(thawed, Err(ControlGroupError::Frozen)));
    }
}
