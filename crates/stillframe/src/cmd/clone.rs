//! `clone`: several VMs from one checkpoint.

use std::path::Path;
use std::time::Instant;

use anyhow::Context as _;
use stillframe_engine::clones::{self, CloneReport, ClonesOptions};
use stillframe_engine::restore::{LazyEvent, RestoreOptions};
use stillframe_engine::runtime;
use stillframe_engine::template::TemplateOptions;
use stillframe_engine::{CloneOptions, LaunchOptions, memory_bytes};

use super::restore::{here, serial_from_here, stands_in_the_way};
use super::{Context, how_it_ended, short, templates};
use crate::args::CloneArgs;
use crate::durations;
use crate::error::CommandError;
use crate::interrupt::{AtLast, Interrupts};
use crate::progress::Meter;
use crate::table::printable;

/// What stands for a clone's number.
const NUMBER: &str = "{}";

/// Starts the clones, and reports each as soon as it runs.
pub fn run(context: &Context, args: &CloneArgs) -> anyhow::Result<()> {
    let asked_at = Instant::now();
    // Clap sees to it that there are both, unless it is about templates only.
    let (Some(id), Some(qmp)) = (&args.id, &args.qmp) else {
        return templates::run(context, args);
    };
    if args.count > 1 && !qmp.contains(NUMBER) {
        return Err(CommandError::SameMonitor.into());
    }
    let mut repository = context.open()?;
    let (id, manifest) = repository.resolve(id, args.vm.as_deref())?;
    let numbers = args.first..args.first + args.count;
    let each: Vec<_> = numbers
        .map(|number| each(args, qmp, number))
        .collect::<Result<_, _>>()?;
    let Some((first, _)) = each.first() else {
        return Ok(());
    };
    let options = ClonesOptions {
        restore: RestoreOptions {
            asked_at,
            launch: first.clone(),
            paused: args.paused,
            keep_clock: args.keep_guest_clock,
            verify: args.verify,
            lazy: false,
            limit_fill: None,
            lock_wait: args.lock_wait,
        },
        each,
        base: TemplateOptions {
            folder: templates::folder(args)?,
            budget_bytes: args.base_budget.unwrap_or_else(default_budget),
            age_limit: args.base_age,
        },
    };
    let interrupted = "interrupted: no more clones";
    let interrupts = Interrupts::listen(context.console, 1, interrupted, AtLast::Wait)
        .context("cannot listen to signals")?;
    let mut meter = Meter::new(context.console);
    let mut told = Ok(());
    let cloned = interrupts.interruptible(|| {
        let mut done = |report: CloneReport| {
            let shown = show(context, &report, report.clone == args.first);
            told = std::mem::replace(&mut told, Ok(())).and(shown);
        };
        let mut events = |event| {
            if let LazyEvent::Progress(progress) = event {
                meter.show(progress.into());
            }
            interrupts.step();
        };
        clones::clones(
            &mut repository,
            (&id, &manifest),
            &options,
            &mut events,
            &mut done,
        )
    });
    let kept = cloned?.inspect_err(|error| stands_in_the_way(context, error))?;
    if !kept && args.base_budget != Some(0) {
        context.console.note(
            "the memory that the clones share is over --base-budget (or --base-age): it goes with the last of them, and is made anew for the next",
        );
    }
    told
}

/// Of memory in the clear, in bytes: enough for a VM that the machine has room for twice.
fn default_budget() -> u64 {
    memory_bytes() / 4
}

fn show(context: &Context, report: &CloneReport, is_first: bool) -> anyhow::Result<()> {
    for change in report.restored.changes.iter().filter(|_| is_first) {
        context.console.note(&format!("changed: {change}"));
    }
    context.console.result(report, || words(report))?;
    Ok(())
}

fn each(args: &CloneArgs, qmp: &str, number: u32) -> anyhow::Result<(LaunchOptions, CloneOptions)> {
    let numbered = |text: &str| text.replace(NUMBER, &number.to_string());
    let qmp = here(Path::new(&numbered(qmp)))?;
    let serial = args.serial.as_deref().map(numbered);
    let replace = args.replace.iter();
    let launch = LaunchOptions {
        serial: serial
            .map(|spec| serial_from_here(&spec, here))
            .transpose()?,
        disks_as_they_are: args.disks_as_they_are,
        qemu: args.start.qemu.clone(),
        as_root: args.start.as_root,
        without_label: args.start.without_label,
        without_group: args.start.without_group,
        allow_commands: args.start.allow_commands,
        replace: replace
            .map(|(old, new)| (old.clone(), numbered(new)))
            .collect(),
        ..LaunchOptions::new(qmp.clone(), runtime::default_log(&qmp))
    };
    let twin = CloneOptions {
        number,
        memory: Vec::new(),
    };
    Ok((launch, twin))
}

fn words(report: &CloneReport) -> String {
    let restored = &report.restored;
    let mut line = format!(
        "clone {} of {} ({}) in {}: process {}, monitor at {}",
        report.clone,
        short(&restored.checkpoint),
        printable(&restored.vm),
        durations::human_us(restored.total_us),
        restored.pid,
        printable(&restored.qmp.display().to_string()),
    );
    if report.base_us > 0 {
        line += &format!(
            "; the memory that all share was made in {}",
            durations::human_us(report.base_us)
        );
    }
    line + &how_it_ended(
        restored.verify.as_ref(),
        restored.clock.as_ref(),
        restored.running,
        restored.suspended,
    )
}
