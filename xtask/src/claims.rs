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

use crate::workspace::Workspace;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The file of promises, from the root of the repository.
pub const SPECIFICATION: &str = "SPECIFICATION.md";
const RESULTS: &str = "docs/results";
const COLUMNS: [&str; 5] = ["id", "promise", "goal", "unit", "bench or test"];

/// Of the table of promises that do not hold.
#[cfg(test)]
const MISSED_COLUMNS: [&str; 3] = ["missed", "last measured", "what is known"];

/// One promised number.
#[derive(Debug, PartialEq)]
pub struct Claim {
    /// Where it stands, counted from 1.
    line: usize,
    id: String,
    promise: String,
    goal: Goal,
    unit: String,
    shown_by: String,
}

/// A bound, as written and as understood.
#[derive(Debug, Clone, PartialEq)]
struct Goal {
    text: String,
    relation: Relation,
    bound: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Relation {
    Less,
    LessOrEqual,
    Equal,
    GreaterOrEqual,
    Greater,
}

/// What a bench found of one claim.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    claim: String,
    /// The goal at that time, as written in SPECIFICATION.md.
    goal: String,
    value: f64,
    unit: String,
    holds: bool,
    /// What measures it again.
    command: String,
    commit: String,
}

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

/// All claims of all tables with the right columns.
pub fn parse_specification(text: &str) -> Result<Vec<Claim>> {
    let mut claims = Vec::new();
    let mut in_table = false;
    for (index, line) in text.lines().enumerate() {
        let Some(cells) = cells_of(line) else {
            in_table = false;
            continue;
        };
        if cells.iter().map(|cell| cell.to_lowercase()).eq(COLUMNS) {
            in_table = true;
        } else if in_table && !cells.iter().all(|cell| is_rule(cell)) {
            let place = || format!("{SPECIFICATION}:{}", index + 1);
            claims.push(parse_claim(index + 1, &cells).with_context(place)?);
        }
    }
    if claims.is_empty() {
        bail!(
            "{SPECIFICATION} has no table with the columns {}",
            COLUMNS.join(" | ")
        );
    }
    Ok(claims)
}

/// The promises that are marked as missed, with the figure given there.
#[cfg(test)]
fn marked_as_missed(text: &str) -> BTreeMap<String, String> {
    let rows = text.lines().filter_map(cells_of);
    let rows = rows.skip_while(|cells| !cells.iter().eq(&MISSED_COLUMNS));
    let rows = rows
        .skip(2)
        .take_while(|cells| cells.len() == MISSED_COLUMNS.len());
    rows.map(|cells| (bare(cells[0]), bare(cells[1]))).collect()
}

/// Every second use of an id, with its line.
pub fn repeated_ids(claims: &[Claim]) -> Vec<(usize, &str)> {
    let mut seen = BTreeSet::new();
    claims
        .iter()
        .filter(|claim| !seen.insert(&claim.id))
        .map(|claim| (claim.line, claim.id.as_str()))
        .collect()
}

fn cells_of(line: &str) -> Option<Vec<&str>> {
    let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    Some(inner.split('|').map(str::trim).collect())
}

fn is_rule(cell: &str) -> bool {
    !cell.is_empty() && cell.chars().all(|letter| letter == '-' || letter == ':')
}

fn parse_claim(line: usize, cells: &[&str]) -> Result<Claim> {
    let [id, promise, goal, unit, shown_by] = cells else {
        bail!("{} columns instead of {}", cells.len(), COLUMNS.len());
    };
    for (cell, column) in cells.iter().zip(COLUMNS) {
        if cell.is_empty() {
            bail!("no {column}");
        }
    }
    Ok(Claim {
        line,
        id: bare(id),
        promise: (*promise).to_owned(),
        goal: Goal::parse(&bare(goal))?,
        unit: bare(unit),
        shown_by: bare(shown_by),
    })
}

/// Without the marks of code.
fn bare(cell: &str) -> String {
    cell.replace('`', "")
}

impl Goal {
    fn parse(text: &str) -> Result<Self> {
        let relations = [
            ("<=", Relation::LessOrEqual),
            (">=", Relation::GreaterOrEqual),
            ("<", Relation::Less),
            (">", Relation::Greater),
            ("=", Relation::Equal),
        ];
        let found = relations
            .iter()
            .find_map(|(sign, relation)| Some((*relation, text.strip_prefix(sign)?)));
        let (relation, bound) = found
            .with_context(|| format!("the goal {text:?} does not begin with <=, >=, <, > or ="))?;
        let bound = bound
            .trim()
            .parse()
            .with_context(|| format!("the goal {text:?} has no number"))?;
        Ok(Self {
            text: text.to_owned(),
            relation,
            bound,
        })
    }

    /// False for a value that is not a number.
    fn holds(&self, value: f64) -> bool {
        match self.relation {
            Relation::Less => value < self.bound,
            Relation::LessOrEqual => value <= self.bound,
            Relation::Equal => value == self.bound,
            Relation::GreaterOrEqual => value >= self.bound,
            Relation::Greater => value > self.bound,
        }
    }
}

/// The measurements of all benches by claim.
fn measurements(results: &Path) -> Result<BTreeMap<String, Measurement>> {
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

    const GOOD: &str = "\
# Promises

| what | else |
|---|---|
| not | this |

| Id | Promise | Goal | Unit | Bench or test |
| --- | :-- | --: | --- | --- |
| `pause` | the guest stands still | `<= 12.5` | ms | `bench checkpoint` |
| speed | pages move | > 2 | GB/s | bench restore |
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
    fn claims_are_read_from_their_tables_alone() {
        let claims = parse_specification(GOOD).unwrap();
        let ids: Vec<_> = claims.iter().map(|claim| claim.id.as_str()).collect();
        assert_eq!(ids, ["pause", "speed"]);
        assert_eq!(claims[0].goal.bound, 12.5);
        assert_eq!(claims[0].shown_by, "bench checkpoint");
        assert_eq!(repeated_ids(&claims), []);
    }

    #[test]
    fn a_repeated_id_is_told_with_its_line() {
        let text = GOOD.replace("| speed", "| pause");
        let claims = parse_specification(&text).unwrap();
        assert_eq!(repeated_ids(&claims), [(10, "pause")]);
    }

    #[test]
    fn what_is_no_claim_is_told_with_its_line() {
        for (from, to, said) in [
            ("`<= 12.5`", "fast", "does not begin with"),
            ("`<= 12.5`", "<= fast", "has no number"),
            ("| ms |", "| |", "no unit"),
            ("| ms |", "| ms | ms |", "6 columns"),
        ] {
            let error = parse_specification(&GOOD.replace(from, to)).unwrap_err();
            let error = format!("{error:#}");
            assert!(error.contains(said) && error.contains(":9"), "{error}");
        }
        assert!(parse_specification("# Nothing\n").is_err());
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
