//! Benches of single functions, without a guest: `cargo bench` prints raw data and claims as JSON, one value per line,
//! and both are stored in docs/results.

use crate::claims::{self, Measurement};
use crate::run::{cargo, output};
use crate::workspace::Workspace;
use anyhow::{Context, Result};
use serde_json::Value;
use std::fs;

/// Runs a bench of a package and writes `docs/results/<name>/`.
pub fn bench(workspace: &Workspace, package: &str, name: &str) -> Result<()> {
    let mut command = cargo();
    command.current_dir(&workspace.root);
    command.args(["bench", "--quiet", "--package", package, "--bench", name]);
    let printed = output(&mut command)?;
    print!("{printed}");
    let (claimed, raw) = split(&printed)?;
    let commit = workspace.commit()?;
    let again = format!("cargo xtask bench {name}");
    let measured = claimed
        .iter()
        .map(|(id, value)| claims::measured(workspace, id, *value, &again, &commit))
        .collect::<Result<Vec<Measurement>>>()?;
    let folder = workspace.root.join("docs/results").join(name);
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("raw.jsonl"), raw)?;
    let summary = serde_json::to_string_pretty(&measured)? + "\n";
    fs::write(folder.join("summary.json"), summary)?;
    Ok(())
}

/// Claims with their values, and the other lines.
fn split(printed: &str) -> Result<(Vec<(String, f64)>, String)> {
    let mut claimed = Vec::new();
    let mut raw = String::new();
    for line in printed.lines().filter(|line| line.starts_with('{')) {
        let value: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
        match value["claim"].as_str() {
            Some(id) => {
                let value = value["value"].as_f64().context("a claim without a value")?;
                claimed.push((id.to_owned(), value));
            }
            None => raw += &format!("{line}\n"),
        }
    }
    Ok((claimed, raw))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_are_split_from_raw_data_and_other_lines() {
        let printed = "running\n{\"a\":1}\n{\"claim\":\"speed\",\"value\":2.5}\n";
        let (claimed, raw) = split(printed).unwrap();
        assert_eq!(claimed, [("speed".to_owned(), 2.5)]);
        assert_eq!(raw, "{\"a\":1}\n");
        assert!(split("{\"claim\":\"speed\"}\n").is_err());
        assert!(split("{no json\n").is_err());
    }
}
