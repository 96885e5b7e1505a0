//! Directories and files that only their owner and root can have made or exchanged.
//!
//! ```text
//!   /            root        no link is followed below a directory that others can write;
//!   ├ dev/shm    sticky      every directory on the way belongs to root or to us, and is either
//!   │  └ DIR     0700, ours  not writable by others or sticky
//!   │     └ FILE 0600, ours  opened through the descriptor of DIR, never through a link
//! ```
//!
//! Another user can take a name in a sticky directory (`/tmp`, `/dev/shm`) first. That is noticed and refused; the
//! directory is never used.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;

/// `st_mode`: entries can only be removed by their owner, the directory's owner and root.
const STICKY: u32 = 0o1000;
/// `st_mode`: group and others may write.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// `st_mode`: any right of group and others.
const RIGHTS_OF_OTHERS: u32 = 0o077;
/// How often a file that another process removes meanwhile is created anew.
const ATTEMPTS: u32 = 100;

/// Why a directory or file is not used.
#[derive(Debug, thiserror::Error)]
pub enum PrivateError {
    /// Another user could have made it, or could exchange it.
    #[error("{path} {what}")]
    NotPrivate {
        /// The directory or file.
        path: PathBuf,
        /// The fault in it, and the remedy.
        what: String,
    },
    /// The kernel refused.
    #[error("cannot {action} {path}")]
    Io {
        /// The action that failed.
        action: &'static str,
        /// The directory or file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl PrivateError {
    /// The kind of the kernel's error, if the kernel refused.
    pub fn io_kind(&self) -> Option<io::ErrorKind> {
        match self {
            PrivateError::NotPrivate { .. } => None,
            PrivateError::Io { source, .. } => Some(source.kind()),
        }
    }
}

/// How a file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Opens for reading.
    Read,
    /// Opens for reading and writing.
    Write,
}

/// An open directory that belongs to us, and that no other user has any right to.
#[derive(Debug)]
pub struct PrivateDir {
    descriptor: OwnedFd,
    path: PathBuf,
}

impl PrivateDir {
    /// Opens the directory; makes it, and its missing parents, with mode 0700.
    ///
    /// # Errors
    /// [`PrivateError::NotPrivate`] when another user owns it or may write on the way to it.
    pub fn create(path: &Path) -> Result<PrivateDir, PrivateError> {
        let (parent, name) = split(path)?;
        let missing = |error: &PrivateError| error.io_kind() == Some(io::ErrorKind::NotFound);
        let above = match trusted(parent) {
            Err(error) if missing(&error) => PrivateDir::create(parent)?.descriptor,
            other => other?,
        };
        match rustix::fs::mkdirat(&above, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(failed("create", path, errno.into())),
        }
        open_directory(above.as_fd(), name, path)?
            .ok_or_else(|| failed("open", path, io::ErrorKind::NotFound.into()))
    }

    /// Opens the directory if it is there.
    ///
    /// # Errors
    /// The errors of [`PrivateDir::create`].
    pub fn open(path: &Path) -> Result<Option<PrivateDir>, PrivateError> {
        let (parent, name) = split(path)?;
        match trusted(parent) {
            Err(error) if error.io_kind() == Some(io::ErrorKind::NotFound) => Ok(None),
            above => open_directory(above?.as_fd(), name, path),
        }
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a directory in it, which must not be there yet.
    pub fn make_directory(&self, name: &str) -> Result<PrivateDir, PrivateError> {
        let path = self.path.join(name);
        rustix::fs::mkdirat(&self.descriptor, name, Mode::RWXU)
            .map_err(|errno| failed("create", &path, errno.into()))?;
        self.directory(name)?
            .ok_or_else(|| failed("open", &path, io::ErrorKind::NotFound.into()))
    }

    /// Opens a directory in it, if there is one.
    pub fn directory(&self, name: &str) -> Result<Option<PrivateDir>, PrivateError> {
        open_directory(
            self.descriptor.as_fd(),
            OsStr::new(name),
            &self.path.join(name),
        )
    }

    /// Makes a file, which must not be there yet, for reading and writing by us alone.
    pub fn create_file(&self, name: &str) -> Result<File, PrivateError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let opened = rustix::fs::openat(
            &self.descriptor,
            name,
            flags | OFlags::CLOEXEC,
            Mode::RUSR | Mode::WUSR,
        );
        opened
            .map(File::from)
            .map_err(|errno| failed("create", &self.path.join(name), errno.into()))
    }

