//! `export`: writes a checkpoint to a file for other programs.

use std::path::{PathBuf, absolute};

use anyhow::Context as _;
use stillframe_engine::Progress;
use stillframe_engine::export::{self, Destination, DiskReport, ExportReport, Format, LoadCommand};
use stillframe_engine::restore::Checkpoint;

use super::{Context, short};
use crate::args::ExportArgs;
use crate::progress::Meter;
use crate::shell;
use crate::table::{self, printable};

/// Exports the checkpoint, or one of its disks.
pub fn run(context: &Context, args: &ExportArgs) -> anyhow::Result<()> {
    match (&args.disk, args.format) {
        (Some(disk), _) => one_disk(context, args, disk),
        (None, Some(format)) => memory(context, args, format),
        // The command line demands one of them.
        (None, None) => Ok(()),
    }
}

fn one_disk(context: &Context, args: &ExportArgs, disk: &str) -> anyhow::Result<()> {
    let mut repository = context.open()?;
    let (id, manifest) = repository.resolve(&args.checkpoint.id, args.checkpoint.vm.as_deref())?;
    let checkpoint = Checkpoint {
        id: &id,
        manifest: &manifest,
    };
    let to = (path(args)?, args.force);
    let interrupts = context.listen(1, "interrupted: ending the export")?;
    let mut meter = Meter::new(context.console);
    let report = interrupts.interruptible(|| {
        let mut step = |progress: Progress| {
            meter.show(progress.into());
            interrupts.step();
        };
        let wait = args.lock.lock_wait;
        let disk = (disk, args.disk_format.as_deref().unwrap_or("raw"));
        export::export_disk(&mut repository, checkpoint, disk, to, wait, &mut step)
    })??;
    drop(meter);
    Ok(context.console.result(&report, || disk_words(&report))?)
}

fn path(args: &ExportArgs) -> anyhow::Result<PathBuf> {
    absolute(&args.output).with_context(|| format!("{} is not a path", args.output.display()))
}

fn disk_words(report: &DiskReport) -> String {
    format!(
        "exported disk {} of checkpoint {} of {} to {}: {}, {}, {} with content, {} zero",
        printable(&report.disk),
        short(&report.checkpoint),
        printable(&report.vm),
        printable(&report.file.display().to_string()),
        printable(&report.format),
        table::bytes(report.bytes),
        table::count(report.pages, "page"),
        report.zero_pages,
    )
}

fn memory(context: &Context, args: &ExportArgs, format: Format) -> anyhow::Result<()> {
    let mut repository = context.open()?;
    let (id, manifest) = repository.resolve(&args.checkpoint.id, args.checkpoint.vm.as_deref())?;
    let checkpoint = Checkpoint {
        id: &id,
        manifest: &manifest,
    };
    let mut pipe = std::io::stdout();
    let to_pipe = args.output.as_os_str() == "-";
    let to = match to_pipe {
        true => Destination::Pipe(&mut pipe),
        false => Destination::File {
            path: path(args)?,
            replace: args.force,
        },
    };
    let interrupts = context.listen(1, "interrupted: ending the export")?;
    let mut meter = Meter::new(context.console);
    let report = interrupts.interruptible(|| {
        export::export(
            &mut repository,
            checkpoint,
            format,
            to,
            args.lock.lock_wait,
            &mut |progress| {
                meter.show(progress.into());
                interrupts.step();
            },
        )
    })??;
    drop(meter);
    for note in &report.notes {
        context.console.note(note);
    }
    // A stream on standard output excludes a result there.
    match to_pipe {
        true => context.console.note(&words(&report)),
        false => context.console.result(&report, || words(&report))?,
    }
    Ok(())
}

fn words(report: &ExportReport) -> String {
    let place = match &report.file {
        Some(file) => printable(&file.display().to_string()),
        None => "standard output".to_owned(),
    };
    let text = format!(
        "exported {} of {} to {place}: {}, {} with content, {} zero",
        short(&report.checkpoint),
        printable(&report.vm),
        table::bytes(report.bytes),
        table::count(report.pages, "page"),
        report.zero_pages,
    );
    text + &reading_words(report)
}

/// The command that reads the file.
fn reading_words(report: &ExportReport) -> String {
    let file = match &report.file {
        Some(file) => file.display().to_string(),
        None => "FILE".to_owned(),
    };
    let with = |words: &[&str]| {
        let words = words.iter().copied().chain([file.as_str()]);
        printable(&shell::join(words))
    };
    match (&report.load, report.format) {
        (Some(load), _) => format!("\nto load it: {}", command(load)),
        (None, Format::Elf) => format!(
            "\nto inspect it: {}, or {}; vmlinux is the guest's kernel with its symbols",
            with(&["gdb", "vmlinux"]),
            with(&["crash", "vmlinux"]),
        ),
        (None, _) => format!(
            "\nto inspect it with Volatility 3: {} banners",
            with(&["vol", "-f"]),
        ),
    }
}

/// One shell command. The recorded `argv[0]` is left out.
fn command(load: &LoadCommand) -> String {
    let (cwd, exe) = (
        load.cwd.display().to_string(),
        load.exe.display().to_string(),
    );
    let arguments = load.arguments.iter().skip(1).map(String::as_str);
    let start = shell::join(std::iter::once(exe.as_str()).chain(arguments));
    printable(&format!("{} && {start}", shell::join(["cd", &cwd])))
}
