//! `fuzz`: builds the fuzz targets of `fuzz/` and runs them, from the corpus in the tree and from inputs that earlier
//! runs on this machine found.
//!
//! The stable compiler suffices: coverage is a pass of LLVM (`-Cpasses=sancov-module`), and the crate `libfuzzer-sys`
//! contains libFuzzer. The total of all runs is in `docs/results/fuzz/executions.json`; `--until` continues from it.
//! `ci` runs all targets for seconds from the corpus in the tree alone, and records nothing.

mod record;

use crate::run::{cargo, run};
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail, ensure};
use record::{Record, Total};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

/// Default time to run a target, in seconds.
pub const SECONDS: u64 = 10;

/// Selects all targets on the command line.
const ALL: &str = "all";

/// Time for which `ci` runs each target, in seconds.
const CI_SECONDS: u64 = 2;

/// Number of targets that `ci` runs at the same time.
const CI_JOBS: usize = 2;

/// Profiles of `fuzz/Cargo.toml`. The one of `ci` builds faster and runs slower.
const PROFILE: &str = "release";
const CI_PROFILE: &str = "ci";

const TARGETS: &str = "fuzz/fuzz_targets";
const CORPUS: &str = "fuzz/corpus";
const RESULTS: &str = "docs/results/fuzz";
pub const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// The words of libFuzzer before the path of an input that it keeps.
const KEPT: &str = "Test unit written to ";

/// The flags of `cargo fuzz` without the address sanitizer: the code under test has no unsafe block.
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

/// Upper bound on an input, in bytes. Longer ones cost executions and reach no more code: a few KiB reach every bound
/// of every decoder.
const INPUT_BYTES_MAX: usize = 4 << 10;

/// The same for targets that read each input several times, which takes a millisecond at 4 KiB.
const SLOW_INPUT_BYTES_MAX: usize = 1 << 10;

/// The same for `guest_state`, whose input is split into page tables of 4 KiB: two can refer to each other.
const PAGE_TABLES_BYTES_MAX: usize = 8 << 10;

/// The end of the run of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Budget {
    /// After this number of seconds.
    Seconds(u64),
    /// When all of its recorded runs add up to this number of executions.
    Total(u64),
}

/// The folders of built targets and of their inputs.
struct Folders {
    root: PathBuf,
    /// The built targets.
    binaries: PathBuf,
    /// Inputs that reach new code, by target.
    corpora: PathBuf,
    /// Inputs that fail, by target.
    artifacts: PathBuf,
    logs: PathBuf,
}

/// The result of one run.
#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    executions: u64,
    seconds: u64,
    /// The input that fails, or another failure.
    finding: Option<String>,
}

/// Runs `target`, or all targets, `jobs` of them at the same time. Fails if a run found an input that fails.
pub fn fuzz(
    workspace: &Workspace,
    target: Option<&str>,
    budget: Budget,
    jobs: usize,
) -> Result<()> {
    let all = targets(&workspace.root)?;
    let target = target.filter(|&target| target != ALL);
    let chosen = match target {
        Some(target) => {
            let known = all.iter().any(|name| name == target);
            ensure!(
                known,
                "no target {target}; the targets are {}",
                all.join(", ")
            );
            vec![target.to_owned()]
        }
        None => all,
    };
    let folders = Folders::new(workspace, PROFILE, "corpus");
    build(workspace, PROFILE, target)?;
    let results = workspace.root.join(RESULTS);
    let record = Mutex::new(Record::read(&results, &workspace.commit()?)?);
    let limit = |name: &str| limit(budget, lock(&record).executions(name));
    let done = |name: &str, outcome: &Outcome| {
        lock(&record).add(Total {
            target: name.to_owned(),
            executions: outcome.executions,
            seconds: outcome.seconds,
            findings: u64::from(outcome.finding.is_some()),
            commit: String::new(),
        })
    };
    run_all(&folders, &chosen, jobs, limit, done)
}

/// Builds all targets and runs each for [`CI_SECONDS`]. Fails if a run found an input that fails.
pub fn smoke(workspace: &Workspace) -> Result<()> {
    let folders = Folders::new(workspace, CI_PROFILE, "corpus-ci");
    match fs::remove_dir_all(&folders.corpora) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).context(folders.corpora.display().to_string());
        }
        _ => {}
    }
    build(workspace, CI_PROFILE, None)?;
    let limit = |_: &str| limit(Budget::Seconds(CI_SECONDS), 0);
    let all = targets(&workspace.root)?;
    run_all(&folders, &all, CI_JOBS, limit, |_, _| Ok(()))
}

