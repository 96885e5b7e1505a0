//! `fuzz`: builds the fuzz targets of `fuzz/` and runs each for a while, from the corpus in the tree and from
//! what earlier runs on this machine found.
//!
//! libFuzzer needs a nightly compiler (`-Cpasses=sancov-module`); nothing else of the project does. The total of
//! all runs is kept in `docs/results/fuzz/executions.json`.

use crate::run::{answer, run};
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// How long a target is run, unless told otherwise.
pub const SECONDS: u64 = 10;

const TARGETS: &str = "fuzz/fuzz_targets";
const RESULTS: &str = "docs/results/fuzz";
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// What `cargo fuzz` sets, but for the address sanitizer: the code under test has no unsafe block.
const FLAGS: &[&str] = &[
    "--cfg fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cdebug-assertions=on",
    "-Coverflow-checks=on",
];

/// All runs of one target so far.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Total {
    target: String,
    executions: u64,
    seconds: u64,
    /// Runs that ended with an input that fails.
    findings: u64,
    /// Of the last run.
    commit: String,
}

/// Runs `target`, or all, for so many seconds each. Fails if an input was found that fails.
pub fn fuzz(workspace: &Workspace, target: Option<&str>, seconds: u64) -> Result<()> {
    let all = targets(&workspace.root)?;
    let chosen = match target {
        Some(target) => {
            let known = all.iter().any(|name| name == target);
            ensure!(known, "no target {target}; there are {}", all.join(", "));
            vec![target.to_owned()]
        }
        None => all,
    };
    let folder = workspace.target.join("fuzz");
    build(workspace, &folder, target)?;
    let commit = workspace.commit()?;
    let mut found = Vec::new();
    for name in &chosen {
        let total = run_one(workspace, &folder, name, seconds)?;
        println!(
            "{name}: {} executions in {} s, {} findings",
            total.executions, total.seconds, total.findings
        );
        if total.findings > 0 {
            found.push(name.as_str());
        }
        add(&workspace.root.join(RESULTS), total, &commit)?;
    }
    if !found.is_empty() {
        let artifacts = folder.join("artifacts");
        bail!("{}: see {}", found.join(", "), artifacts.display());
    }
    Ok(())
}

/// The targets by name: each is a file.
fn targets(root: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(root.join(TARGETS)).context(TARGETS)? {
        let path = entry?.path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        names.push(stem.into_owned());
    }
    names.sort();
    Ok(names)
}

fn build(workspace: &Workspace, folder: &Path, target: Option<&str>) -> Result<()> {
    let toolchains = answer(Command::new("rustup").args(["toolchain", "list"]))?;
    if !toolchains.lines().any(|line| line.starts_with("nightly")) {
        run(Command::new("rustup")
            .args(["toolchain", "install", "nightly"])
            .args(["--profile", "minimal"]))?;
    }
    let mut command = Command::new("rustup");
    command
        .args(["run", "nightly", "cargo", "build", "--release"])
        .args(["--manifest-path", "fuzz/Cargo.toml", "--target", TRIPLE])
        .arg("--target-dir")
        .arg(folder)
        .current_dir(&workspace.root)
        .env("RUSTFLAGS", FLAGS.join(" "))
        .env_remove("RUSTUP_TOOLCHAIN")
        .env_remove("CARGO");
    if let Some(target) = target {
        command.args(["--bin", target]);
    }
    run(&mut command)
}

