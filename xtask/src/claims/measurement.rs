//! Reads the measurements of the benches from `docs/results/<bench>/summary.json`.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The measurement of one claim.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    pub claim: String,
    /// The goal at that time, as written in SPECIFICATION.md.
    pub goal: String,
    pub value: f64,
    pub unit: String,
    pub holds: bool,
    /// The command that measures it.
    pub command: String,
    /// The measured commit, with a mark if the work tree had changes.
    pub commit: String,
}

/// The measurements of all benches by claim.
pub fn measurements(results: &Path) -> Result<BTreeMap<String, Measurement>> {
    let mut by_claim = BTreeMap::new();
    let Ok(folder) = fs::read_dir(results) else {
        return Ok(by_claim);
    };
    let mut benches: Vec<_> = folder.flatten().map(|entry| entry.path()).collect();
    benches.sort();
    for summary in benches.iter().map(|bench| bench.join("summary.json")) {
        if !summary.is_file() {
            continue;
        }
        let place = || format!("cannot read {}", summary.display());
        let text = fs::read_to_string(&summary).with_context(place)?;
        let list: Vec<Measurement> = serde_json::from_str(&text).with_context(place)?;
        for measurement in list {
            let claim = measurement.claim.clone();
            if by_claim.insert(claim.clone(), measurement).is_some() {
                bail!("{} measures {claim} a second time", summary.display());
            }
        }
    }
    Ok(by_claim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_of_all_benches_are_put_together_and_none_may_repeat_a_claim() {
        let results = tempfile::tempdir().unwrap();
        let write = |bench: &str, claims: &[&str]| {
            let list: Vec<_> = claims
                .iter()
                .map(|claim| {
                    serde_json::json!({"claim": claim, "goal": "> 0", "value": 1.5, "unit": "s",
                        "holds": true, "command": "c", "commit": "d"})
                })
                .collect();
            let folder = results.path().join(bench);
            fs::create_dir(&folder).unwrap();
            let text = serde_json::Value::from(list).to_string();
            fs::write(folder.join("summary.json"), text).unwrap();
        };
        assert!(
            measurements(&results.path().join("none"))
                .unwrap()
                .is_empty()
        );
        fs::create_dir(results.path().join("raw-only")).unwrap();
        write("one", &["a"]);
        write("two", &["b", "c"]);
        assert_eq!(measurements(results.path()).unwrap().len(), 3);
        write("three", &["b"]);
        let error = measurements(results.path()).unwrap_err().to_string();
        assert!(error.contains("measures b a second time"), "{error}");
    }
}
