//! What a bench leaves behind: `docs/results/<bench>/summary.json` beside its raw data.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;

/// One promised number of `SPECIFICATION.md`, measured.
#[derive(Debug, Serialize)]
pub struct Claim {
    /// Its id there.
    pub claim: &'static str,
    /// The goal in words, such as `<= 1.5`.
    pub goal: &'static str,
    /// What was measured.
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

/// Writes raw data, one JSON value a line.
pub fn write_raw(bench: &str, name: &str, lines: &[Value]) -> Result<()> {
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(folder(bench)?.join(name), text)?;
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
