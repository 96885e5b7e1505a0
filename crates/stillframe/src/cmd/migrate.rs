//! `migrate`: moves a running VM to another host. If the VM is watched, the watch migrates it ([`client`]).

pub mod cancellation;
mod client;
pub mod message;
pub mod perform;

use stillframe_engine::Selector;
use stillframe_engine::checkpoint::{ScheduleChoice, ScheduleKind};
use stillframe_engine::migration::{
    self, MigrateEvent, MigrateOptions, MigrateReport, SettledReport, Wish,
};
use stillframe_engine::{PAGE_BYTES, Round};

use self::cancellation::Cancellation;
use self::message::Request;
use self::perform::{Migration, Notice, is_unclear};
use super::{Context, capture, launch};
use crate::args::MigrateArgs;
use crate::durations;
use crate::interrupt::Interrupted;
use crate::progress::{Meter, Step, Unit};
use crate::table::{self, printable};

/// Migrates, or settles a hand-over that was interrupted.
pub fn run(context: &Context, args: &MigrateArgs) -> anyhow::Result<()> {
    let selector = capture::selector(&args.vm)?;
    let request = request(args)?;
    let migration = Migration::new(&request)?;
    let wish = match (args.resume, args.take_back) {
        (false, false) => {
            let report = match client::migrate(context, &selector, &request)? {
                Some(report) => report,
                None => migrate(context, &selector, &migration)?,
            };
            context.console.result(&report, || words(&report))?;
            return Ok(());
        }
        (_, true) => Wish::Here,
        (true, false) => Wish::There,
    };
    let mut reconnect = || migration.reconnect();
    let report = migration::settle(&selector, wish, args.reconnect, &mut reconnect)?;
    context.console.result(&report, || settled_words(&report))?;
    Ok(())
}

/// The migration that the command line describes.
fn request(args: &MigrateArgs) -> anyhow::Result<Request> {
    let certs = args.security.certs.as_deref().map(launch::absolute_path);
    let shared = args.shared_images.iter();
    let shared = shared.map(|path| launch::absolute_path(path));
    Ok(Request {
        to: args.to.to_string(),
        certs: certs.transpose()?,
        options: MigrateOptions {
            mode: args.mode.mode(),
            verify: args.verify,
            pause_limit: args.pause_limit,
            bytes_per_s: args.bandwidth,
            downtime: args.downtime_limit,
            cache_bytes: args.delta_cache,
            connections: args.connections.map_or_else(connections, usize::from),
            skip_fake: args.skip_fake.into(),
            page_ids: args.page_ids.hash(),
            compression: args.compression,
            copy_disks: args.copied(),
            shared_images: shared.collect::<anyhow::Result<_>>()?,
            patience: args.reconnect,
            base: None,
        },
        rehearse: args.rehearse,
    })
}

/// Attaches to a VM that is not watched, and migrates it.
fn migrate(
    context: &Context,
    selector: &Selector,
    migration: &Migration,
) -> anyhow::Result<MigrateReport> {
    let interrupts = context.listen(1, INTERRUPTED)?;
    let wire = migration.connect()?;
    let always = ScheduleChoice::Always(ScheduleKind::PreCopy);
    let mut vm = capture::attach(context, selector, always)?;
    let mut reporter = Reporter::new(context);
    let cancellation = Cancellation::default();
    let cancelled = || cancellation.is_cancelled();
    let migrated = cancellation.on_interrupt(&interrupts, || {
        migration.perform(&mut vm, wire, &cancelled, &mut |notice: Notice<'_>| {
            if let Notice::Connected(wire) = &notice {
                cancellation.cover(wire);
            }
            reporter.report(&notice);
        })
    });
    let Err(error) = migrated else {
        return migrated;
    };
    capture::detach(context, vm);
    match cancellation.is_cancelled() && !is_unclear(&error) {
        true => Err(Interrupted.into()),
        false => Err(error),
    }
}

/// Prints what happens in a migration.
struct Reporter<'c> {
    context: &'c Context,
    meter: Meter,
}

