//! Limits the number of packages that the project depends on, and keeps both lock files current.

use super::Problem;
use crate::run::{cargo, output};
use std::path::Path;

/// Upper bound on the packages in Cargo.lock, including the workspace.
const PACKAGES_MAX: usize = 350;

/// The fuzz targets are a workspace with a lock file of its own: no build of this workspace updates
/// it when a crate gets a new dependency.
pub fn check_fuzz_lock(root: &Path) -> Option<Problem> {
    let mut metadata = cargo();
    metadata
        .args(["metadata", "--locked", "--format-version=1"])
        .args(["--filter-platform", crate::fuzz::TRIPLE])
        .args(["--manifest-path", "fuzz/Cargo.toml"])
        .current_dir(root);
    let error = output(&mut metadata).err()?;
    let message =
        format!("{error:#}; if it is out of date: cargo update --workspace in the folder fuzz");
    Some(Problem::error("fuzz/Cargo.lock", 0, message))
}

/// Counts the packages of a lock file.
pub fn check(lock: &str) -> Option<Problem> {
    let packages = lock.lines().filter(|line| *line == "[[package]]").count();
    (packages > PACKAGES_MAX).then(|| {
        let message = format!("{packages} packages, at most {PACKAGES_MAX} are allowed");
        Problem::error("Cargo.lock", 0, message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock(packages: usize) -> String {
        "[[package]]\nname = \"x\"\n\n".repeat(packages)
    }

    #[test]
    fn the_limit_passes_and_one_more_fails() {
        assert_eq!(check(&lock(PACKAGES_MAX)), None);
        let problem = check(&lock(PACKAGES_MAX + 1)).unwrap();
        assert!(problem.message.starts_with("351 packages"), "{problem}");
    }
}
