//! Results to standard output, everything else to standard error; with `--json` both as JSON, one object a line. A
//! reader that goes away is no reason to panic.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::json;
use thiserror::Error;

use crate::table::printable;

/// Why a result could not be handed over.
#[derive(Debug, Error)]
pub enum OutputError {
    /// The reader of the pipe has gone; it has what it wanted.
    #[error("nobody reads the results any more")]
    ReaderGone,
    /// For instance a full disk.
    #[error("cannot write the result")]
    Io(#[source] io::Error),
    /// A result that is no JSON.
    #[error("cannot encode the result as JSON")]
    Encode(#[source] serde_json::Error),
}

/// How results and messages are written.
#[derive(Debug, Clone, Copy)]
pub struct Console {
    /// Results as JSON.
    pub json: bool,
    /// No progress, no notes.
    pub quiet: bool,
    /// Details, too.
    pub verbose: bool,
}

impl Console {
    /// One result: `words` (made of printable lines) for a reader, or `object` in one line of JSON.
    pub fn result(
        &self,
        object: &impl Serialize,
        words: impl FnOnce() -> String,
    ) -> Result<(), OutputError> {
        let text = match self.json {
            true => serde_json::to_string(object).map_err(OutputError::Encode)?,
            false => words(),
        };
        write_line(&mut io::stdout().lock(), &text)
    }

    /// Something worth knowing, unless the user wants quiet.
    pub fn note(&self, text: &str) {
        if !self.quiet {
            self.say("note", "", text);
        }
    }

    /// Something worth knowing for a user who wants details.
    pub fn detail(&self, text: &str) {
        if self.verbose {
            self.note(text);
        }
    }

    /// Something that went wrong although the command goes on.
    pub fn warn(&self, text: &str) {
        self.say("warning", "warning: ", text);
    }

    /// Why the command fails, and with which exit code.
    pub fn error(&self, text: &str, code: i32) {
        match self.json {
            true => print(&json!({"error": text, "exit_code": code}).to_string()),
            false => self.say("error", "error: ", text),
        }
    }

    fn say(&self, kind: &str, prefix: &str, text: &str) {
        match self.json {
            true => print(&json!({ kind: text }).to_string()),
            false => {
                let text = format!("{prefix}{text}");
                let lines: Vec<String> = text.lines().map(printable).collect();
                print(&lines.join("\n"));
            }
        }
    }
}

/// A message. Nothing better can be done when standard error is closed.
fn print(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

fn write_line(out: &mut impl Write, text: &str) -> Result<(), OutputError> {
    // A line at a time, whole, so that a reader following `watch` never sees half a result.
    let written = out
        .write_all(format!("{text}\n").as_bytes())
        .and_then(|()| out.flush());
    written.map_err(failed)
}

/// Why standard output did not take something.
pub fn failed(error: io::Error) -> OutputError {
    match error.kind() {
        io::ErrorKind::BrokenPipe => OutputError::ReaderGone,
        _ => OutputError::Io(error),
    }
}

/// An error and its sources in one line. A source whose words the line already holds is left out.
pub fn chain<'e>(errors: impl Iterator<Item = &'e (dyn std::error::Error + 'static)>) -> String {
    let mut line = String::new();
    for error in errors {
        let words = error.to_string();
        if line.is_empty() {
            line = words;
        } else if !line.contains(&words) {
            line = format!("{line}: {words}");
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Gone;

    impl Write for Gone {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_left_is_told_from_a_full_disk() {
        assert!(matches!(
            write_line(&mut Gone, "x"),
            Err(OutputError::ReaderGone)
        ));
        let mut full: &mut [u8] = &mut [0; 1];
        assert!(matches!(
            write_line(&mut full, "xyz"),
            Err(OutputError::Io(_))
        ));
        let mut line = Vec::new();
        write_line(&mut line, "x").unwrap();
        assert_eq!(line, b"x\n");
    }

    #[test]
    fn the_chain_says_everything_once() {
        let io = io::Error::new(io::ErrorKind::NotFound, "no such file");
        let error = anyhow::Error::new(io)
            .context("cannot open a: no such file")
            .context("failed");
        assert_eq!(chain(error.chain()), "failed: cannot open a: no such file");
        let io = io::Error::new(io::ErrorKind::NotFound, "no such file");
        let error = anyhow::Error::new(io).context("cannot open a");
        assert_eq!(chain(error.chain()), "cannot open a: no such file");
    }
}
