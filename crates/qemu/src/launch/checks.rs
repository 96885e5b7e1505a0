//! What must be so on this host before a recorded VM may be started again.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use super::holders::{Use, holder_of};
use super::{LaunchError, LaunchOptions, LaunchPlan};
use crate::arguments::{CommandLine, Properties};
use crate::monitor::{Disk, FeatureWord, FileIdentity, missing_features};
use crate::record::VmRecord;

/// The recorded program must be there.
pub(super) fn program(record: &VmRecord) -> Result<(), LaunchError> {
    match record.exe.is_file() {
        true => Ok(()),
        false => Err(LaunchError::ProgramMissing {
            exe: record.exe.clone(),
            version: record.identity.qemu_version.clone(),
        }),
    }
}

impl LaunchPlan {
    /// Asks the program for its version, which must be the recorded one. That takes 20 ms; a QEMU that
    /// was started tells by itself ([`super::Starting::wait`]).
    ///
    /// # Errors
    /// [`LaunchError::VersionDiffers`], [`LaunchError::Run`].
    pub fn check_version(&self) -> Result<(), LaunchError> {
        self.expect_version(version_of(&self.exe)?)
    }

    /// What the new VM's processors can do must be all that the guest knows of.
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

/// Asks a program for its version.
///
/// # Errors
/// [`LaunchError::Run`].
pub fn version_of(program: &Path) -> Result<String, LaunchError> {
    let output = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .map_err(|source| LaunchError::Run {
            program: program.to_owned(),
            source,
        })?;
    Ok(version_in(&String::from_utf8_lossy(&output.stdout)))
}

/// The version in `QEMU emulator version 10.0.2 (Debian ...)`.
fn version_in(text: &str) -> String {
    let mut words = text.split_ascii_whitespace();
    words.find(|word| *word == "version");
    words.next().unwrap_or("of unknown version").to_owned()
}

/// Every disk must be the recorded one, unchanged, and nobody else's; clones only read it, so others may
/// do that too.
pub(super) fn disks(record: &VmRecord, options: &LaunchOptions) -> Result<(), LaunchError> {
    let as_they_are = options.disks_as_they_are;
    let counts = match options.clone {
        Some(_) => Use::Writing,
        None => Use::Any,
    };
    for (index, disk) in record.disks.iter().enumerate() {
        // Of the files of one device the first is the image, the others are what it is based on.
        let earlier = &record.disks[..index];
        let is_image =
            !disk.device.is_empty() && !earlier.iter().any(|other| other.device == disk.device);
        if is_image {
            in_arguments(record, disk)?;
        }
        if disk.temporary {
            if !as_they_are {
                return Err(LaunchError::DiskTemporary {
                    device: disk.device.clone(),
                });
            }
        } else if disk.path.is_absolute() {
            file(disk, as_they_are, counts)?;
        } else if !as_they_are {
            return Err(LaunchError::DiskUnknown {
                device: disk.device.clone(),
                path: disk.path.clone(),
            });
        }
    }
    Ok(())
}

/// The disks of a VM that runs must be those that were recorded, unchanged.
pub(super) fn running_disks(
    then: &VmRecord,
    now: &VmRecord,
    as_they_are: bool,
) -> Result<(), LaunchError> {
    if as_they_are {
        return Ok(());
    }
    let find = |disk: &Disk| {
        let mut disks = now.disks.iter();
        disks.find(|other| (&other.device, &other.path) == (&disk.device, &disk.path))
    };
    for disk in &then.disks {
        let changed = |what| LaunchError::DiskChanged {
            device: disk.device.clone(),
            path: disk.path.clone(),
            what,
        };
        let there = find(disk).ok_or_else(|| changed("is not a disk of this VM any more"))?;
        if let Some(what) = difference(disk.identity, there.identity) {
            return Err(changed(what));
        }
    }
    Ok(())
}

/// The file of a disk must be named by the command line, or the command line describes another VM
/// than the one that was recorded: its disk was exchanged by a monitor command.
fn in_arguments(record: &VmRecord, disk: &Disk) -> Result<(), LaunchError> {
    let line = record.command_line();
    let elsewhere = line.has("readconfig");
    let name = disk.path.file_name().and_then(|name| name.to_str());
    let (Some(name), false, true) = (name, elsewhere, disk.path.is_absolute()) else {
        return Ok(());
    };
    let escaped = name.replace(',', ",,");
    let named = |word: &String| word.contains(name) || word.contains(&escaped);
    if disk.temporary || line.to_argv().iter().any(named) {
        return Ok(());
    }
    Err(LaunchError::DiskNotInArguments {
        device: disk.device.clone(),
        path: disk.path.clone(),
    })
}

fn file(disk: &Disk, as_they_are: bool, counts: Use) -> Result<(), LaunchError> {
    let metadata = fs::metadata(&disk.path).map_err(|source| LaunchError::DiskMissing {
        device: disk.device.clone(),
        path: disk.path.clone(),
        source,
    })?;
    // Even a disk used as it is must not have two users.
    if !disk.read_only
        && let Some(holder) = holder_of(&metadata, counts)
    {
        return Err(LaunchError::DiskInUse {
            device: disk.device.clone(),
            path: disk.path.clone(),
            pid: holder.pid,
            program: holder.program,
        });
    }
    match difference(disk.identity, FileIdentity::of(&metadata)) {
        Some(what) if !as_they_are => Err(LaunchError::DiskChanged {
            device: disk.device.clone(),
            path: disk.path.clone(),
            what,
        }),
        _ => Ok(()),
    }
}

fn difference(recorded: Option<FileIdentity>, now: Option<FileIdentity>) -> Option<&'static str> {
    let (Some(recorded), Some(now)) = (recorded, now) else {
        return Some("cannot be compared with what it was");
    };
    if (recorded.device, recorded.inode) != (now.device, now.inode) {
        Some("was replaced by another file")
    } else if recorded.bytes != now.bytes {
        Some("has another size")
    } else if recorded.modified_ns != now.modified_ns {
        Some("was written to")
    } else {
        None
    }
}

/// A file that is to hold shared RAM must be nobody else's.
pub(super) fn shared_ram(arguments: &[String], cwd: &Path) -> Result<(), LaunchError> {
    let command_line = CommandLine::parse(arguments);
    for object in command_line.values("object") {
        let properties = Properties::parse(object, "qom-type");
        let file = properties.get("mem-path");
        let shared =
            properties.get("qom-type") == Some("memory-backend-file") && properties.is_on("share");
        let (Some(file), true) = (file, shared) else {
            continue;
        };
        let path = cwd.join(file);
        let metadata = fs::metadata(&path).ok().filter(fs::Metadata::is_file);
        if let Some(holder) = metadata.as_ref().and_then(|file| holder_of(file, Use::Any)) {
            return Err(LaunchError::RamInUse {
                path,
                pid: holder.pid,
                program: holder.program,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
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
    fn differences_of_files() {
        let identity = FileIdentity {
            device: 1,
            inode: 2,
            bytes: 3,
            modified_ns: 4,
        };
        let with = |change: fn(&mut FileIdentity)| {
            let mut changed = identity;
            change(&mut changed);
            difference(Some(identity), Some(changed))
        };
        assert_eq!(with(|_| ()), None);
        assert_eq!(
            with(|file| file.inode = 9),
            Some("was replaced by another file")
        );
        assert_eq!(with(|file| file.bytes = 9), Some("has another size"));
        assert_eq!(with(|file| file.modified_ns = 9), Some("was written to"));
        assert!(difference(None, Some(identity)).is_some());
    }
}
