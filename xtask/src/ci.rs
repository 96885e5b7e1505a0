//! `ci` and `test`: everything in its order, each step with the time it took.

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

/// Where the tests of the whole find the guests and the binary.
const GUESTS_VARIABLE: &str = "STILLFRAME_GUESTS";
const BINARY_VARIABLE: &str = "STILLFRAME_BIN";
/// The same of a binary in which tests can inject faults.
const FAULTY_VARIABLE: &str = "STILLFRAME_FAULTY_BIN";
/// Compiles fault points in, for that binary and the unit tests, which so share what is built.
const FAULT_POINTS: [&str; 2] = ["--features", "stillframe/fault-points"];

/// What every commit must pass. Ends in the test runner's own summary.
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

/// Whatever the tests need, then all tests.
pub fn test(workspace: &Workspace) -> Result<()> {
    step("setup", setup::setup)?;
    let guests = step("guests", || guests::build(workspace))?;
    run_tests(workspace, &guests)
}

/// Runs one step and says how long it took.
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

/// A binary with fault points, not optimised beyond what tests are.
pub fn build_faulty(workspace: &Workspace) -> Result<PathBuf> {
    run(in_root(workspace)
        .args(["build", "--package", "stillframe"])
        .args(FAULT_POINTS))?;
    Ok(workspace.target.join("debug/stillframe"))
}

/// Packages as users get them; the folder of the binaries.
pub fn build_release(workspace: &Workspace, packages: &[&str]) -> Result<PathBuf> {
    let mut command = in_root(workspace);
    command.args(["build", "--release"]);
    for package in packages {
        command.args(["--package", package]);
    }
    run(&mut command)?;
    Ok(workspace.target.join("release"))
}

/// All tests of all crates, also after one has failed. No line of ours follows a good end.
///
/// One binary serves all of them. Its fault points do nothing unless a test names one, and its debug assertions hold
/// the code to more than users' binaries do; what is measured is measured with theirs (`bench`, `demo`).
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