/// Runs all these targets, even if one fails. `limit` gives the end of a run, and `done` receives its outcome.
fn run_all(
    folders: &Folders,
    names: &[String],
    jobs: usize,
    limit: impl Fn(&str) -> Option<String> + Sync,
    done: impl Fn(&str, &Outcome) -> Result<()> + Sync,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let findings = Mutex::new(Vec::new());
    let worker = || {
        while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
            let Some(limit) = limit(name) else {
                continue;
            };
            let outcome = run_one(folders, name, &limit)?;
            let (executions, seconds) = (outcome.executions, outcome.seconds);
            println!("{name}: {executions} executions in {seconds} s");
            done(name, &outcome)?;
            if let Some(finding) = outcome.finding {
                lock(&findings).push(format!("{name}: {finding}"));
            }
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
    let findings = lock(&findings);
    if !findings.is_empty() {
        bail!("fuzz targets that fail:\n{}", findings.join("\n"));
    }
    Ok(())
}

/// Locks a mutex, also a poisoned one: the values here are consistent between two changes.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The argument that ends a run; `None` if nothing is left to run.
fn limit(budget: Budget, recorded: u64) -> Option<String> {
    match budget {
        Budget::Seconds(seconds) => Some(format!("-max_total_time={seconds}")),
        Budget::Total(total) => match total.saturating_sub(recorded) {
            0 => None,
            left => Some(format!("-runs={left}")),
        },
    }
}

/// The names of the targets: each is a file.
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

impl Folders {
    fn new(workspace: &Workspace, profile: &str, corpora: &str) -> Self {
        let folder = target_folder(workspace);
        Self {
            root: workspace.root.clone(),
            binaries: folder.join(TRIPLE).join(profile),
            corpora: folder.join(corpora),
            artifacts: folder.join("artifacts"),
            logs: folder.join("logs"),
        }
    }
}

/// A folder of its own: the rest of the workspace is built with other flags.
fn target_folder(workspace: &Workspace) -> PathBuf {
    workspace.target.join("fuzz")
}

fn build(workspace: &Workspace, profile: &str, target: Option<&str>) -> Result<()> {
    let mut command = cargo();
    command
        .args(["build", "--locked", "--profile", profile])
        .args(["--manifest-path", "fuzz/Cargo.toml", "--target", TRIPLE])
        .arg("--target-dir")
        .arg(target_folder(workspace))
        .current_dir(&workspace.root)
        .env("RUSTFLAGS", FLAGS.join(" "));
    if let Some(target) = target {
        command.args(["--bin", target]);
    }
    run(&mut command)
}

fn run_one(folders: &Folders, name: &str, limit: &str) -> Result<Outcome> {
    let corpus = folders.corpora.join(name);
    let artifacts = folders.artifacts.join(name);
    for folder in [&corpus, &artifacts, &folders.logs] {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let log = folders.logs.join(name);
    let mut command = Command::new(folders.binaries.join(name));
    command
        .arg(limit)
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .args(["-print_final_stats=1", "-timeout=60", "-rss_limit_mb=2048"])
        .arg(format!("-max_len={}", input_bytes_max(name)))
        .arg("-reload=0")
        .arg(&corpus)
        .current_dir(&folders.root)
        .stderr(File::create(&log).with_context(|| log.display().to_string())?);
    let ours = Path::new(CORPUS).join(name);
    if folders.root.join(&ours).is_dir() {
        command.arg(ours);
    }
    let begin = Instant::now();
    let status = command.status().with_context(|| name.to_owned())?;
    // The output of a target need not be UTF-8.
    let output = fs::read(&log).with_context(|| log.display().to_string())?;
    let output = String::from_utf8_lossy(&output);
    let executions = executions(&output);
    let finding = (!status.success()).then(|| match kept(&output) {
        Some(input) => format!("fails on {input}, see {}", log.display()),
        None => format!("{status}, see {}", log.display()),
    });
    ensure!(
        executions.is_some() || finding.is_some(),
        "{name} did not report its executions, see {}",
        log.display()
    );
    Ok(Outcome {
        executions: executions.unwrap_or_default(),
        seconds: begin.elapsed().as_secs(),
        finding,
    })
}

fn input_bytes_max(target: &str) -> usize {
    match target {
        "guest_state" => PAGE_TABLES_BYTES_MAX,
        "arguments" | "device_state" | "layer" | "rewrite" => SLOW_INPUT_BYTES_MAX,
        _ => INPUT_BYTES_MAX,
    }
}

/// The number of executions that libFuzzer prints at its end.
fn executions(output: &str) -> Option<u64> {
    let count = |line: &str| {
        line.strip_prefix("stat::number_of_executed_units:")?
            .trim()
            .parse()
            .ok()
    };
    output.lines().rev().find_map(count)
}

/// The input on which a run ended.
fn kept(output: &str) -> Option<&str> {
    output
        .lines()
        .rev()
        .find_map(|line| Some(line.split_once(KEPT)?.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of libFuzzer at the end of a run that fails.
    const FAILED: &str = "\
#2\tINITED\n\
artifact_prefix='/a/'; Test unit written to /a/slow-unit-1\n\
==7== ERROR: libFuzzer: deadly signal\n\
artifact_prefix='/a/'; Test unit written to /a/crash-2\n\
stat::number_of_executed_units: 4711\n\
stat::x: 1\n";

    #[test]
    fn executions_and_the_failing_input_are_read_from_the_output() {
        assert_eq!(executions(FAILED), Some(4711));
        assert_eq!(kept(FAILED), Some("/a/crash-2"));
        assert_eq!(executions(""), None);
        assert_eq!(kept("#2\tINITED\n"), None);
    }

    #[test]
    fn a_run_ends_where_its_budget_ends() {
        assert_eq!(limit(Budget::Total(10), 10), None);
        let rest = limit(Budget::Total(10), 6);
        assert_eq!(rest.as_deref(), Some("-runs=4"));
        let seconds = limit(Budget::Seconds(3), 6);
        assert_eq!(seconds.as_deref(), Some("-max_total_time=3"));
    }

    /// Targets that are shell scripts: name and script.
    fn scripts(root: &Path, all: &[(&str, &str)]) -> (Folders, Vec<String>) {
        for (name, script) in all {
            let text = root.join("script");
            fs::write(&text, format!("#!/bin/sh\n{script}\n")).unwrap();
            // Another process writes the program, because a fork in another test may keep a file open for writing.
            let mut install = Command::new("install");
            run(install.arg("--mode=755").arg(text).arg(root.join(name))).unwrap();
        }
        let folders = Folders {
            root: root.to_owned(),
            binaries: root.to_owned(),
            corpora: root.join("corpora"),
            artifacts: root.join("artifacts"),
            logs: root.join("logs"),
        };
        let names = all.iter().map(|(name, _)| (*name).to_owned()).collect();
        (folders, names)
    }

    #[test]
    fn a_finding_fails_the_run_with_the_target_and_its_input_after_all_have_run() {
        const COUNT: &str = "echo stat::number_of_executed_units: 5 >&2";
        let root = tempfile::tempdir().unwrap();
        let bad = format!("printf '%s' \"{FAILED}\" >&2; exit 77");
        let all = [
            ("bad", bad.as_str()),
            ("dead", "kill -9 $$"),
            ("good", COUNT),
        ];
        let (folders, names) = scripts(root.path(), &all);
        let seen = Mutex::new(Vec::new());
        let done = |name: &str, outcome: &Outcome| {
            lock(&seen).push((name.to_owned(), outcome.executions));
            Ok(())
        };
        let limit = |_: &str| Some("-runs=5".to_owned());
        let error = run_all(&folders, &names, 1, limit, done)
            .unwrap_err()
            .to_string();
        assert!(error.contains("bad: fails on /a/crash-2, see"), "{error}");
        assert!(error.contains("dead: signal: 9"), "{error}");
        assert!(!error.contains("good"), "{error}");
        let counts = [("bad", 4711), ("dead", 0), ("good", 5)];
        let counts = counts.map(|(name, count)| (name.to_owned(), count));
        assert_eq!(lock(&seen)[..], counts);
    }

    #[test]
    fn good_targets_pass_and_one_that_reports_nothing_does_not() {
        const COUNT: &str = "echo stat::number_of_executed_units: 5 >&2";
        let root = tempfile::tempdir().unwrap();
        let (folders, names) = scripts(root.path(), &[("good", COUNT), ("mute", "true")]);
        let limit = |_: &str| Some("-runs=5".to_owned());
        let run = |names: &[String]| run_all(&folders, names, 2, limit, |_, _| Ok(()));
        assert!(run(&names[..1]).is_ok());
        let error = run(&names).unwrap_err().to_string();
        assert!(error.contains("mute did not report"), "{error}");
    }

    /// Each target is in the manifest and has a small corpus in the tree.
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
