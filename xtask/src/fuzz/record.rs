//! The executions of all runs so far, in `docs/results/fuzz/executions.json`.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// The sum of all runs of one target.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Total {
    pub target: String,
    pub executions: u64,
    pub seconds: u64,
    /// Number of runs that ended on an input that fails.
    pub findings: u64,
    /// The commit of the last run.
    pub commit: String,
}

/// The totals of all targets; the file is rewritten after each run.
pub struct Record {
    path: PathBuf,
    commit: String,
    totals: BTreeMap<String, Total>,
}

impl Record {
    /// Reads the totals; the next runs are of `commit`.
    pub fn read(folder: &Path, commit: &str) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        let path = folder.join("executions.json");
        let totals = match File::open(&path) {
            Ok(file) => file
                .lock_shared()
                .map_err(anyhow::Error::from)
                .and_then(|()| totals_in(&file))
                .with_context(|| path.display().to_string())?,
            Err(_) => BTreeMap::new(),
        };
        Ok(Self {
            path,
            commit: commit.to_owned(),
            totals,
        })
    }

    /// Number of executions of a target.
    pub fn executions(&self, target: &str) -> u64 {
        self.totals.get(target).map_or(0, |total| total.executions)
    }

    /// Adds a run, to those that another process has added meanwhile too.
    pub fn add(&mut self, last: Total) -> Result<()> {
        let path = self.path.clone();
        self.add_locked(last)
            .with_context(|| path.display().to_string())
    }

    fn add_locked(&mut self, last: Total) -> Result<()> {
        let mut options = File::options();
        let file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&self.path)?;
        // Until it is closed.
        file.lock()?;
        self.totals = totals_in(&file)?;
        let total = self.totals.entry(last.target.clone()).or_default();
        *total = Total {
            executions: total.executions + last.executions,
            seconds: total.seconds + last.seconds,
            findings: total.findings + last.findings,
            commit: self.commit.clone(),
            target: last.target,
        };
        let totals: Vec<&Total> = self.totals.values().collect();
        let text = serde_json::to_string_pretty(&totals)? + "\n";
        Ok(fs::write(&self.path, text)?)
    }
}

/// The totals by target; none in an empty file.
fn totals_in(mut file: &File) -> Result<BTreeMap<String, Total>> {
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    let totals: Vec<Total> = match text.is_empty() {
        true => Vec::new(),
        false => serde_json::from_str(&text)?,
    };
    let named = |total: Total| (total.target.clone(), total);
    Ok(totals.into_iter().map(named).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(target: &str, executions: u64) -> Total {
        Total {
            target: target.to_owned(),
            executions,
            seconds: 2,
            ..Total::default()
        }
    }

    #[test]
    fn runs_add_up() {
        let folder = tempfile::tempdir().unwrap();
        let mut record = Record::read(folder.path(), "c0ffee").unwrap();
        record.add(run("b", 1)).unwrap();
        let mut record = Record::read(folder.path(), "c0ffee").unwrap();
        for (target, executions) in [("a", 10), ("b", 5)] {
            record.add(run(target, executions)).unwrap();
        }
        let record = Record::read(folder.path(), "c0ffee").unwrap();
        let found: Vec<_> = record
            .totals
            .values()
            .map(|total| (total.target.as_str(), total.executions, total.seconds))
            .collect();
        assert_eq!(found, [("a", 10, 2), ("b", 6, 4)]);
        assert_eq!(record.executions("b"), 6);
        assert_eq!(record.executions("c"), 0);
    }

    #[test]
    fn processes_at_the_same_time_lose_no_run() {
        let folder = tempfile::tempdir().unwrap();
        let each = |target: &'static str| {
            let mut record = Record::read(folder.path(), "c0ffee").unwrap();
            for _ in 0..50 {
                record.add(run(target, 1)).unwrap();
            }
        };
        std::thread::scope(|scope| {
            for target in ["a", "b"] {
                scope.spawn(move || each(target));
            }
        });
        let record = Record::read(folder.path(), "c0ffee").unwrap();
        assert_eq!(["a", "b"].map(|target| record.executions(target)), [50; 2]);
    }
}
