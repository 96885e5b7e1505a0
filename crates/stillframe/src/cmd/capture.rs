//! What `checkpoint` and `watch` share: attaching, one checkpoint, and its report.

use stillframe_engine::attach::{AttachError, Vm};
use stillframe_engine::checkpoint::{
    CheckpointOptions, CheckpointReport, Plan, ScheduleChoice, ScheduleKind,
};
use stillframe_engine::pipeline::WorkControl;
use stillframe_engine::{ProgressSink, Selector};
use stillframe_repo::Tags;

use super::{Context, clock_words, probe, short};
use crate::args::{CaptureArgs, VmSelector};
use crate::durations;
use crate::error::CommandError;
use crate::interrupt::{Interrupted, Interrupts};
use crate::output::Console;
use crate::progress::Meter;
use crate::table::{self, printable};

/// What the command line says about the VM.
pub fn selector(vm: &VmSelector) -> Result<Selector, CommandError> {
    vm.selector().ok_or(CommandError::NoVm)
}

/// Attaches, after making sure that this machine lets us.
pub fn attach(
    context: &Context,
    selector: &Selector,
    schedule: ScheduleChoice,
) -> anyhow::Result<Vm> {
    probe::require()?;
    let vm = Vm::attach(selector, schedule)?;
    told_attached(context, &vm);
    Ok(vm)
}

/// The same to a VM that is to be rewound.
pub fn attach_to_rewind(context: &Context, selector: &Selector) -> anyhow::Result<Vm> {
    probe::require()?;
    let vm = Vm::attach_to_rewind(selector)?;
    told_attached(context, &vm);
    Ok(vm)
}

/// Attaches to the same VM once more.
pub fn attach_again(
    context: &Context,
    pid: i32,
    schedule: ScheduleChoice,
) -> Result<Vm, AttachError> {
    let vm = Vm::attach(&Selector::Pid(pid), schedule)?;
    told_attached(context, &vm);
    Ok(vm)
}

fn told_attached(context: &Context, vm: &Vm) {
    let (pid, memory) = (vm.pid(), table::bytes(vm.ram_bytes()));
    context.console.note(&format!(
        "attached to process {pid}, {memory} of guest memory"
    ));
    for caution in vm.cautions() {
        context.console.warn(&caution.to_string());
    }
}

/// Ends tracking; the VM is as it was. A failure is only reported: tracking ends with this process.
pub fn detach(context: &Context, vm: Vm) {
    let (pid, alive) = (vm.pid(), vm.is_alive());
    match vm.detach() {
        Ok(()) => context
            .console
            .note(&format!("detached from process {pid}")),
        Err(error) if alive => {
            let chain = crate::output::chain(anyhow::Error::new(error).chain());
            context
                .console
                .warn(&format!("could not detach in good order: {chain}"));
        }
        // A VM that has ended has nothing to detach from.
        Err(_) => {}
    }
}

/// What the command line says about how.
///
/// # Errors
/// There are too many tags.
pub fn options(args: &CaptureArgs) -> Result<CheckpointOptions, CommandError> {
    let tags = Tags::try_from(args.tags.clone())?;
    Ok(CheckpointOptions {
        pause_limit: args.pause_limit(),
        lock_wait: args.lock_wait,
        verify: args.verify,
        delta_cache_bytes: args.delta_cache,
        dedup: !args.no_dedup,
        keep_guest_clock: args.keep_guest_clock,
        copy_buffer_bytes: args.copy_buffer,
        tags,
        note: args.note.clone(),
    })
}

/// Shows how far work is, and gives it up at the user's signal.
pub struct Control {
    console: Console,
    interrupts: Interrupts,
}

impl Control {
    /// Progress goes to the context's console.
    pub fn new(context: &Context, interrupts: Interrupts) -> Control {
        Control {
            console: context.console,
            interrupts,
        }
    }
}

