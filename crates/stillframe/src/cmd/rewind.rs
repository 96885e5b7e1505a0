//! `rewind`: a running VM back to one of its checkpoints.

use anyhow::Context as _;
use stillframe_engine::LaunchError;
use stillframe_engine::rewind::{RewindError, RewindOptions, RewindReport};

use super::{Context, capture, how_it_ended, short};
use crate::args::RewindArgs;
use crate::durations;
use crate::interrupt::{AtLast, Interrupts};
use crate::progress::Meter;
use crate::table::{self, printable};

/// Attaches, goes back, detaches.
pub fn run(context: &Context, args: &RewindArgs) -> anyhow::Result<()> {
    let selector = capture::selector(&args.vm)?;
    let mut repository = context.open()?;
    // While pages are exchanged this process must not end.
    let interrupted = "interrupted: leaving the VM as it is";
    let interrupts = Interrupts::listen(context.console, 1, interrupted, AtLast::Wait)
        .context("cannot listen to signals")?;
    let label = args.of_vm.as_ref().or(args.vm.vm.as_ref());
    let (id, manifest) = repository.resolve(&args.id, label.map(String::as_str))?;
    let mut vm = capture::attach_to_rewind(context, &selector)?;
    let options = RewindOptions {
        paused: args.paused,
        keep_clock: args.keep_guest_clock,
        verify: args.verify,
        pause_limit: args.pause_limit,
        copy_buffer_bytes: args.copy_buffer,
        disks_as_they_are: args.disks_as_they_are,
        of_vm: args.of_vm.clone(),
        lock_wait: args.lock_wait,
    };
    let mut meter = Meter::new(context.console);
    let rewound = interrupts.interruptible(|| {
        let target = (&id, &manifest);
        vm.rewind(&mut repository, target, &options, &mut |progress| {
            meter.show(progress.into());
            interrupts.step();
        })
    });
    capture::detach(context, vm);
    let report = rewound?.inspect_err(|error| {
        if let RewindError::Disk(LaunchError::DiskChanged { .. }) = error {
            let option = "--disks-as-they-are rewinds all the same, at the risk of damaging them";
            context.console.note(option);
        }
    })?;
    context.console.result(&report, || words(&report))?;
    Ok(())
}

fn words(report: &RewindReport) -> String {
    let downtime = &report.downtime_us;
    let line = format!(
        "rewound process {} to {} of {} in {}: {} of {} written; paused {}",
        report.pid,
        short(&report.checkpoint),
        printable(&report.vm),
        durations::human_us(report.total_us),
        table::count(report.written, "page"),
        table::count(report.compared, "page"),
        durations::human_us(downtime.total),
    );
    line + &how_it_ended(
        report.verify.as_ref(),
        report.clock.as_ref(),
        report.running,
        report.suspended,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillframe_engine::rewind::RewindDowntime;

    #[test]
    fn what_was_written_of_how_much_is_told() {
        let report = RewindReport {
            checkpoint: "1a2b3c4d5e".to_owned(),
            vm: "vm1".to_owned(),
            pid: 4711,
            running: false,
            suspended: false,
            compared: 4096,
            written: 1,
            downtime_us: RewindDowntime {
                total: 24_000,
                ..RewindDowntime::default()
            },
            total_us: 800_000,
            clock: None,
            verify: None,
        };
        assert_eq!(
            words(&report),
            "rewound process 4711 to 1a2b3c4d of vm1 in 800 ms: 1 page of 4096 pages written; paused 24 ms; the guest is paused, `cont` on the monitor lets it run"
        );
    }
}
