//! `rebuild-index`: rebuilds the index from the packs.

use serde_json::{Value, json};
use stillframe_repo::{Progress, RebuildReport};

use super::{Context, check};
use crate::error::CommandError;
use crate::progress::Meter;
use crate::table::{self, printable};

/// Rebuilds the index.
///
/// # Errors
/// A pack could not be read.
pub fn run(context: &Context) -> anyhow::Result<()> {
    let mut repository = context.open()?;
    let interrupts = context.listen(1, "interrupted: the old index stays")?;
    let mut meter = Meter::new(context.console);
    let report = interrupts.interruptible(|| {
        repository.rebuild_index(&mut |progress: Progress| {
            meter.show(progress.into());
            interrupts.step();
        })
    })??;
    drop(meter);
    context
        .console
        .result(&object(&report), || words(&report))?;
    match report.problems.len() as u64 {
        0 => Ok(()),
        number => Err(CommandError::Problems(number).into()),
    }
}

fn object(report: &RebuildReport) -> Value {
    json!({
        "packs": report.packs,
        "index_files_replaced": report.index_files_replaced,
        "problems": check::problems(&report.problems),
    })
}

fn words(report: &RebuildReport) -> String {
    let problems = report
        .problems
        .iter()
        .map(|problem| printable(&problem.to_string()));
    let summary = format!(
        "a new index of {} replaces {}; run `stillframe check` to verify the repository",
        table::count(report.packs, "pack"),
        table::count(report.index_files_replaced, "index file"),
    );
    problems.chain([summary]).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_result_in_one_line() {
        let report = RebuildReport {
            packs: 2,
            index_files_replaced: 1,
            problems: Vec::new(),
        };
        assert!(words(&report).starts_with("a new index of 2 packs replaces 1 index file;"));
        assert_eq!(object(&report)["packs"], 2);
    }
}
