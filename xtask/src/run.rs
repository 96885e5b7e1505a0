//! Runs other programs; a failure is an error that names the program.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// How long the output of an ended program may be silent before it counts as complete: a process that it left may
/// have it open still.
const SILENCE: Duration = Duration::from_secs(2);

/// Prints the command and runs it with inherited output. An exit status other than 0 is an error.
pub fn run(command: &mut Command) -> Result<()> {
    let line = line_of(command);
    println!("$ {line}");
    let status = command
        .status()
        .with_context(|| format!("cannot start `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed: {status}");
    }
    Ok(())
}

/// As [`run`], for the test runner. After a failure it prints once more what the failed tests said: in a log of
/// thousands of lines that is far above the end.
pub fn run_tests(command: &mut Command) -> Result<()> {
    let line = line_of(command);
    println!("$ {line}");
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{line}`"))?;
    let stdout = child.stdout.take().context("no standard output")?;
    let (to, from) = channel();
    std::thread::spawn(move || send_lines(stdout, &to));
    let mut failures = Failures::default();
    let mut ended = None;
    let status = loop {
        match (from.recv_timeout(SILENCE), ended) {
            (Ok(line), _) => {
                println!("{line}");
                failures.add(&line);
            }
            (Err(RecvTimeoutError::Timeout), Some(status)) => break status,
            (Err(RecvTimeoutError::Timeout), None) => ended = child.try_wait()?,
            (Err(RecvTimeoutError::Disconnected), _) => break child.wait()?,
        }
    };
    if !status.success() {
        println!(
            "== what the failed tests said\n{}",
            failures.said.join("\n")
        );
        bail!("`{line}` failed: {status}");
    }
    Ok(())
}

fn send_lines(from: impl Read, to: &std::sync::mpsc::Sender<String>) {
    for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
        if to
            .send(String::from_utf8_lossy(&line).into_owned())
            .is_err()
        {
            return;
        }
    }
}

/// Collects the sections between `failures:` and the result of a test binary.
#[derive(Default)]
struct Failures {
    is_inside: bool,
    said: Vec<String>,
}

impl Failures {
    fn add(&mut self, line: &str) {
        self.is_inside |= line == "failures:";
        self.is_inside &= !line.starts_with("test result: ");
        if self.is_inside {
            self.said.push(line.to_owned());
        }
    }
}

/// Runs the command without printing it, and returns its standard output.
pub fn output(command: &mut Command) -> Result<String> {
    let line = line_of(command);
    let output = command
        .output()
        .with_context(|| format!("cannot start `{line}`"))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("`{line}` failed: {}: {}", output.status, errors.trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("the output of `{line}` is not UTF-8"))
}

/// The cargo that runs xtask, so that all steps use one toolchain.
pub fn cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// The command as a shell line, environment first.
fn line_of(command: &Command) -> String {
    let mut words = Vec::new();
    for (name, value) in command.get_envs() {
        let value = value.unwrap_or_default().to_string_lossy();
        words.push(format!("{}={}", name.to_string_lossy(), quoted(&value)));
    }
    let program = std::path::Path::new(command.get_program());
    let program = program.file_name().unwrap_or(command.get_program());
    words.push(program.to_string_lossy().into_owned());
    for argument in command.get_args() {
        words.push(quoted(&argument.to_string_lossy()));
    }
    words.join(" ")
}

fn quoted(word: &str) -> String {
    if word.is_empty() || word.contains(char::is_whitespace) {
        format!("'{word}'")
    } else {
        word.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_program_is_named_with_its_error_output() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such luck >&2; exit 3"]);
        let error = format!("{:#}", output(&mut command).unwrap_err());
        assert!(error.contains("sh -c 'echo no"), "{error}");
        assert!(error.ends_with("no such luck"), "{error}");
    }

    #[test]
    fn what_failed_tests_said_is_kept() {
        let mut failures = Failures::default();
        let log = "test a ... ok\ntest b ... FAILED\n\nfailures:\n\n---- b stdout ----\nError: no\n\nfailures:\n    b\n\n\
            test result: FAILED. 1 passed\ntest c ... ok\ntest result: ok. 1 passed";
        log.lines().for_each(|line| failures.add(line));
        let said = failures.said.join("\n");
        assert!(
            said.contains("Error: no") && !said.contains("... ok"),
            "{said}"
        );
    }

    /// A process that is left, and has the output open, does not hold it up.
    #[test]
    fn a_failing_test_run_ends_though_a_process_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let pid = folder.path().join("pid");
        let script = format!("sleep 600 & echo $! > {}; exit 1", pid.display());
        assert!(run_tests(Command::new("sh").args(["-c", &script])).is_err());
        let pid = std::fs::read_to_string(pid).unwrap();
        // Fails where it has ended.
        assert!(
            Command::new("kill")
                .arg(pid.trim())
                .status()
                .unwrap()
                .success()
        );
    }
}
