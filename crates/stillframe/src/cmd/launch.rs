//! How a new QEMU is started; shared by `restore`, `clone` and `receive`.

use std::error::Error;
use std::path::{Path, PathBuf, absolute};

use anyhow::Context as _;
use stillframe_engine::clones::CloneError;
use stillframe_engine::restore::RestoreError;
use stillframe_engine::{LaunchError, LaunchOptions, runtime};
use stillframe_repo::Manifest;

use super::Context;
use crate::args::LaunchArgs;

/// The engine's options for a QEMU with this monitor and first serial port, and the default log.
pub fn options(
    args: &LaunchArgs,
    qmp: &Path,
    serial: Option<&str>,
) -> anyhow::Result<LaunchOptions> {
    let qmp = absolute_path(qmp)?;
    let log = runtime::default_log(&qmp);
    Ok(LaunchOptions {
        serial: serial
            .map(|spec| absolute_serial(spec, absolute_path))
            .transpose()?,
        replace: args.replace.clone(),
        disks_as_they_are: args.disks_as_they_are,
        qemu: args.qemu.clone(),
        as_root: args.as_root,
        without_label: args.without_label,
        without_group: args.without_group,
        allow_commands: args.allow_commands,
        ..LaunchOptions::new(qmp, log)
    })
}

/// The path from the root directory. QEMU runs in the recorded directory, not in the current one.
pub fn absolute_path(path: &Path) -> anyhow::Result<PathBuf> {
    absolute(path).with_context(|| format!("{} is not a path", path.display()))
}

/// The serial port with an absolute path to its file or socket.
fn absolute_serial(
    spec: &str,
    absolute_path: impl Fn(&Path) -> anyhow::Result<PathBuf>,
) -> anyhow::Result<String> {
    for kind in ["file:", "unix:", "pipe:"] {
        if let Some(rest) = spec.strip_prefix(kind) {
            let path = absolute_path(Path::new(rest))?;
            return Ok(format!("{kind}{}", path.display()));
        }
    }
    Ok(spec.to_owned())
}

/// Names `--disks new=DIR` if it would have prevented the error.
pub fn suggest_new_disks(context: &Context, error: &RestoreError, manifest: &Manifest) {
    let holds = |device: &String| {
        let mut disks = manifest.disks.iter();
        disks.any(|disk| disk.table.name == *device)
    };
    if let RestoreError::Launch(
        LaunchError::DiskChanged { device, .. }
        | LaunchError::DiskMissing { device, .. }
        | LaunchError::DiskInUse { device, .. },
    ) = error
        && holds(device)
    {
        context.console.note(
            "--disks new=DIR starts the VM with its disks as the checkpoint holds them, in new files",
        );
    }
}

/// Names `--disks-as-they-are` if it would have prevented the error. It does not help against a disk that another
/// process has open.
pub fn suggest_option(context: &Context, error: &(dyn Error + 'static)) {
    let restore_error = match error.downcast_ref() {
        Some(CloneError::Restore(error)) => Some(error),
        _ => error.downcast_ref(),
    };
    if let Some(RestoreError::Launch(
        LaunchError::DiskChanged { .. }
        | LaunchError::DiskReplaced { .. }
        | LaunchError::DiskTemporary { .. }
        | LaunchError::DiskUnknown { .. },
    )) = restore_error
    {
        context
            .console
            .note("--disks-as-they-are starts the VM anyway, at the risk of damaging its disks");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_serial_file_is_relative_to_the_current_directory() {
        let here = |path: &Path| Ok(Path::new("/here").join(path));
        let spec = |text| absolute_serial(text, here).unwrap();
        assert_eq!(spec("file:out"), "file:/here/out");
        assert_eq!(spec("file:/tmp/out"), "file:/tmp/out");
        assert_eq!(
            spec("unix:s,server=on,wait=off"),
            "unix:/here/s,server=on,wait=off"
        );
        assert_eq!(
            spec("tcp:127.0.0.1:1,server=on,wait=off"),
            "tcp:127.0.0.1:1,server=on,wait=off"
        );
        assert_eq!(spec("null"), "null");
    }
}
