//! Whether a claim can stand on its last figure.

use super::due::{due, has_goal_of};
use super::history::Since;
use super::measurement::Measurement;
use super::missed::LastMeasured;
use super::specification::Claim;
use crate::workspace::DIRTY_MARK;
use anyhow::Result;
use std::fmt;

/// How a claim stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
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

impl Verdict {
    /// In the order in which they are counted.
    pub const ALL: [Verdict; 5] = [
        Verdict::Holds,
        Verdict::Broken,
        Verdict::Stale,
        Verdict::UnknownCommit,
        Verdict::Dirty,
    ];
}

impl fmt::Display for Verdict {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(match self {
            Verdict::Holds => "holds",
            Verdict::Broken => "BROKEN",
            Verdict::Stale => "STALE",
            Verdict::UnknownCommit => "unknown commit",
            Verdict::Dirty => "dirty",
        })
    }
}

/// A verdict with what led to it.
#[derive(Debug, PartialEq)]
pub struct Judged {
    pub verdict: Verdict,
    pub reason: String,
}

/// Judges a claim. `marked` is what the table of missed promises says of it; `since` knows what has happened to its
/// code since a commit.
pub fn judge(
    claim: &Claim,
    last: Option<&Measurement>,
    marked: Option<&LastMeasured>,
    since: impl FnOnce(&str) -> Result<Since>,
) -> Result<Judged> {
    let Some(last) = last else {
        return Ok(Judged {
            verdict: Verdict::Broken,
            reason: "never measured".to_owned(),
        });
    };
    let (value, unit) = (last.value, &last.unit);
    let mut reason = format!("{value} {unit} by `{}` at {}", last.command, last.commit);
    let mut verdict = Verdict::Holds;
    if let Some((traced, words)) = trace(&last.commit, since)? {
        verdict = traced;
        reason += &format!("; {words}");
    }
    if let Some(due) = due(claim, Some(last), marked) {
        verdict = Verdict::Broken;
        reason += &format!("; {}", shortfall(claim, last, &due));
    }
    Ok(Judged { verdict, reason })
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

/// Why a figure is not one of today's code.
fn trace(
    commit: &str,
    since: impl FnOnce(&str) -> Result<Since>,
) -> Result<Option<(Verdict, String)>> {
    if commit.ends_with(DIRTY_MARK) {
        let words = "the work tree had changes that no commit holds";
        return Ok(Some((Verdict::Dirty, words.to_owned())));
    }
    Ok(match since(commit)? {
        Since::Unchanged => None,
        Since::UnknownCommit => {
            let words = format!("the history of HEAD has no commit {commit}");
            Some((Verdict::UnknownCommit, words))
        }
        Since::Changed {
            commits,
            first_path,
        } => {
            let words =
                format!("commits that touched its code since: {commits}, first {first_path}");
            Some((Verdict::Stale, words))
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
| `pause` | the guest stands still | `<= 12.5` | ms | `bench checkpoint` |
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

    fn verdict(last: Option<&Measurement>) -> (Verdict, String) {
        let judged = judge(&claim(), last, None, |_| Ok(Since::Unchanged)).unwrap();
        (judged.verdict, judged.reason)
    }

    #[test]
    fn a_claim_holds_only_by_a_measurement_that_meets_its_own_goal() {
        assert_eq!(verdict(Some(&measurement(12.5))).0, Verdict::Holds);
        assert_eq!(verdict(None).0, Verdict::Broken);
        assert_eq!(verdict(Some(&measurement(12.6))).0, Verdict::Broken);
        assert_eq!(verdict(Some(&measurement(f64::NAN))).0, Verdict::Broken);
        let mut other = measurement(1.0);
        other.holds = false;
        assert_eq!(verdict(Some(&other)).0, Verdict::Broken);
        let mut goal = measurement(1.0);
        goal.goal = "<= 20".to_owned();
        let mut unit = measurement(1.0);
        unit.unit = "s".to_owned();
        for other in [goal, unit] {
            let (verdict, reason) = verdict(Some(&other));
            assert_eq!(verdict, Verdict::Broken);
            assert!(reason.contains("another goal"), "{reason}");
        }
    }

    #[test]
    fn a_figure_of_another_form_of_the_promise_does_not_hold() {
        let verdict = |commit: &str| {
            let marked = LastMeasured::OtherForm(commit.to_owned());
            let last = measurement(1.0);
            let judged = judge(&claim(), Some(&last), Some(&marked), |_| {
                Ok(Since::Unchanged)
            });
            judged.unwrap().verdict
        };
        assert_eq!(verdict("0123abc"), Verdict::Broken);
        assert_eq!(verdict("4567def"), Verdict::Holds);
    }

    #[test]
    fn a_figure_of_a_changed_work_tree_is_dirty_and_git_is_not_asked() {
        let mut last = measurement(1.0);
        last.commit += DIRTY_MARK;
        let judged = judge(&claim(), Some(&last), None, |_| bail!("asked")).unwrap();
        assert_eq!(judged.verdict, Verdict::Dirty);
    }

    #[test]
    fn a_figure_of_an_unknown_commit_does_not_stand() {
        let last = measurement(1.0);
        let judged = judge(&claim(), Some(&last), None, |_| Ok(Since::UnknownCommit)).unwrap();
        assert_eq!(judged.verdict, Verdict::UnknownCommit);
        assert!(judged.reason.contains("no commit 0123abc"), "{judged:?}");
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
    fn a_figure_of_older_code_is_stale_and_the_reason_says_by_how_much() {
        let judged = judge(&claim(), Some(&measurement(1.0)), None, changed).unwrap();
        assert_eq!(judged.verdict, Verdict::Stale);
        let end = "touched its code since: 3, first crates/a.rs";
        assert!(judged.reason.ends_with(end), "{judged:?}");
    }

    #[test]
    fn a_missed_goal_outweighs_old_code_and_both_are_said() {
        let judged = judge(&claim(), Some(&measurement(13.0)), None, changed).unwrap();
        assert_eq!(judged.verdict, Verdict::Broken);
        assert!(judged.reason.contains("first crates/a.rs"), "{judged:?}");
        assert!(judged.reason.ends_with("does not hold"), "{judged:?}");
    }

    #[test]
    fn a_failing_question_to_git_is_an_error() {
        assert!(judge(&claim(), Some(&measurement(1.0)), None, |_| bail!("no git")).is_err());
    }
}