    /// Opens a file, if it is there.
    ///
    /// # Errors
    /// [`PrivateError::NotPrivate`] where it is no regular file of ours that has this name only.
    pub fn file(&self, name: &str, access: Access) -> Result<Option<File>, PrivateError> {
        let path = self.path.join(name);
        let how = match access {
            Access::Read => OFlags::RDONLY,
            Access::Write => OFlags::RDWR,
        };
        let flags = how | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.descriptor, name, flags, Mode::empty()) {
            Ok(file) => {
                let stat = stat_of(&file, &path)?;
                expect_own_file(&stat, &path)?;
                expect_no_rights_of_others(&stat, &path)?;
                Ok(Some(File::from(file)))
            }
            Err(Errno::NOENT) => Ok(None),
            Err(Errno::LOOP) => Err(not_private(&path, "is a symbolic link: remove it")),
            Err(errno) => Err(failed("open", &path, errno.into())),
        }
    }

    /// Opens a file, or makes it, and waits until no other process has it locked (flock(2)). The lock
    /// ends when the file is closed. Without `wait`, `None` while another process has it.
    pub fn lock_file(&self, name: &str, wait: bool) -> Result<Option<File>, PrivateError> {
        let path = self.path.join(name);
        let operation = match wait {
            true => FlockOperation::LockExclusive,
            false => FlockOperation::NonBlockingLockExclusive,
        };
        for _ in 0..ATTEMPTS {
            let file = match self.file(name, Access::Write)? {
                Some(file) => file,
                None => match self.create_file(name) {
                    Err(error) if error.io_kind() == Some(io::ErrorKind::AlreadyExists) => continue,
                    other => other?,
                },
            };
            match rustix::fs::flock(&file, operation) {
                Err(Errno::WOULDBLOCK) => return Ok(None),
                other => other.map_err(|errno| failed("lock", &path, errno.into()))?,
            }
            // A process that had the lock may have removed the file.
            if stat_of(&file, &path)?.st_nlink > 0 {
                return Ok(Some(file));
            }
        }
        Err(failed("lock", &path, io::ErrorKind::Interrupted.into()))
    }

    /// Writes a file that is whole whenever it has its name. One that was there is replaced.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), PrivateError> {
        let new = format!("{name}.new-{}", std::process::id());
        self.remove(&new)?;
        let written = self.create_file(&new).and_then(|mut file| {
            file.write_all(bytes)
                .map_err(|source| failed("write", &self.path.join(name), source))?;
            self.rename(&new, name)
        });
        if written.is_err() {
            // A half-made directory is of no use.
            let _ = self.remove(&new);
        }
        written
    }

    /// Renames `from` to `to`.
    pub fn rename(&self, from: &str, to: &str) -> Result<(), PrivateError> {
        rustix::fs::renameat(&self.descriptor, from, &self.descriptor, to)
            .map_err(|errno| failed("rename", &self.path.join(from), errno.into()))
    }

    /// Removes a file, if it is there.
    pub fn remove(&self, name: &str) -> Result<(), PrivateError> {
        self.unlink(name, AtFlags::empty())
    }

    /// Removes a directory, if it is there, and the files in it.
    pub fn remove_directory(&self, name: &str) -> Result<(), PrivateError> {
        if let Some(directory) = self.directory(name)? {
            for file in directory.names()? {
                directory.remove(&file)?;
            }
        }
        self.unlink(name, AtFlags::REMOVEDIR)
    }

    fn unlink(&self, name: &str, flags: AtFlags) -> Result<(), PrivateError> {
        match rustix::fs::unlinkat(&self.descriptor, name, flags) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(failed("remove", &self.path.join(name), errno.into())),
        }
    }

    /// The names of what lies in it. Names that are not UTF-8 are left out: none of ours is such.
    pub fn names(&self) -> Result<Vec<String>, PrivateError> {
        let list = |errno: Errno| failed("list", &self.path, errno.into());
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.descriptor).map_err(list)? {
            let entry = entry.map_err(list)?;
            match entry.file_name().to_str() {
                Ok("." | "..") | Err(_) => {}
                Ok(name) => names.push(name.to_owned()),
            }
        }
        Ok(names)
    }
}

