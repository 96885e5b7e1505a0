//! The program that is run: whether no other user controls it, and its version.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use stillframe_sys::credentials::own_uid;

use super::helper::{self, Order};
use super::{LaunchError, LaunchPlan};
use crate::credentials::Credentials;
use crate::monitor::{FeatureWord, missing_features};
use crate::record::VmRecord;

/// The bit of a folder in which only an entry's owner may rename or remove it.
const STICKY: u32 = 0o1000;
/// Writable for the group, or for all users.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// The program to run: the one that the user names, or the recorded one. The recorded one must be such that only
/// root and the user of this process can exchange it.
pub(super) fn choose(record: &VmRecord, named: Option<&Path>) -> Result<PathBuf, LaunchError> {
    let missing = |exe: &Path| LaunchError::ProgramMissing {
        exe: exe.to_owned(),
        version: record.identity.qemu_version.clone(),
    };
    let wanted = named.unwrap_or(&record.exe);
    // Only the target of a link is checked, and run.
    let exe = fs::canonicalize(wanted).map_err(|_| missing(wanted))?;
    if !exe.is_file() {
        return Err(missing(wanted));
    }
    if named.is_none() {
        trust(&exe, own_uid())?;
    }
    Ok(exe)
}

/// The file and every folder above it belong to root or `uid`, and no other user can write to them.
fn trust(exe: &Path, uid: u32) -> Result<(), LaunchError> {
    let distrust = |part: &Path, why: String| LaunchError::ProgramNotTrusted {
        exe: exe.to_owned(),
        part: part.to_owned(),
        why,
    };
    let mut entry_is_safe = false;
    for (depth, part) in exe.ancestors().enumerate() {
        let found = fs::symlink_metadata(part);
        let found = found.map_err(|error| distrust(part, format!("cannot be checked: {error}")))?;
        if found.uid() != 0 && found.uid() != uid {
            return Err(distrust(part, format!("belongs to user {}", found.uid())));
        }
        // In a sticky folder, as /tmp, no other user can exchange the entry that was found safe.
        let sticky = depth > 0 && found.mode() & STICKY != 0 && entry_is_safe;
        if found.mode() & WRITABLE_BY_OTHERS != 0 && !sticky {
            return Err(distrust(part, "is writable for other users".to_owned()));
        }
        entry_is_safe = true;
    }
    Ok(())
}

impl LaunchPlan {
    /// Queries the program for its version, which must be the recorded one. That takes 20 ms. A QEMU that was
    /// started reports its version itself ([`super::Starting::wait`]).
    ///
    /// # Errors
    /// [`LaunchError::VersionDiffers`], [`LaunchError::Run`], [`LaunchError::NotStarted`].
    pub fn check_version(&self) -> Result<(), LaunchError> {
        // The label may keep it from answering over a pipe of ours, and it runs no guest.
        let credentials = self.credentials.clone().map(|these| Credentials {
            security_label: None,
            control_group: None,
            ..these
        });
        self.expect_version(ask_version(&self.helper, &self.exe, credentials)?)
    }

    /// The features of the new VM's processors must include all that the guest knows of.
    pub(super) fn expect_features(&self, now: &[FeatureWord]) -> Result<(), LaunchError> {
        let missing = missing_features(&self.cpu_features, now);
        match missing.is_empty() {
            true => Ok(()),
            false => Err(LaunchError::CpuFeatures {
                missing: missing.join(", "),
            }),
        }
    }

    pub(super) fn expect_version(&self, found: String) -> Result<(), LaunchError> {
        match found == self.version {
            true => Ok(()),
            false => Err(LaunchError::VersionDiffers {
                exe: self.exe.clone(),
                found,
                recorded: self.version.clone(),
            }),
        }
    }
}

/// Queries a program that the user named for its version, as the user of this process.
///
/// # Errors
/// [`LaunchError::Run`], [`LaunchError::NotStarted`].
pub fn version_of(program: &Path) -> Result<String, LaunchError> {
    ask_version(&helper::this_program(), program, None)
}

fn ask_version(
    helper: &Path,
    program: &Path,
    credentials: Option<Credentials>,
) -> Result<String, LaunchError> {
    let order = Order {
        program: program.to_owned(),
        arguments: vec!["--version".to_owned()],
        credentials,
        monitor: false,
        socket_folder: None,
    };
    let failed = |source| LaunchError::Run {
        program: program.to_owned(),
        source,
    };
    let (mut command, socket) = helper::command(helper, &order).map_err(failed)?;
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    // Our copy of the helper's end goes, so that a helper that ended does not block us.
    drop(command);
    // Both fail only where the helper has ended, whose words follow.
    let _ = helper::send(&socket, &order).and_then(|()| helper::go(&socket));
    let output = child.wait_with_output().map_err(failed)?;
    if output.status.code() == Some(helper::EXIT_NOT_STARTED) {
        let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(LaunchError::NotStarted { words });
    }
    Ok(version_in(&String::from_utf8_lossy(&output.stdout)))
}

/// The version in `QEMU emulator version 10.0.2 (Debian ...)`.
fn version_in(text: &str) -> String {
    let mut words = text.split_ascii_whitespace();
    words.find(|word| *word == "version");
    words.next().unwrap_or("of unknown version").to_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn versions() {
        let table = [
            ("QEMU emulator version 10.0.2 (Debian 1:10.0.2)\n", "10.0.2"),
            ("QEMU emulator version 9.2.50\nCopyright", "9.2.50"),
            ("something else", "of unknown version"),
        ];
        for (text, expected) in table {
            assert_eq!(version_in(text), expected, "{text}");
        }
    }

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
        let refused = |exe: &Path, uid| match trust(exe, uid) {
            Err(LaunchError::ProgramNotTrusted { part, .. }) => Some(part),
            other => other.map(|()| None).expect("no other error"),
        };
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
}
