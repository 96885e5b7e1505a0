//! `fuzz`: builds the fuzz targets of `fuzz/` and runs each for a while, from the corpus in the tree and from
//! what earlier runs on this machine found.
//!
//! libFuzzer needs a nightly compiler (`-Cpasses=sancov-module`); nothing else of the project does. The total of
//! all runs is kept in `docs/results/fuzz/executions.json`, and `--until` goes on from there.

use crate::run::{answer, run};
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
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

/// Longest input, in bytes. Longer ones cost executions and reach nothing else: no decoder has a bound that a few
/// KiB do not reach.
const INPUT_BYTES_MAX: usize = 4 << 10;

/// The same for targets that read each input several times, so that it takes them a millisecond at 4 KiB.
const SLOW_INPUT_BYTES_MAX: usize = 1 << 10;

/// The same for `guest_state`, whose input is cut into page tables of 4 KiB: two lead to each other.
const PAGE_TABLES_BYTES_MAX: usize = 8 << 10;

/// How long each target is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Budget {
    /// This number of seconds.
    Seconds(u64),
    /// Until all of its runs so far add up to so many executions.
    Total(u64),
}

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

/// Runs `target`, or all, `jobs` of them at a time. Fails if an input was found that fails.
pub fn fuzz(
    workspace: &Workspace,
    target: Option<&str>,
    budget: Budget,
    jobs: usize,
) -> Result<()> {
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
    let results = workspace.root.join(RESULTS);
    let record = Mutex::new(Record::read(&results, &workspace.commit()?)?);
    let next = AtomicUsize::new(0);
    let worker = || {
        while let Some(name) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
            let recorded = lock(&record).executions(name);
            let Some(limit) = limit(budget, recorded) else {
                continue;
            };
            let total = run_one(workspace, &folder, name, &limit)?;
            println!(
                "{name}: {} executions in {} s, {} findings",
                total.executions, total.seconds, total.findings
            );
            lock(&record).add(total)?;
        }
        Ok::<_, anyhow::Error>(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(worker)).collect();
        let ends = workers.into_iter().map(|worker| match worker.join() {
            Ok(end) => end,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        ends.collect::<Result<Vec<()>>>()
    })?;
    let found = lock(&record).found.join(", ");
    if !found.is_empty() {
        let artifacts = folder.join("artifacts");
        bail!("{found}: see {}", artifacts.display());
    }
    Ok(())
}

/// A record is whole between two of its changes, so a panic elsewhere does not spoil it.
fn lock<'a>(record: &'a Mutex<Record>) -> std::sync::MutexGuard<'a, Record> {
    record
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The argument that ends a run, or none where nothing is left to run.
fn limit(budget: Budget, recorded: u64) -> Option<String> {
    match budget {
        Budget::Seconds(seconds) => Some(format!("-max_total_time={seconds}")),
        Budget::Total(total) => match total.saturating_sub(recorded) {
            0 => None,
            left => Some(format!("-runs={left}")),
        },
    }
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

fn run_one(workspace: &Workspace, folder: &Path, name: &str, limit: &str) -> Result<Total> {
    let corpus = folder.join("corpus").join(name);
    let artifacts = folder.join("artifacts").join(name);
    let logs = folder.join("logs");
    for folder in [&corpus, &artifacts, &logs] {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let log = logs.join(name);
    let mut command = Command::new(folder.join(TRIPLE).join("release").join(name));
    command
        .arg(limit)
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .args(["-print_final_stats=1", "-timeout=60", "-rss_limit_mb=2048"])
        .arg(format!("-max_len={}", input_bytes_max(name)))
        .arg("-reload=0")
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

fn input_bytes_max(target: &str) -> usize {
    match target {
        "guest_state" => PAGE_TABLES_BYTES_MAX,
        "arguments" | "device_state" | "rewrite" => SLOW_INPUT_BYTES_MAX,
        _ => INPUT_BYTES_MAX,
    }
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

/// The totals of all targets, in a file that is written anew after each run.
struct Record {
    path: PathBuf,
    commit: String,
    totals: BTreeMap<String, Total>,
    /// Targets that failed on an input since the record was read.
    found: Vec<String>,
}

impl Record {
    fn read(folder: &Path, commit: &str) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        let path = folder.join("executions.json");
        let totals: Vec<Total> = match fs::read_to_string(&path) {
            Ok(text) => serde_json::from_str(&text).with_context(|| path.display().to_string())?,
            Err(_) => Vec::new(),
        };
        let named = |total: Total| (total.target.clone(), total);
        Ok(Self {
            path,
            commit: commit.to_owned(),
            totals: totals.into_iter().map(named).collect(),
            found: Vec::new(),
        })
    }

    fn executions(&self, target: &str) -> u64 {
        self.totals.get(target).map_or(0, |total| total.executions)
    }

    /// Adds a run to those before.
    fn add(&mut self, last: Total) -> Result<()> {
        if last.findings > 0 {
            self.found.push(last.target.clone());
        }
        let total = self.totals.entry(last.target.clone()).or_default();
        *total = Total {
            executions: total.executions + last.executions,
            seconds: total.seconds + last.seconds,
            findings: total.findings + last.findings,
            commit: self.commit.clone(),
            target: last.target,
        };
        let totals: Vec<&Total> = self.totals.values().collect();
        let text = serde_json::to_string_pretty(&totals)? + "\n";
        fs::write(&self.path, text).with_context(|| self.path.display().to_string())
    }
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
        let mut record = Record::read(folder.path(), "c0ffee").unwrap();
        record.add(run("b", 1)).unwrap();
        let mut record = Record::read(folder.path(), "c0ffee").unwrap();
        for (target, executions) in [("a", 10), ("b", 5)] {
            record.add(run(target, executions)).unwrap();
        }
        let record = Record::read(folder.path(), "c0ffee").unwrap();
        let found: Vec<_> = record
            .totals
            .values()
            .map(|total| (total.target.as_str(), total.executions, total.seconds))
            .collect();
        assert_eq!(found, [("a", 10, 2), ("b", 6, 4)]);
        assert_eq!(limit(Budget::Total(10), record.executions("a")), None);
        let rest = limit(Budget::Total(10), record.executions("b"));
        assert_eq!(rest.as_deref(), Some("-runs=4"));
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
