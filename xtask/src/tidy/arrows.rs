//! Checks dependencies between crates: only those of the architecture are allowed.

use super::Problem;
use crate::workspace::Package;

/// Every crate of the workspace and the workspace crates that it may use.
const RULES: &[(&str, &[&str])] = &[
    ("stillframe-fault", &[]),
    ("stillframe-sys", &[]),
    ("stillframe-page", &[]),
    ("stillframe-link", &[]),
    ("stillframe-nbd", &[]),
    ("stillframe-qemu", &["stillframe-page", "stillframe-sys"]),
    ("stillframe-repo", &["stillframe-fault", "stillframe-page"]),
    (
        "stillframe-engine",
        &[
            "stillframe-fault",
            "stillframe-sys",
            "stillframe-qemu",
            "stillframe-page",
            "stillframe-link",
            "stillframe-nbd",
            "stillframe-repo",
        ],
    ),
    (
        "stillframe",
        &["stillframe-engine", "stillframe-link", "stillframe-repo"],
    ),
    // End-to-end tests use only the command line.
    ("stillframe-harness", &[]),
    ("stillframe-stress", &["stillframe-harness"]),
    (
        "stillframe-bench",
        &["stillframe-harness", "stillframe-stress"],
    ),
    (
        "stillframe-e2e",
        &["stillframe-harness", "stillframe-stress"],
    ),
    ("stillframe-guest-agent", &[]),
    ("stillframe-guest-workload", &["stillframe-sys"]),
    ("xtask", &[]),
];

/// Compares each crate's dependencies of all kinds with its rule.
pub fn check(packages: &[Package]) -> Vec<Problem> {
    check_against(RULES, packages)
}

fn check_against(rules: &[(&str, &[&str])], packages: &[Package]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut report = |name: &str, message| problems.push(Problem::error(name, 0, message));
    for package in packages {
        let Some((_, allowed)) = rules.iter().find(|(name, _)| *name == package.name) else {
            let message = "this crate has no rule: add one in xtask/src/tidy/arrows.rs";
            report(&package.name, message.to_owned());
            continue;
        };
        for dependency in &package.dependencies {
            let own = packages.iter().any(|other| other.name == dependency.name);
            if own && !allowed.contains(&dependency.name.as_str()) {
                let may = match allowed {
                    [] => "no crate of the workspace".to_owned(),
                    _ => allowed.join(", "),
                };
                report(
                    &package.name,
                    format!("uses {}; it may use {may}", dependency.name),
                );
            }
        }
    }
    for (name, _) in rules {
        if packages.iter().all(|package| package.name != *name) {
            report(
                name,
                "has a rule but is not a crate of the workspace".to_owned(),
            );
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Dependency;

    const SAMPLE: &[(&str, &[&str])] = &[("low", &[]), ("high", &["low"])];

    fn package(name: &str, dependencies: &[&str]) -> Package {
        Package {
            name: name.to_owned(),
            dependencies: dependencies
                .iter()
                .map(|name| Dependency {
                    name: (*name).to_owned(),
                })
                .collect(),
        }
    }

    fn messages(packages: &[Package]) -> Vec<String> {
        let problems = check_against(SAMPLE, packages);
        problems.iter().map(Problem::to_string).collect()
    }

    #[test]
    fn allowed_dependencies_and_external_crates_pass() {
        let packages = [
            package("low", &["serde"]),
            package("high", &["low", "serde"]),
        ];
        assert_eq!(messages(&packages), [""; 0]);
    }

    #[test]
    fn a_forbidden_dependency_fails() {
        let packages = [package("low", &["high"]), package("high", &[])];
        assert_eq!(
            messages(&packages),
            ["error: low: uses high; it may use no crate of the workspace"]
        );
    }

    #[test]
    fn a_crate_without_a_rule_fails() {
        let packages = [
            package("low", &[]),
            package("high", &[]),
            package("new", &[]),
        ];
        assert!(messages(&packages)[0].starts_with("error: new: this crate has no rule"));
    }

    #[test]
    fn a_rule_without_a_crate_fails() {
        let found = messages(&[package("low", &[])]);
        assert_eq!(
            found,
            ["error: high: has a rule but is not a crate of the workspace"]
        );
    }
}