fn run_one(workspace: &Workspace, folder: &Path, name: &str, seconds: u64) -> Result<Total> {
    let corpus = folder.join("corpus").join(name);
    let artifacts = folder.join("artifacts").join(name);
    let logs = folder.join("logs");
    for folder in [&corpus, &artifacts, &logs] {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let log = logs.join(name);
    let mut command = Command::new(folder.join(TRIPLE).join("release").join(name));
    command
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .args(["-print_final_stats=1", "-timeout=20", "-rss_limit_mb=2048"])
        .args(["-max_len=65536", "-reload=0"])
        .arg(&corpus)
        .current_dir(&workspace.root)
        .stderr(File::create(&log).with_context(|| log.display().to_string())?);
    let ours: PathBuf = ["fuzz", "corpus", name].iter().collect();
    if workspace.root.join(&ours).is_dir() {
        command.arg(ours);
    }
    let begin = Instant::now();
    let status = command.status().with_context(|| name.to_owned())?;
    let said = fs::read_to_string(&log).with_context(|| log.display().to_string())?;
    Ok(Total {
        target: name.to_owned(),
        executions: executions(&said).with_context(|| log.display().to_string())?,
        seconds: begin.elapsed().as_secs(),
        findings: u64::from(!status.success()),
        commit: String::new(),
    })
}

/// What libFuzzer says at its end.
fn executions(said: &str) -> Result<u64> {
    let count = |line: &str| {
        line.strip_prefix("stat::number_of_executed_units:")?
            .trim()
            .parse()
            .ok()
    };
    let count = said.lines().rev().find_map(count);
    count.context("libFuzzer did not tell how often it ran the target")
}

/// Adds a run to those before.
fn add(folder: &Path, last: Total, commit: &str) -> Result<()> {
    let path = folder.join("executions.json");
    let totals: Vec<Total> = match fs::read_to_string(&path) {
        Ok(text) => serde_json::from_str(&text).with_context(|| path.display().to_string())?,
        Err(_) => Vec::new(),
    };
    let named = |total: Total| (total.target.clone(), total);
    let mut totals: BTreeMap<String, Total> = totals.into_iter().map(named).collect();
    let total = totals.entry(last.target.clone()).or_default();
    *total = Total {
        executions: total.executions + last.executions,
        seconds: total.seconds + last.seconds,
        findings: total.findings + last.findings,
        commit: commit.to_owned(),
        target: last.target,
    };
    let totals: Vec<&Total> = totals.values().collect();
    fs::create_dir_all(folder)?;
    let text = serde_json::to_string_pretty(&totals)? + "\n";
    fs::write(&path, text).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executions_are_read_from_what_libfuzzer_says() {
        let said = "#2\tINITED\n#5\tDONE\nstat::number_of_executed_units: 4711\nstat::x: 1\n";
        assert_eq!(executions(said).unwrap(), 4711);
        assert!(executions("").is_err());
    }

    #[test]
    fn runs_add_up() {
        let folder = tempfile::tempdir().unwrap();
        let run = |target: &str, executions| Total {
            target: target.to_owned(),
            executions,
            seconds: 2,
            ..Total::default()
        };
        for (target, executions) in [("b", 1), ("a", 10), ("b", 5)] {
            add(folder.path(), run(target, executions), "c0ffee").unwrap();
        }
        let text = fs::read_to_string(folder.path().join("executions.json")).unwrap();
        let totals: Vec<Total> = serde_json::from_str(&text).unwrap();
        let found: Vec<_> = totals
            .iter()
            .map(|total| (total.target.as_str(), total.executions, total.seconds))
            .collect();
        assert_eq!(found, [("a", 10, 2), ("b", 6, 4)]);
    }

    /// Each target is built, has a corpus in the tree, and that is small.
    #[test]
    fn every_target_is_declared_and_has_a_small_corpus() {
        const FILES_MAX: usize = 20;
        const BYTES_MAX: u64 = 32 << 10;
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let manifest = fs::read_to_string(root.join("fuzz/Cargo.toml")).unwrap();
        let targets = targets(&root).unwrap();
        assert_eq!(manifest.matches("[[bin]]").count(), targets.len());
        for name in targets {
            let path = format!("path = \"fuzz_targets/{name}.rs\"");
            assert!(manifest.contains(&path), "{name}");
            let corpus = fs::read_dir(root.join("fuzz/corpus").join(&name)).expect(&name);
            let lengths: Vec<u64> = corpus
                .map(|file| file.unwrap().metadata().unwrap().len())
                .collect();
            assert!((1..=FILES_MAX).contains(&lengths.len()), "{name}");
            assert!(lengths.iter().sum::<u64>() <= BYTES_MAX, "{name}");
        }
    }
}
