//! Reads SPECIFICATION.md: the claims with their goals, the code of each bench, and the missed promises.

use super::missed::{self, Missed, parse_missed};
use super::table::{Row, bare, rows};
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The file of promises, from the root of the repository.
pub const SPECIFICATION: &str = "SPECIFICATION.md";
const COLUMNS: [&str; 5] = ["id", "promise", "goal", "unit", "bench or test"];

/// The columns of the table with the code of each bench.
const CODE_COLUMNS: [&str; 2] = ["bench", "code that its figures are about"];

/// Prefix of a claim's `bench or test`; the table of code leaves it out.
const COMMAND: &str = "cargo xtask ";

/// The content of the file.
#[derive(Debug, PartialEq)]
pub struct Specification {
    pub claims: Vec<Claim>,
    pub code: Vec<BenchCode>,
    pub missed: Vec<Missed>,
}

/// The code that a bench measures.
#[derive(Debug, PartialEq)]
pub struct BenchCode {
    line: usize,
    /// Its command, without `cargo xtask`.
    pub bench: String,
    /// Files and folders, from the root of the repository.
    pub paths: Vec<String>,
}

/// One promised number.
#[derive(Debug, PartialEq)]
pub struct Claim {
    /// Its line, counted from 1.
    pub line: usize,
    pub id: String,
    pub promise: String,
    pub goal: Goal,
    pub unit: String,
    pub shown_by: String,
}

/// A bound, as written and parsed.
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

impl Specification {
    /// Reads it from the root of the repository.
    pub fn read(root: &Path) -> Result<Self> {
        let place = || format!("cannot read {SPECIFICATION}");
        let text = fs::read_to_string(root.join(SPECIFICATION)).with_context(place)?;
        Self::parse(&text)
    }

    /// Parses all rows of all tables with these columns.
    pub fn parse(text: &str) -> Result<Self> {
        let claims = parse_rows(text, &COLUMNS, parse_claim)?;
        if claims.is_empty() {
            bail!(
                "{SPECIFICATION} has no table with the columns {}",
                COLUMNS.join(" | ")
            );
        }
        Ok(Self {
            claims,
            code: parse_rows(text, &CODE_COLUMNS, parse_code)?,
            missed: parse_rows(text, &missed::COLUMNS, parse_missed)?,
        })
    }

    /// The code of the bench that measures a claim.
    pub fn code_of(&self, claim: &Claim) -> Option<&BenchCode> {
        self.code.iter().find(|code| code.bench == claim.bench())
    }

    /// The row of a claim in the table of missed promises.
    pub fn missed_row(&self, claim: &Claim) -> Option<&Missed> {
        self.missed.iter().find(|row| row.claim == claim.id)
    }

    /// Contradictions and missing rows, with their lines; `exists` checks a path of the tree.
    pub fn problems(&self, exists: impl Fn(&str) -> bool) -> Vec<(usize, String)> {
        let mut problems = Vec::new();
        let mut seen = BTreeSet::new();
        for claim in &self.claims {
            if !seen.insert(&claim.id) {
                problems.push((claim.line, format!("a second claim named {}", claim.id)));
            }
            if self.code_of(claim).is_none() {
                let message = format!("no row names the code of `{}`", claim.bench());
                problems.push((claim.line, message));
            }
        }
        let mut seen = BTreeSet::new();
        for code in &self.code {
            let bench = &code.bench;
            if !seen.insert(bench) {
                problems.push((code.line, format!("a second row for `{bench}`")));
            }
            if self.claims.iter().all(|claim| claim.bench() != bench) {
                problems.push((code.line, format!("`{bench}` shows no claim")));
            }
            for path in code.paths.iter().filter(|path| !exists(path)) {
                problems.push((code.line, format!("there is no {path}")));
            }
        }
        problems
    }
}

/// The rows of all tables with these columns; an error names the line.
fn parse_rows<T>(
    text: &str,
    columns: &[&str],
    parse: impl Fn(&Row<'_>) -> Result<T>,
) -> Result<Vec<T>> {
    let checked = |row: &Row<'_>| {
        if row.cells.len() != columns.len() {
            bail!("{} columns instead of {}", row.cells.len(), columns.len());
        }
        for (cell, column) in row.cells.iter().zip(columns) {
            if cell.is_empty() {
                bail!("no {column}");
            }
        }
        parse(row)
    };
    rows(text, columns)
        .iter()
        .map(|row| checked(row).with_context(|| format!("{SPECIFICATION}:{}", row.line)))
        .collect()
}

fn parse_claim(row: &Row<'_>) -> Result<Claim> {
    Ok(Claim {
        line: row.line,
        id: bare(row.cells[0]),
        promise: row.cells[1].to_owned(),
        goal: Goal::parse(&bare(row.cells[2]))?,
        unit: bare(row.cells[3]),
        shown_by: bare(row.cells[4]),
    })
}

