//! The results of a bench: `docs/results/<bench>/summary.json` beside its raw data.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::{Serialize, Serializer};
use serde_json::Value;

/// Raw data longer than this is compressed: every run rewrites it, and the history of the tree keeps them all.
const PLAIN_BYTES_MAX: usize = 100_000;
/// Zstandard level of raw data.
const ZSTD_LEVEL: i32 = 19;

/// One promised number of `SPECIFICATION.md`, measured.
#[derive(Debug, Serialize)]
pub struct Claim {
    /// Its id there.
    pub claim: &'static str,
    /// The goal.
    pub goal: Goal,
    /// The measured value.
    pub value: f64,
    /// In this unit.
    pub unit: &'static str,
    /// Whether it holds.
    pub holds: bool,
    /// How to measure it again.
    pub command: &'static str,
    /// The commit that was measured.
    pub commit: String,
}

/// The goal of a value, written as in `SPECIFICATION.md`.
#[derive(Debug, Clone, Copy)]
pub enum Goal {
    /// This or less.
    AtMost(f64),
    /// This or more.
    AtLeast(f64),
    /// More than this.
    Above(f64),
    /// Nothing at all.
    Zero,
}

impl Goal {
    /// A value that is no number meets no goal.
    fn is_met_by(self, value: f64) -> bool {
        match self {
            Goal::AtMost(most) => value <= most,
            Goal::AtLeast(least) => value >= least,
            Goal::Above(bound) => value > bound,
            Goal::Zero => value == 0.0,
        }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Goal::AtMost(most) => write!(f, "<= {most}"),
            Goal::AtLeast(least) => write!(f, ">= {least}"),
            Goal::Above(bound) => write!(f, "> {bound}"),
            Goal::Zero => write!(f, "= 0"),
        }
    }
}

impl Serialize for Goal {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Claim {
    /// A value just measured.
    pub fn new(
        claim: &'static str,
        goal: Goal,
        value: f64,
        unit: &'static str,
        command: &'static str,
    ) -> Claim {
        Claim {
            claim,
            goal,
            value: (value * 1000.0).round() / 1000.0,
            unit,
            holds: goal.is_met_by(value),
            command,
            commit: commit(),
        }
    }

    /// It holds only if enough was measured, too.
    pub fn if_enough(mut self, enough: bool) -> Claim {
        self.holds &= enough;
        self
    }
}

/// The commit that is measured, as `cargo xtask` says.
pub fn commit() -> String {
    std::env::var("STILLFRAME_COMMIT").unwrap_or_else(|_| "unknown".to_owned())
}

/// The folder of a bench; made if missing.
pub fn folder(bench: &str) -> Result<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../docs/results")
        .join(bench);
    fs::create_dir_all(&folder)?;
    Ok(folder.canonicalize()?)
}

/// Writes the claims of a bench.
pub fn write_summary(bench: &str, claims: &[Claim]) -> Result<()> {
    let path = folder(bench)?.join("summary.json");
    fs::write(path, serde_json::to_string_pretty(claims)? + "\n")?;
    Ok(())
}

/// Writes raw data, one JSON value a line; compressed to `name.zst` where it is long.
pub fn write_raw(bench: &str, name: &str, lines: &[Value]) -> Result<()> {
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    write_text(&folder(bench)?, name, &text)
}

/// The same for raw data that is a text already.
pub fn write_text(folder: &Path, name: &str, text: &str) -> Result<()> {
    let plain = folder.join(name);
    let packed = folder.join(format!("{name}.zst"));
    let other = match text.len() > PLAIN_BYTES_MAX {
        true => {
            fs::write(&packed, zstd::bulk::compress(text.as_bytes(), ZSTD_LEVEL)?)?;
            plain
        }
        false => {
            fs::write(&plain, text)?;
            packed
        }
    };
    // That of a run before would be taken for this one's.
    if other.exists() {
        fs::remove_file(&other)?;
    }
    Ok(())
}

/// The value below which `share` (0 to 1) of the sorted samples lie, by nearest rank.
pub fn percentile(samples: &[f64], share: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    if sorted.is_empty() {
        return f64::NAN;
    }
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_are_written_as_they_are_checked() {
        for (goal, words, met, missed) in [
            (Goal::AtMost(1.3), "<= 1.3", 1.3, 1.301),
            (Goal::AtLeast(52.88), ">= 52.88", 52.88, 52.8),
            (Goal::Above(95.0), "> 95", 95.1, 95.0),
            (Goal::Zero, "= 0", 0.0, 1.0),
        ] {
            assert_eq!(goal.to_string(), words);
            assert!(goal.is_met_by(met) && !goal.is_met_by(missed) && !goal.is_met_by(f64::NAN));
        }
        let claim = Claim::new("id", Goal::AtMost(1.0), 1.0004, "ratio", "command");
        assert_eq!((claim.value, claim.holds), (1.0, false));
        let claim = Claim::new("id", Goal::Zero, 0.0, "pages", "command");
        assert!(claim.holds && !claim.if_enough(false).holds);
    }
}
