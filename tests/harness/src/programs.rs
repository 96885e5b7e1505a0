//! Programs that a test makes.
//!
//! They are written by another process. The kernel refuses to run a file that is open for writing, and a process that
//! another test starts at that moment has, for a moment, a copy of each descriptor of this one.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};

/// Copies a program.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    let copied = Command::new("cp").arg("--").args([from, to]).status()?;
    ensure!(copied.success(), "cannot copy {}", from.display());
    Ok(())
}

/// Writes a script that anyone may run.
pub fn script(path: &Path, text: &str) -> Result<()> {
    let mut install = Command::new("install")
        .args(["-m", "755", "/dev/stdin"])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()?;
    if let Some(mut input) = install.stdin.take() {
        input.write_all(text.as_bytes())?;
    }
    ensure!(install.wait()?.success(), "cannot write {}", path.display());
    Ok(())
}
