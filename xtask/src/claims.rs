//! `claims`: the numbers that SPECIFICATION.md promises, against what was last measured.
//!
//! SPECIFICATION.md holds one or more tables with the columns
//!
//! ```text
//! | id | promise | goal | unit | bench or test |
//! ```
//!
//! where a goal is a bound such as `<= 12.5` (also `<`, `>`, `>=`, `=`) in that unit. Each bench
//! leaves its last run in `docs/results/<bench>/summary.json`, a list of [`Measurement`]s. One claim
//! is measured by one bench. A promise that its last measurement missed stands in a table with the columns
//!
//! ```text
//! | missed | last measured | what is known |
//! ```

mod measurement;
mod specification;
mod table;

pub use measurement::Measurement;
pub use specification::{SPECIFICATION, parse_specification, repeated_ids};

use crate::workspace::Workspace;
use anyhow::{Context, Result, bail};
use measurement::measurements;
use specification::Claim;
use std::fs;

const RESULTS: &str = "docs/results";

/// Of the table of promises that do not hold.
#[cfg(test)]
const MISSED_COLUMNS: [&str; 3] = ["missed", "last measured", "what is known"];

/// Prints every promise with its last value; an error when one does not hold.
pub fn claims(workspace: &Workspace) -> Result<()> {
    let path = workspace.root.join(SPECIFICATION);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {SPECIFICATION}"))?;
    let claims = parse_specification(&text)?;
    if let Some((line, id)) = repeated_ids(&claims).first() {
        bail!("{SPECIFICATION}:{line}: a second claim named {id}");
    }
    let last = measurements(&workspace.root.join(RESULTS))?;
    let mut broken = 0;
    for claim in &claims {
        let verdict = judge(claim, last.get(&claim.id));
        broken += usize::from(verdict.is_err());
        let (mark, found) = match &verdict {
            Ok(found) => ("holds ", found),
            Err(found) => ("BROKEN", found),
        };
        println!(
            "{mark} {}: {} {} {}",
            claim.id, claim.promise, claim.goal.text, claim.unit
        );
        println!("       {found} [{}]", claim.shown_by);
    }
    for (id, measurement) in &last {
        if claims.iter().all(|claim| claim.id != *id) {
            println!(
                "note: {id} was measured by `{}` and is not promised",
                measurement.command
            );
        }
    }
    println!("claims: {}, of them broken: {broken}", claims.len());
    if broken > 0 {
        bail!("{broken} promises do not hold or were not measured");
    }
    Ok(())
}

/// A value just measured, judged by the goal that SPECIFICATION.md sets for it.
pub fn measured(
    workspace: &Workspace,
    id: &str,
    value: f64,
    command: &str,
    commit: &str,
) -> Result<Measurement> {
    let path = workspace.root.join(SPECIFICATION);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {SPECIFICATION}"))?;
    let claims = parse_specification(&text)?;
    let claim = claims
        .iter()
        .find(|claim| claim.id == id)
        .with_context(|| format!("{SPECIFICATION} does not promise {id}"))?;
    Ok(Measurement {
        claim: id.to_owned(),
        goal: claim.goal.text.clone(),
        value,
        unit: claim.unit.clone(),
        holds: claim.goal.holds(value),
        command: command.to_owned(),
        commit: commit.to_owned(),
    })
}

/// What was found, as an error when the claim cannot stand on it.
fn judge(claim: &Claim, last: Option<&Measurement>) -> Result<String, String> {
    let Some(last) = last else {
        return Err("never measured".to_owned());
    };
    let found = format!(
        "{} {} by `{}` at {}",
        last.value, last.unit, last.command, last.commit
    );
    if last.goal.trim() != claim.goal.text || last.unit != claim.unit {
        let old = format!("{} {}", last.goal, last.unit);
        return Err(format!(
            "{found}, against another goal ({old}): measure again"
        ));
    }
    if !last.holds || !claim.goal.holds(last.value) {
        return Err(format!("{found}: does not hold"));
    }
    Ok(found)
}

/// The promises that are marked as missed, with the figure given there.
#[cfg(test)]
fn marked_as_missed(text: &str) -> std::collections::BTreeMap<String, String> {
    let rows = table::rows(text, &MISSED_COLUMNS);
    let marked = rows.iter().map(|row| &row.cells);
    marked
        .map(|cells| (table::bare(cells[0]), table::bare(cells[1])))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::path::Path;

    const GOOD: &str = "\
| id | promise | goal | unit | bench or test |
| --- | --- | --- | --- | --- |
| `pause` | the guest stands still | `<= 12.5` | ms | `bench checkpoint` |
";

    fn measurement(value: f64) -> Measurement {
        Measurement {
            claim: "pause".to_owned(),
            goal: "<= 12.5".to_owned(),
            value,
            unit: "ms".to_owned(),
            holds: true,
            command: "cargo xtask bench".to_owned(),
            commit: "abc".to_owned(),
        }
    }

    #[test]
    fn a_claim_stands_only_on_a_measurement_that_holds_against_its_own_goal() {
        let claim = &parse_specification(GOOD).unwrap()[0];
        assert!(judge(claim, Some(&measurement(12.5))).is_ok());
        assert!(judge(claim, None).is_err());
        assert!(judge(claim, Some(&measurement(12.6))).is_err());
        assert!(judge(claim, Some(&measurement(f64::NAN))).is_err());
        let mut other = measurement(1.0);
        other.holds = false;
        assert!(judge(claim, Some(&other)).is_err());
        let mut other = measurement(1.0);
        other.goal = "<= 20".to_owned();
        assert!(
            judge(claim, Some(&other))
                .unwrap_err()
                .contains("another goal")
        );
    }

    /// What does not hold is said where it is promised, with its figure.
    #[test]
    fn missed_promises_are_marked() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let text = fs::read_to_string(root.join(SPECIFICATION)).unwrap();
        let last = measurements(&root.join(RESULTS)).unwrap();
        let missed: BTreeMap<String, String> = parse_specification(&text)
            .unwrap()
            .iter()
            .filter(|claim| judge(claim, last.get(&claim.id)).is_err())
            .map(|claim| {
                let figure = last.get(&claim.id).map(|last| last.value.to_string());
                (claim.id.clone(), figure.unwrap_or_default())
            })
            .collect();
        assert_eq!(marked_as_missed(&text), missed);
    }
}
