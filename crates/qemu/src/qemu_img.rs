//! `qemu-img`, which comes with QEMU and makes images of every format that it knows.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

const PROGRAM: &str = "qemu-img";

/// Makes an empty image of this format and length, in bytes. A file that is there is overwritten.
///
/// # Errors
/// Why there is none, in words.
pub fn create(path: &Path, format: &str, bytes: u64) -> Result<(), String> {
    run(&["create", "-q", "-f", format, "--"], path, bytes)
}

/// Makes a qcow2 image of this length, in bytes, that has nothing yet: all is read from a raw backing file, which need not
/// be there now. A file that is there is overwritten.
///
/// # Errors
/// Why there is none, in words.
pub fn create_overlay(path: &Path, backing: &str, bytes: u64) -> Result<(), String> {
    let words = [
        "create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", backing, "--",
    ];
    run(&words, path, bytes)
}

fn run(words: &[&str], path: &Path, bytes: u64) -> Result<(), String> {
    let made = Command::new(PROGRAM)
        .args(words)
        .arg(path)
        .arg(bytes.to_string())
        .output();
    let made = made.map_err(|error| format!("{PROGRAM}: {error}"))?;
    match made.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&made.stderr).trim().to_owned()),
    }
}

/// The program at work; it does not go on alone.
struct AtWork(Child);

impl Drop for AtWork {
    fn drop(&mut self) {
        // It has ended, unless the caller has given up.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Copies a raw image, which may be one that is read from a server, into an image of this format. A file that is there is
/// overwritten. Until the end `wait` is called again and again, and waits a little.
///
/// # Errors
/// Why it is not done, in words.
pub fn convert_raw(
    from: &str,
    format: &str,
    to: &Path,
    wait: &mut dyn FnMut(),
) -> Result<(), String> {
    let mut command = Command::new(PROGRAM);
    command.args(["convert", "-f", "raw", "-O", format, "--", from]);
    waited(command.arg(to), wait)
}

/// Copies into a qcow2 image what it lacks of its backing file, which it needs no more then. No process may have it open. Done
/// again, it goes on. Until the end `wait` is called again and again, and waits a little.
///
/// # Errors
/// Why it is not done, in words.
pub fn complete(image: &Path, wait: &mut dyn FnMut()) -> Result<(), String> {
    if !needs_backing(image).map_err(|error| error.to_string())? {
        return Ok(());
    }
    let mut options = OsString::from("driver=qcow2,file.driver=file,file.filename=");
    // A comma is doubled in a value.
    let path = image.as_os_str().as_bytes().split(|byte| *byte == b',');
    options.push(OsStr::from_bytes(
        &path.collect::<Vec<_>>().join(&b",,"[..]),
    ));
    // The image has a delay of years, so that no guest sees an error. If this process is killed the program must end: it has the
    // image locked.
    options.push(",backing.file.reconnect-delay=0");
    let mut command = Command::new(PROGRAM);
    command.args(["rebase", "--image-opts", "-b", "", "--"]);
    waited(command.arg(options), wait)
}

/// Whether a qcow2 image has a backing file.
fn needs_backing(image: &Path) -> io::Result<bool> {
    // The file's mark, its version and the offset of the backing file's name; docs/interop/qcow2.txt.
    let mut header = [0; 16];
    File::open(image)?.read_exact(&mut header)?;
    Ok(header[8..] != [0; 8])
}

/// Runs the program to its end.
fn waited(command: &mut Command, wait: &mut dyn FnMut()) -> Result<(), String> {
    let words = |error: std::io::Error| format!("{PROGRAM}: {error}");
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = AtWork(child.map_err(words)?);
    // Its few words fit the pipe.
    let status = loop {
        match child.0.try_wait().map_err(words)? {
            Some(status) => break status,
            None => wait(),
        }
    };
    if status.success() {
        return Ok(());
    }
    let mut said = String::new();
    if let Some(stderr) = &mut child.0.stderr {
        stderr.read_to_string(&mut said).map_err(words)?;
    }
    Err(match said.trim() {
        "" => format!("{PROGRAM} ended: {status}"),
        said => said.to_owned(),
    })
}
