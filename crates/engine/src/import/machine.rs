//! The machine that a migration file belongs to, queried from a QEMU that is started with its command line.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use stillframe_qemu::device_state::{self, DeviceStateError};
use stillframe_qemu::launch::{self, LaunchOptions};
use stillframe_qemu::migration_file::FileBlock;
use stillframe_qemu::record::{Described, VmRecord};

use super::{ImportError, ImportOptions};
use crate::guardian::{Guardian, OnDisconnect};

/// Time for QEMU to open its monitor.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Starts QEMU so that it waits for a state that never comes, queries it, and ends it.
pub(super) fn query(options: &ImportOptions) -> Result<VmRecord, ImportError> {
    let program = options.command.first().map_or("", String::as_str);
    let exe = find_program(program, &options.cwd).ok_or_else(|| ImportError::NoProgram {
        program: program.to_owned(),
    })?;
    let mut record = VmRecord::described(Described {
        label: options.vm.clone(),
        qemu_version: launch::version_of(&exe)?,
        exe,
        arguments: options.command.clone(),
        cwd: options.cwd.clone(),
    });
    let launch = LaunchOptions {
        disks_as_they_are: true,
        // The user typed the command line.
        allow_commands: true,
        qemu: Some(record.exe.clone()),
        // This QEMU is one of ours: what confines this process confines it.
        without_label: true,
        without_group: true,
        ..LaunchOptions::new(options.scratch.join("qmp"), options.scratch.join("log"))
    };
    let plan = launch::plan(&record, &launch)?;
    let guardian = Guardian::start()?;
    // Dropped, it is ended; so it is when this process is killed.
    let starting = launch::start(&plan, &launch)?;
    guardian.on_disconnect(OnDisconnect::End {
        pid: starting.process.pid(),
        start_time: starting.process.start_time(),
    })?;
    let mut launched = starting.wait(START_LIMIT)?;
    record.complete(&launched.process, &mut launched.monitor)?;
    drop(launched);
    guardian.on_disconnect(OnDisconnect::Nothing)?;
    match record.identity.architecture.as_str() {
        "x86_64" => Ok(record),
        _ => Err(ImportError::Architecture {
            program: record.exe,
            architecture: record.identity.architecture,
        }),
    }
}

/// The file of a program, as a shell would find it.
fn find_program(name: &str, cwd: &Path) -> Option<PathBuf> {
    let found = if name.contains('/') {
        Some(cwd.join(name))
    } else {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let folders = std::env::split_paths(&path).filter(|_| !name.is_empty());
        folders
            .map(|folder| folder.join(OsStr::new(name)))
            .find(|path| path.is_file())
    };
    // As the kernel names the program of a process, which is what checkpoints record.
    found?.canonicalize().ok().filter(|path| path.is_file())
}

/// Whether that QEMU is the one the file is for.
pub(super) fn expect_same(
    record: &VmRecord,
    machine: &str,
    blocks: &[FileBlock],
) -> Result<(), ImportError> {
    if record.identity.machine != machine {
        return Err(ImportError::Machine {
            file: machine.to_owned(),
            command_line: record.identity.machine.clone(),
        });
    }
    let known = &record.ram_blocks;
    let different = |difference: String| Err(ImportError::Blocks { difference });
    for block in blocks {
        let FileBlock { name, used_bytes } = block;
        match known.iter().find(|known| known.name == *name) {
            None => return different(format!("{name} is only in the file")),
            Some(known) if known.used_bytes != *used_bytes => {
                return different(format!(
                    "{name} has {used_bytes} bytes in the file and {} in the VM",
                    known.used_bytes
                ));
            }
            Some(_) => {}
        }
    }
    let is_in_file = |name: &str| blocks.iter().any(|block| block.name == name);
    match known.iter().find(|known| !is_in_file(&known.name)) {
        Some(known) => different(format!("{} is not in the file", known.name)),
        None => Ok(()),
    }
}

/// Whether the VM ran when it was saved. QEMU's section says so: a length, and the state's name, filled up with
/// zeros.
pub(super) fn ran(raw: &[u8]) -> Result<bool, DeviceStateError> {
    let sections = device_state::sections(raw)?;
    let state = sections
        .iter()
        .find(|section| section.name == "globalstate");
    let name = state.and_then(|state| raw.get(state.data.start + 4..state.data.end));
    // Older machine types do not save it, and continue running.
    Ok(name.is_none_or(|name| name.starts_with(b"running\0")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_as_a_shell_finds_them() {
        let shell = find_program("sh", Path::new("/")).expect("every machine has one");
        assert!(shell.is_absolute());
        assert_eq!(find_program("bin/sh", Path::new("/")), Some(shell));
        for nothing in ["", "no-such-program", "./no-such-program"] {
            assert_eq!(find_program(nothing, Path::new("/")), None, "{nothing}");
        }
    }
}
