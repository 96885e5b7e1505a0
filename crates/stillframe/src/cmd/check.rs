//! `check`: checks the repository for damage.

use serde_json::{Value, json};
use stillframe_repo::{CheckReport, Problem, Progress};

use super::Context;
use crate::args::CheckArgs;
use crate::error::CommandError;
use crate::progress::Meter;
use crate::table::{self, printable};

/// Checks the repository.
///
/// # Errors
/// The repository is damaged.
pub fn run(context: &Context, args: &CheckArgs) -> anyhow::Result<()> {
    let mut repository = context.open()?;
    let interrupts = context.listen(1, "interrupted: ending the check")?;
    let mut meter = Meter::new(context.console);
    let report = interrupts.interruptible(|| {
        repository.check(args.read_data, &mut |progress: Progress| {
            meter.show(progress.into());
            interrupts.step();
        })
    })??;
    drop(meter);
    context
        .console
        .result(&object(&report), || words(&report, args.read_data))?;
    match report.problems.len() as u64 {
        0 => Ok(()),
        number => Err(CommandError::Problems(number).into()),
    }
}

/// Problems as JSON.
pub fn problems(problems: &[Problem]) -> Value {
    let object = |problem: &Problem| json!({ "file": problem.file, "what": problem.what });
    problems.iter().map(object).collect()
}

fn object(report: &CheckReport) -> Value {
    json!({
        "clean": report.is_clean(),
        "problems": problems(&report.problems),
        "checkpoints": report.checkpoints,
        "index_files": report.index_files,
        "packs": report.packs,
        "images": report.images,
        "blobs": report.blobs,
        "pack_bytes": report.pack_bytes,
        "unindexed_packs": report.unindexed_packs,
        "bytes_read": report.bytes_read,
    })
}

fn words(report: &CheckReport, read_data: bool) -> String {
    let mut lines: Vec<String> = report
        .problems
        .iter()
        .map(|problem| printable(&problem.to_string()))
        .collect();
    let read = match read_data {
        true => format!(
            "{} of data read and verified",
            table::bytes(report.bytes_read)
        ),
        false => "data not read (--read-data reads it)".to_owned(),
    };
    lines.push(format!(
        "{}: {}, {}, {} in {}, {read}",
        if report.is_clean() {
            "no problems"
        } else {
            "DAMAGED"
        },
        table::count(report.checkpoints, "checkpoint"),
        table::count(report.blobs, "blob"),
        table::bytes(report.pack_bytes),
        table::count(report.packs, "pack"),
    ));
    if report.images > 0 {
        let images = table::count(report.images, "indexed image");
        lines.push(format!("{images} (`stillframe index --list` shows them)"));
    }
    if report.unindexed_packs > 0 {
        let packs = table::count(report.unindexed_packs, "pack");
        lines.push(format!(
            "{packs} of unfinished checkpoints; `stillframe prune` removes them"
        ));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_come_first_and_the_summary_last() {
        let clean = CheckReport {
            checkpoints: 1,
            blobs: 2,
            packs: 3,
            ..CheckReport::default()
        };
        assert_eq!(
            words(&clean, false),
            "no problems: 1 checkpoint, 2 blobs, 0 B in 3 packs, data not read (--read-data reads it)"
        );
        let problem = Problem {
            file: "index/x".to_owned(),
            what: "cut\nshort".to_owned(),
        };
        let damaged = CheckReport {
            problems: vec![problem],
            ..clean
        };
        let text = words(&damaged, true);
        assert!(
            text.starts_with("index/x: cut\\nshort\nDAMAGED: 1 checkpoint"),
            "{text}"
        );
        assert_eq!(object(&damaged)["clean"], false);
        assert_eq!(object(&damaged)["problems"][0]["file"], "index/x");
    }
}
