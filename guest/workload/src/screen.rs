//! The text console as watched memory: lines scroll over it and are read back.
//!
//! The console's characters lie in the video memory of the virtual graphics card, which is no part of main RAM. A
//! checkpoint that forgets it shows here. The kernel's `/dev/vcs` reads the characters back from there.

use crate::memory::Corruption;
use crate::random::mix;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};

/// The console that is written to.
const CONSOLE: &str = "/dev/tty0";
/// The characters of that console.
const CHARACTERS: &str = "/dev/vcs";
/// The same with attributes, after four bytes: rows, columns, cursor column, cursor row.
const WITH_HEADER: &str = "/dev/vcsa";

/// The console and the text that it must show.
pub struct Screen {
    console: File,
    rows: usize,
    columns: usize,
    seed: u64,
    lines_written: u64,
}

impl Screen {
    /// Opens the console of this machine.
    pub fn open(seed: u64) -> io::Result<Self> {
        let header = fs::read(WITH_HEADER)?;
        let [rows, columns, ..] = header[..] else {
            return Err(io::Error::other("the console reports no size"));
        };
        Ok(Self {
            console: OpenOptions::new().write(true).open(CONSOLE)?,
            rows: usize::from(rows),
            columns: usize::from(columns),
            seed,
            lines_written: 0,
        })
    }

    /// Checks the screen's text, then scrolls `lines` new lines over it.
    pub fn scroll(&mut self, lines: u64) -> io::Result<Result<(), Corruption>> {
        let shown = fs::read(CHARACTERS)?;
        let rows = Rows {
            seed: self.seed,
            lines_written: self.lines_written,
            rows: self.rows,
        };
        if let Err(corruption) = rows.check(&shown, self.columns) {
            return Ok(Err(corruption));
        }
        for number in self.lines_written..self.lines_written + lines {
            let line = format!("{}\r\n", line_text(self.seed, number));
            self.console.write_all(line.as_bytes())?;
        }
        self.lines_written += lines;
        Ok(Ok(()))
    }
}

/// The text that each row of the screen must show.
struct Rows {
    seed: u64,
    lines_written: u64,
    rows: usize,
}

impl Rows {
    /// Compares the characters on the screen, row by row. Before the first lines have pushed
    /// whatever the kernel printed off the screen, there is nothing to compare.
    fn check(&self, shown: &[u8], columns: usize) -> Result<(), Corruption> {
        let full_rows = self.rows.saturating_sub(1);
        let Some(first) = self.lines_written.checked_sub(full_rows as u64) else {
            return Ok(());
        };
        for (row, found) in shown.chunks(columns.max(1)).take(full_rows).enumerate() {
            let expected = line_text(self.seed, first + row as u64);
            let found = String::from_utf8_lossy(found);
            if found.trim_end() != expected {
                return Err(Corruption::Screen {
                    row,
                    expected,
                    found: found.trim_end().to_owned(),
                });
            }
        }
        Ok(())
    }
}

fn line_text(seed: u64, number: u64) -> String {
    format!("line {number} {:016x}", mix(seed ^ number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn screen_after(lines_written: u64) -> (Rows, Vec<u8>) {
        let rows = Rows {
            seed: 5,
            lines_written,
            rows: 4,
        };
        let first = lines_written.saturating_sub(3);
        let shown = (first..first + 3)
            .map(|number| format!("{:<40}", line_text(5, number)))
            .chain([" ".repeat(40)])
            .collect::<String>();
        (rows, shown.into_bytes())
    }

    #[test]
    fn the_last_lines_written_pass() {
        let (rows, shown) = screen_after(100);
        assert_eq!(rows.check(&shown, 40), Ok(()));
    }

    #[test]
    fn an_older_screen_is_found() {
        let (rows, _) = screen_after(100);
        let (_, older) = screen_after(99);
        assert!(matches!(
            rows.check(&older, 40),
            Err(Corruption::Screen { row: 0, .. })
        ));
    }

    #[test]
    fn a_screen_not_yet_scrolled_over_is_not_checked() {
        let (rows, _) = screen_after(2);
        assert_eq!(rows.check(b"whatever the firmware left", 40), Ok(()));
    }
}
