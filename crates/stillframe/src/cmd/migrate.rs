//! `migrate`: moves a running VM to another host.

use stillframe_engine::checkpoint::{ScheduleChoice, ScheduleKind};
use stillframe_engine::migration::{
    self, MigrateEvent, MigrateOptions, MigrateReport, SILENCE_MAX, SettledReport, Unreachable,
    VERSIONS, Wire, Wish,
};
use stillframe_engine::{PAGE_BYTES, Round};
use stillframe_link::{ConnectError, Security, connect};

use super::{Context, capture, receive};
use crate::args::MigrateArgs;
use crate::durations;
use crate::output;
use crate::progress::{Meter, Step, Unit};
use crate::table::{self, printable};

/// Migrates, or settles a hand-over that was interrupted.
pub fn run(context: &Context, args: &MigrateArgs) -> anyhow::Result<()> {
    let security = receive::security(&args.security)?;
    match (args.resume, args.take_back) {
        (false, false) => migrate(context, args, &security),
        (_, true) => settle(context, args, &security, Wish::Here),
        (true, false) => settle(context, args, &security, Wish::There),
    }
}

fn migrate(context: &Context, args: &MigrateArgs, security: &Security) -> anyhow::Result<()> {
    let selector = capture::selector(&args.vm)?;
    let connect = || connect(&args.to, security, &VERSIONS, SILENCE_MAX);
    let mut wire = migration::connection(connect()?);
    let always = ScheduleChoice::Always(ScheduleKind::PreCopy);
    let mut vm = capture::attach(context, &selector, always)?;
    let options = MigrateOptions {
        mode: args.mode.mode(),
        verify: args.verify,
        pause_limit: args.pause_limit,
        bytes_per_s: args.bandwidth,
        downtime: args.downtime_limit,
        cache_bytes: args.delta_cache,
        connections: args.connections.map_or_else(connections, usize::from),
        skip_fake: args.skip_fake.into(),
        page_ids: args.page_ids.hash(),
        copy_disks: args.copied(),
        patience: args.reconnect,
        base: None,
    };
    let mut meter = Meter::new(context.console);
    let mut reconnect = || reconnect(args, security);
    if args.rehearse {
        let rehearsed = vm.rehearse(wire, &mut reconnect, &options);
        let again = rehearsed
            .map_err(anyhow::Error::from)
            .and_then(|()| Ok(connect()?));
        wire = match again {
            Ok(link) => migration::connection(link),
            Err(error) => {
                capture::detach(context, vm);
                return Err(error);
            }
        };
        context.console.note(REHEARSED);
    }
    let mut events = |event: MigrateEvent| match event {
        MigrateEvent::Progress(progress) => meter.show(progress.into()),
        MigrateEvent::Disks { done, total } => meter.show(Step {
            what: "copying disks",
            done,
            total,
            unit: Unit::Bytes,
        }),
        MigrateEvent::Round(round) => context.console.note(&round_words(&round)),
        MigrateEvent::Cut => context.console.warn(CUT),
        MigrateEvent::Increment => context.console.note(INCREMENT),
        MigrateEvent::Later => context.console.note(LATER),
    };
    let migrated = vm.migrate(wire, &mut reconnect, &options, &mut events);
    if migrated.is_err() {
        capture::detach(context, vm);
    }
    let report = migrated?;
    context.console.result(&report, || words(&report))?;
    Ok(())
}

/// Said when nothing is in the way.
const REHEARSED: &str =
    "rehearsed: the destination has started a QEMU and loaded an early device state into it";

/// Said when it is tried to connect again.
const CUT: &str = "the connection was lost; the VM runs on here, and it is tried to connect again";

/// Said when both hosts reach the VM's last checkpoint.
const INCREMENT: &str = "only what was written since the last checkpoint is sent; the destination reads the rest from the repository, \
                         while the VM runs there";

/// Said before a VM runs without all its memory.
const LATER: &str = "the rest of the memory moves when the VM runs at the destination; if a host or a QEMU is lost \
                     until all is there, the VM is lost";

/// More than four carry no more where the processors are the limit, and few networks need more.
fn connections() -> usize {
    std::thread::available_parallelism().map_or(1, |processors| processors.get().min(4))
}

/// `round 2: 12.0 MiB left, which take 66 ms; the guest writes 40.0 MiB/s, 181.0 MiB/s are sent`
fn round_words(round: &Round) -> String {
    let bytes = |pages: u64| table::bytes(pages.saturating_mul(PAGE_BYTES));
    format!(
        "round {}: {} left, which take {}; the guest writes {}/s, {}/s are sent",
        round.number,
        bytes(round.left),
        durations::human_us(round.expected_us),
        bytes(round.written_per_s),
        bytes(round.streamed_per_s),
    )
}

fn words(report: &MigrateReport) -> String {
    let fetched = match report.fetched {
        0 => String::new(),
        pages => format!(", {} when it ran there", table::count(pages, "page")),
    };
    format!(
        "{} runs at the destination: {} sent in {} and {}, {} of them again{fetched}; it was stopped for {}",
        printable(&report.vm),
        table::bytes(report.bytes_sent),
        durations::human_us(report.total_us),
        table::count(u64::from(report.rounds), "round"),
        table::count(report.pages.doomed, "page"),
        durations::human_us(report.downtime_us),
    )
}

fn settle(
    context: &Context,
    args: &MigrateArgs,
    security: &Security,
    wish: Wish,
) -> anyhow::Result<()> {
    let selector = capture::selector(&args.vm)?;
    let mut reconnect = || reconnect(args, security);
    let report = migration::settle(&selector, wish, args.reconnect, &mut reconnect)?;
    context.console.result(&report, || settled_words(&report))?;
    Ok(())
}

fn settled_words(report: &SettledReport) -> String {
    let vm = printable(&report.vm);
    match report.moved {
        true => format!("{vm} runs at the destination; its QEMU here has ended"),
        false => format!("{vm} runs here, and never will at the destination"),
    }
}

fn reconnect(args: &MigrateArgs, security: &Security) -> Result<Wire, Unreachable> {
    let unreachable = |error: ConnectError| Unreachable {
        refused: error.is_refused(),
        why: output::chain(anyhow::Error::new(error).chain()),
    };
    connect(&args.to, security, &VERSIONS, SILENCE_MAX)
        .map(migration::connection)
        .map_err(unreachable)
}
