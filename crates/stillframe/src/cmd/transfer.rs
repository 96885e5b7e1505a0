//! `transfer`: sends a running VM to another process, which starts it in a new QEMU.

use serde_json::json;
use stillframe_engine::checkpoint::{ScheduleChoice, ScheduleKind};
use stillframe_engine::transfer::{
    self, Mode, ReceiveOptions, ReceiveReport, SILENCE_MAX, SendOptions, SendReport, VERSIONS,
};
use stillframe_link::{ConnectError, Identity, Link, Listener, Security, connect};

use super::{Context, capture, launch, state_words};
use crate::args::{ReceiveArgs, SecurityArgs, SendArgs, TransferArgs, TransferSide};
use crate::durations;
use crate::output;
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
    let security = security(&args.security)?;
    let link = connect(&args.to, &security, &VERSIONS, SILENCE_MAX)?;
    let mut connection = transfer::connection(link);
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
        "sent {} in {}: {}; {} while it ran, {} while it was paused for {}",
        printable(&report.vm),
        durations::human_us(report.total_us),
        table::bytes(report.bytes_sent),
        table::count(report.streamed, "page"),
        table::count(report.last, "page"),
        durations::human_us(report.downtime_us),
    )
}

fn receive(context: &Context, args: &ReceiveArgs) -> anyhow::Result<()> {
    let options = ReceiveOptions {
        launch: launch::options(&args.launch, &args.qmp, args.serial.as_deref())?,
        paused: args.paused,
    };
    let mut connection = transfer::connection(await_sender(context, args)?);
    let mut meter = Meter::new(context.console);
    let report = transfer::receive(&mut connection, &options, &mut |progress| {
        meter.show(progress.into());
    })?;
    context
        .console
        .result(&report, || received_words(&report))?;
    Ok(())
}

/// Listens until one host is let in. Those that are not are reported.
fn await_sender(context: &Context, args: &ReceiveArgs) -> anyhow::Result<Link> {
    let listener = Listener::bind(
        &args.listen,
        security(&args.security)?,
        VERSIONS,
        args.allow.clone(),
        SILENCE_MAX,
    )?;
    let address = listener.local_address()?;
    let console = context.console;
    console.result(&json!({ "listening": address }), || {
        format!("listening at {address}")
    })?;
    let refused = |error: ConnectError| {
        let error: &(dyn std::error::Error + 'static) = &error;
        let chain = std::iter::successors(Some(error), |error| error.source());
        console.warn(&printable(&output::chain(chain)));
    };
    Ok(listener.wait(refused)?)
}

fn security(args: &SecurityArgs) -> anyhow::Result<Security> {
    Ok(match &args.certs {
        Some(folder) => Security::Tls(Identity::load(folder)?),
        None => Security::PlainText,
    })
}

fn received_words(report: &ReceiveReport) -> String {
    let state = state_words(report.verify.as_ref(), None, report.running, false);
    format!(
        "received {}: process {}, {}{state}",
        printable(&report.vm),
        report.pid,
        table::count(report.pages, "page"),
    )
}
