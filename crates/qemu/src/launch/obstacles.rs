//! The obstacles to restoring a VM, known while it runs. A user who learns of them when the VM is gone learns of
//! them too late.

use super::{LaunchError, LaunchOptions, checks, host_access, owner, program, rewrite, secrets};
use crate::arguments::CommandLine;
use crate::record::VmRecord;

/// Every obstacle that will not go away by itself, in words; empty for a VM that can be restored as it is. A
/// condition that holds only while the VM runs (its disks are in use) is no obstacle. Nothing is started or
/// changed.
pub fn restorability(record: &VmRecord) -> Vec<String> {
    all(record).iter().map(in_words).collect()
}

impl VmRecord {
    /// Finds out what would stand in the way of restoring it, unless the record `before`, of the same VM, had the
    /// same devices and disks, and the disks were there or missing as they are now.
    /// Takes microseconds, and the time of reading the program where the VM's user can exchange it. Does not speak to
    /// QEMU.
    pub fn find_obstacles(&mut self, before: Option<&VmRecord>) {
        let disks = |record: &VmRecord| {
            let disks = record.disks.iter();
            let what = disks.map(|disk| {
                let is_there = disk.identity.is_some();
                (
                    disk.device.clone(),
                    disk.path.clone(),
                    disk.temporary,
                    is_there,
                )
            });
            what.collect::<Vec<_>>()
        };
        let is_same =
            |before: &&VmRecord| before.hot_plug == self.hot_plug && disks(before) == disks(self);
        self.obstacles = match before.filter(is_same) {
            Some(before) => before.obstacles.clone(),
            None => restorability(self),
        };
    }
}

fn all(record: &VmRecord) -> Vec<LaunchError> {
    let options = LaunchOptions::new("/restored.qmp".into(), "/restored.log".into());
    let mut found = Vec::new();
    let credentials = match owner::decide(record, &options) {
        Ok(owner) => owner.credentials,
        Err(error) => {
            found.push(error);
            None
        }
    };
    found.extend(program::choose(record, None, credentials.as_ref()).err());
    let run_as = credentials.filter(|then| then.uid != 0);
    let settings = rewrite::Settings {
        options: &options,
        run_as: run_as.as_ref(),
        disks: &record.disks,
    };
    let arguments = record.command_line().to_argv();
    let (arguments, obstacles) = rewrite::obstacles(&arguments, &record.cwd, &settings);
    found.extend(obstacles);
    let line = CommandLine::parse(&arguments);
    let programs = host_access::survey(&line).programs;
    if !programs.is_empty() {
        found.push(LaunchError::CommandsNotAllowed { options: programs });
    }
    found.extend(secrets::lasting_obstacles(&line, &record.cwd));
    found.extend(checks::strangers(&arguments, &record.disks));
    found.extend(record.disks.iter().filter_map(checks::lasting_obstacle));
    found
}

fn in_words(error: &LaunchError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::{Disk, FileIdentity};
    use crate::record::Described;

    /// The obstacles of the record before are taken over, but not where a disk has gone, or is back.
    #[test]
    fn a_disk_that_goes_or_comes_back_changes_the_obstacles() {
        let folder = tempfile::tempdir().expect("temporary directory");
        let path = folder.path().join("disk.img");
        let record = || {
            let there = std::fs::metadata(&path).ok();
            let mut record = VmRecord::described(Described {
                label: None,
                exe: "/bin/sh".into(),
                qemu_version: "10.0.2".into(),
                arguments: ["q", "-hda"].map(str::to_owned).to_vec(),
                cwd: "/".into(),
            });
            record.arguments.push(path.display().to_string());
            record.disks = vec![Disk {
                device: "ide0-hd0".into(),
                node: String::new(),
                path: path.clone(),
                format: "raw".into(),
                read_only: false,
                temporary: false,
                flash: false,
                unchecked: false,
                bytes: 512,
                identity: there.and_then(|there| FileIdentity::of(&there)),
            }];
            record
        };
        let is_missed = |record: &VmRecord| {
            let mut all = record.obstacles.iter();
            all.any(|obstacle| obstacle.contains("disk.img is missing"))
        };
        let mut last: Option<VmRecord> = None;
        for is_there in [true, false, true] {
            match is_there {
                true => std::fs::write(&path, [0; 512]).expect("written"),
                false => std::fs::remove_file(&path).expect("removed"),
            }
            let mut now = record();
            now.find_obstacles(last.as_ref());
            assert_eq!(is_missed(&now), !is_there, "{:?}", now.obstacles);
            last = Some(now);
        }
    }
}
