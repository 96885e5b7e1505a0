//! A program file: the users that can exchange it, and the digest that shows whether it was exchanged.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use stillframe_sys::process::Process;

/// The bit of a folder in which only an entry's owner may rename or remove it.
const STICKY: u32 = 0o1000;
/// Writable for the group, or for all users.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// Upper bound on the size of a program whose digest is taken, in bytes.
const MAX_BYTES: u64 = 1 << 30;

/// The part of a program's path that lets another user exchange the program.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Exchangeable {
    /// The file, or a folder above it.
    pub part: PathBuf,
    /// How another user has control of it.
    pub why: String,
}

/// Checks that the file `exe` and every folder above it belong to root or `uid`, and that no other user can write to
/// them. `exe` must be free of links.
pub(crate) fn check_control(exe: &Path, uid: u32) -> Result<(), Exchangeable> {
    let exchangeable = |part: &Path, why: String| Exchangeable {
        part: part.to_owned(),
        why,
    };
    let mut entry_is_safe = false;
    for (depth, part) in exe.ancestors().enumerate() {
        let found = fs::symlink_metadata(part);
        let found =
            found.map_err(|error| exchangeable(part, format!("cannot be checked: {error}")))?;
        if found.uid() != 0 && found.uid() != uid {
            return Err(exchangeable(
                part,
                format!("belongs to user {}", found.uid()),
            ));
        }
        // In a sticky folder, as /tmp, no other user can exchange the entry that was found safe.
        let sticky = depth > 0 && found.mode() & STICKY != 0 && entry_is_safe;
        if found.mode() & WRITABLE_BY_OTHERS != 0 && !sticky {
            return Err(exchangeable(part, "is writable for other users".to_owned()));
        }
        entry_is_safe = true;
    }
    Ok(())
}

/// The BLAKE3 digest of a program file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Digest(String);

impl Digest {
    /// The digest of the program that `process` runs, if a user other than root can exchange the file `exe`. None for
    /// a program of root's, and where it cannot be read. Also none for a process that is confined: a guest that broke
    /// into it could exchange the program, and a restore would run that outside of what confined it.
    pub(crate) fn of_running(process: &Process, exe: &Path) -> Option<Digest> {
        let exe = fs::canonicalize(exe).ok()?;
        check_control(&exe, 0).err()?;
        if process.is_confined() {
            return None;
        }
        // The kernel's link leads to the running program, also where its path leads to another one by now.
        let running = PathBuf::from(format!("/proc/{}/exe", process.pid()));
        let digest = Digest::of_file(&running).ok()?;
        process.is_alive().then_some(digest)
    }

    /// The digest of a file's content.
    ///
    /// # Errors
    /// Those of the file system. Anything but a file of at most 1 GiB is refused.
    pub(crate) fn of_file(path: &Path) -> io::Result<Digest> {
        // Its owner may have put a FIFO there, which must not block the open.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let file: File = OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(path)?;
        let found = file.metadata()?;
        if !found.is_file() || found.len() > MAX_BYTES {
            let words = "is no file, or larger than 1 GiB";
            return Err(io::Error::new(io::ErrorKind::InvalidData, words));
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(file.take(MAX_BYTES))?;
        Ok(Digest(hasher.finalize().to_hex().to_string()))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use stillframe_sys::credentials::own_uid;

    use super::*;

    #[test]
    fn a_program_that_others_can_exchange_is_not_trusted() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let inner = folder.path().join("bin");
        fs::create_dir(&inner).expect("made");
        let exe = inner.join("qemu-system-x86_64");
        fs::write(&exe, "").expect("written");
        let mode = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("mode set");
        };
        let refused = |exe: &Path, uid| check_control(exe, uid).err().map(|found| found.part);
        mode(&exe, 0o755);
        mode(&inner, 0o755);
        // The folder for temporary files above is sticky.
        assert_eq!(refused(&exe, own_uid()), None);
        mode(&exe, 0o775);
        assert_eq!(refused(&exe, own_uid()), Some(exe.clone()));
        mode(&exe, 0o755);
        mode(&inner, 0o777);
        assert_eq!(refused(&exe, own_uid()), Some(inner.clone()));
        mode(&inner, 0o1777);
        assert_eq!(refused(&exe, own_uid()), None);
        // It belongs to another user, unless it is root's.
        let another = own_uid() + 1;
        let expected = (own_uid() != 0).then_some(exe.clone());
        assert_eq!(refused(&exe, another), expected);
    }

    #[test]
    fn a_digest_is_of_a_file_s_content_only() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = |name: &str| folder.path().join(name);
        for (name, content) in [("a", "1"), ("b", "1"), ("c", "2")] {
            fs::write(path(name), content).expect("written");
        }
        let of = |name: &str| Digest::of_file(&path(name));
        assert_eq!(of("a").expect("read"), of("b").expect("read"));
        assert_ne!(of("a").expect("read"), of("c").expect("read"));
        assert!(Digest::of_file(folder.path()).is_err());
        // A FIFO that no process writes.
        rustix::fs::mknodat(
            rustix::fs::CWD,
            path("fifo"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .expect("made");
        assert!(of("fifo").is_err());
        assert!(of("missing").is_err());
    }
}
