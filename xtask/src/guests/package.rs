//! A Debian package, fetched and unpacked, not installed.

use crate::run::run;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What is in a package, in a folder that is gone when this is.
pub struct Unpacked {
    work: PathBuf,
    /// As it would lie below `/`.
    pub root: PathBuf,
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        // What is left is cleared the next time.
        let _ = fs::remove_dir_all(&self.work);
    }
}

/// Fetches the package into a folder of its name beside the guests.
pub fn unpack(folder: &Path, package: &str) -> Result<Unpacked> {
    let work = folder.join(package);
    if work.exists() {
        // Left over from a run that was cut short.
        fs::remove_dir_all(&work).with_context(|| format!("cannot clear {}", work.display()))?;
    }
    fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
    let unpacked = Unpacked {
        root: work.join("unpacked"),
        work,
    };
    run(Command::new("apt-get")
        .current_dir(&unpacked.work)
        // apt's own user may not write into our folder.
        .args(["--quiet", "--option", "APT::Sandbox::User=root"])
        .args(["download", package]))?;
    let archive = only_file(&unpacked.work, |name| name.ends_with(".deb"))?;
    run(Command::new("dpkg")
        .arg("-x")
        .args([&archive, &unpacked.root]))?;
    Ok(unpacked)
}

/// The one file of a kind in a folder.
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
            "{} holds {} files of the kind looked for, not one",
            folder.display(),
            found.len()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_files_are_not_guessed_among() {
        let folder = tempfile::tempdir().unwrap();
        assert!(only_file(folder.path(), |_| true).is_err());
        fs::write(folder.path().join("a"), "").unwrap();
        assert!(only_file(folder.path(), |name| name == "a").is_ok());
        fs::write(folder.path().join("b"), "").unwrap();
        assert!(only_file(folder.path(), |_| true).is_err());
    }
}