/// Paths are marked as code and separated by commas.
fn parse_code(row: &Row<'_>) -> Result<BenchCode> {
    let cell = row.cells[1];
    let path = |part: &str| {
        let inner = part.trim().strip_prefix('`')?.strip_suffix('`')?;
        Some(inner.to_owned())
    };
    let paths = cell.split(',').map(path).collect::<Option<Vec<String>>>();
    Ok(BenchCode {
        line: row.line,
        bench: bare(row.cells[0]),
        paths: paths.with_context(|| format!("{cell} is not a list of paths in backticks"))?,
    })
}

impl Claim {
    /// The bench that measures it, as named in the table of code.
    pub fn bench(&self) -> &str {
        self.shown_by
            .strip_prefix(COMMAND)
            .unwrap_or(&self.shown_by)
    }
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
| `pause` | the guest is stopped | `<= 12.5` | ms | `bench checkpoint` |
| speed | pages move | > 2 | GB/s | cargo xtask bench restore |

| bench | code that its figures are about |
| --- | --- |
| `bench checkpoint` | `crates/a`, `tests/b.rs` |
| bench restore | `crates/a` |
";

    /// The problems of a changed text, where `crates/a` and `tests/b.rs` exist.
    fn problems(text: &str) -> Vec<(usize, String)> {
        let specification = Specification::parse(text).unwrap();
        specification.problems(|path| ["crates/a", "tests/b.rs"].contains(&path))
    }

    fn error(text: &str) -> String {
        format!("{:#}", Specification::parse(text).unwrap_err())
    }

    #[test]
    fn claims_are_read_from_their_tables_alone() {
        let claims = Specification::parse(GOOD).unwrap().claims;
        let ids: Vec<_> = claims.iter().map(|claim| claim.id.as_str()).collect();
        assert_eq!(ids, ["pause", "speed"]);
        assert_eq!(claims[0].goal.bound, 12.5);
        assert_eq!(claims[0].shown_by, "bench checkpoint");
        assert_eq!(problems(GOOD), []);
    }

    #[test]
    fn a_repeated_id_is_reported_with_its_line() {
        let text = GOOD.replace("| speed", "| pause");
        assert_eq!(
            problems(&text),
            [(10, "a second claim named pause".to_owned())]
        );
    }

    #[test]
    fn a_row_that_is_no_claim_is_reported_with_its_line() {
        for (from, to, expected) in [
            ("`<= 12.5`", "fast", "does not begin with"),
            ("`<= 12.5`", "<= fast", "has no number"),
            ("| ms |", "| |", "no unit"),
            ("| ms |", "| ms | ms |", "6 columns"),
        ] {
            let error = error(&GOOD.replace(from, to));
            assert!(error.contains(expected) && error.contains(":9"), "{error}");
        }
        assert!(error("# Nothing\n").contains("has no table"));
    }

    #[test]
    fn the_code_of_a_bench_is_found_by_its_command() {
        let specification = Specification::parse(GOOD).unwrap();
        let paths = |index: usize| {
            let code = specification.code_of(&specification.claims[index]);
            code.unwrap().paths.clone()
        };
        assert_eq!(paths(0), ["crates/a", "tests/b.rs"]);
        assert_eq!(paths(1), ["crates/a"]);
    }

    #[test]
    fn a_claim_whose_bench_has_no_row_is_a_problem() {
        let text = GOOD.replace("| bench restore | `crates/a` |\n", "");
        let message = "no row names the code of `bench restore`".to_owned();
        assert_eq!(problems(&text), [(10, message)]);
    }

    #[test]
    fn a_path_that_does_not_exist_is_a_problem() {
        for path in ["crates/gone", ""] {
            let text = GOOD.replace("`tests/b.rs`", &format!("`{path}`"));
            assert_eq!(problems(&text), [(14, format!("there is no {path}"))]);
        }
    }

    #[test]
    fn a_row_of_code_that_is_repeated_or_has_no_claim_is_a_problem() {
        let text = format!("{GOOD}| bench restore | `tests/b.rs` |\n| demo | `crates/a` |\n");
        let found = problems(&text);
        let messages = ["a second row for `bench restore`", "`demo` shows no claim"];
        assert_eq!(
            found,
            [(16, messages[0].to_owned()), (17, messages[1].to_owned())]
        );
    }

    #[test]
    fn paths_without_backticks_are_reported_with_their_line() {
        for cell in ["crates/a", "`crates/a`, tests/b.rs", "`crates/a` and more"] {
            let text = GOOD.replace("`crates/a`, `tests/b.rs`", cell);
            let error = error(&text);
            assert!(error.contains("SPECIFICATION.md:14"), "{error}");
            assert!(
                error.contains("not a list of paths in backticks"),
                "{error}"
            );
        }
    }
}
