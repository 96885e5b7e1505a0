//! The kernel of the Linux guests: Debian's cloud kernel, unpacked and not installed.

use crate::run::{answer, run};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The package that always depends on the newest cloud kernel of the release.
const NEWEST: &str = "linux-image-cloud-amd64";
/// What is kept of it.
const KERNEL: &str = "vmlinuz";
const MODULES: &str = "modules";

/// Puts `vmlinuz` into the folder. Once it is there, nothing is asked of the network again;
/// remove it for a newer one.
pub fn fetch(folder: &Path) -> Result<()> {
    match folder.join(KERNEL).is_file() {
        true => Ok(()),
        false => fetch_anew(folder),
    }
}

/// The same, and its modules: the folder in which they are, with `modules.builtin`.
pub fn fetch_modules(folder: &Path) -> Result<PathBuf> {
    let modules = folder.join(MODULES);
    // Both or none: modules serve the kernel of their own package only.
    if !modules.is_dir() || !folder.join(KERNEL).is_file() {
        fetch_anew(folder)?;
    }
    Ok(modules)
}

fn fetch_anew(folder: &Path) -> Result<()> {
    let package = newest_package()?;
    let work = folder.join("kernel");
    if work.exists() {
        // Left over from a run that was cut short.
        fs::remove_dir_all(&work).with_context(|| format!("cannot clear {}", work.display()))?;
    }
    fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
    run(Command::new("apt-get")
        .current_dir(&work)
        // apt's own user may not write into our folder.
        .args(["--quiet", "--option", "APT::Sandbox::User=root"])
        .args(["download", &package]))?;
    let archive = only_file(&work, |name| name.ends_with(".deb"))?;
    let unpacked = work.join("unpacked");
    run(Command::new("dpkg").arg("-x").args([&archive, &unpacked]))?;
    let image = only_file(&unpacked.join("boot"), |name| name.starts_with("vmlinuz-"))?;
    // Debian has `/lib` in `/usr` in newer releases.
    let roots = [
        unpacked.join("lib/modules"),
        unpacked.join("usr/lib/modules"),
    ];
    let root = roots.iter().find(|root| root.is_dir());
    let own = only_file(root.context("the kernel has no modules")?, |_| true)?;
    let modules = folder.join(MODULES);
    if modules.exists() {
        fs::remove_dir_all(&modules)
            .with_context(|| format!("cannot clear {}", modules.display()))?;
    }
    for (from, to) in [(&own, modules), (&image, folder.join(KERNEL))] {
        fs::rename(from, &to).with_context(|| format!("cannot put {} in place", to.display()))?;
    }
    fs::remove_dir_all(&work).with_context(|| format!("cannot clear {}", work.display()))
}

/// The versioned package behind [`NEWEST`].
fn newest_package() -> Result<String> {
    let show = || answer(Command::new("apt-cache").args(["show", "--no-all-versions", NEWEST]));
    let said = match show() {
        Ok(said) => said,
        // A machine on which apt was never updated knows no package at all.
        Err(_) => {
            run(Command::new("apt-get").args(["--quiet", "update"]))?;
            show()?
        }
    };
    versioned_dependency(&said).with_context(|| format!("{NEWEST} depends on no kernel package"))
}

/// Reads `Depends: linux-image-6.1.0-1-cloud-amd64 (= 6.1.1-1), ...`.
fn versioned_dependency(show: &str) -> Option<String> {
    show.lines()
        .find_map(|line| line.strip_prefix("Depends: "))?
        .split(',')
        .filter_map(|dependency| dependency.split_whitespace().next())
        .find(|name| name.starts_with("linux-image-"))
        .map(str::to_owned)
}

fn only_file(folder: &Path, wanted: impl Fn(&str) -> bool) -> Result<PathBuf> {
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
    fn the_versioned_kernel_is_found_among_the_dependencies() {
        let show = "Package: linux-image-cloud-amd64\nVersion: 6.1.192-2\n\
                    Depends: kmod, linux-image-6.1.0-56-cloud-amd64 (= 6.1.192-2)\n";
        let found = versioned_dependency(show);
        assert_eq!(found.as_deref(), Some("linux-image-6.1.0-56-cloud-amd64"));
        assert_eq!(versioned_dependency("Package: x\n"), None);
    }

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
