//! Fetches and unpacks a Debian package without installing it.

use crate::run::run;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The content of a package, in a folder that is removed on drop.
pub struct Unpacked {
    work: PathBuf,
    /// The content as it would be below `/`.
    pub root: PathBuf,
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        // The next run removes the rest.
        let _ = fs::remove_dir_all(&self.work);
    }
}

/// Fetches the package into a folder of its name among the guests.
pub fn unpack(folder: &Path, package: &str) -> Result<Unpacked> {
    let work = folder.join(package);
    if work.exists() {
        // Left by an interrupted run.
        fs::remove_dir_all(&work).with_context(|| format!("cannot clear {}", work.display()))?;
    }
    fs::create_dir_all(&work).with_context(|| format!("cannot create {}", work.display()))?;
    let unpacked = Unpacked {
        root: work.join("unpacked"),
        work,
    };
    run(Command::new("apt-get")
        .current_dir(&unpacked.work)
        // apt's sandbox user cannot write to this folder.
        .args(["--quiet", "--option", "APT::Sandbox::User=root"])
        .args(["download", package]))?;
    let archive = only_file(&unpacked.work, |name| name.ends_with(".deb"))?;
    run(Command::new("dpkg")
        .arg("-x")
        .args([&archive, &unpacked.root]))?;
    Ok(unpacked)
}

/// The only matching file in a folder.
pub fn only_file(folder: &Path, wanted: impl Fn(&str) -> bool) -> Result<PathBuf> {
    let found: Vec<PathBuf> = fs::read_dir(folder)
        .with_context(|| format!("cannot list {}", folder.display()))?
        .flatten()
        .filter(|entry| entry.file_name().to_str().is_some_and(&wanted))
        .map(|entry| entry.path())
        .collect();
    match <[PathBuf; 1]>::try_from(found) {
        Ok([path]) => Ok(path),
        Err(found) => bail!(
            "{} has {} matching files, not one",
            folder.display(),
            found.len()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_matching_files_are_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(only_file(folder.path(), |_| true).is_err());
        fs::write(folder.path().join("a"), "").unwrap();
        assert!(only_file(folder.path(), |name| name == "a").is_ok());
        fs::write(folder.path().join("b"), "").unwrap();
        assert!(only_file(folder.path(), |_| true).is_err());
    }
}
