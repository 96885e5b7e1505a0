//! Code that commands on running VMs share: attaching, capture options, progress, and the report of a checkpoint.

use stillframe_engine::attach::{AttachError, Vm};
use stillframe_engine::balloon::BalloonReport;
use stillframe_engine::checkpoint::{
    CheckpointOptions, CheckpointReport, Plan, ScheduleChoice, ScheduleKind, StoredDisk,
};
use stillframe_engine::disks::DiskSchedule;
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

/// The VM that the command line selects.
pub fn selector(vm: &VmSelector) -> Result<Selector, CommandError> {
    vm.selector().ok_or(CommandError::NoVm)
}

/// Attaches, after a check that this machine can track a VM.
pub fn attach(
    context: &Context,
    selector: &Selector,
    schedule: ScheduleChoice,
) -> anyhow::Result<Vm> {
    probe::require()?;
    let vm = Vm::attach(selector, schedule)?;
    report_attached(context, &vm);
    Ok(vm)
}

/// Attaches to a VM to rewind it.
pub fn attach_to_rewind(context: &Context, selector: &Selector) -> anyhow::Result<Vm> {
    probe::require()?;
    let vm = Vm::attach_to_rewind(selector)?;
    report_attached(context, &vm);
    Ok(vm)
}

/// Attaches to the same VM again.
pub fn attach_again(
    context: &Context,
    pid: i32,
    schedule: ScheduleChoice,
) -> Result<Vm, AttachError> {
    let vm = Vm::attach(&Selector::Pid(pid), schedule)?;
    report_attached(context, &vm);
    Ok(vm)
}

fn report_attached(context: &Context, vm: &Vm) {
    let (pid, memory) = (vm.pid(), table::bytes(vm.ram_bytes()));
    context.console.note(&format!(
        "attached to process {pid}, {memory} of guest memory"
    ));
    for caution in vm.cautions() {
        context.console.warn(&caution.to_string());
    }
}

/// Ends tracking and leaves the VM as it was found. A failure is only reported: tracking ends with this process.
pub fn detach(context: &Context, vm: Vm) {
    let (pid, alive) = (vm.pid(), vm.is_alive());
    match vm.detach() {
        Ok(()) => context
            .console
            .note(&format!("detached from process {pid}")),
        Err(error) if alive => {
            let chain = crate::output::chain(anyhow::Error::new(error).chain());
            context.console.warn(&format!(
                "detaching failed: {chain}; tracking ends when this process exits"
            ));
        }
        // The VM has ended: there is nothing to detach from.
        Err(_) => {}
    }
}

/// The engine's options from the command line.
///
/// # Errors
/// There are too many tags, or two choices for one disk.
pub fn options(args: &CaptureArgs) -> Result<CheckpointOptions, CommandError> {
    let tags = Tags::try_from(args.tags.clone())?;
    Ok(CheckpointOptions {
        pause_limit: args.pause_limit(),
        lock_wait: args.lock.lock_wait,
        verify: args.verify,
        delta_cache_bytes: args.delta_cache,
        dedup: !args.no_dedup,
        images: !args.no_images,
        keep_guest_clock: args.keep_guest_clock,
        copy_buffer_bytes: args.copy_buffer,
        disks: args.disks().map_err(CommandError::DisksTwice)?,
        free_pages: args.free_pages,
        balloon: args.balloon,
        tags,
        note: args.note.clone(),
    })
}

/// Shows progress, and aborts the work at the user's signal.
pub struct Control {
    console: Console,
    interrupts: Interrupts,
}