impl AsFd for PrivateDir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Opens a file to append to, or makes it with mode 0600. Where others may write its directory, no link
/// is followed, and a file that another user has made is refused.
///
/// # Errors
/// [`PrivateError::NotPrivate`], and the kernel's errors.
pub fn open_to_append(path: &Path) -> Result<File, PrivateError> {
    let (parent, name) = split(path)?;
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let open_failed = |errno: Errno| failed("open", path, errno.into());
    let above = trusted(parent).and_then(|above| stat_of(&above, parent));
    let safe = match above {
        // Not in a sticky directory either: there others can make links.
        Ok(stat) => stat.st_mode & WRITABLE_BY_OTHERS == 0,
        Err(PrivateError::NotPrivate { .. }) => false,
        Err(error) => return Err(error),
    };
    if safe {
        return Ok(File::from(
            rustix::fs::open(path, flags, mode).map_err(open_failed)?,
        ));
    }
    open_beside_others(path, parent, name, flags, mode)
}

fn open_beside_others(
    path: &Path,
    parent: &Path,
    name: &OsStr,
    flags: OFlags,
    mode: Mode,
) -> Result<File, PrivateError> {
    let above = rustix::fs::open(
        parent,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .map_err(|errno| failed("open", parent, errno.into()))?;
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    match rustix::fs::openat(&above, name, flags, mode) {
        Ok(file) => {
            expect_own_file(&stat_of(&file, path)?, path)?;
            Ok(File::from(file))
        }
        Err(Errno::LOOP) => Err(not_private(
            path,
            "is a symbolic link in a directory that others can write: remove it, or name another file",
        )),
        Err(errno) => Err(failed("open", path, errno.into())),
    }
}

/// A directory's parent, and its own name.
fn split(path: &Path) -> Result<(&Path, &OsStr), PrivateError> {
    let last = path.components().next_back();
    match (path.is_absolute(), path.parent(), last) {
        (true, Some(parent), Some(Component::Normal(name))) => Ok((parent, name)),
        _ => Err(not_private(
            path,
            "is not an absolute path of a directory or file",
        )),
    }
}

/// Opens a directory of which every component belongs to root or to us, and in which others can exchange
/// nothing of ours.
fn trusted(path: &Path) -> Result<OwnedFd, PrivateError> {
    let real = fs::canonicalize(path).map_err(|source| failed("open", path, source))?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut walked = PathBuf::from("/");
    let mut directory = rustix::fs::open(&walked, flags, Mode::empty())
        .map_err(|errno| failed("open", &walked, errno.into()))?;
    expect_trusted(&stat_of(&directory, &walked)?, &walked)?;
    for component in real.components() {
        let Component::Normal(name) = component else {
            continue;
        };
        walked.push(name);
        directory = rustix::fs::openat(&directory, name, flags, Mode::empty())
            .map_err(|errno| failed("open", &walked, errno.into()))?;
        expect_trusted(&stat_of(&directory, &walked)?, &walked)?;
    }
    Ok(directory)
}

fn open_directory(
    above: BorrowedFd<'_>,
    name: &OsStr,
    path: &Path,
) -> Result<Option<PrivateDir>, PrivateError> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = match rustix::fs::openat(above, name, flags, Mode::empty()) {
        Ok(found) => found,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(failed("open", path, errno.into())),
    };
    let stat = stat_of(&found, path)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => {}
        FileType::Symlink => return Err(not_private(path, "is a symbolic link: remove it")),
        _ => return Err(not_private(path, "is not a directory: remove it")),
    }
    expect_owner(&stat, path)?;
    expect_no_rights_of_others(&stat, path)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let descriptor = rustix::fs::openat(&found, ".", flags, Mode::empty())
        .map_err(|errno| failed("open", path, errno.into()))?;
    Ok(Some(PrivateDir {
        descriptor,
        path: path.to_owned(),
    }))
}

