//! `receive`: waits for a VM that another host migrates here, and starts it.

use std::time::Duration;

use serde_json::json;
use stillframe_engine::LaunchOptions;
use stillframe_engine::migration::{
    self, Awaited, FilledReport, NewQemu, ReceiveError, ReceiveEvent, ReceiveOptions,
    ReceiveReport, Received, SILENCE_MAX, SeedFrom, VERSIONS,
};
use stillframe_link::{ConnectError, Listener};
use stillframe_repo::Repository;

use super::migrate::perform::security;
use super::{Context, launch, state_words, supervised_words};
use crate::args::ReceiveArgs;
use crate::durations;
use crate::output;
use crate::progress::Meter;
use crate::table::{self, printable};

/// Receives a VM, or goes on for a process that was killed.
pub fn run(context: &Context, args: &ReceiveArgs) -> anyhow::Result<()> {
    let mut options = ReceiveOptions {
        qemu: qemu(args)?,
        paused: args.paused,
        overwrite_disks: args.overwrite_disks,
        shared_images: args.shared_images.clone(),
        rehearsed: None,
        patience: args.reconnect,
    };
    let repository = args.seed.as_ref().map(|_| context.open());
    let mut repository = repository.transpose()?;
    let listener = listen(context, args)?;
    let refused = |error: ConnectError| {
        let words = output::chain(anyhow::Error::new(error).chain());
        context.console.warn(&printable(&words));
    };
    // A listener that fails is one to which no source comes.
    let mut again = |awaited: Awaited, limit: Duration| {
        if awaited == Awaited::Again {
            context.console.warn(&format!(
                "there is no connection to the source; it is waited for, for up to {}",
                durations::human(limit)
            ));
        }
        let link = listener.wait_for(limit, refused).ok().flatten();
        link.map(migration::connection)
    };
    let mut printed = Ok(());
    let mut meter = Meter::new(context.console);
    let mut events = |event: ReceiveEvent<'_>| match event {
        ReceiveEvent::Arrived(report) => {
            printed = context.console.result(report, || words(report));
        }
        ReceiveEvent::Filled(report) => {
            // Not a result: scripts have two lines of them, whatever the mode.
            let complete = json!({ "complete": report });
            context.console.event(&complete, || filled_words(&report));
        }
        ReceiveEvent::Supervised(event) => context.console.note(&supervised_words(&event)),
        ReceiveEvent::Progress(progress) => meter.show(progress.into()),
        ReceiveEvent::Cut(error) => context.console.warn(&cut_words(error)),
    };
    match args.resume {
        true => {
            let qmp = options.qemu.qmp();
            let mut from = seed_from(repository.as_mut(), args);
            migration::resume_receiving(qmp, &mut again, from.as_mut(), &mut events)?;
        }
        false => loop {
            let wire = migration::connection(listener.wait(refused)?);
            let mut from = seed_from(repository.as_mut(), args);
            match migration::receive(wire, &mut again, &options, from.as_mut(), &mut events)? {
                Received::Over => break,
                Received::Nothing => {}
                Received::Rehearsed(rehearsal) => {
                    options.rehearsed = Some(rehearsal);
                    context.console.note(REHEARSED);
                }
            }
        },
    }
    Ok(printed?)
}

/// Where a checkpoint of the VM is looked for.
fn seed_from<'r>(
    repository: Option<&'r mut Repository>,
    args: &ReceiveArgs,
) -> Option<SeedFrom<'r>> {
    Some(SeedFrom {
        repository: repository?,
        name: args.seed.clone().unwrap_or_default(),
        lock_wait: args.lock.lock_wait,
    })
}

/// `the connection to the source was lost while the VM runs there (...); what came is kept`
fn cut_words(error: &ReceiveError) -> String {
    let why = output::chain(std::iter::once(error as &dyn std::error::Error));
    format!(
        "the connection to the source was lost while the VM runs there ({why}); what came is kept"
    )
}

/// Said when the VM itself is still to come.
const REHEARSED: &str = "a migration was rehearsed; the VM itself is waited for";

/// The QEMU that the command line names, or how to start one.
fn qemu(args: &ReceiveArgs) -> anyhow::Result<NewQemu> {
    Ok(match (&args.into, &args.qmp) {
        (Some(into), _) => NewQemu::Into(launch::absolute_path(into)?),
        (None, qmp) => {
            // The command line has one of the two.
            let qmp = qmp.clone().unwrap_or_default();
            let options = launch::options(&args.launch, &qmp, args.serial.as_deref())?;
            NewQemu::Start(Box::new(LaunchOptions {
                newer_qemu: args.newer_qemu,
                ..options
            }))
        }
    })
}

/// Listens, and says where.
fn listen(context: &Context, args: &ReceiveArgs) -> anyhow::Result<Listener> {
    let listener = Listener::bind(
        &args.listen,
        security(args.security.certs.as_ref())?,
        VERSIONS,
        args.allow.clone(),
        SILENCE_MAX,
    )?;
    let address = listener.local_address()?;
    context
        .console
        .result(&json!({ "listening": address }), || {
            format!("listening at {address}")
        })?;
    Ok(listener)
}

fn filled_words(report: &FilledReport) -> String {
    format!(
        "all its memory is here after {}: {} fetched, and its guest waited {} times",
        durations::human_us(report.after_us),
        table::count(report.pages, "page"),
        report.faults,
    )
}

fn words(report: &ReceiveReport) -> String {
    let state = state_words(report.verify.as_ref(), None, report.running, false);
    format!(
        "received {}: process {}, {}{state}",
        printable(&report.vm),
        report.pid,
        table::count(report.pages, "page"),
    )
}
