//! Limits the number of packages that the project depends on.

use super::Problem;

/// Upper bound on the packages in Cargo.lock, including the workspace.
const PACKAGES_MAX: usize = 350;

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
