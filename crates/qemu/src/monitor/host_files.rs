//! The host's files as the QEMU process sees and uses them.

use std::fs::{self, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The properties that show that a file is still the same and was not written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// Device of the file system; for a block device the device itself.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Length in bytes; zero for a block device.
    pub bytes: u64,
    /// Time of the last change of the content, in nanoseconds since the epoch.
    pub modified_ns: i64,
}

impl FileIdentity {
    /// The identity of a regular file or block device.
    pub fn of(metadata: &Metadata) -> Option<FileIdentity> {
        let kind = metadata.file_type();
        if !(kind.is_file() || kind.is_block_device()) {
            return None;
        }
        Some(FileIdentity {
            device: if kind.is_file() {
                metadata.dev()
            } else {
                metadata.rdev()
            },
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified_ns: metadata
                .mtime()
                .saturating_mul(1_000_000_000)
                .saturating_add(metadata.mtime_nsec()),
        })
    }
}

/// Where the QEMU process looks for files.
pub(crate) struct HostView {
    /// Its root directory, which may be another than ours (mount namespace, chroot).
    pub(super) root: PathBuf,
    pub(super) cwd: PathBuf,
}

impl HostView {
    pub(crate) fn new(pid: i32, cwd: &Path) -> HostView {
        HostView {
            root: Path::new("/proc").join(pid.to_string()).join("root"),
            cwd: cwd.to_owned(),
        }
    }

    /// The file at an absolute path. When QEMU's root may not be looked into, its files are
    /// looked for where ours are.
    pub(super) fn identity(&self, path: &Path) -> Option<FileIdentity> {
        let inside = self.root.join(path.strip_prefix("/").ok()?);
        let metadata = fs::metadata(inside).or_else(|_| fs::metadata(path));
        FileIdentity::of(&metadata.ok()?)
    }
}

/// The files a process has open.
#[derive(Debug, Default)]
pub(super) struct OpenFiles {
    files: Vec<OpenFile>,
}

#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    identity: FileIdentity,
    writable: bool,
}

impl OpenFiles {
    /// Empty when the process may not be examined.
    pub(super) fn of(pid: i32) -> OpenFiles {
        let process = Path::new("/proc").join(pid.to_string());
        let descriptors = fs::read_dir(process.join("fd")).into_iter().flatten();
        let open_file = |number: &str| -> Option<OpenFile> {
            let link = process.join("fd").join(number);
            let info = fs::read_to_string(process.join("fdinfo").join(number)).ok()?;
            Some(OpenFile {
                path: fs::read_link(&link).ok()?,
                identity: FileIdentity::of(&fs::metadata(&link).ok()?)?,
                writable: is_writable(&info)?,
            })
        };
        let files = descriptors
            .flatten()
            .filter_map(|descriptor| open_file(descriptor.file_name().to_str()?));
        OpenFiles {
            files: files.collect(),
        }
    }

    /// Whether the process has the file open for writing; nothing when it does not have it open.
    pub(super) fn is_written(&self, file: &FileIdentity) -> Option<bool> {
        let same = |open: &&OpenFile| {
            (open.identity.device, open.identity.inode) == (file.device, file.inode)
        };
        let modes = self.files.iter().filter(same).map(|open| open.writable);
        modes.reduce(|one, other| one || other)
    }

    /// QEMU makes the throw-away image of `snapshot=on` as `vl.XXXXXX` in the directory for temporary files, and
    /// unlinks it at once (`block.c`, `create_tmp_file`). proc(5) appends " (deleted)" to the path of such a file.
    pub(super) fn is_temporary(&self, path: &Path) -> bool {
        let name = path.file_name().and_then(|name| name.to_str());
        let unlinked = |open: &OpenFile| {
            let text = open.path.to_str();
            text.and_then(|text| text.strip_suffix(" (deleted)")) == path.to_str()
        };
        name.is_some_and(|name| name.starts_with("vl.")) && self.files.iter().any(unlinked)
    }
}

/// The access mode in `/proc/PID/fdinfo/N` (proc(5): `flags:` and the octal flags of open(2)).
fn is_writable(info: &str) -> Option<bool> {
    const ACCESS_MODE: u32 = 0o3;
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
    let flags = u32::from_str_radix(flags.trim(), 8).ok()?;
    Some(flags & ACCESS_MODE != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn us() -> OpenFiles {
        OpenFiles::of(i32::try_from(std::process::id()).expect("pids are small"))
    }

    #[test]
    fn how_a_file_is_open() {
        let file = tempfile::NamedTempFile::new().expect("temporary file");
        let path = file.into_temp_path();
        let identity = || FileIdentity::of(&fs::metadata(&path).expect("metadata")).expect("file");
        assert_eq!(us().is_written(&identity()), None);
        let reader = fs::File::open(&path).expect("opened");
        assert_eq!(us().is_written(&identity()), Some(false));
        let writer = fs::OpenOptions::new()
            .append(true)
            .open(&path)
            .expect("opened");
        assert_eq!(us().is_written(&identity()), Some(true));
        drop((reader, writer));
        assert_eq!(us().is_written(&identity()), None);
    }

    #[test]
    fn throw_away_images() {
        let directory = tempfile::tempdir().expect("temporary directory");
        let named = |name: &str| directory.path().join(name);
        let _vl = fs::File::create(named("vl.ABCDEF")).expect("created");
        let _other = fs::File::create(named("disk.img")).expect("created");
        assert!(!us().is_temporary(&named("vl.ABCDEF")));
        fs::remove_file(named("vl.ABCDEF")).expect("removed");
        fs::remove_file(named("disk.img")).expect("removed");
        assert!(us().is_temporary(&named("vl.ABCDEF")));
        assert!(!us().is_temporary(&named("disk.img")));
    }

    #[test]
    fn directories_and_pipes_have_no_identity() {
        let identity = |path: &str| FileIdentity::of(&fs::metadata(path).expect("metadata"));
        assert_eq!(identity("/"), None);
        assert_eq!(identity("/dev/null"), None);
        assert!(identity("/proc/self/exe").is_some());
    }
}
