//! `stillframe` running beside the test: what it has said so far, signals to it, and its end.

use std::fs::{self, File};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use tempfile::TempDir;

/// Time for an action that takes a second on a machine that does nothing else.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A process whose words go to files. It ends when dropped.
#[derive(Debug)]
pub struct Running {
    child: Child,
    folder: TempDir,
}

/// How it ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit code; none when a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl Ended {
    /// Its output with `--json`.
    pub fn results(&self) -> Result<Vec<Value>> {
        whole_lines(&self.out)
    }

    /// What it said of an event with `--json`, among the other words of standard error.
    pub fn event(&self, name: &str) -> Option<Value> {
        let lines = self.err.lines();
        let events = lines.filter_map(|line| serde_json::from_str::<Value>(line).ok());
        events.filter_map(|event| event.get(name).cloned()).next()
    }

    /// How many errors it reported.
    pub fn errors(&self) -> usize {
        count_errors(&self.err)
    }
}

impl Running {
    /// Starts it.
    pub fn start(command: Command) -> Result<Running> {
        let folder = tempfile::tempdir()?;
        let child = hearing(&command)
            .stdout(File::create(folder.path().join("out"))?)
            .stderr(File::create(folder.path().join("err"))?)
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        Ok(Running { child, folder })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Standard error so far.
    pub fn err(&self) -> String {
        self.said("err")
    }

    /// Its output so far with `--json`.
    pub fn results(&self) -> Result<Vec<Value>> {
        whole_lines(&self.said("out"))
    }

    /// Waits until it has given at least `count` results.
    pub fn wait_results(&mut self, count: usize) -> Result<Vec<Value>> {
        self.wait_until(&format!("{count} results"), |it| {
            Ok(it.results()?.len() >= count)
        })?;
        self.results()
    }

    /// Waits until standard error holds `words`.
    pub fn wait_words(&mut self, words: &str) -> Result<()> {
        self.wait_until(&format!("{words:?}"), |it| Ok(it.err().contains(words)))
    }

    /// Waits until standard error holds `words` at least `count` times.
    pub fn wait_words_times(&mut self, words: &str, count: usize) -> Result<()> {
        self.wait_until(&format!("{words:?} {count} times"), |it| {
            Ok(it.err().matches(words).count() >= count)
        })
    }

    /// Waits until standard error holds `words` once more than it does now.
    pub fn wait_words_again(&mut self, words: &str) -> Result<()> {
        let times = |it: &Running| it.err().matches(words).count();
        let now = times(self);
        self.wait_until(&format!("{words:?} again"), |it| Ok(times(it) > now))
    }

    /// A signal by name, such as `INT`.
    pub fn signal(&self, name: &str) -> Result<()> {
        signal(self.pid(), name)
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Ends it as a crash would; unlike [`Running::signal`] at once, without a process to do it.
    pub fn kill(&mut self) -> Result<()> {
        Ok(self.child.kill()?)
    }

    /// Ends it as a crash would, and waits until that is so: a successor may take it for alive before.
    pub fn crash(&mut self) -> Result<()> {
        self.kill()?;
        self.wait_exit().map(drop)
    }

    /// Waits for its end, and returns its output.
    pub fn end(self) -> Result<Ended> {
        self.end_within(PATIENCE)
    }

    /// The same for an action that may take longer.
    pub fn end_within(mut self, limit: Duration) -> Result<Ended> {
        let code = self.wait_exit_within(limit)?;
        let (out, err) = (self.said("out"), self.said("err"));
        Ok(Ended { code, out, err })
    }

    /// Waits for its end; its exit code, or none when a signal ended it.
    pub fn wait_exit(&mut self) -> Result<Option<i32>> {
        self.wait_exit_within(PATIENCE)
    }

    fn wait_exit_within(&mut self, limit: Duration) -> Result<Option<i32>> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status.code());
            }
            if Instant::now() > deadline {
                bail!("it did not end within {limit:?}: {}", self.err());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until that is so of it.
    pub fn wait_until(
        &mut self,
        what: &str,
        is_so: impl Fn(&Running) -> Result<bool>,
    ) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            // Asked first: what was said before the end counts.
            let ended = self.child.try_wait()?;
            if is_so(self)? {
                return Ok(());
            }
            if let Some(status) = ended {
                bail!("it ended ({status}) before {what}: {}", self.err());
            }
            if Instant::now() > deadline {
                bail!("no {what} within {PATIENCE:?}: {}", self.err());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn said(&self, stream: &str) -> String {
        let bytes = fs::read(self.folder.path().join(stream)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The same command, with no signal ignored. Tests that run in a shell's background are started with SIGINT
/// ignored, and so would be the commands that they start. env(1) resets that, and becomes the command.
fn hearing(command: &Command) -> Command {
    let mut hearing = Command::new("env");
    hearing
        .arg("--default-signal=INT,TERM,HUP")
        .arg(command.get_program())
        .args(command.get_args())
        .stdin(Stdio::null());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => hearing.env(name, value),
            None => hearing.env_remove(name),
        };
    }
    hearing
}

/// One JSON value a line; a line still being written has no end yet.
fn whole_lines(out: &str) -> Result<Vec<Value>> {
    let whole = out.rfind('\n').map_or("", |end| &out[..end]);
    let values = whole.lines().map(serde_json::from_str);
    values
        .map(|value| value.context("a result is no JSON"))
        .collect()
}

/// Lines of standard error that report an error.
pub fn count_errors(err: &str) -> usize {
    err.lines()
        .filter(|line| line.starts_with("error: ") || line.starts_with("{\"error\":"))
        .count()
}

/// Sends a signal by name, through kill(1): the standard library knows only SIGKILL.
pub fn signal(pid: u32, name: &str) -> Result<()> {
    let status = Command::new("kill")
        .args(["-s", name, &pid.to_string()])
        .status()?;
    match status.success() {
        true => Ok(()),
        false => bail!("cannot send {name} to process {pid}"),
    }
}
