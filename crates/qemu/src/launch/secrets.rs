//! Files with keys and passwords that a command line names (`-object secret,file=`).

use std::path::{Path, PathBuf};

use super::LaunchError;
use crate::arguments::{Argument, CommandLine, Properties};

/// Folders of libvirt whose content lives as long as the domain.
const GOES_WITH_DOMAIN: &[&str] = &["/libvirt/qemu/domain-", "/run/libvirt/qemu/"];

/// They must be there.
pub(super) fn check(arguments: &[String], cwd: &Path) -> Result<(), LaunchError> {
    let line = CommandLine::parse(arguments);
    match files(&line, cwd).find(|(_, path)| !path.exists()) {
        Some((option, path)) => Err(LaunchError::SecretMissing {
            option: option.words(),
            path,
        }),
        None => Ok(()),
    }
}

/// The secrets that are missing, or will be when the VM has ended.
pub(super) fn lasting_obstacles(line: &CommandLine, cwd: &Path) -> Vec<LaunchError> {
    let obstacle = |(option, path): (&Argument, PathBuf)| {
        let option = option.words();
        let text = path.to_string_lossy();
        if GOES_WITH_DOMAIN.iter().any(|part| text.contains(part)) {
            return Some(LaunchError::SecretGoes { option, path });
        }
        (!path.exists()).then_some(LaunchError::SecretMissing { option, path })
    };
    files(line, cwd).filter_map(obstacle).collect()
}

fn files<'l>(
    line: &'l CommandLine,
    cwd: &'l Path,
) -> impl Iterator<Item = (&'l Argument, PathBuf)> {
    let objects = line.options.iter().filter(|option| option.is("object"));
    objects.filter_map(|option| {
        let properties = Properties::parse(option.value()?, "qom-type");
        let is_secret = properties.get("qom-type") == Some("secret");
        let file = properties.get("file").filter(|_| is_secret)?;
        Some((option, cwd.join(file)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_libvirt_removes_is_known_before() {
        let there = tempfile::NamedTempFile::new().expect("temporary file");
        let there = there.path().display().to_string();
        let master = "/var/lib/libvirt/qemu/domain-3-web/master-key.aes";
        let argv = |file: &str| {
            let object = format!("secret,id=masterKey0,format=raw,file={file}");
            ["q".to_owned(), "-object".to_owned(), object].to_vec()
        };
        let lasting = |file: &str| {
            let line = CommandLine::parse(&argv(file));
            lasting_obstacles(&line, Path::new("/"))
        };
        assert!(lasting(&there).is_empty());
        assert!(matches!(
            lasting(master)[..],
            [LaunchError::SecretGoes { .. }]
        ));
        assert!(matches!(
            lasting("/nowhere")[..],
            [LaunchError::SecretMissing { .. }]
        ));
        assert!(check(&argv(&there), Path::new("/")).is_ok());
        assert!(check(&argv("nowhere"), Path::new("/")).is_err());
    }
}
