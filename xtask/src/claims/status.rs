//! The status of a claim by its last figure.

use super::due::{due, has_goal_of};
use super::history::Since;
use super::measurement::Measurement;
use super::missed::LastMeasured;
use super::specification::Claim;
use crate::workspace::DIRTY_MARK;
use anyhow::Result;
use std::fmt;

/// The status of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    /// Its last figure meets the goal, and its code has not changed since.
    Holds,
    /// Its last figure misses the goal, or there is none for this goal.
    Broken,
    /// The goal was met, by code that has changed since.
    Stale,
    /// The goal was met at a commit that is not in the history.
    UnknownCommit,
    /// The goal was met by a work tree that no commit holds.
    Dirty,
}

impl Status {
    /// All, in the order of the summary.
    pub const ALL: [Status; 5] = [
        Status::Holds,
        Status::Broken,
        Status::Stale,
        Status::UnknownCommit,
        Status::Dirty,
    ];
}

impl fmt::Display for Status {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(match self {
            Status::Holds => "holds",
            Status::Broken => "BROKEN",
            Status::Stale => "STALE",
            Status::UnknownCommit => "unknown commit",
            Status::Dirty => "dirty",
        })
    }
}

/// A status and its reason.
#[derive(Debug, PartialEq)]
pub struct Assessment {
    pub status: Status,
    pub reason: String,
}

/// Assesses a claim. `marked` is its entry in the table of missed promises; `since` gives the changes of its code since
/// a commit.
pub fn assess(
    claim: &Claim,
    last: Option<&Measurement>,
    marked: Option<&LastMeasured>,
    since: impl FnOnce(&str) -> Result<Since>,
) -> Result<Assessment> {
    let Some(last) = last else {
        return Ok(Assessment {
            status: Status::Broken,
            reason: "never measured".to_owned(),
        });
    };
    let (value, unit) = (last.value, &last.unit);
    let mut reason = format!("{value} {unit} by `{}` at {}", last.command, last.commit);
    let mut status = Status::Holds;
    if let Some((traced, words)) = trace(&last.commit, since)? {
        status = traced;
        reason += &format!("; {words}");
    }
    if let Some(due) = due(claim, Some(last), marked) {
        status = Status::Broken;
        reason += &format!("; {}", shortfall(claim, last, &due));
    }
    Ok(Assessment { status, reason })
}

/// Why a figure does not show that the goal is met.
fn shortfall(claim: &Claim, last: &Measurement, due: &LastMeasured) -> String {
    match due {
        LastMeasured::Figure(_) | LastMeasured::Never => "does not hold".to_owned(),
        LastMeasured::OtherForm(_) if has_goal_of(last, claim) => {
            "the promise had another form: measure again".to_owned()
        }
        LastMeasured::OtherForm(_) => {
            let old = format!("{} {}", last.goal, last.unit);
            format!("against another goal ({old}): measure again")
        }
    }
}

