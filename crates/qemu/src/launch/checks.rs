//! The conditions on this host under which a recorded VM may be started again.

use std::fs;
use std::path::Path;

use super::holders::{Holder, Use, holder_of};
use super::{DiskOrigin, LaunchError, LaunchOptions};
use crate::arguments::{CommandLine, Properties};
use crate::monitor::{Disk, FileIdentity};
use crate::record::VmRecord;

/// Every disk must be the recorded one, unchanged, and in use by no other process. Clones only read it, so other
/// processes may read it too. A disk that takes the place of a recorded one cannot be compared with it. Returns the
/// changes that starting the VM makes on the host, in words.
pub(super) fn disks(
    recorded: &[Disk],
    disks: &[Disk],
    options: &LaunchOptions,
) -> Result<Vec<String>, LaunchError> {
    let counts = match options.clone {
        Some(_) => Use::Writing,
        None => Use::Any,
    };
    let mut changes = Vec::new();
    let is_new = |disk: &Disk| {
        let mut images = options.images.iter();
        images.any(|image| image.device == disk.device)
    };
    for (recorded, disk) in recorded.iter().zip(disks) {
        if is_new(disk) {
            continue;
        }
        let as_it_is = options.disks_as_they_are || recorded.unchecked;
        if let Some(error) = lasting_obstacle(disk) {
            if !as_it_is {
                return Err(error);
            }
            if disk.temporary || !disk.path.is_absolute() {
                continue;
            }
        }
        match &options.disk_origin {
            DiskOrigin::HandedOver => {
                handed_over(disk, recorded, as_it_is)?;
            }
            DiskOrigin::Recorded => file(disk, recorded, as_it_is, counts)?,
        }
        if disk.flash && !disk.read_only && options.clone.is_none() {
            changes.push(format!(
                "disk {}: {} is written when the VM runs: its content is that of the checkpoint then",
                disk.device,
                disk.path.display()
            ));
        }
    }
    Ok(changes)
}

/// The property of a recorded disk that will always need the user's decision.
pub(super) fn lasting_obstacle(disk: &Disk) -> Option<LaunchError> {
    if disk.temporary {
        return Some(LaunchError::DiskTemporary {
            device: disk.device.clone(),
        });
    }
    if !disk.path.is_absolute() {
        return Some(LaunchError::DiskUnknown {
            device: disk.device.clone(),
            path: disk.path.clone(),
        });
    }
    // It was found for its identity then.
    let missing = || fs::metadata(&disk.path).err();
    let source = disk.identity.is_none().then(missing).flatten()?;
    Some(LaunchError::DiskMissing {
        device: disk.device.clone(),
        path: disk.path.clone(),
        source,
    })
}

/// Disks that the command line does not name: monitor commands exchanged them.
pub(super) fn strangers(arguments: &[String], disks: &[Disk]) -> Vec<LaunchError> {
    let images = disks.iter().enumerate().filter(|(index, disk)| {
        // Of the files of one device the first is the image, the others are its backing files.
        let earlier = &disks[..*index];
        !disk.device.is_empty() && !earlier.iter().any(|other| other.device == disk.device)
    });
    images
        .filter_map(|(_, disk)| in_arguments(arguments, disk).err())
        .collect()
}

/// The disks of a running VM that are not compared with those of a record.
#[derive(Debug, PartialEq, Eq)]
pub enum Unchecked<'d> {
    /// All: the user wants them as they are.
    All,
    /// Those of these devices, which get the content that they had.
    Devices(Vec<&'d str>),
}

/// The disks of a VM that runs must be those that were recorded, unchanged.
pub(super) fn running_disks(
    then: &VmRecord,
    now: &VmRecord,
    unchecked: &Unchecked<'_>,
) -> Result<(), LaunchError> {
    let Unchecked::Devices(unchecked) = unchecked else {
        return Ok(());
    };
    let find = |disk: &Disk| {
        let mut disks = now.disks.iter();
        disks.find(|other| (&other.device, &other.path) == (&disk.device, &disk.path))
    };
    // The content of flash memory is in the checkpoint.
    let checked =
        |disk: &&Disk| !disk.flash && !disk.unchecked && !unchecked.contains(&&*disk.device);
    for disk in then.disks.iter().filter(checked) {
        let gone = || changed(disk, "is not a disk of this VM any more");
        let there = find(disk).ok_or_else(gone)?;
        if let Some(what) = difference(disk.identity, there.identity) {
            return Err(changed(disk, what));
        }
    }
    Ok(())
}

