//! `clone`: starts several VMs from one checkpoint.

use std::path::Path;
use std::time::Instant;

use anyhow::Context as _;
use stillframe_engine::clones::{self, CloneError, CloneReport, ClonesOptions, EachClone};
use stillframe_engine::memory_bytes;
use stillframe_engine::restore::{Checkpoint, LazyEvent, RestoreOptions};
use stillframe_engine::template::TemplateOptions;

use super::launch::{self, absolute_path, suggest_new_disks, suggest_option};
use super::{Context, short, state_words, templates};
use crate::args::{CloneArgs, RestoreDisks};
use crate::durations;
use crate::error::CommandError;
use crate::interrupt::{AfterAbort, Interrupts};
use crate::progress::Meter;
use crate::table::printable;

/// Placeholder for a clone's number.
const NUMBER: &str = "{}";

/// Starts the clones, and reports each when it runs.
pub fn run(context: &Context, args: &CloneArgs) -> anyhow::Result<()> {
    let requested_at = Instant::now();
    // Clap ensures that there are both, unless the command only lists or removes templates.
    let (Some(id), Some(qmp)) = (&args.id, &args.qmp) else {
        return templates::run(context, args);
    };
    if args.count > 1 && !qmp.contains(NUMBER) {
        return Err(CommandError::SameMonitor.into());
    }
    let mut repository = context.open()?;
    let (id, manifest) = repository.resolve(id, args.vm.as_deref())?;
    let checkpoint = Checkpoint {
        id: &id,
        manifest: &manifest,
    };
    let options = options(args, qmp, requested_at)?;
    let interrupted = "interrupted: starting no more clones";
    let interrupts = Interrupts::listen(context.console, 1, interrupted, AfterAbort::Wait)
        .context("cannot handle signals")?;
    let mut meter = Meter::new(context.console);
    let mut shown = Ok(());
    let cloned = interrupts.interruptible(|| {
        let mut done = |report: CloneReport| {
            let result = show(context, &report, report.clone == args.first);
            shown = std::mem::replace(&mut shown, Ok(())).and(result);
        };
        let mut events = |event| {
            if let LazyEvent::Progress(progress) = event {
                meter.show(progress.into());
            }
            interrupts.step();
        };
        clones::clones(
            &mut repository,
            checkpoint,
            &options,
            &mut events,
            &mut done,
        )
    });
    let kept = cloned?.inspect_err(|error| {
        if let CloneError::Restore(error) = error {
            suggest_new_disks(context, error, &manifest);
        }
        suggest_option(context, error);
    })?;
    if !kept && args.template_budget != Some(0) {
        context.console.note(
            "the memory template exceeds --template-budget or --template-age: it is not kept for later clones",
        );
    }
    shown
}

fn options(args: &CloneArgs, qmp: &str, requested_at: Instant) -> anyhow::Result<ClonesOptions> {
    // The engine replaces these options by those of each clone.
    let launch = each(args, qmp, args.first)?.launch;
    let numbers = args.first..args.first + args.count;
    let each = numbers.map(|number| each(args, qmp, number));
    let each = each.collect::<anyhow::Result<Vec<_>>>()?;
    Ok(ClonesOptions {
        restore: RestoreOptions {
            requested_at,
            launch,
            paused: args.guest.paused,
            empty_disks: false,
            keep_clock: args.guest.keep_guest_clock,
            verify: args.guest.verify,
            lazy: false,
            limit_fill: None,
            lock_wait: args.lock.lock_wait,
        },
        each,
        template: TemplateOptions {
            folder: templates::folder(args)?,
            budget_bytes: args.template_budget.unwrap_or_else(default_budget),
            age_limit: args.template_age,
        },
        disks: match &args.disks {
            Some(RestoreDisks::New(folder)) => Some(absolute_path(folder)?),
            Some(RestoreDisks::Lazy(_) | RestoreDisks::Nothing) => {
                anyhow::bail!("clones read their disks from images: --disks new=DIR");
            }
            _ => None,
        },
    })
}

/// The default of `--template-budget`, in bytes.
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

/// The clone with this number.
fn each(args: &CloneArgs, qmp: &str, number: u32) -> anyhow::Result<EachClone> {
    let numbered = |text: &str| text.replace(NUMBER, &number.to_string());
    let qmp = numbered(qmp);
    let serial = args.serial.as_deref().map(numbered);
    let mut launch = launch::options(&args.launch, Path::new(&qmp), serial.as_deref())?;
    launch.disks_as_they_are |= args.disks == Some(RestoreDisks::AsTheyAre);
    for (_, new) in &mut launch.replace {
        *new = numbered(new);
    }
    Ok(EachClone { number, launch })
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
    if report.disks_us > 0 {
        line += &format!(
            "; the images of its disks were written in {}",
            durations::human_us(report.disks_us)
        );
    }
    if report.template_us > 0 {
        line += &format!(
            "; the memory template was written in {}",
            durations::human_us(report.template_us)
        );
    }
    line + &state_words(
        restored.verify.as_ref(),
        restored.clock.as_ref(),
        restored.running,
        restored.suspended,
    )
}