impl Control {
    /// A control that shows progress on the context's console.
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

/// Warns of obstacles to a restore, of disks that are not in the checkpoint, and of free pages that are, if `reported` does
/// not contain it yet.
pub fn report_obstacles(context: &Context, report: &CheckpointReport, reported: &mut Vec<String>) {
    let obstacles = report
        .obstacles
        .iter()
        .map(|obstacle| format!("this checkpoint cannot be restored without changes: {obstacle}"));
    let disks = report.disks_left_out.iter().map(|disk| {
        format!(
            "the content of disk {} is not in this checkpoint, and its files must not change: {}",
            disk.device, disk.because
        )
    });
    let free = report.free_pages.iter().flat_map(|free| &free.not_known);
    let free = free.map(|why| {
        format!(
            "free pages are not left out, or not all of them: {}",
            printable(why)
        )
    });
    let balloon = report.balloon.iter().flat_map(balloon_warnings);
    let warnings: Vec<String> = obstacles.chain(disks).chain(free).chain(balloon).collect();
    for warning in warnings.iter().filter(|one| !reported.contains(one)) {
        context.console.warn(warning);
    }
    *reported = warnings;
}

/// What the balloon did not do.
fn balloon_warnings(balloon: &BalloonReport) -> impl Iterator<Item = String> {
    let not_taken = balloon.not_taken.as_ref().map(|why| {
        let what = match balloon.taken_bytes {
            0 => "the balloon took no memory".to_owned(),
            taken => format!("the balloon took only {}", table::bytes(taken)),
        };
        format!("{what}: {}", printable(why))
    });
    let missing = (balloon.missing_bytes > 0).then(|| {
        format!(
            "the guest has not taken {} of its memory back yet: it does so by itself when it runs; `balloon {}` on its monitor says it again",
            table::bytes(balloon.missing_bytes),
            balloon.original_bytes
        )
    });
    not_taken.into_iter().chain(missing)
}

/// Prints the result.
///
/// # Errors
/// A comparison found differences.
pub fn print(context: &Context, report: &CheckpointReport) -> anyhow::Result<()> {
    for image in &report.changed_images {
        context.console.warn(&format!(
            "image {image} is not as it was indexed: this checkpoint does not need it, older ones may. Put it back as it was, or run `stillframe index` on it where it is now; `stillframe check` says which are affected"
        ));
    }
    // For an increment this was reported with its parent.
    if report.parent.is_none()
        && let Some(first) = report.missing_packs.first()
    {
        let packs = table::count(report.missing_packs.len() as u64, "pack");
        context.console.warn(&format!(
            "{packs} of the repository missing or cut short ({first}, ...): this checkpoint does not need them, older ones may. Restore the files, or run `stillframe check` to list the damage"
        ));
    }
    context.console.result(report, || words(report))?;
    match report.verify.as_ref().map_or(0, |verify| verify.differing) {
        0 => Ok(()),
        differing => Err(CommandError::Differs(differing).into()),
    }
}

/// The predictions for each schedule, in words.
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
            "{kind} {} (plus {} of waiting at first writes)",
            durations::human_us(pause),
            durations::human_us(guest)
        )
    });
    format!(
        "expected pauses: {}; of each, QEMU takes {} for its device state",
        predicted.join(", "),
        durations::human_us(plan.floor_us)
    )
}

