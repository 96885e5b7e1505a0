//! `stats`: counts the pages of a VM that change, and the bytes in each (FITDOC, table I).
//!
//! It compares two checkpoints. For a running VM it takes two checkpoints into a temporary repository, which is removed
//! afterwards. With `--contents` it counts the pages of each checkpoint by their content instead.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde_json::{Value, json};
use stillframe_engine::attach::Vm;
use stillframe_engine::checkpoint::{
    CheckpointOptions, CheckpointWriter, ScheduleChoice, ScheduleKind,
};
use stillframe_engine::pipeline::WorkControl as _;
use stillframe_engine::statistics::{self, Statistics};
use stillframe_repo::{CheckpointId, Password, Repository};

use super::{Context, capture, contents, short};
use crate::args::StatsArgs;
use crate::durations;
use crate::error::CommandError;
use crate::interrupt::{Interrupted, Interrupts};
use crate::picture;
use crate::progress::{Meter, Status};
use crate::table::{self, Align, Table, printable};

/// How often the wait checks for signals.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Two checkpoints and the changes between them.
struct Measured {
    vm: String,
    older: CheckpointId,
    newer: CheckpointId,
    statistics: Statistics,
}

/// Measures, draws the picture of `--svg`, and prints the result.
pub fn run(context: &Context, args: &StatsArgs) -> anyhow::Result<()> {
    if args.contents {
        return contents::run(context, args);
    }
    let measured = match (args.over, args.checkpoints.as_slice()) {
        (Some(over), []) => live(context, args, over)?,
        (None, [older, newer]) => {
            let mut repository = context.open()?;
            let vm = args.vm.as_deref();
            let (older, newer) = (
                repository.resolve(older, vm)?.0,
                repository.resolve(newer, vm)?.0,
            );
            between(context, &mut repository, older, newer, args.lock.lock_wait)?
        }
        _ => return Err(CommandError::NothingToMeasure.into()),
    };
    if let Some(path) = &args.svg {
        draw(path, &measured)?;
    }
    context
        .console
        .result(&object(&measured), || words(&measured))?;
    Ok(())
}

fn between(
    context: &Context,
    repository: &mut Repository,
    older: CheckpointId,
    newer: CheckpointId,
    lock_wait: Duration,
) -> anyhow::Result<Measured> {
    let mut meter = Meter::new(context.console);
    let reader = repository.reader(lock_wait)?;
    let manifests = [reader.manifest(&older)?, reader.manifest(&newer)?];
    let statistics = statistics::between(&reader, manifests.each_ref(), &mut |progress| {
        meter.show(progress.into());
    })?;
    let [_, manifest] = manifests;
    Ok(Measured {
        vm: manifest.vm,
        older,
        newer,
        statistics,
    })
}

/// Measures a running VM with two checkpoints, `over` apart from start to start.
fn live(context: &Context, args: &StatsArgs, over: Duration) -> anyhow::Result<Measured> {
    let selector = capture::selector(&args.selector())?;
    let first = "interrupted: discarding the measurement (again: exit at once)";
    let interrupts = context.listen(1, first)?;
    let folder = tempfile::Builder::new()
        .prefix("stillframe-stats-")
        .tempdir()
        .context("cannot create a directory for two checkpoints")?;
    let directory = folder.path().join("repository");
    let mut repository = Repository::init(&directory, &Password::random()?)?;
    let mut vm = capture::attach(
        context,
        &selector,
        ScheduleChoice::Always(ScheduleKind::PreCopy),
    )?;
    let taken = take_two(context, &interrupts, &mut vm, &mut repository, args, over);
    capture::detach(context, vm);
    let [older, newer] = taken?;
    between(context, &mut repository, older, newer, args.lock.lock_wait)
}

