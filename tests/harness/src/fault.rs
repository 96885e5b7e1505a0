//! Faults injected into Stillframe at named points: a binary of its own, which `cargo xtask` builds.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

/// Where the binary with fault points is: `STILLFRAME_FAULTY_BIN`, which `cargo xtask` sets.
fn faulty_binary() -> Result<PathBuf> {
    let path = std::env::var_os("STILLFRAME_FAULTY_BIN");
    let path = path.context(
        "STILLFRAME_FAULTY_BIN names no binary with fault points: run `cargo xtask test`, which builds one",
    )?;
    Ok(path.into())
}

/// The same command, of a binary that has this fault (`point:action:pass`), and the file that shows that the fault
/// happened.
pub fn with_fault(command: &Command, fault: &str, folder: &Path) -> Result<(Command, PathBuf)> {
    let reached = folder.join("reached");
    let mut faulty = Command::new(faulty_binary()?);
    faulty
        .args(command.get_args())
        .env("STILLFRAME_FAULT", fault)
        .env("STILLFRAME_FAULT_REACHED", &reached)
        .stdin(Stdio::null());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => faulty.env(name, value),
            None => faulty.env_remove(name),
        };
    }
    Ok((faulty, reached))
}