/// The command line must name the file of a disk. Otherwise it describes another VM than the recorded one, whose
/// disk was exchanged by a monitor command.
fn in_arguments(arguments: &[String], disk: &Disk) -> Result<(), LaunchError> {
    let elsewhere = CommandLine::parse(arguments).has("readconfig");
    let name = disk.path.file_name().and_then(|name| name.to_str());
    let (Some(name), false, true) = (name, elsewhere, disk.path.is_absolute()) else {
        return Ok(());
    };
    let escaped = name.replace(',', ",,");
    let named = |word: &String| word.contains(name) || word.contains(&escaped);
    if disk.temporary || arguments.iter().any(named) {
        return Ok(());
    }
    Err(LaunchError::DiskNotInArguments {
        device: disk.device.clone(),
        path: disk.path.clone(),
    })
}

fn file(disk: &Disk, recorded: &Disk, as_it_is: bool, counts: Use) -> Result<(), LaunchError> {
    let metadata = metadata(disk)?;
    // Even a disk used as it is must not have two users.
    if !disk.read_only
        && let Some(holder) = holder_of(&metadata, counts)
    {
        return Err(in_use(disk, holder));
    }
    if disk.path != recorded.path && !disk.flash && !as_it_is {
        return Err(LaunchError::DiskReplaced {
            device: disk.device.clone(),
            path: disk.path.clone(),
            recorded: recorded.path.clone(),
        });
    }
    let difference = match disk.flash {
        true => difference_of_size,
        false => difference,
    };
    match difference(disk.identity, FileIdentity::of(&metadata)) {
        Some(what) if !as_it_is => Err(changed(disk, what)),
        _ => Ok(()),
    }
}

/// A disk that another QEMU, perhaps on another host, still has: QEMU itself locks it when the VM runs here.
fn handed_over(disk: &Disk, recorded: &Disk, as_it_is: bool) -> Result<(), LaunchError> {
    let metadata = metadata(disk)?;
    match difference_of_size(recorded.identity, FileIdentity::of(&metadata)) {
        Some(what) if !as_it_is => Err(changed(disk, what)),
        _ => Ok(()),
    }
}

/// A disk that was given up, and is to be used again by the process that has it open.
pub(super) fn idle_disk(disk: &Disk, except: i32) -> Result<(), LaunchError> {
    if disk.identity.is_none() {
        // No file, such as `nbd://...`.
        return Ok(());
    }
    let metadata = metadata(disk)?;
    if !disk.read_only
        && let Some(holder) = holder_of(&metadata, Use::Writing).filter(|one| one.pid != except)
    {
        return Err(in_use(disk, holder));
    }
    match difference(disk.identity, FileIdentity::of(&metadata)) {
        Some(what) => Err(changed(disk, what)),
        None => Ok(()),
    }
}

fn metadata(disk: &Disk) -> Result<fs::Metadata, LaunchError> {
    fs::metadata(&disk.path).map_err(|source| LaunchError::DiskMissing {
        device: disk.device.clone(),
        path: disk.path.clone(),
        source,
    })
}

fn in_use(disk: &Disk, holder: Holder) -> LaunchError {
    LaunchError::DiskInUse {
        device: disk.device.clone(),
        path: disk.path.clone(),
        pid: holder.pid,
        program: holder.program,
    }
}

fn changed(disk: &Disk, what: &'static str) -> LaunchError {
    LaunchError::DiskChanged {
        device: disk.device.clone(),
        path: disk.path.clone(),
        what,
    }
}

/// The content of flash memory is in the checkpoint; its size is the machine's.
fn difference_of_size(
    recorded: Option<FileIdentity>,
    now: Option<FileIdentity>,
) -> Option<&'static str> {
    match (recorded, now) {
        (Some(recorded), Some(now)) if recorded.bytes != now.bytes => Some("has another size"),
        _ => None,
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

/// A file that is to hold shared RAM must be in use by no other process.
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
