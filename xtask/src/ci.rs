//! `ci` and `test`: run their steps in order and print the time of each.

use crate::fuzz;
use crate::guests::{self, Guests, newer_qemu};
use crate::run::{self, cargo, run};
use crate::setup;
use crate::tidy;
use crate::workspace::Workspace;
use anyhow::Result;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

/// Environment variables that name the guests and the binary for the end-to-end tests.
const GUESTS_VARIABLE: &str = "STILLFRAME_GUESTS";
const BINARY_VARIABLE: &str = "STILLFRAME_BIN";
/// The same for a binary in which tests can inject faults.
const FAULTY_VARIABLE: &str = "STILLFRAME_FAULTY_BIN";
/// Number of tests of one binary that run at the same time (`RUST_TEST_THREADS`), unless the user sets it: this many
/// for each processor. An end-to-end test waits for its guest for nearly half of its time.
const TEST_THREADS_VARIABLE: &str = "RUST_TEST_THREADS";
const TESTS_A_PROCESSOR: usize = 2;
/// Compiles fault points in, for that binary and the unit tests, so that both share one build.
const FAULT_POINTS: [&str; 2] = ["--features", "stillframe/fault-points"];

/// Runs what every commit must pass. The output ends with the summary of the test runner.
pub fn ci(workspace: &Workspace) -> Result<()> {
    step("setup", setup::setup)?;
    step("format", || {
        run(in_root(workspace).args(["fmt", "--all", "--check"]))
    })?;
    step("lints", || {
        run(in_root(workspace)
            .args(["clippy", "--workspace", "--all-targets"])
            .args(["--", "--deny", "warnings"]))
    })?;
    step("tidy", || tidy::tidy(workspace))?;
    let guests = step("guests", || guests::build(workspace))?;
    step("fuzz targets", || fuzz::smoke(workspace))?;
    run_tests(workspace, &guests, TestSet::All)
}

/// The tests to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TestSet {
    /// The unit tests, those on the kernel and on QEMU's monitor, and the first day of a VM (about 2 minutes)
    Quick,
    /// All
    All,
}

/// Builds what the tests need, then runs a set of them.
pub fn test(workspace: &Workspace, set: TestSet) -> Result<()> {
    step("setup", setup::setup)?;
    let guests = step("guests", || guests::build(workspace))?;
    run_tests(workspace, &guests, set)
}

/// Runs one step and prints its time.
pub fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    println!("== {name}");
    let began = Instant::now();
    let done = work();
    let outcome = if done.is_ok() { "done" } else { "FAILED" };
    println!(
        "== {name}: {outcome} in {:.1} s",
        began.elapsed().as_secs_f64()
    );
    done
}

fn in_root(workspace: &Workspace) -> Command {
    let mut command = cargo();
    command.current_dir(&workspace.root);
    command
}

/// Builds a binary with fault points, optimised like the tests.
pub fn build_faulty(workspace: &Workspace) -> Result<PathBuf> {
    run(in_root(workspace)
        .args(["build", "--package", "stillframe"])
        .args(FAULT_POINTS))?;
    Ok(workspace.target.join("debug/stillframe"))
}

/// Builds all tests, and such a binary. Together: by itself it would be built with other features of dependencies, and
/// our own crates would be compiled twice.
fn build_tests(workspace: &Workspace) -> Result<PathBuf> {
    run(in_root(workspace)
        .args(["build", "--workspace", "--lib", "--bins", "--tests"])
        .args(FAULT_POINTS))?;
    Ok(workspace.target.join("debug/stillframe"))
}

/// Builds packages as users get them; returns the folder of the binaries.
pub fn build_release(workspace: &Workspace, packages: &[&str]) -> Result<PathBuf> {
    let mut command = in_root(workspace);
    command.args(["build", "--release"]);
    for package in packages {
        command.args(["--package", package]);
    }
    run(&mut command)?;
    Ok(workspace.target.join("release"))
}

/// Targets of the quick tests.
const QUICK: [&str; 6] = ["--lib", "--bins", "--test", "kernel", "--test", "real_qemu"];
/// The end-to-end tests among them: modules of `tests/functional`.
const QUICK_END_TO_END: [&str; 5] = ["--test", "functional", "--", "first_day", "shape"];

/// Runs tests of all crates, also after a failure. After success xtask prints nothing more.
///
/// All tests use one binary. Its fault points are inactive unless a test names one, and it has debug assertions;
/// measurements (`bench`, `demo`) use a release binary.
fn run_tests(workspace: &Workspace, guests: &Guests, set: TestSet) -> Result<()> {
    let binary = step("build with fault points", || build_tests(workspace))?;
    if set == TestSet::All {
        step("newer QEMU", || newer_qemu::fetch(&guests.folder))?;
    }
    println!("== tests");
    let threads = std::env::var_os(TEST_THREADS_VARIABLE).unwrap_or_else(|| {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
        (TESTS_A_PROCESSOR * processors).to_string().into()
    });
    let run_some = |targets: &[&str]| {
        run::run_tests(
            in_root(workspace)
                .env(TEST_THREADS_VARIABLE, &threads)
                .env(GUESTS_VARIABLE, &guests.folder)
                .env(BINARY_VARIABLE, &binary)
                .env(FAULTY_VARIABLE, &binary)
                .args(["test", "--workspace", "--no-fail-fast"])
                .args(FAULT_POINTS)
                .args(targets),
        )
    };
    match set {
        TestSet::All => run_some(&[]),
        TestSet::Quick => run_some(&QUICK).and_then(|()| run_some(&QUICK_END_TO_END)),
    }
}
