//! `transfer`: a running VM into a new QEMU of another process.

use stillframe_engine::checkpoint::{ScheduleChoice, ScheduleKind};
use stillframe_engine::transfer::{
    self, Mode, ReceiveOptions, ReceiveReport, SendOptions, SendReport, accept, connect,
};
use stillframe_engine::{LaunchOptions, runtime};

use super::restore::{here, serial_from_here};
use super::{Context, capture, how_it_ended};
use crate::args::{ReceiveArgs, SendArgs, TransferArgs, TransferSide};
use crate::durations;
use crate::progress::Meter;
use crate::table::{self, printable};

/// Sends or receives.
pub fn run(context: &Context, args: &TransferArgs) -> anyhow::Result<()> {
    match &args.side {
        TransferSide::Send(args) => send(context, args),
        TransferSide::Receive(args) => receive(context, args),
    }
}

fn send(context: &Context, args: &SendArgs) -> anyhow::Result<()> {
    let selector = capture::selector(&args.vm)?;
    let mut connection = connect(&args.to)?;
    let always = ScheduleChoice::Always(ScheduleKind::PreCopy);
    let mut vm = capture::attach(context, &selector, always)?;
    let options = SendOptions {
        mode: match args.hand_over {
            true => Mode::HandOver,
            false => Mode::Copy,
        },
        verify: args.verify,
        pause_limit: args.pause_limit,
        bytes_per_s: args.bandwidth,
        downtime: args.downtime_limit,
        copy_buffer_bytes: args.copy_buffer,
    };
    let mut meter = Meter::new(context.console);
    let sent = vm.send(&mut connection, &options, &mut |progress| {
        meter.show(progress.into());
    });
    capture::detach(context, vm);
    let report = sent?;
    context.console.result(&report, || sent_words(&report))?;
    Ok(())
}

fn sent_words(report: &SendReport) -> String {
    format!(
        "sent {} in {}: {}, of {} while it ran and {} after, stopped for {}",
        printable(&report.vm),
        durations::human_us(report.total_us),
        table::bytes(report.bytes_sent),
        table::count(report.streamed, "page"),
        table::count(report.last, "page"),
        durations::human_us(report.downtime_us),
    )
}

fn receive(context: &Context, args: &ReceiveArgs) -> anyhow::Result<()> {
    let qmp = here(&args.qmp)?;
    let serial = args.serial.as_deref();
    let options = ReceiveOptions {
        launch: LaunchOptions {
            serial: serial
                .map(|spec| serial_from_here(spec, here))
                .transpose()?,
            disks_as_they_are: args.disks_as_they_are,
            qemu: args.start.qemu.clone(),
            as_root: args.start.as_root,
            without_label: args.start.without_label,
            without_group: args.start.without_group,
            allow_commands: args.start.allow_commands,
            replace: args.replace.clone(),
            ..LaunchOptions::new(qmp.clone(), runtime::default_log(&qmp))
        },
        paused: args.paused,
    };
    let mut connection = accept(&args.from)?;
    let mut meter = Meter::new(context.console);
    let report = transfer::receive(&mut connection, &options, &mut |progress| {
        meter.show(progress.into());
    })?;
    context
        .console
        .result(&report, || received_words(&report))?;
    Ok(())
}

fn received_words(report: &ReceiveReport) -> String {
    let ended = how_it_ended(report.verify.as_ref(), None, report.running, false);
    format!(
        "received {}: process {}, {}{ended}",
        printable(&report.vm),
        report.pid,
        table::count(report.pages, "page"),
    )
}