fn expect_trusted(stat: &Stat, path: &Path) -> Result<(), PrivateError> {
    if stat.st_uid != 0 && stat.st_uid != us() {
        return Err(not_private(
            path,
            format!(
                "belongs to user {}, who could exchange what lies in it: name another directory",
                stat.st_uid
            ),
        ));
    }
    match stat.st_mode & WRITABLE_BY_OTHERS == 0 || stat.st_mode & STICKY != 0 {
        true => Ok(()),
        false => Err(not_private(
            path,
            "can be written by other users, who could exchange what lies in it: chmod go-w, or name another directory",
        )),
    }
}

fn expect_owner(stat: &Stat, path: &Path) -> Result<(), PrivateError> {
    match stat.st_uid == us() {
        true => Ok(()),
        false => Err(not_private(
            path,
            format!(
                "belongs to user {}, not to this one ({}), and is not used: remove it, or name another",
                stat.st_uid,
                us()
            ),
        )),
    }
}

fn expect_no_rights_of_others(stat: &Stat, path: &Path) -> Result<(), PrivateError> {
    match stat.st_mode & RIGHTS_OF_OTHERS == 0 {
        true => Ok(()),
        false => Err(not_private(
            path,
            format!(
                "is open to other users (mode {:o}): remove it, or chmod go= where no other user has made what lies in it",
                stat.st_mode & 0o7777
            ),
        )),
    }
}

fn expect_own_file(stat: &Stat, path: &Path) -> Result<(), PrivateError> {
    expect_owner(stat, path)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(not_private(path, "is not a regular file: remove it"));
    }
    match stat.st_nlink > 1 {
        true => Err(not_private(path, "has a second name: remove it")),
        false => Ok(()),
    }
}

fn us() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn stat_of(file: impl AsFd, path: &Path) -> Result<Stat, PrivateError> {
    rustix::fs::fstat(file).map_err(|errno| failed("examine", path, errno.into()))
}

fn not_private(path: &Path, what: impl Into<String>) -> PrivateError {
    PrivateError::NotPrivate {
        path: path.to_owned(),
        what: what.into(),
    }
}

fn failed(action: &'static str, path: &Path, source: io::Error) -> PrivateError {
    PrivateError::Io {
        action,
        path: path.to_owned(),
        source,
    }
}

