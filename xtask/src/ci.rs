//! `ci` and `test`: run their steps in order and print the time of each.

use crate::fuzz;
use crate::guests::{self, Guests};
use crate::run::{cargo, run};
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
    run_tests(workspace, &guests)
}

/// Builds what the tests need, then runs all tests.
pub fn test(workspace: &Workspace) -> Result<()> {
    step("setup", setup::setup)?;
    let guests = step("guests", || guests::build(workspace))?;
    run_tests(workspace, &guests)
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

/// Runs all tests of all crates, also after a failure. After success xtask prints nothing more.
///
/// All tests use one binary. Its fault points are inactive unless a test names one, and it has debug assertions;
/// measurements (`bench`, `demo`) use a release binary.
fn run_tests(workspace: &Workspace, guests: &Guests) -> Result<()> {
    let binary = step("build with fault points", || build_faulty(workspace))?;
    println!("== tests");
    run(in_root(workspace)
        .env(GUESTS_VARIABLE, &guests.folder)
        .env(BINARY_VARIABLE, &binary)
        .env(FAULTY_VARIABLE, &binary)
        .args(["test", "--workspace", "--no-fail-fast"])
        .args(FAULT_POINTS))
}
