//! The kernel of the Linux guests: Debian's cloud kernel, unpacked and not installed.

use super::package::{self, only_file};
use crate::run::{answer, run};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The package that always depends on the newest cloud kernel of the release.
const NEWEST: &str = "linux-image-cloud-amd64";
/// What is kept of it.
const KERNEL: &str = "vmlinuz";
const MODULES: &str = "modules";

/// Puts `vmlinuz` and its modules into the folder, and gives the folder in which these are, with
/// `modules.builtin`. Once they are there, nothing is asked of the network again; remove them for newer ones.
pub fn fetch(folder: &Path) -> Result<PathBuf> {
    let modules = folder.join(MODULES);
    // Both or none: modules serve the kernel of their own package only.
    if !modules.is_dir() || !folder.join(KERNEL).is_file() {
        fetch_anew(folder)?;
    }
    Ok(modules)
}

fn fetch_anew(folder: &Path) -> Result<()> {
    let unpacked = package::unpack(folder, &newest_package()?)?;
    let unpacked = &unpacked.root;
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
    Ok(())
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
}
