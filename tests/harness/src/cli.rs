//! `stillframe` as a user runs it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::running::count_errors;

/// The password of every test repository.
pub const PASSWORD: &str = "correct horse";

/// A repository and the binary to use on it.
#[derive(Debug, Clone)]
pub struct Stillframe {
    repository: PathBuf,
}

/// Where the binary is: `STILLFRAME_BIN`, which `cargo xtask` sets, or the usual target folder.
pub fn binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("STILLFRAME_BIN") {
        return Ok(path.into());
    }
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    for profile in ["release", "debug"] {
        let path = target.join(profile).join("stillframe");
        if path.exists() {
            return Ok(path);
        }
    }
    bail!("there is no stillframe binary: run `cargo xtask test`, which builds what the tests need")
}

impl Stillframe {
    /// Uses the repository at `repository`, which may not exist yet.
    pub fn at(repository: &Path) -> Stillframe {
        Stillframe {
            repository: repository.to_owned(),
        }
    }

    /// Creates the repository.
    pub fn init(repository: &Path) -> Result<Stillframe> {
        let stillframe = Stillframe::at(repository);
        // Nearly all tests open their repository dozens of times, which takes a third of a second each time otherwise.
        stillframe.ok(&["init", "--random-password"])?;
        Ok(stillframe)
    }

    /// The folder.
    pub fn repository(&self) -> &Path {
        &self.repository
    }

    /// Where the engine keeps files of VMs that live, as for the user who runs the tests.
    pub fn runtime_folder() -> PathBuf {
        let named = std::env::var_os("STILLFRAME_RUNTIME_DIR");
        named.map_or_else(|| PathBuf::from("/run/stillframe"), PathBuf::from)
    }

    /// A command with repository and password set.
    pub fn command(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new(binary()?);
        command
            .env_remove("STILLFRAME_PASSWORD_FILE")
            .env_remove("STILLFRAME_PASSWORD_COMMAND")
            .env("STILLFRAME_REPOSITORY", &self.repository)
            .env("STILLFRAME_PASSWORD", PASSWORD)
            .args(arguments)
            .stdin(Stdio::null());
        Ok(command)
    }

    /// Runs to the end, whatever it is.
    pub fn run(&self, arguments: &[&str]) -> Result<Output> {
        self.command(arguments)?
            .output()
            .with_context(|| arguments.join(" "))
    }

    /// Runs, and fails unless it succeeds. Returns standard output.
    pub fn ok(&self, arguments: &[&str]) -> Result<String> {
        let output = self.run(arguments)?;
        if !output.status.success() {
            bail!(
                "stillframe {} ended with {}: {}",
                arguments.join(" "),
                output.status,
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Runs with `--json`, and reads the answer.
    pub fn json(&self, arguments: &[&str]) -> Result<Value> {
        let mut arguments = arguments.to_vec();
        arguments.push("--json");
        let text = self.ok(&arguments)?;
        serde_json::from_str(&text).with_context(|| format!("{}: {text}", arguments.join(" ")))
    }

    /// Runs a command that prints one JSON object a line, such as `watch --json`.
    pub fn json_lines(&self, arguments: &[&str]) -> Result<Vec<Value>> {
        let mut arguments = arguments.to_vec();
        arguments.push("--json");
        let text = self.ok(&arguments)?;
        text.lines()
            .map(|line| Ok(serde_json::from_str(line)?))
            .collect()
    }

    /// Runs, expects this exit code and one clear error, and returns standard error.
    pub fn fails(&self, arguments: &[&str], code: i32) -> Result<String> {
        refusal(&mut self.command(arguments)?, code)
    }

    /// Starts without waiting; both outputs go to files beside the repository or nowhere.
    pub fn spawn(&self, arguments: &[&str]) -> Result<Child> {
        let mut command = self.command(arguments)?;
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().with_context(|| arguments.join(" "))
    }
}

/// The command, started by this program, which is given these words before it.
pub fn behind(program: &str, words: &[&str], command: &Command) -> Command {
    let mut outer = Command::new(program);
    outer
        .args(words)
        .arg(command.get_program())
        .args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => outer.env(name, value),
            None => outer.env_remove(name),
        };
    }
    outer
}

/// Runs `command`, expects this exit code and one clear error, and returns standard error.
pub fn refusal(command: &mut Command, code: i32) -> Result<String> {
    let words: Vec<_> = command
        .get_args()
        .map(|word| word.display().to_string())
        .collect();
    let words = words.join(" ");
    let output = command.output().with_context(|| words.clone())?;
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.code() != Some(code) {
        bail!(
            "`{words}` ended with {} instead of {code}: {stderr}",
            output.status
        );
    }
    let errors = count_errors(&stderr);
    if errors != 1 || stderr.contains("panicked") {
        bail!("`{words}` gave {errors} errors instead of one clear one: {stderr}");
    }
    Ok(stderr)
}

/// A number of a report, such as `pages.free`.
pub fn count(report: &Value, of: &str, name: &str) -> Result<u64> {
    let count = report[of][name].as_u64();
    count.with_context(|| format!("no {name}: {report}"))
}
