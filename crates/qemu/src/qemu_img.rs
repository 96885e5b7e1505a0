//! `qemu-img`, which comes with QEMU and makes images of every format that it knows.

use std::path::Path;
use std::process::Command;

const PROGRAM: &str = "qemu-img";

/// Makes an empty image of this format and length, in bytes. A file that is there is overwritten.
///
/// # Errors
/// Why there is none, in words.
pub fn create(path: &Path, format: &str, bytes: u64) -> Result<(), String> {
    let made = Command::new(PROGRAM)
        .args(["create", "-q", "-f", format, "--"])
        .arg(path)
        .arg(bytes.to_string())
        .output();
    let made = made.map_err(|error| format!("{PROGRAM}: {error}"))?;
    match made.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&made.stderr).trim().to_owned()),
    }
}