fn take_two(
    context: &Context,
    interrupts: &Interrupts,
    vm: &mut Vm,
    repository: &mut Repository,
    args: &StatsArgs,
    over: Duration,
) -> anyhow::Result<[CheckpointId; 2]> {
    let options = CheckpointOptions {
        lock_wait: args.lock.lock_wait,
        delta_cache_bytes: 0,
        ..CheckpointOptions::default()
    };
    let control = capture::Control::new(context, interrupts.clone());
    let mut checkpoints = CheckpointWriter::default();
    let mut take = |repository: &mut Repository| -> anyhow::Result<CheckpointId> {
        let taken = control.run(true, |progress| {
            vm.checkpoint(&mut checkpoints, repository, &options, progress)
        });
        let report = taken??;
        Ok(repository.resolve(&report.checkpoint, None)?.0)
    };
    let older = take(repository)?;
    let begin = Instant::now();
    let mut status = Status::new(context.console);
    loop {
        let left = over.saturating_sub(begin.elapsed());
        if left.is_zero() {
            break;
        }
        if interrupts.any() {
            return Err(Interrupted.into());
        }
        status.show(format!("second checkpoint in {:.1} s", left.as_secs_f64()));
        std::thread::sleep(left.min(POLL_INTERVAL));
    }
    drop(status);
    Ok([older, take(repository)?])
}

fn draw(path: &Path, measured: &Measured) -> anyhow::Result<()> {
    let title = format!(
        "{}: {} over {:.1} s",
        printable(&measured.vm),
        table::count(measured.statistics.dirty_pages, "dirty page"),
        measured.statistics.interval_s
    );
    let svg = picture::histogram(&title, &measured.statistics)?;
    fs::write(path, svg).with_context(|| format!("cannot write {}", path.display()))
}

fn object(measured: &Measured) -> Value {
    json!({
        "vm": measured.vm,
        "older": measured.older.to_string(),
        "newer": measured.newer.to_string(),
        "statistics": measured.statistics,
        "rates": measured.statistics.rates(),
    })
}

/// The lines of FITDOC's table I, and rates per second.
fn words(measured: &Measured) -> String {
    let found = &measured.statistics;
    let rates = found.rates();
    let percent = |share: Option<f64>| {
        share.map_or_else(|| "-".to_owned(), |share| format!("{:.2} %", share * 100.0))
    };
    let mut table = Table::new(&[("", Align::Left), ("", Align::Right)]);
    let mut line = |name: &str, value: String| table.row([name.to_owned(), value]);
    line("vm", measured.vm.clone());
    let ids = [measured.older, measured.newer].map(|id| id.to_string());
    line(
        "checkpoints",
        format!("{} {}", short(&ids[0]), short(&ids[1])),
    );
    line(
        "interval",
        durations::human(Duration::from_secs_f64(found.interval_s)),
    );
    line("zero pages", found.zero_pages.to_string());
    line("[0]", found.unchanged_pages.to_string());
    for range in &found.histogram {
        line(&picture::name(range), range.pages.to_string());
    }
    line("dirty pages", found.dirty_pages.to_string());
    line("total pages", found.pages.to_string());
    line("dirty bytes", found.dirty_bytes.to_string());
    line("8B dirty bytes", found.dirty_word_bytes.to_string());
    line("delta bytes", found.delta_bytes.to_string());
    line("dirty page rate", percent(rates.dirty_pages));
    let shares = [
        (
            "dirty bytes / bytes of dirty pages",
            rates.dirty_bytes_of_dirty_pages,
        ),
        (
            "dirty bytes / bytes of total pages",
            rates.dirty_bytes_of_all,
        ),
        (
            "8B dirty bytes / dirty bytes",
            rates.word_bytes_of_dirty_bytes,
        ),
    ];
    for (name, share) in shares {
        line(name, percent(share));
    }
    if let (Some(pages), Some(bytes)) = (rates.dirty_pages_per_s, rates.dirty_bytes_per_s) {
        line("dirty pages per second", format!("{pages:.1}"));
        line("dirty bytes per second", table::bytes(bytes as u64));
    }
    table.render().trim_start().to_owned()
}
