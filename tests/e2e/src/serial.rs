//! What the workload in a guest says on the serial port.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

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

    /// All ticks so far; an error where the guest found its memory corrupt or went down.
    pub fn ticks(&self) -> Result<Vec<Tick>> {
        let text = self.text();
        // A line still being written has no end yet.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let mut ticks = Vec::new();
        for line in whole.lines().map(str::trim) {
            if line.contains("CORRUPT") || line.contains("Kernel panic") || line.contains("BUG:") {
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
        let deadline = Instant::now() + limit;
        loop {
            let ticks = self.ticks()?;
            if ticks.len() >= count {
                return Ok(ticks);
            }
            if Instant::now() > deadline {
                let text = self.text();
                let tail: String = text
                    .chars()
                    .rev()
                    .take(600)
                    .collect::<Vec<_>>()
                    .into_iter()
                    .rev()
                    .collect();
                bail!(
                    "{} ticks instead of {count} after {limit:?}; the end of it: {tail}",
                    ticks.len()
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits for `more` ticks from now on.
    pub fn wait_more(&self, more: usize, limit: Duration) -> Result<Vec<Tick>> {
        let now = self.ticks()?.len();
        self.wait_ticks(now + more, limit)
    }
}
