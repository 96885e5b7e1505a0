//! How many packages the project pulls in.

use super::Problem;

/// Packages in Cargo.lock, ours among them.
const PACKAGES_MAX: usize = 350;

/// Counts the packages of a lock file.
pub fn check(lock: &str) -> Option<Problem> {
    let packages = lock.lines().filter(|line| *line == "[[package]]").count();
    (packages > PACKAGES_MAX).then(|| {
        let message = format!("{packages} packages, at most {PACKAGES_MAX} may be");
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
    fn the_limit_passes_and_one_more_does_not() {
        assert_eq!(check(&lock(PACKAGES_MAX)), None);
        let problem = check(&lock(PACKAGES_MAX + 1)).unwrap();
        assert!(problem.message.starts_with("351 packages"), "{problem}");
    }
}
