//! Which crate may use which: the arrows of the architecture, and no others.

use super::Problem;
use crate::workspace::Package;

/// Every crate of the workspace with the crates of ours that it may use.
const RULES: &[(&str, &[&str])] = &[
    ("stillframe-fault", &[]),
    ("stillframe-sys", &[]),
    ("stillframe-page", &[]),
    ("stillframe-qemu", &["stillframe-sys"]),
    ("stillframe-repo", &["stillframe-fault", "stillframe-page"]),
    (
        "stillframe-engine",
        &[
            "stillframe-fault",
            "stillframe-sys",
            "stillframe-qemu",
            "stillframe-page",
            "stillframe-repo",
        ],
    ),
    ("stillframe", &["stillframe-engine", "stillframe-repo"]),
    // Tests of the whole know it by its command line alone.
    ("stillframe-e2e", &[]),
    ("stillframe-guest-workload", &[]),
    ("xtask", &[]),
];

/// Compares each crate's dependencies, of whatever kind, with its rule.
pub fn check(packages: &[Package]) -> Vec<Problem> {
    check_against(RULES, packages)
}

fn check_against(rules: &[(&str, &[&str])], packages: &[Package]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut tell = |name: &str, message| problems.push(Problem::error(name, 0, message));
    for package in packages {
        let Some((_, allowed)) = rules.iter().find(|(name, _)| *name == package.name) else {
            let message = "this crate has no rule: say in tidy which crates it may use";
            tell(&package.name, message.to_owned());
            continue;
        };
        for dependency in &package.dependencies {
            let ours = packages.iter().any(|other| other.name == dependency.name);
            if ours && !allowed.contains(&dependency.name.as_str()) {
                let may = match allowed {
                    [] => "nothing of ours".to_owned(),
                    _ => allowed.join(", "),
                };
                tell(
                    &package.name,
                    format!("uses {}; it may use {may}", dependency.name),
                );
            }
        }
    }
    for (name, _) in rules {
        if packages.iter().all(|package| package.name != *name) {
            tell(
                name,
                "has a rule and is no crate of the workspace".to_owned(),
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
    fn arrows_that_the_rules_have_pass_and_other_peoples_crates_do_not_matter() {
        let packages = [
            package("low", &["serde"]),
            package("high", &["low", "serde"]),
        ];
        assert_eq!(messages(&packages), [""; 0]);
    }

    #[test]
    fn an_arrow_the_other_way_does_not_pass() {
        let packages = [package("low", &["high"]), package("high", &[])];
        assert_eq!(
            messages(&packages),
            ["error: low: uses high; it may use nothing of ours"]
        );
    }

    #[test]
    fn a_crate_without_a_rule_does_not_pass() {
        let packages = [
            package("low", &[]),
            package("high", &[]),
            package("new", &[]),
        ];
        assert!(messages(&packages)[0].starts_with("error: new: this crate has no rule"));
    }

    #[test]
    fn a_rule_without_a_crate_does_not_pass() {
        let found = messages(&[package("low", &[])]);
        assert_eq!(
            found,
            ["error: high: has a rule and is no crate of the workspace"]
        );
    }
}
