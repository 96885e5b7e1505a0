//! The output of a workload in a guest on the serial port, and of a guest with real software.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::running::PATIENCE;

/// A serial port written to a file.
#[derive(Debug, Clone)]
pub struct Serial {
    path: PathBuf,
}

/// One `tick N sum S` line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tick {
    /// N.
    pub number: u64,
    /// S.
    pub sum: String,
}

impl Serial {
    /// The file that QEMU writes.
    pub fn new(path: &Path) -> Serial {
        Serial {
            path: path.to_owned(),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Everything said so far.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.path).unwrap_or_default()).into_owned()
    }

    /// The last five lines so far.
    pub fn last_lines(&self) -> String {
        let text = self.text();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(5)..].join(" | ")
    }

    /// All ticks so far; an error where the guest found its memory corrupt or went down.
    pub fn ticks(&self) -> Result<Vec<Tick>> {
        let text = self.text();
        let mut ticks = Vec::new();
        for line in whole_lines(&text) {
            let failed = ["CORRUPT", "WORKLOAD FAILED", "lab failed"];
            if failed.iter().any(|words| line.contains(words)) || is_crash(line) {
                bail!("the guest says: {line}");
            }
            let mut words = line.split_whitespace();
            if words.next() == Some("tick")
                && let Some(number) = words.next().and_then(|word| word.parse().ok())
                && words.next() == Some("sum")
                && let Some(sum) = words.next()
            {
                ticks.push(Tick {
                    number,
                    sum: sum.to_owned(),
                });
            }
        }
        Ok(ticks)
    }

    /// Waits until `count` ticks have been printed.
    pub fn wait_ticks(&self, count: usize, limit: Duration) -> Result<Vec<Tick>> {
        let mut seen = 0;
        self.wait(limit, |serial| {
            let ticks = serial.ticks()?;
            seen = ticks.len();
            Ok((seen >= count).then_some(ticks))
        })
        .with_context(|| format!("{seen} ticks instead of {count}"))
    }

    /// Waits until it has said a line.
    pub fn wait_line(&self, wanted: &str, limit: Duration) -> Result<()> {
        let said = self.wait(limit, |serial| {
            serial.ticks()?;
            let text = serial.text();
            Ok(whole_lines(&text).any(|line| line == wanted).then_some(()))
        });
        said.with_context(|| format!("{wanted:?} was waited for"))
    }

    /// Waits for a whole line that begins like this.
    pub fn wait_for(&self, beginning: &str, limit: Duration) -> Result<String> {
        let said = self.wait(limit, |serial| {
            serial.ticks()?;
            let text = serial.text();
            let line = whole_lines(&text).find(|line| line.starts_with(beginning));
            Ok(line.map(str::to_owned))
        });
        said.with_context(|| format!("a line {beginning:?} was waited for"))
    }

    /// The last record or transaction that a guest has said to be committed (`guest/init`).
    pub fn committed(&self) -> Option<u64> {
        let text = self.text();
        let numbers = whole_lines(&text).filter_map(|line| line.strip_prefix("committed "));
        numbers
            .filter_map(|number| number.trim().parse().ok())
            .max()
    }

    /// Waits until `more` are committed, from now on, or from the first one that this port has said.
    pub fn wait_more_committed(&self, more: u64) -> Result<u64> {
        let mut first = None;
        self.wait(PATIENCE, |serial| {
            serial.ticks()?;
            let committed = serial.committed();
            first = first.or(committed);
            let wanted = first.map(|first| first + more);
            Ok(committed.filter(|now| wanted.is_some_and(|wanted| *now >= wanted)))
        })
        .with_context(|| format!("{more} more to be committed were waited for, from {first:?} on"))
    }

    /// The units of work that a guest with real software has done; none before it is ready, an error
    /// where it failed or went down. See `guest/debian/serial`.
    pub fn units(&self) -> Result<Option<u64>> {
        let text = self.text();
        let mut units = None;
        for line in whole_lines(&text) {
            if line.starts_with("lab failed") || is_crash(line) {
                bail!("the guest says: {line}; the end of it: {}", self.tail());
            }
            if line == "lab ready" {
                units = Some(0);
            } else if let Some(number) = line.strip_prefix("lab unit ") {
                units = Some(number.parse().with_context(|| line.to_owned())?);
            }
        }
        Ok(units)
    }

    /// Waits until this many units have been done; 0: until the work begins.
    pub fn wait_units(&self, count: u64, limit: Duration) -> Result<u64> {
        self.wait(limit, |serial| {
            Ok(serial.units()?.filter(|&units| units >= count))
        })
        .with_context(|| format!("{count} units were waited for"))
    }

    /// Waits for `more` units from now on. A port that has no units yet, as that of a migrated guest, counts from its
    /// first one.
    pub fn wait_more_units(&self, more: u64, limit: Duration) -> Result<u64> {
        let mut first = None;
        self.wait(limit, |serial| {
            let units = serial.units()?;
            first = first.or(units);
            let wanted = first.map(|first| first + more);
            Ok(units.filter(|units| wanted.is_some_and(|wanted| *units >= wanted)))
        })
        .with_context(|| format!("{more} more units were waited for, from {first:?} on"))
    }

    /// Waits for an answer, or an error that contains the end of the output.
    fn wait<T>(
        &self,
        limit: Duration,
        mut answer: impl FnMut(&Serial) -> Result<Option<T>>,
    ) -> Result<T> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(answer) = answer(self)? {
                return Ok(answer);
            }
            if Instant::now() > deadline {
                bail!("not after {limit:?}; the end of it: {}", self.tail());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn tail(&self) -> String {
        let text = self.text();
        let skipped = text.chars().count().saturating_sub(600);
        text.chars().skip(skipped).collect()
    }

    /// Waits for `more` ticks from now on.
    pub fn wait_more(&self, more: usize, limit: Duration) -> Result<Vec<Tick>> {
        let now = self.ticks()?.len();
        self.wait_ticks(now + more, limit)
    }
}

/// A line still being written has no end yet.
fn whole_lines(text: &str) -> impl Iterator<Item = &str> {
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(str::trim)
}

fn is_crash(line: &str) -> bool {
    line.contains("Kernel panic") || line.contains("BUG:")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_port<T>(text: &str, of: impl FnOnce(&Serial) -> T) -> T {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("serial");
        fs::write(&path, text).unwrap();
        of(&Serial::new(&path))
    }

    fn units(text: &str) -> Result<Option<u64>> {
        with_port(text, Serial::units)
    }

    #[test]
    fn more_units_count_from_the_first_on_that_the_port_has() {
        let more = |text: &str, more| {
            with_port(text, |serial| {
                serial.wait_more_units(more, Duration::ZERO).ok()
            })
        };
        assert_eq!(more("it 6\nlab unit 7\n", 0), Some(7));
        assert_eq!(more("it 6\nlab unit 7\n", 1), None);
        assert_eq!(more("it 6\n", 0), None);
    }

    #[test]
    fn units_count_from_ready_on_and_only_in_whole_lines() {
        assert_eq!(units("").unwrap(), None);
        assert_eq!(units("booting\nlab ready\nlab un").unwrap(), Some(0));
        let text = "lab ready\nlab unit 1\nNOTICE: x\nlab unit 2\nlab unit 3";
        assert_eq!(units(text).unwrap(), Some(2));
    }

    #[test]
    fn a_failed_work_is_an_error_with_what_went_before() {
        let error = units("lab ready\nno space\nlab failed: working: ended with status 1\n");
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("status 1") && error.contains("no space"),
            "{error}"
        );
        assert!(units("lab unit many\n").is_err());
    }
}