/// Why a figure is not of the current code.
fn trace(
    commit: &str,
    since: impl FnOnce(&str) -> Result<Since>,
) -> Result<Option<(Status, String)>> {
    if commit.ends_with(DIRTY_MARK) {
        let words = "the work tree had changes that no commit holds";
        return Ok(Some((Status::Dirty, words.to_owned())));
    }
    Ok(match since(commit)? {
        Since::Unchanged => None,
        Since::UnknownCommit => {
            let words = format!("the history of HEAD has no commit {commit}");
            Some((Status::UnknownCommit, words))
        }
        Since::Changed {
            commits,
            first_path,
        } => {
            let words =
                format!("commits that touched its code since: {commits}, first {first_path}");
            Some((Status::Stale, words))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claims::specification::Specification;
    use anyhow::bail;

    fn claim() -> Claim {
        let text = "\
| id | promise | goal | unit | bench or test |
| --- | --- | --- | --- | --- |
| `pause` | the guest is stopped | `<= 12.5` | ms | `bench checkpoint` |
";
        Specification::parse(text).unwrap().claims.remove(0)
    }

    fn measurement(value: f64) -> Measurement {
        Measurement {
            claim: "pause".to_owned(),
            goal: "<= 12.5".to_owned(),
            value,
            unit: "ms".to_owned(),
            holds: true,
            command: "cargo xtask bench".to_owned(),
            commit: "0123abc".to_owned(),
        }
    }

    fn status(last: Option<&Measurement>) -> (Status, String) {
        let assessment = assess(&claim(), last, None, |_| Ok(Since::Unchanged)).unwrap();
        (assessment.status, assessment.reason)
    }

    #[test]
    fn a_claim_holds_only_by_a_measurement_that_meets_its_own_goal() {
        assert_eq!(status(Some(&measurement(12.5))).0, Status::Holds);
        assert_eq!(status(None).0, Status::Broken);
        assert_eq!(status(Some(&measurement(12.6))).0, Status::Broken);
        assert_eq!(status(Some(&measurement(f64::NAN))).0, Status::Broken);
        let mut other = measurement(1.0);
        other.holds = false;
        assert_eq!(status(Some(&other)).0, Status::Broken);
        let mut goal = measurement(1.0);
        goal.goal = "<= 20".to_owned();
        let mut unit = measurement(1.0);
        unit.unit = "s".to_owned();
        for other in [goal, unit] {
            let (status, reason) = status(Some(&other));
            assert_eq!(status, Status::Broken);
            assert!(reason.contains("another goal"), "{reason}");
        }
    }

    #[test]
    fn a_figure_of_another_form_of_the_promise_does_not_hold() {
        let status = |commit: &str| {
            let marked = LastMeasured::OtherForm(commit.to_owned());
            let last = measurement(1.0);
            let assessment = assess(&claim(), Some(&last), Some(&marked), |_| {
                Ok(Since::Unchanged)
            });
            assessment.unwrap().status
        };
        assert_eq!(status("0123abc"), Status::Broken);
        assert_eq!(status("4567def"), Status::Holds);
    }

    #[test]
    fn a_figure_of_a_changed_work_tree_is_dirty_and_git_is_not_queried() {
        let mut last = measurement(1.0);
        last.commit += DIRTY_MARK;
        let assessment = assess(&claim(), Some(&last), None, |_| bail!("queried")).unwrap();
        assert_eq!(assessment.status, Status::Dirty);
    }

    #[test]
    fn a_figure_of_an_unknown_commit_has_that_status() {
        let last = measurement(1.0);
        let assessment = assess(&claim(), Some(&last), None, |_| Ok(Since::UnknownCommit)).unwrap();
        assert_eq!(assessment.status, Status::UnknownCommit);
        assert!(
            assessment.reason.contains("no commit 0123abc"),
            "{assessment:?}"
        );
    }

    fn changed(commit: &str) -> Result<Since> {
        assert_eq!(commit, "0123abc");
        let first_path = "crates/a.rs".to_owned();
        Ok(Since::Changed {
            commits: 3,
            first_path,
        })
    }

    #[test]
    fn a_figure_of_older_code_is_stale_and_the_reason_counts_the_commits() {
        let assessment = assess(&claim(), Some(&measurement(1.0)), None, changed).unwrap();
        assert_eq!(assessment.status, Status::Stale);
        let end = "touched its code since: 3, first crates/a.rs";
        assert!(assessment.reason.ends_with(end), "{assessment:?}");
    }

    #[test]
    fn a_missed_goal_outweighs_old_code_and_both_are_in_the_reason() {
        let assessment = assess(&claim(), Some(&measurement(13.0)), None, changed).unwrap();
        assert_eq!(assessment.status, Status::Broken);
        assert!(
            assessment.reason.contains("first crates/a.rs"),
            "{assessment:?}"
        );
        assert!(
            assessment.reason.ends_with("does not hold"),
            "{assessment:?}"
        );
    }

    #[test]
    fn a_failing_query_of_git_is_an_error() {
        assert!(assess(&claim(), Some(&measurement(1.0)), None, |_| bail!("no git")).is_err());
    }
}
