//! Fetches the kernel of the Linux guests: Debian's cloud kernel, not installed.

use super::package::{self, only_file};
use crate::run::{output, run};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The package that always depends on the newest cloud kernel of the release.
const NEWEST: &str = "linux-image-cloud-amd64";
/// Its files in the folder of the guests.
const KERNEL: &str = "vmlinuz";
const MODULES: &str = "modules";

/// Fetches `vmlinuz` and its modules into the folder, once; remove them to get newer ones. Returns the folder of the
/// modules, which also has `modules.builtin`.
pub fn fetch(folder: &Path) -> Result<PathBuf> {
    let modules = folder.join(MODULES);
    // Both or none: modules fit only the kernel of their own package.
    if !modules.is_dir() || !folder.join(KERNEL).is_file() {
        fetch_both(folder)?;
    }
    Ok(modules)
}

fn fetch_both(folder: &Path) -> Result<()> {
    let unpacked = package::unpack(folder, &newest_package()?)?;
    let unpacked = &unpacked.root;
    let image = only_file(&unpacked.join("boot"), |name| name.starts_with("vmlinuz-"))?;
    // In newer releases of Debian, `/lib` is in `/usr`.
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
        fs::rename(from, &to).with_context(|| format!("cannot install {}", to.display()))?;
    }
    Ok(())
}

/// The versioned package behind [`NEWEST`].
fn newest_package() -> Result<String> {
    let show = || output(Command::new("apt-cache").args(["show", "--no-all-versions", NEWEST]));
    let shown = match show() {
        Ok(shown) => shown,
        // Before the first update, apt has no list of packages.
        Err(_) => {
            run(Command::new("apt-get").args(["--quiet", "update"]))?;
            show()?
        }
    };
    versioned_dependency(&shown).with_context(|| format!("{NEWEST} depends on no kernel package"))
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
