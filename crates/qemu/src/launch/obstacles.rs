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
    /// same devices and disks.
    /// Takes microseconds, and does not speak to QEMU.
    pub fn find_obstacles(&mut self, before: Option<&VmRecord>) {
        let disks = |record: &VmRecord| {
            let disks = record.disks.iter();
            let what = disks.map(|disk| (disk.device.clone(), disk.path.clone(), disk.temporary));
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
    let mut found: Vec<LaunchError> = program::choose(record, None).err().into_iter().collect();
    let run_as = match owner::decide(record, &options) {
        Ok(owner) => owner.credentials.filter(|then| then.uid != 0),
        Err(error) => {
            found.push(error);
            None
        }
    };
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
