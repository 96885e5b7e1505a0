//! Runs other programs; a failure is an error that names the program.

use anyhow::{Context, Result, bail};
use std::process::Command;

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
}