/// A path as one file name: `/` becomes `!`; what would be ambiguous then, or is not ASCII, is written as `%XX`.
pub fn as_file_name(path: &Path) -> String {
    let bytes = path.as_os_str().as_bytes();
    let bytes = bytes.strip_prefix(b"/").unwrap_or(bytes);
    let mut name = String::new();
    for &byte in bytes {
        match byte {
            b'/' => name.push('!'),
            b'!' | b'%' | 0x80.. => name.push_str(&format!("%{byte:02X}")),
            _ => name.push(char::from(byte)),
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn refused<T>(result: Result<T, PrivateError>, words: &str) {
        let error = result.err().expect("this must be refused").to_string();
        assert!(error.contains(words), "{error}");
    }

    fn chmod(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_directory_is_made_for_its_owner_alone_and_found_again() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/b");
        assert!(PrivateDir::open(&path).unwrap().is_none());
        let made = PrivateDir::create(&path).unwrap();
        for path in [path.as_path(), path.parent().unwrap()] {
            let mode = fs::metadata(path).unwrap().permissions().mode();
            assert_eq!(mode & 0o7777, 0o700);
        }
        made.write("file", b"one").unwrap();
        made.write("file", b"two").unwrap();
        assert_eq!(fs::read(path.join("file")).unwrap(), b"two");
        let again = PrivateDir::create(&path).unwrap();
        assert_eq!(again.names().unwrap(), ["file"]);
        assert!(again.create_file("file").is_err());
        assert!(again.file("none", Access::Read).unwrap().is_none());
        again.make_directory("c").unwrap().write("d", b"").unwrap();
        again.remove_directory("c").unwrap();
        again.remove_directory("c").unwrap();
        again.remove("file").unwrap();
        assert!(again.names().unwrap().is_empty());
    }

    #[test]
    fn what_others_may_touch_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("dir");
        fs::create_dir(&path).unwrap();
        chmod(&path, 0o750);
        refused(PrivateDir::create(&path), "open to other users (mode 750)");
        chmod(&path, 0o700);
        let dir = PrivateDir::create(&path).unwrap();
        let below = path.join("below");
        chmod(&path, 0o770);
        refused(PrivateDir::create(&below), "can be written by other users");
        // Sticky, as /tmp is, other users cannot exchange our files.
        chmod(&path, 0o1777);
        PrivateDir::create(&below).unwrap();
        chmod(&path, 0o700);
        dir.write("file", b"").unwrap();
        chmod(&path.join("file"), 0o640);
        refused(dir.file("file", Access::Read), "mode 640");
        chmod(&path.join("file"), 0o400);
        assert!(dir.file("file", Access::Read).unwrap().is_some());
        fs::hard_link(path.join("file"), path.join("other")).unwrap();
        refused(dir.file("file", Access::Read), "second name");
    }

    #[test]
    fn links_are_not_followed() {
        let root = tempfile::tempdir().unwrap();
        let (target, link) = (root.path().join("target"), root.path().join("link"));
        fs::create_dir(&target).unwrap();
        chmod(&target, 0o700);
        symlink(&target, &link).unwrap();
        refused(PrivateDir::create(&link), "symbolic link");
        let dir = PrivateDir::create(&target).unwrap();
        symlink(root.path().join("made"), target.join("file")).unwrap();
        refused(dir.file("file", Access::Write), "symbolic link");
        refused(dir.lock_file("file", true), "symbolic link");
        assert!(dir.create_file("file").is_err());
        refused(dir.directory("file"), "symbolic link");
        assert!(!root.path().join("made").exists());
        refused(PrivateDir::create(Path::new("relative")), "absolute");
        refused(PrivateDir::create(Path::new("/")), "absolute");
    }

    #[test]
    fn a_lock_is_held_once() {
        let root = tempfile::tempdir().unwrap();
        let dir = PrivateDir::create(&root.path().join("dir")).unwrap();
        let held = dir.lock_file("lock", true).unwrap();
        assert!(held.is_some());
        assert!(dir.lock_file("lock", false).unwrap().is_none());
        drop(held);
        assert!(dir.lock_file("lock", false).unwrap().is_some());
    }

    #[test]
    fn a_log_among_others_is_a_file_of_ours() {
        let root = tempfile::tempdir().unwrap();
        let (log, link) = (root.path().join("log"), root.path().join("link"));
        symlink(root.path().join("made"), &link).unwrap();
        chmod(root.path(), 0o1777);
        refused(open_to_append(&link), "symbolic link");
        assert!(!root.path().join("made").exists());
        open_to_append(&log).unwrap().write_all(b"a").unwrap();
        open_to_append(&log).unwrap().write_all(b"b").unwrap();
        assert_eq!(fs::read(&log).unwrap(), b"ab");
        // Where only we can make links, they are meant.
        chmod(root.path(), 0o755);
        open_to_append(&link).unwrap();
        assert!(root.path().join("made").exists());
        open_to_append(Path::new("/dev/null")).unwrap();
    }

    #[test]
    fn each_path_has_a_name_of_its_own() {
        let name = |path: &str| as_file_name(Path::new(path));
        assert_eq!(name("/run/vm/x.qmp"), "run!vm!x.qmp");
        assert_eq!(name("/run/a!b%"), "run!a%21b%25");
    }
}
