//! `rewind`: returns a running VM to one of its checkpoints.

use anyhow::Context as _;
use stillframe_engine::LaunchError;
use stillframe_engine::restore::Checkpoint;
use stillframe_engine::rewind::{RewindError, RewindOptions, RewindReport};

use super::{Context, capture, short, state_words};
use crate::args::RewindArgs;
use crate::durations;
use crate::interrupt::{AfterAbort, Interrupts};
use crate::progress::Meter;
use crate::table::{self, printable};

/// Attaches, rewinds, detaches.
pub fn run(context: &Context, args: &RewindArgs) -> anyhow::Result<()> {
    let selector = capture::selector(&args.vm)?;
    let mut repository = context.open()?;
    // This process must not exit while pages are exchanged.
    let interrupted = "interrupted: leaving the VM as it is";
    let interrupts = Interrupts::listen(context.console, 1, interrupted, AfterAbort::Wait)
        .context("cannot handle signals")?;
    let label = args.of_vm.as_ref().or(args.vm.vm.as_ref());
    let (id, manifest) = repository.resolve(&args.id, label.map(String::as_str))?;
    let mut vm = capture::attach_to_rewind(context, &selector)?;
    let options = RewindOptions {
        paused: args.guest.paused,
        keep_clock: args.guest.keep_guest_clock,
        verify: args.guest.verify,
        pause_limit: args.pause_limit,
        copy_buffer_bytes: args.copy_buffer,
        disks_as_they_are: args.disks_as_they_are,
        of_vm: args.of_vm.clone(),
        lock_wait: args.lock.lock_wait,
    };
    let mut meter = Meter::new(context.console);
    let rewound = interrupts.interruptible(|| {
        let target = Checkpoint {
            id: &id,
            manifest: &manifest,
        };
        vm.rewind(&mut repository, target, &options, &mut |progress| {
            meter.show(progress.into());
            interrupts.step();
        })
    });
    capture::detach(context, vm);
    let report = rewound?.inspect_err(|error| {
        if let RewindError::Disk(LaunchError::DiskChanged { .. }) = error {
            let option =
                "--disks-as-they-are rewinds the VM anyway, at the risk of damaging its disks";
            context.console.note(option);
        }
    })?;
    context.console.result(&report, || words(&report))?;
    Ok(())
}

fn words(report: &RewindReport) -> String {
    let downtime = &report.downtime_us;
    let mut line = format!(
        "rewound process {} to {} of {} in {}: {} of {} written; paused {}",
        report.pid,
        short(&report.checkpoint),
        printable(&report.vm),
        durations::human_us(report.total_us),
        table::count(report.written, "page"),
        table::count(report.compared, "page"),
        durations::human_us(downtime.total),
    );
    for disk in &report.disks {
        let pages = table::count(disk.written, "page");
        line += &format!("; disk {}: {pages} written", printable(&disk.device));
    }
    line + &state_words(
        report.verify.as_ref(),
        report.clock.as_ref(),
        report.running,
        report.suspended,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillframe_engine::rewind::{DiskRewound, RewindDowntime};

    #[test]
    fn written_and_compared_pages_are_reported() {
        let report = RewindReport {
            checkpoint: "1a2b3c4d5e".to_owned(),
            vm: "vm1".to_owned(),
            pid: 4711,
            running: false,
            suspended: false,
            compared: 4096,
            written: 1,
            disks: vec![DiskRewound {
                device: "virtio0".to_owned(),
                written: 2,
            }],
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
            "rewound process 4711 to 1a2b3c4d of vm1 in 800 ms: 1 page of 4096 pages written; paused 24 ms; disk virtio0: 2 pages written; the guest is paused, `cont` on the monitor resumes it"
        );
    }
}
