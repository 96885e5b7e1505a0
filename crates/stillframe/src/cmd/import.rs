//! `import`: creates a checkpoint from a migration file of QEMU.

use std::path::absolute;

use anyhow::Context as _;
use stillframe_engine::import::{self, ImportOptions, ImportReport};

use super::{Context, short};
use crate::args::ImportArgs;
use crate::durations;
use crate::progress::Meter;
use crate::table::{self, printable};

/// Imports the file.
pub fn run(context: &Context, args: &ImportArgs) -> anyhow::Result<()> {
    let mut repository = context.open()?;
    let scratch = tempfile::Builder::new()
        .prefix("stillframe-import-")
        .tempdir()
        .context("cannot create a directory for QEMU's monitor")?;
    let options = ImportOptions {
        file: absolute(&args.file)
            .with_context(|| format!("{} is not a path", args.file.display()))?,
        vm: args.vm.clone(),
        command: args.command.clone(),
        cwd: std::env::current_dir().context("the current directory does not exist")?,
        scratch: scratch.path().to_owned(),
        lock_wait: args.lock.lock_wait,
    };
    let interrupts = context.listen(1, "interrupted: ending the import")?;
    let mut meter = Meter::new(context.console);
    let report = interrupts.interruptible(|| {
        import::import(&mut repository, &options, &mut |progress| {
            meter.show(progress.into());
            interrupts.step();
        })
    })??;
    drop(meter);
    for note in &report.notes {
        context.console.note(note);
    }
    context.console.result(&report, || words(&report))?;
    Ok(())
}

fn words(report: &ImportReport) -> String {
    format!(
        "imported {} ({}, {}) as {} of {} in {}: {} new, {} duplicate, {} zero, {} stored",
        printable(&report.file.display().to_string()),
        report.format,
        printable(&report.machine),
        short(&report.checkpoint),
        printable(&report.vm),
        durations::human_us(report.total_us),
        table::count(report.pages.new, "page"),
        report.pages.duplicate,
        report.pages.zero,
        table::bytes(report.bytes_stored),
    )
}