fn words(report: &CheckpointReport) -> String {
    let pages = &report.pages;
    let schedule = match report.instead_of {
        Some(first) => format!(
            "{}, because {first} lost pages to the host's KSM or the balloon",
            report.schedule
        ),
        None => report.schedule.to_string(),
    };
    let paused = match report.downtime_us.total {
        0 => "the VM was paused already".to_owned(),
        total => format!("paused {} ({schedule})", durations::human_us(total)),
    };
    let mut line = format!(
        "checkpoint {} of {}: {paused}, {} captured, {} new, {} as deltas, {} stored in {}",
        short(&report.checkpoint),
        printable(&report.vm),
        table::count(pages.captured, "page"),
        pages.new,
        pages.delta,
        table::bytes(report.bytes_stored),
        durations::human_us(report.total_us),
    );
    if let Some(free) = report.free_pages.as_ref().filter(|free| free.left_out > 0) {
        line += &format!(", {} left out as free", table::count(free.left_out, "page"));
    }
    if let Some(balloon) = report
        .balloon
        .as_ref()
        .filter(|balloon| balloon.taken_bytes > 0)
    {
        line += &format!(
            ", {} taken by the balloon before, in {}",
            table::bytes(balloon.taken_bytes),
            durations::human_us(balloon.operation_us)
        );
    }
    line.extend(report.disks.iter().map(disk_words));
    if let Some(clock) = &report.clock {
        line += &clock_words(clock);
    }
    if let Some(verify) = &report.verify {
        line += &match verify.differing {
            0 if verify.free > 0 => format!(
                ", all {} verified ({} of them free, and zeros now)",
                table::count(verify.pages, "page"),
                verify.free
            ),
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

/// What a checkpoint has of a disk.
fn disk_words(disk: &StoredDisk) -> String {
    let how = match disk.schedule {
        DiskSchedule::Rounds => "copied in rounds",
        DiskSchedule::Filter => "read",
    };
    format!(
        ", disk {} of {} ({} {how}, {} stored)",
        printable(&disk.device),
        table::bytes(disk.bytes),
        table::bytes(disk.bytes_read),
        table::bytes(disk.bytes_stored)
    )
}

#[cfg(test)]
mod tests {
    use stillframe_engine::capture::downtime::DowntimeRecord;
    use stillframe_engine::disks::{DiskChoice, DiskMode};
    use stillframe_engine::verify::VerifyReport;
    use stillframe_repo::PageCounts;

    use super::*;

    #[test]
    fn the_command_line_has_the_engines_defaults() {
        let options = given(&[]).unwrap();
        assert_eq!(options, CheckpointOptions::default());
    }

    /// The options of `checkpoint` with these further arguments.
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
    fn tags_and_note_are_passed_on_unless_there_are_too_many_tags() {
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

    #[test]
    fn disks_are_chosen_together_and_one_by_one() {
        let line = ["--disks=capture,vda=reference", "--disks", "a=b=none"].map(str::to_owned);
        let each = [("vda", DiskMode::Reference), ("a=b", DiskMode::None)];
        let expected = DiskChoice {
            others: DiskMode::Capture,
            each: each.map(|(name, mode)| (name.to_owned(), mode)).into(),
            ..DiskChoice::default()
        };
        assert_eq!(given(&line).unwrap().disks, expected);
        let kept = given(&["--keep-bitmaps".to_owned()]).unwrap();
        assert!(kept.disks.keep_bitmaps);
        for twice in ["auto,none", "vda=auto,none,vda=capture"] {
            let error = given(&[format!("--disks={twice}")]).unwrap_err();
            assert!(error.to_string().contains("two things of"), "{error}");
        }
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
                free: 0,
            },
            copied: Default::default(),
            free_pages: None,
            balloon: None,
            disks: Vec::new(),
            disks_left_out: Vec::new(),
            bytes_stored: 67_318_579,
            total_us: 410_000,
            phases_us: Default::default(),
            obstacles: Vec::new(),
            missing_packs: Vec::new(),
            changed_images: Vec::new(),
            verify: None,
        }
    }

    #[test]
    fn a_checkpoint_in_one_line() {
        assert_eq!(
            words(&report()),
            "checkpoint 1a2b3c4d of vm1: paused 3.4 ms (pre-copy), 16412 pages captured, 16100 new, 212 as deltas, 64.2 MiB stored in 410 ms"
        );
    }

    #[test]
    fn a_replaced_schedule_is_reported() {
        let mut report = report();
        report.instead_of = Some(ScheduleKind::CopyOnWrite);
        let expected = "paused 3.4 ms (pre-copy, because copy-on-write lost pages to the host's KSM or the balloon)";
        assert!(words(&report).contains(expected), "{}", words(&report));
    }

    #[test]
    fn the_comparison_is_reported() {
        let mut report = report();
        report.downtime_us.total = 0;
        report.verify = Some(VerifyReport {
            pages: 70_000,
            differing: 0,
            free: 0,
            first: Vec::new(),
        });
        let line = words(&report);
        assert!(line.contains("the VM was paused already"), "{line}");
        assert!(line.ends_with(", all 70000 pages verified"), "{line}");
        let first = vec!["pc.ram 7".to_owned()];
        report.verify = Some(VerifyReport {
            pages: 70_000,
            differing: 1,
            free: 0,
            first,
        });
        assert!(words(&report).ends_with(", 1 DIFFER: pc.ram 7"));
    }

    #[test]
    fn the_report_has_all_documented_keys() {
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
            "free",
        ] {
            assert!(object["pages"][kind].is_u64(), "{kind}");
        }
        assert!(object["bytes_stored"].is_u64());
    }
}