impl WorkControl for Control {
    fn run<T>(
        &self,
        alone: bool,
        work: impl FnOnce(ProgressSink<'_>) -> T,
    ) -> Result<T, Interrupted> {
        let mut meter = alone.then(|| Meter::new(self.console));
        self.interrupts.interruptible(|| {
            work(&mut |progress| {
                if let Some(meter) = &mut meter {
                    meter.show(progress.into());
                }
                self.interrupts.step();
            })
        })
    }
}

/// Warns of what would prevent a restore, unless `told` contains it already.
pub fn tell_obstacles(context: &Context, report: &CheckpointReport, told: &mut Vec<String>) {
    for obstacle in &report.obstacles {
        if !told.contains(obstacle) {
            let words = format!("this checkpoint cannot be restored as it is: {obstacle}");
            context.console.warn(&words);
        }
    }
    told.clone_from(&report.obstacles);
}

/// Prints the result; an error when a comparison found differences.
pub fn tell(context: &Context, report: &CheckpointReport) -> anyhow::Result<()> {
    // It was reported for the increment's parent already.
    if report.parent.is_none()
        && let Some(first) = report.missing_packs.first()
    {
        let packs = table::count(report.missing_packs.len() as u64, "pack");
        context.console.warn(&format!(
            "{packs} of the repository missing or cut short ({first} and so on): this checkpoint does without, older ones may not. Put them back, or see what is lost with `stillframe check`"
        ));
    }
    context.console.result(report, || words(report))?;
    match report.verify.as_ref().map_or(0, |verify| verify.differing) {
        0 => Ok(()),
        differing => Err(CommandError::Differs(differing).into()),
    }
}

/// What was predicted of each schedule, in words.
pub fn predictions(plan: &Plan) -> String {
    let kinds = [
        ScheduleKind::StopCopy,
        ScheduleKind::PreCopy,
        ScheduleKind::CopyOnWrite,
    ];
    let predicted = kinds.map(|kind| {
        let prediction = plan.of(kind);
        let (pause, guest) = (prediction.pause_us, prediction.guest_us);
        format!(
            "{kind} {} (and {} of first writes)",
            durations::human_us(pause),
            durations::human_us(guest)
        )
    });
    format!(
        "pauses are expected to take {}; QEMU's own share is {}",
        predicted.join(", "),
        durations::human_us(plan.floor_us)
    )
}

fn words(report: &CheckpointReport) -> String {
    let pages = &report.pages;
    let schedule = match report.instead_of {
        Some(first) => format!(
            "{}, after {first} lost pages to the host's KSM or the balloon",
            report.schedule
        ),
        None => report.schedule.to_string(),
    };
    let paused = match report.downtime_us.total {
        0 => "the VM was paused already".to_owned(),
        total => format!("paused {} ({schedule})", durations::human_us(total)),
    };
    let mut line = format!(
        "checkpoint {} of {}: {paused}, {} looked at, {} new, {} in part, {} stored in {}",
        short(&report.checkpoint),
        printable(&report.vm),
        table::count(pages.captured, "page"),
        pages.new,
        pages.delta,
        table::bytes(report.bytes_stored),
        durations::human_us(report.total_us),
    );
    if let Some(clock) = &report.clock {
        line += &clock_words(clock);
    }
    if let Some(verify) = &report.verify {
        line += &match verify.differing {
            0 => format!(", all {} verified", table::count(verify.pages, "page")),
            differing => {
                format!(
                    ", {differing} DIFFER: {}",
                    printable(&verify.first.join(", "))
                )
            }
        };
    }
    line
}

#[cfg(test)]
mod tests {
    use stillframe_engine::capture::downtime::DowntimeRecord;
    use stillframe_engine::verify::VerifyReport;
    use stillframe_repo::PageCounts;

    use super::*;

    #[test]
    fn the_command_line_has_the_engines_defaults() {
        let options = given(&[]).unwrap();
        assert_eq!(options, CheckpointOptions::default());
    }

