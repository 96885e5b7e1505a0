//! Prints results to standard output and messages to standard error; with `--json` both as JSON, one value per line.
//! A closed pipe is an error, not a panic.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Value, json};
use thiserror::Error;

use crate::table::printable;

/// Why a result could not be printed.
#[derive(Debug, Error)]
pub enum OutputError {
    /// The reader has closed the pipe.
    #[error("standard output is closed")]
    ReaderGone,
    /// Writing failed, for instance on a full disk.
    #[error("cannot write the result")]
    Io(#[source] io::Error),
    /// The result has no JSON form.
    #[error("cannot encode the result as JSON")]
    Encode(#[source] serde_json::Error),
}

/// How results and messages are printed.
#[derive(Debug, Clone, Copy)]
pub struct Console {
    /// Results as JSON.
    pub json: bool,
    /// Neither progress nor notes.
    pub quiet: bool,
    /// Details as well.
    pub verbose: bool,
}

impl Console {
    /// Prints one result: `words` (printable lines), or `object` as one line of JSON.
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

    /// Prints a note, unless `quiet`.
    pub fn note(&self, text: &str) {
        if !self.quiet {
            self.message("note", "", text);
        }
    }

    /// Prints what happened beside the results, unless `quiet`: `words`, or `object` as one line of JSON.
    pub fn event(&self, object: &Value, words: impl FnOnce() -> String) {
        match (self.quiet, self.json) {
            (true, _) => {}
            (false, true) => print(&object.to_string()),
            (false, false) => self.message("note", "", &words()),
        }
    }

    /// Prints a note if `verbose`.
    pub fn detail(&self, text: &str) {
        if self.verbose {
            self.note(text);
        }
    }

    /// Prints a problem that does not end the command.
    pub fn warn(&self, text: &str) {
        self.message("warning", "warning: ", text);
    }

    /// Prints the error that ends the command with this exit code.
    pub fn error(&self, text: &str, code: i32) {
        match self.json {
            true => print(&json!({"error": text, "exit_code": code}).to_string()),
            false => self.message("error", "error: ", text),
        }
    }

    fn message(&self, kind: &str, prefix: &str, text: &str) {
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

/// Prints a line to standard error. If that is closed, the line is lost.
fn print(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

fn write_line(out: &mut impl Write, text: &str) -> Result<(), OutputError> {
    // Whole lines, so that a reader of `watch` never sees half a result.
    let written = out
        .write_all(format!("{text}\n").as_bytes())
        .and_then(|()| out.flush());
    written.map_err(failed)
}

/// The reason that a write to standard output failed.
pub fn failed(error: io::Error) -> OutputError {
    match error.kind() {
        io::ErrorKind::BrokenPipe => OutputError::ReaderGone,
        _ => OutputError::Io(error),
    }
}

/// An error and its sources in one line, without sources whose text the line already contains.
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
    fn a_closed_pipe_and_a_full_disk_are_different_errors() {
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
    fn the_chain_has_each_text_once() {
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
