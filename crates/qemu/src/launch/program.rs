//! The program that is run: whether no other user controls it, and its version.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use stillframe_sys::credentials::own_uid;

use super::helper::{self, Order};
use super::{LaunchError, LaunchPlan};
use crate::credentials::Credentials;
use crate::executable::{self, Digest};
use crate::monitor::{FeatureWord, missing_features};
use crate::record::VmRecord;

/// The program to run: the one that the operator names, or the recorded one. The recorded one must be such that no
/// user can exchange it but root, the user of this process, and the user that the VM is to run as, `run_as`. If that
/// last user can exchange it, it must also have the recorded content.
pub(super) fn choose(
    record: &VmRecord,
    named: Option<&Path>,
    run_as: Option<&Credentials>,
) -> Result<PathBuf, LaunchError> {
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
    if named.is_some() {
        return Ok(exe);
    }
    let Err(exchangeable) = executable::check_control(&exe, own_uid()) else {
        return Ok(exe);
    };
    // Its owner gains nothing by a program that runs with the owner's rights.
    let owner = run_as.filter(|then| executable::check_control(&exe, then.uid).is_ok());
    let (Some(owner), Some(recorded)) = (owner, &record.exe_digest) else {
        return Err(LaunchError::ProgramNotTrusted {
            exe,
            part: exchangeable.part,
            why: exchangeable.why,
        });
    };
    match Digest::of_file(&exe) {
        Ok(found) if found == *recorded => Ok(exe),
        Ok(_) => Err(LaunchError::ProgramChanged {
            exe,
            uid: owner.uid,
        }),
        Err(source) => Err(LaunchError::Run {
            program: exe,
            source,
        }),
    }
}

impl LaunchPlan {
    /// Queries the program for its version, which must be the recorded one, or a newer one if that is allowed. That takes 20 ms. A QEMU that was
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
        match found == self.version || self.or_newer && is_newer(&found, &self.version) {
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

/// Whether a version is above another, of both of which the numbers are known.
fn is_newer(found: &str, recorded: &str) -> bool {
    let numbers = |version: &str| -> Option<Vec<u32>> {
        version.split('.').map(|part| part.parse().ok()).collect()
    };
    matches!((numbers(found), numbers(recorded)), (Some(found), Some(recorded)) if found > recorded)
}

/// The version in `QEMU emulator version 10.0.2 (Debian ...)`.
fn version_in(text: &str) -> String {
    let mut words = text.split_ascii_whitespace();
    words.find(|word| *word == "version");
    words.next().unwrap_or("of unknown version").to_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::chown;

    use super::*;
    use crate::record::Described;

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
    fn a_newer_version_is_known_by_its_numbers() {
        for (found, recorded, newer) in [
            ("10.0.3", "10.0.2", true),
            ("10.1.0", "10.0.13", true),
            ("10.0.13", "10.0.2", true),
            ("11.1.3", "10.0.2", true),
            ("10.0.2", "10.0.2", false),
            ("9.2.50", "10.0.2", false),
            ("of unknown version", "10.0.2", false),
            ("11.0.0", "of unknown version", false),
        ] {
            assert_eq!(is_newer(found, recorded), newer, "{found} {recorded}");
            let plan = |or_newer| LaunchPlan {
                version: recorded.to_owned(),
                or_newer,
                ..LaunchPlan::default()
            };
            let expect = |or_newer| plan(or_newer).expect_version(found.to_owned()).is_ok();
            assert_eq!(expect(false), found == recorded, "{found} {recorded}");
            assert_eq!(
                expect(true),
                newer || found == recorded,
                "{found} {recorded}"
            );
        }
    }

    fn record_of(exe: &Path, exe_digest: Option<Digest>) -> VmRecord {
        let mut record = VmRecord::described(Described {
            label: None,
            exe: exe.to_owned(),
            qemu_version: "10.0.2".into(),
            arguments: vec!["q".to_owned()],
            cwd: "/".into(),
        });
        record.exe_digest = exe_digest;
        record
    }

    /// As root: a program of another user runs as that user alone, and only with its recorded content.
    #[test]
    fn a_user_s_program_runs_as_that_user_while_it_is_the_recorded_one() {
        assert_eq!(own_uid(), 0, "this test gives a file to another user");
        let folder = tempfile::tempdir().expect("temporary folder");
        let exe = folder.path().join("qemu-system-x86_64");
        fs::write(&exe, "the program").expect("written");
        chown(&exe, Some(7), Some(7)).expect("given away");
        let digest = Digest::of_file(&exe).ok();
        let record = record_of(&exe, digest);
        let not_trusted = |chosen| matches!(chosen, Err(LaunchError::ProgramNotTrusted { .. }));
        let chosen = choose(&record, None, Some(&Credentials::of_user(7)));
        assert_eq!(chosen.expect("the owner's"), exe);
        assert!(not_trusted(choose(&record, None, None)), "as root");
        assert!(not_trusted(choose(
            &record,
            None,
            Some(&Credentials::of_user(8))
        )));
        let older = record_of(&exe, None);
        assert!(not_trusted(choose(
            &older,
            None,
            Some(&Credentials::of_user(7))
        )));
        fs::write(&exe, "another one").expect("written");
        let changed = choose(&record, None, Some(&Credentials::of_user(7)));
        assert!(
            matches!(changed, Err(LaunchError::ProgramChanged { uid: 7, .. })),
            "{changed:?}"
        );
        // The operator's word.
        assert_eq!(choose(&record, Some(&exe), None).expect("named"), exe);
    }
}