    /// What a command line of `checkpoint` with these options says.
    fn given(more: &[String]) -> Result<CheckpointOptions, CommandError> {
        use clap::Parser as _;
        let line = ["stillframe", "checkpoint", "--vm", "web1"].map(str::to_owned);
        let cli = crate::args::Cli::try_parse_from([&line, more].concat());
        let crate::args::Command::Checkpoint(args) = cli.unwrap().command else {
            panic!("not this command");
        };
        options(&args.capture)
    }

    #[test]
    fn tags_and_note_are_handed_over_unless_they_are_too_many() {
        let numbered = |count: u32| -> Vec<String> {
            (0..count).map(|number| format!("--tag={number}")).collect()
        };
        let mut line = numbered(32);
        line.extend(["--tag=7".to_owned(), "--note=by hand".to_owned()]);
        let options = given(&line).unwrap();
        assert_eq!(options.tags.iter().count(), 32);
        assert_eq!(options.note.unwrap().to_string(), "by hand");
        let error = given(&numbered(33)).unwrap_err();
        assert!(error.to_string().contains("at most 32"), "{error}");
    }

    fn report() -> CheckpointReport {
        CheckpointReport {
            clock_taken_us: 0,
            clock: None,
            checkpoint: "1a2b3c4d5e6f".to_owned(),
            vm: "vm1".to_owned(),
            time: jiff::Timestamp::UNIX_EPOCH,
            parent: None,
            schedule: ScheduleKind::PreCopy,
            instead_of: None,
            plan: None,
            downtime_us: DowntimeRecord {
                total: 3_400,
                ..DowntimeRecord::default()
            },
            pages: PageCounts {
                total: 70_000,
                captured: 16_412,
                new: 16_100,
                duplicate: 90,
                zero: 0,
                delta: 212,
                unchanged: 10,
            },
            copied: Default::default(),
            bytes_stored: 67_318_579,
            total_us: 410_000,
            phases_us: Default::default(),
            obstacles: Vec::new(),
            missing_packs: Vec::new(),
            verify: None,
        }
    }

    #[test]
    fn a_checkpoint_in_one_line() {
        assert_eq!(
            words(&report()),
            "checkpoint 1a2b3c4d of vm1: paused 3.4 ms (pre-copy), 16412 pages looked at, 16100 new, 212 in part, 64.2 MiB stored in 410 ms"
        );
    }

    #[test]
    fn another_schedule_than_the_wanted_is_told() {
        let mut report = report();
        report.instead_of = Some(ScheduleKind::CopyOnWrite);
        let told = "paused 3.4 ms (pre-copy, after copy-on-write lost pages to the host's KSM or the balloon)";
        assert!(words(&report).contains(told), "{}", words(&report));
    }

    #[test]
    fn the_comparison_is_told() {
        let mut report = report();
        report.downtime_us.total = 0;
        report.verify = Some(VerifyReport {
            pages: 70_000,
            differing: 0,
            first: Vec::new(),
        });
        let line = words(&report);
        assert!(line.contains("the VM was paused already"), "{line}");
        assert!(line.ends_with(", all 70000 pages verified"), "{line}");
        let first = vec!["pc.ram 7".to_owned()];
        report.verify = Some(VerifyReport {
            pages: 70_000,
            differing: 1,
            first,
        });
        assert!(words(&report).ends_with(", 1 DIFFER: pc.ram 7"));
    }

    #[test]
    fn scripts_find_what_they_were_promised() {
        let object = serde_json::to_value(report()).unwrap();
        assert!(object["checkpoint"].is_string() && object["vm"].is_string());
        for phase in [
            "total",
            "stop",
            "scan",
            "copy",
            "device_state",
            "wait",
            "verify",
            "resume",
        ] {
            assert!(object["downtime_us"][phase].is_u64(), "{phase}");
        }
        for kind in [
            "total",
            "captured",
            "new",
            "duplicate",
            "zero",
            "delta",
            "unchanged",
        ] {
            assert!(object["pages"][kind].is_u64(), "{kind}");
        }
        assert!(object["bytes_stored"].is_u64());
    }
}
