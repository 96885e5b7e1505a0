//! `claims`: compares the numbers that SPECIFICATION.md promises with the last measurements.
//!
//! SPECIFICATION.md holds one or more tables with the columns
//!
//! ```text
//! | id | promise | goal | unit | bench or test |
//! ```
//!
//! where a goal is a bound such as `<= 12.5` (also `<`, `>`, `>=`, `=`) in that unit. Each bench writes its last run to
//! `docs/results/<bench>/summary.json`, a list of [`Measurement`]s. One bench measures each claim. A promise that its
//! last measurement does not confirm is in a table with the columns
//!
//! ```text
//! | missed | last measured | what is known |
//! ```
//!
//! where the last measurement is the figure that misses the goal, `never`, or `not in this form at COMMIT`: the figure
//! of that commit was measured against another goal, or another wording of the promise.
//!
//! A figure is valid for the commit that was measured. That commit must be in the history, and no later commit may have
//! touched the code that the figure is about. A table names that code for each bench, as paths in backticks:
//!
//! ```text
//! | bench | code that its figures are about |
//! ```

mod due;
mod history;
mod measurement;
mod missed;
mod specification;
mod status;
mod table;

pub use measurement::Measurement;
pub use specification::{SPECIFICATION, Specification};

use crate::workspace::Workspace;
use anyhow::{Context, Result, bail};
use history::{GitHistory, History, Since};
use measurement::measurements;
use specification::Claim;
use status::{Assessment, Status, assess};
use std::collections::BTreeMap;

const RESULTS: &str = "docs/results";

/// Prints every promise with its last value.
///
/// # Errors
/// A promise does not hold, or the table of missed promises is outdated.
pub fn claims(workspace: &Workspace) -> Result<()> {
    let specification = Specification::read(&workspace.root)?;
    let last = measurements(&workspace.root.join(RESULTS))?;
    let history = GitHistory::read(&workspace.root)?;
    let all = assess_all(&specification, &last, &history)?;
    for (claim, assessment) in &all {
        let (id, promise) = (&claim.id, &claim.promise);
        let (goal, unit) = (&claim.goal.text, &claim.unit);
        println!("{:<14} {id}: {promise} {goal} {unit}", assessment.status);
        println!("{:<14} {} [{}]", "", assessment.reason, claim.shown_by);
    }
    for (id, measurement) in &last {
        if specification.claims.iter().all(|claim| claim.id != *id) {
            println!(
                "note: {id} was measured by `{}` and is not promised",
                measurement.command
            );
        }
    }
    let outdated = due::problems(&specification, &last);
    for (line, message) in &outdated {
        println!("{SPECIFICATION}:{line}: {message}");
    }
    let count = |status| {
        let same = all
            .iter()
            .filter(|(_, assessment)| assessment.status == status);
        same.count()
    };
    let counts = Status::ALL.map(|status| format!("{status}: {}", count(status)));
    println!("claims: {}, of them {}", all.len(), counts.join(", "));
    let others = all.len() - count(Status::Holds);
    if others > 0 {
        bail!("{others} promises do not hold as measured");
    }
    if !outdated.is_empty() {
        bail!("the table of missed promises is outdated");
    }
    Ok(())
}

