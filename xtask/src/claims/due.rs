//! The required rows of the table of missed promises, by the last measurements.

use super::measurement::Measurement;
use super::missed::LastMeasured;
use super::specification::{Claim, Specification};
use std::collections::{BTreeMap, BTreeSet};

/// The required row for a claim; `None` if its last measurement confirms it.
///
/// A bench does not record the wording of a promise. After a change of the wording, the author rejects the old figure:
/// `marked` names its commit. The next figure has another commit and makes that row wrong, so the author must decide
/// whether the bench measures the new wording.
pub fn due(
    claim: &Claim,
    last: Option<&Measurement>,
    marked: Option<&LastMeasured>,
) -> Option<LastMeasured> {
    let Some(last) = last else {
        return Some(LastMeasured::Never);
    };
    let other_form = LastMeasured::OtherForm(last.commit.clone());
    if !has_goal_of(last, claim) || marked == Some(&other_form) {
        return Some(other_form);
    }
    let holds = last.holds && claim.goal.holds(last.value);
    (!holds).then_some(LastMeasured::Figure(last.value))
}

/// Whether a figure was measured against the current goal of the claim.
pub fn has_goal_of(last: &Measurement, claim: &Claim) -> bool {
    last.goal.trim() == claim.goal.text && last.unit == claim.unit
}

/// Wrong or missing rows, with the line.
pub fn problems(
    specification: &Specification,
    last: &BTreeMap<String, Measurement>,
) -> Vec<(usize, String)> {
    let mut problems = Vec::new();
    for claim in &specification.claims {
        let row = specification.missed_row(claim);
        let marked = row.map(|row| &row.last);
        let due = due(claim, last.get(&claim.id), marked);
        if due.as_ref() == marked {
            continue;
        }
        let due = due.map_or("and holds".to_owned(), |due| format!("as {due}"));
        let marked = marked.map_or("not".to_owned(), |marked| format!("as {marked}"));
        let message = format!("{} is marked {marked}, measured {due}", claim.id);
        problems.push((row.map_or(claim.line, |row| row.line), message));
    }
    let mut seen = BTreeSet::new();
    for row in &specification.missed {
        if !seen.insert(&row.claim) {
            problems.push((row.line, format!("{} is marked a second time", row.claim)));
        }
        if specification
            .claims
            .iter()
            .all(|claim| claim.id != row.claim)
        {
            problems.push((row.line, format!("there is no claim {}", row.claim)));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLAIM: &str = "\
| id | promise | goal | unit | bench or test |
| --- | --- | --- | --- | --- |
| pause | the guest is stopped | <= 12.5 | ms | bench checkpoint |
";

    fn specification(missed: &str) -> Specification {
        let header = "| missed | last measured | what is known |\n| --- | --- | --- |\n";
        Specification::parse(&format!("{CLAIM}\n{header}{missed}")).unwrap()
    }

    fn measurement(goal: &str, value: f64) -> BTreeMap<String, Measurement> {
        let measurement = Measurement {
            claim: "pause".to_owned(),
            goal: goal.to_owned(),
            value,
            unit: "ms".to_owned(),
            holds: true,
            command: "cargo xtask bench checkpoint".to_owned(),
            commit: "0123abc".to_owned(),
        };
        BTreeMap::from([("pause".to_owned(), measurement)])
    }

    /// Each measurement has exactly one correct row.
    #[test]
    fn the_table_has_what_was_measured_and_nothing_else() {
        let rows = [
            "",
            "| pause | never | - |\n",
            "| pause | 13.5 | - |\n",
            "| pause | not in this form at 0123abc | - |\n",
        ];
        let measured = [
            (BTreeMap::new(), 1),
            (measurement("<= 12.5", 13.5), 2),
            (measurement("<= 20", 13.5), 3),
            (measurement("<= 20", 1.0), 3),
            (measurement("<= 12.5", 1.0), 0),
        ];
        for (last, right) in &measured {
            for (index, row) in rows.iter().enumerate() {
                let problems = problems(&specification(row), last);
                let by_hand = index == 3 && !last.is_empty();
                let expected = usize::from(index != *right && !by_hand);
                assert_eq!(problems.len(), expected, "{row} {problems:?}");
            }
        }
    }

    #[test]
    fn a_rejected_figure_is_of_one_commit() {
        let row = "| pause | not in this form at 0123abc | - |\n";
        let mut last = measurement("<= 12.5", 1.0);
        assert_eq!(problems(&specification(row), &last), []);
        last.get_mut("pause").unwrap().commit = "4567def".to_owned();
        let message = "pause is marked as not in this form at 0123abc, measured and holds";
        let expected = [(7, message.to_owned())];
        assert_eq!(problems(&specification(row), &last), expected);
    }

    #[test]
    fn what_is_missing_is_reported_where_it_is_promised() {
        let problems = problems(&specification(""), &measurement("<= 12.5", 13.5));
        let message = "pause is marked not, measured as 13.5";
        assert_eq!(problems, [(3, message.to_owned())]);
    }

    #[test]
    fn rows_that_repeat_a_claim_or_have_none_are_problems() {
        let rows = "| pause | never | - |\n| pause | never | - |\n| speed | 1 | - |\n";
        let problems = problems(&specification(rows), &BTreeMap::new());
        let expected = [
            (8, "pause is marked a second time".to_owned()),
            (9, "there is no claim speed".to_owned()),
        ];
        assert_eq!(problems, expected);
    }
}
