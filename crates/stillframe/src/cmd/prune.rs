//! `prune`: frees the space of data that no checkpoint needs.

use serde_json::{Value, json};
use stillframe_repo::{Progress, PruneReport, Repository};

use super::{Context, templates};
use crate::args::PruneArgs;
use crate::progress::Meter;
use crate::table;

/// Prunes, or reports what a prune would free.
pub fn run(context: &Context, args: &PruneArgs) -> anyhow::Result<()> {
    let mut repository = context.open()?;
    let report = perform(context, &mut repository, args.dry_run)?;
    if !args.dry_run {
        templates::drop_forgotten(context, &repository);
    }
    context.console.result(&object(&report, args.dry_run), || {
        words(&report, args.dry_run)
    })?;
    Ok(())
}

/// Prunes with progress, until done or interrupted.
pub fn perform(
    context: &Context,
    repository: &mut Repository,
    dry_run: bool,
) -> anyhow::Result<PruneReport> {
    let interrupts = context.listen(1, "interrupted: the next prune frees the rest")?;
    let mut meter = Meter::new(context.console);
    let report = interrupts.interruptible(|| {
        repository.prune(dry_run, &mut |progress: Progress| {
            meter.show(progress.into());
            interrupts.step();
        })
    });
    Ok(report??)
}

/// The result as JSON.
pub fn object(report: &PruneReport, dry_run: bool) -> Value {
    json!({
        "dry_run": dry_run,
        "checkpoints": report.checkpoints,
        "blobs_used": report.blobs_used,
        "blobs_unused": report.blobs_unused,
        "packs_kept": report.packs_kept,
        "packs_removed": report.packs_removed,
        "packs_repacked": report.packs_repacked,
        "packs_unindexed": report.packs_unindexed,
        "bytes_before": report.bytes_before,
        "bytes_after": report.bytes_after,
    })
}

/// The result in one line.
pub fn words(report: &PruneReport, dry_run: bool) -> String {
    let freed = report.bytes_before.saturating_sub(report.bytes_after);
    let removed = report.packs_removed + report.packs_unindexed;
    let unused = match removed + report.packs_repacked {
        // Nothing was freed, and the user must learn why.
        0 if report.blobs_unused > 0 => format!(
            ", {} unused in packs that are mostly in use",
            report.blobs_unused
        ),
        _ => String::new(),
    };
    format!(
        "{} {} of {}: {} {}, {} repacked, {} kept; {} in use{unused}",
        if dry_run { "would free about" } else { "freed" },
        table::bytes(freed),
        table::bytes(report.bytes_before),
        table::count(removed, "pack"),
        if dry_run { "to remove" } else { "removed" },
        report.packs_repacked,
        report.packs_kept,
        table::count(report.blobs_used, "blob"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_freed_in_one_line() {
        let report = PruneReport {
            blobs_used: 9,
            packs_removed: 1,
            packs_unindexed: 1,
            packs_repacked: 3,
            packs_kept: 4,
            bytes_before: 3 << 20,
            bytes_after: 1 << 20,
            ..PruneReport::default()
        };
        assert_eq!(
            words(&report, false),
            "freed 2.0 MiB of 3.0 MiB: 2 packs removed, 3 repacked, 4 kept; 9 blobs in use"
        );
        assert!(words(&report, true).starts_with("would free about 2.0 MiB"));
        assert_eq!(object(&report, true)["dry_run"], true);
        let nothing = PruneReport {
            blobs_used: 9,
            blobs_unused: 2,
            packs_kept: 4,
            bytes_before: 3 << 20,
            bytes_after: 3 << 20,
            ..PruneReport::default()
        };
        assert_eq!(
            words(&nothing, false),
            "freed 0 B of 3.0 MiB: 0 packs removed, 0 repacked, 4 kept; 9 blobs in use, 2 unused in packs that are \
             mostly in use"
        );
    }
}
