//! The promises that this evaluation answers, and whether they hold.

use anyhow::Result;

use super::measure::Measured;
use super::{COMMAND, Figure, Page, each, mean, paper, size, time};
use crate::results::{self, Claim};

/// Stored bytes may be this much of the bytes of all written pages.
const BYTES_RATIO: f64 = 0.33;

/// The claims, means over the guests.
pub fn claims(guests: &[Measured]) -> Result<Vec<Claim>> {
    let ratio = mean(&each(guests, size::bytes_ratio)?);
    let time = mean(&each(guests, time::gigabit_reduction)?);
    let full = mean(&each(guests, size::full_reduction)?);
    let remus = mean(&each(guests, size::remus_reduction)?);
    let least = |claim, goal, value: f64, limit: f64| Claim {
        claim,
        goal,
        value: rounded(value),
        unit: "percent",
        holds: value >= limit,
        command: COMMAND,
        commit: results::commit(),
    };
    Ok(vec![
        Claim {
            claim: "fitdoc-bytes-ratio",
            goal: "<= 0.33",
            value: rounded(ratio),
            unit: "ratio",
            holds: ratio <= BYTES_RATIO,
            command: COMMAND,
            commit: results::commit(),
        },
        least(
            "fitdoc-time-reduction-gigabit",
            ">= 70.54",
            time,
            paper::TIME_REDUCTION_MEAN,
        ),
        least(
            "fitdoc-size-reduction-full",
            ">= 83.02",
            full,
            paper::FULL_REDUCTION_MEAN,
        ),
        least(
            "fitdoc-size-reduction-remus",
            ">= 52.88",
            remus,
            paper::REMUS_REDUCTION_MEAN,
        ),
    ])
}

fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Adds them to the page.
pub fn add(page: &mut Page, claims: &[Claim]) {
    let rows: Vec<Vec<String>> = claims
        .iter()
        .map(|claim| {
            let holds = match claim.holds {
                true => "holds",
                false => "does not hold",
            };
            vec![
                claim.claim.to_owned(),
                claim.goal.to_owned(),
                format!("{} {}", claim.value, claim.unit),
                holds.to_owned(),
            ]
        })
        .collect();
    let failed = claims.iter().filter(|claim| !claim.holds).count();
    page.add(&Figure {
        title: "Promises",
        paper: "mean reductions of 70.54 % (time), 83.02 % (size, against a full save) and 52.88 % (size, against Remus).",
        ours: &format!("{failed} of {} do not hold.", claims.len()),
        columns: &["claim", "goal", "measured", ""],
        rows: &rows,
        pictures: &[],
        differs: "the goals for the three reductions are the paper's own means; each of ours is the mean over the guests \
                  of the tables above.",
    });
}
