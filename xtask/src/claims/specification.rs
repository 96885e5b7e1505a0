//! What SPECIFICATION.md promises: claims, each with a goal.

use super::table::{bare, rows};
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;

/// The file of promises, from the root of the repository.
pub const SPECIFICATION: &str = "SPECIFICATION.md";
const COLUMNS: [&str; 5] = ["id", "promise", "goal", "unit", "bench or test"];

/// One promised number.
#[derive(Debug, PartialEq)]
pub struct Claim {
    /// Where it stands, counted from 1.
    pub line: usize,
    pub id: String,
    pub promise: String,
    pub goal: Goal,
    pub unit: String,
    pub shown_by: String,
}

/// A bound, as written and as understood.
#[derive(Debug, Clone, PartialEq)]
pub struct Goal {
    pub text: String,
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

/// All claims of all tables with the right columns.
pub fn parse_specification(text: &str) -> Result<Vec<Claim>> {
    let place = |line| format!("{SPECIFICATION}:{line}");
    let claims = rows(text, &COLUMNS)
        .iter()
        .map(|row| parse_claim(row.line, &row.cells).with_context(|| place(row.line)))
        .collect::<Result<Vec<Claim>>>()?;
    if claims.is_empty() {
        bail!(
            "{SPECIFICATION} has no table with the columns {}",
            COLUMNS.join(" | ")
        );
    }
    Ok(claims)
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
    pub fn holds(&self, value: f64) -> bool {
        match self.relation {
            Relation::Less => value < self.bound,
            Relation::LessOrEqual => value <= self.bound,
            Relation::Equal => value == self.bound,
            Relation::GreaterOrEqual => value >= self.bound,
            Relation::Greater => value > self.bound,
        }
    }
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
}
