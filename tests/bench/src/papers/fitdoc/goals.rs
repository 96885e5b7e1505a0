//! The promises that this evaluation answers.

use anyhow::Result;

use super::measure::Measured;
use super::{COMMAND, each, mean, paper, size, time};
use stillframe_harness::results::{Claim, Goal};

/// Stored bytes may be this much of the bytes of all written pages.
const BYTES_RATIO: f64 = 0.33;

/// The claims, means over the guests.
pub fn claims(guests: &[Measured]) -> Result<Vec<Claim>> {
    let least = |claim, least, values: Vec<f64>| {
        let goal = Goal::AtLeast(least);
        Claim::new(claim, goal, mean(&values), "percent", COMMAND)
    };
    Ok(vec![
        Claim::new(
            "fitdoc-bytes-ratio",
            Goal::AtMost(BYTES_RATIO),
            mean(&each(guests, size::bytes_ratio)?),
            "ratio",
            COMMAND,
        ),
        least(
            "fitdoc-time-reduction-gigabit",
            paper::TIME_REDUCTION_MEAN,
            each(guests, time::gigabit_reduction)?,
        ),
        least(
            "fitdoc-size-reduction-full",
            paper::FULL_REDUCTION_MEAN,
            each(guests, size::full_reduction)?,
        ),
        least(
            "fitdoc-size-reduction-remus",
            paper::REMUS_REDUCTION_MEAN,
            each(guests, size::remus_reduction)?,
        ),
    ])
}