/// The measurement of a new value, compared with its goal in SPECIFICATION.md.
pub fn measured(
    workspace: &Workspace,
    id: &str,
    value: f64,
    command: &str,
    commit: &str,
) -> Result<Measurement> {
    let specification = Specification::read(&workspace.root)?;
    let claim = specification
        .claims
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

/// Assesses all claims in their order.
///
/// # Errors
/// The tables contradict each other or the tree.
fn assess_all<'a>(
    specification: &'a Specification,
    last: &BTreeMap<String, Measurement>,
    history: &impl History,
) -> Result<Vec<(&'a Claim, Assessment)>> {
    let problems = specification.problems(|path| history.has_path(path));
    if !problems.is_empty() {
        let lines = problems
            .iter()
            .map(|(line, message)| format!("{SPECIFICATION}:{line}: {message}"));
        bail!("{}", lines.collect::<Vec<_>>().join("\n"));
    }
    // Claims of one run share one query.
    let mut known: BTreeMap<(&str, String), Since> = BTreeMap::new();
    let mut all = Vec::new();
    for claim in &specification.claims {
        let code = specification.code_of(claim);
        let paths = code.map_or(&[][..], |code| &code.paths);
        let since = |commit: &str| {
            let run = (claim.bench(), commit.to_owned());
            if let Some(since) = known.get(&run) {
                return Ok(since.clone());
            }
            let since = history.since(commit, paths)?;
            known.insert(run, since.clone());
            Ok(since)
        };
        let marked = specification.missed_row(claim).map(|row| &row.last);
        let assessment = assess(claim, last.get(&claim.id), marked, since)?;
        all.push((claim, assessment));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::history::tests::Sample;
    use super::*;
    use std::cell::RefCell;
    use std::fs;
    use std::path::Path;

    const TABLES: &str = "\
| id | promise | goal | unit | bench or test |
| --- | --- | --- | --- | --- |
| pause | the guest is stopped | <= 2 | ms | cargo xtask bench checkpoint |
| pages | pages are exact | = 0 | pages | cargo xtask bench checkpoint |
| speed | pages move | > 2 | GB/s | cargo xtask bench delta |

| bench | code that its figures are about |
| --- | --- |
| bench checkpoint | `engine`, `bench.rs` |
| bench delta | `page` |
";

    fn summary(claims: &[(&str, &str, f64, &str)], commit: &str) -> String {
        let list: Vec<_> = claims
            .iter()
            .map(|(claim, goal, value, unit)| {
                serde_json::json!({"claim": claim, "goal": goal, "value": value, "unit": unit,
                    "holds": true, "command": "c", "commit": commit})
            })
            .collect();
        serde_json::Value::from(list).to_string()
    }

    /// Both benches measured at one commit.
    fn record(root: &Path, commit: &str) {
        let pause = ("pause", "<= 2", 1.5, "ms");
        let pages = ("pages", "= 0", 0.0, "pages");
        let speed = ("speed", "> 2", 3.0, "GB/s");
        for (bench, claims) in [("checkpoint", &[pause, pages][..]), ("delta", &[speed])] {
            let folder = root.join(RESULTS).join(bench);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("summary.json"), summary(claims, commit)).unwrap();
        }
    }

    fn statuses(root: &Path) -> Result<Vec<Status>> {
        let specification = Specification::read(root)?;
        let last = measurements(&root.join(RESULTS))?;
        let all = assess_all(&specification, &last, &GitHistory::read(root)?)?;
        Ok(all
            .iter()
            .map(|(_, assessment)| assessment.status)
            .collect())
    }

    #[test]
    fn figures_hold_until_a_commit_touches_their_code() {
        use Status::{Dirty, Holds, Stale, UnknownCommit};
        let sample = Sample::new();
        let root = sample.root();
        sample.commit("engine/a.rs", "1");
        sample.commit("page/a.rs", "1");
        sample.commit("bench.rs", "1");
        let commit = sample.commit(SPECIFICATION, TABLES);
        record(root, &commit[..12]);
        assert_eq!(statuses(root).unwrap(), [Holds; 3]);
        sample.commit("other/a.rs", "1");
        assert_eq!(statuses(root).unwrap(), [Holds; 3]);
        sample.commit("engine/b.rs", "1");
        assert_eq!(statuses(root).unwrap(), [Stale, Stale, Holds]);
        record(root, "0123456789ab");
        assert_eq!(statuses(root).unwrap(), [UnknownCommit; 3]);
        record(root, &format!("{}-dirty", &commit[..12]));
        assert_eq!(statuses(root).unwrap(), [Dirty; 3]);
    }

    #[test]
    fn tables_that_name_missing_code_are_an_error() {
        let sample = Sample::new();
        let root = sample.root();
        sample.commit("engine/a.rs", "1");
        sample.commit("bench.rs", "1");
        sample.commit(SPECIFICATION, TABLES);
        let error = statuses(root).unwrap_err().to_string();
        assert_eq!(error, "SPECIFICATION.md:10: there is no page");
        sample.commit("page/a.rs", "1");
        assert!(statuses(root).is_ok());
        sample.commit(
            SPECIFICATION,
            &TABLES.replace("| bench delta | `page` |", ""),
        );
        let error = statuses(root).unwrap_err().to_string();
        assert!(
            error.contains(":5: no row names the code of `bench delta`"),
            "{error}"
        );
    }

    /// Records its queries.
    struct Queries(RefCell<Vec<(String, Vec<String>)>>);

    impl History for Queries {
        fn has_path(&self, _: &str) -> bool {
            true
        }

        fn since(&self, commit: &str, paths: &[String]) -> Result<Since> {
            let query = (commit.to_owned(), paths.to_vec());
            self.0.borrow_mut().push(query);
            Ok(Since::Unchanged)
        }
    }

    #[test]
    fn git_is_queried_once_for_each_bench() {
        let root = tempfile::tempdir().unwrap();
        record(root.path(), "0123abc");
        let specification = Specification::parse(TABLES).unwrap();
        let last = measurements(&root.path().join(RESULTS)).unwrap();
        let queries = Queries(RefCell::default());
        assess_all(&specification, &last, &queries).unwrap();
        let paths = |paths: &[&str]| paths.iter().map(|&path| path.to_owned()).collect();
        let commit = || "0123abc".to_owned();
        let expected: [(String, Vec<String>); 2] = [
            (commit(), paths(&["engine", "bench.rs"])),
            (commit(), paths(&["page"])),
        ];
        assert_eq!(queries.0.into_inner(), expected);
    }

    /// SPECIFICATION.md lists each promise that does not hold, with its figure.
    #[test]
    fn missed_promises_are_marked() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let specification = Specification::read(&root).unwrap();
        let last = measurements(&root.join(RESULTS)).unwrap();
        assert_eq!(due::problems(&specification, &last), []);
    }
}