impl<'c> Reporter<'c> {
    fn new(context: &'c Context) -> Reporter<'c> {
        Reporter {
            context,
            meter: Meter::new(context.console),
        }
    }

    fn report(&mut self, notice: &Notice<'_>) {
        let console = self.context.console;
        match notice {
            Notice::Connected(_) => {}
            Notice::Rehearsed => console.note(REHEARSED),
            Notice::Event(MigrateEvent::Progress(progress)) => self.meter.show((*progress).into()),
            Notice::Event(MigrateEvent::Disks { done, total }) => self.meter.show(Step {
                what: "copying disks",
                done: *done,
                total: *total,
                unit: Unit::Bytes,
            }),
            Notice::Event(MigrateEvent::Round(round)) => console.note(&round_words(round)),
            Notice::Event(MigrateEvent::Cut) => console.warn(CUT),
            Notice::Event(MigrateEvent::Increment) => console.note(INCREMENT),
            Notice::Event(MigrateEvent::Later) => console.note(LATER),
            Notice::Event(MigrateEvent::ImagesUnused) => console.warn(IMAGES_UNUSED),
            Notice::Event(MigrateEvent::NoImage(path)) => console.warn(&format!(
                "the destination has no {} of this length (`receive --shared-image`): pages of it are sent",
                printable(path)
            )),
            Notice::Event(MigrateEvent::CopyLeft(why)) => console.warn(&format!(
                "QEMU did not end the copy of a disk, and the next migration tries it again: {why}"
            )),
        }
    }
}

/// Said at the first signal.
const INTERRUPTED: &str =
    "interrupted: cancelling, unless the VM is given up already (again: exit at once)";

/// Said when nothing is in the way.
const REHEARSED: &str =
    "rehearsed: the destination has started a QEMU and loaded an early device state into it";

/// Said when it is tried to connect again.
const CUT: &str = "the connection was lost; the VM runs on here, and it is tried to connect again";

/// Said when both hosts reach the VM's last checkpoint.
const INCREMENT: &str = "only what was written since the last checkpoint is sent; the destination reads the rest from the \
                         repository, while the VM runs there";

/// Said before a VM runs without all its memory.
const LATER: &str = "the rest of the memory moves when the VM runs at the destination; if a host or a QEMU is lost \
                     until all is there, the VM is lost";

/// Said where no page is sent before it is wanted.
const IMAGES_UNUSED: &str = "--shared-image is of no use here: pages are fetched by the destination, and come whole; pre-copy and \
                             hybrid send places";

/// More than four carry no more where the processors are the limit, and few networks need more.
fn connections() -> usize {
    std::thread::available_parallelism().map_or(1, |processors| processors.get().min(4))
}

/// `round 2: 12.0 MiB left, which take 66 ms; the guest writes 40.0 MiB/s, 181.0 MiB/s are sent`
fn round_words(round: &Round) -> String {
    let bytes = |pages: u64| table::bytes(pages.saturating_mul(PAGE_BYTES));
    let take = round.expected_us.map_or_else(
        || "none has left".to_owned(),
        |expected| format!("which take {}", durations::human_us(expected)),
    );
    format!(
        "round {}: {} left, {take}; the guest writes {}/s, {}/s are sent",
        round.number,
        bytes(round.left),
        bytes(round.written_per_s),
        bytes(round.streamed_per_s),
    )
}

/// The result in one line.
pub fn words(report: &MigrateReport) -> String {
    let fetched = match report.fetched {
        0 => String::new(),
        pages => format!(", {} when it ran there", table::count(pages, "page")),
    };
    let in_image = match report.pages.in_image {
        0 => String::new(),
        pages => format!(", {} found in shared images", table::count(pages, "page")),
    };
    format!(
        "{} runs at the destination: {} sent in {} and {}, {} of them again{in_image}{fetched}; it was stopped for {}",
        printable(&report.vm),
        table::bytes(report.bytes_sent),
        durations::human_us(report.total_us),
        table::count(u64::from(report.rounds), "round"),
        table::count(report.pages.doomed, "page"),
        durations::human_us(report.downtime_us),
    )
}

fn settled_words(report: &SettledReport) -> String {
    let vm = printable(&report.vm);
    match report.moved {
        true => format!("{vm} runs at the destination; its QEMU here has ended"),
        false => format!("{vm} runs here, and never will at the destination"),
    }
}

#[cfg(test)]
pub mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Cli, Command};

    /// The request of a command line.
    pub fn sample() -> Request {
        let line =
            "stillframe migrate web1 --to host2 --certs certs --bandwidth 10M --copy-disks=a,b";
        let cli = Cli::try_parse_from(line.split(' ')).unwrap();
        let Command::Migrate(args) = cli.command else {
            panic!("not this command");
        };
        request(&args).unwrap()
    }

    #[test]
    fn a_request_is_the_same_on_the_other_side() {
        let request = sample();
        assert!(request.certs.as_ref().unwrap().is_absolute());
        let line = serde_json::to_string(&request).unwrap();
        assert!(line.len() < message::REQUEST_BYTES_MAX);
        assert_eq!(serde_json::from_str::<Request>(&line).unwrap(), request);
        let more = line.replacen('{', "{\"more\":1,", 1);
        assert!(serde_json::from_str::<Request>(&more).is_err());
    }
}
