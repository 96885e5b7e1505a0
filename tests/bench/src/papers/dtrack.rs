//! `cargo xtask bench papers dtrack`: live migration over a link of a given speed, beside QEMU's own in all the ways that
//! it offers; and D-Track's ways to leave out fake dirty pages, beside each other.
//!
//! [`guest`] has the guests, [`run`] one migration, [`qemu`] QEMU's ways, and [`tables`] what is made of the outcomes.

mod guest;
mod qemu;
mod run;
mod tables;

use anyhow::{Context, Result};

use self::guest::{RAM_MIB, Saved, Work};
use self::qemu::Tuning;
use self::run::{Outcome, Way};
use super::page::Page;
use stillframe_harness::network::Link;
use stillframe_harness::results;

const BENCH: &str = "migration";
const COMMAND: &str = "cargo xtask bench papers dtrack";

/// The ways, in the order of the columns. Stillframe's is the last.
const WAYS: [(&str, Way); 6] = [
    ("QEMU pre-copy", Way::Qemu(Tuning::PreCopy)),
    ("QEMU XBZRLE", Way::Qemu(Tuning::Xbzrle)),
    ("QEMU multifd + zstd", Way::Qemu(Tuning::MultifdZstd)),
    ("QEMU auto-converge", Way::Qemu(Tuning::AutoConverge)),
    ("QEMU post-copy", Way::Qemu(Tuning::PostCopy)),
    ("Stillframe", Way::Stillframe(&[])),
];

/// Without deltas, as in the paper, and without ids unless said: how pages are found that need not be sent.
const SKIPS: [(&str, Way); 11] = [
    ("off", skip(&["--skip-fake=off", "--page-ids=off"])),
    (
        "D-Track, version 1",
        skip(&["--skip-fake=thread", "--page-ids=off"]),
    ),
    (
        "D-Track, version 2",
        skip(&["--skip-fake=thread-delayed", "--page-ids=off"]),
    ),
    ("exact", skip(&["--skip-fake=exact", "--page-ids=off"])),
    ("auto", skip(&["--skip-fake=auto", "--page-ids=off"])),
    ("auto, with ids", skip(&["--skip-fake=auto"])),
    (
        "ids by SHA-1",
        skip(&["--skip-fake=off", "--page-ids=sha1"]),
    ),
    ("ids by MD5", skip(&["--skip-fake=off", "--page-ids=md5"])),
    (
        "ids by Murmur3",
        skip(&["--skip-fake=off", "--page-ids=murmur3"]),
    ),
    (
        "ids by BLAKE3",
        skip(&["--skip-fake=off", "--page-ids=blake3"]),
    ),
    ("ids by XXH3", skip(&["--skip-fake=off", "--page-ids=xxh3"])),
];

const fn skip(words: &'static [&'static str]) -> Way {
    Way::WithoutDeltas(words)
}

/// Cells of the table.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Cells {
    /// Only this guest (idle, reader, writer, noise, silent); then nothing is recorded.
    #[arg(long)]
    guest: Option<String>,
    /// Only the ways whose name has this in it; then nothing is recorded.
    #[arg(long)]
    way: Option<String>,
    /// Mbit a second of the link.
    #[arg(long, default_value_t = 1000)]
    mbit: u64,
    /// Migrations of each cell.
    #[arg(long, default_value_t = 3)]
    turns: usize,
}

impl Cells {
    fn are_some(&self) -> bool {
        self.guest.is_some() || self.way.is_some() || self.mbit != 1000
    }

    fn wants(&self, work: Work, way: &str) -> bool {
        let among = |name: &str, only: &Option<String>| {
            only.as_ref()
                .is_none_or(|only| name.contains(only.as_str()))
        };
        among(work.name(), &self.guest) && among(way, &self.way)
    }
}

/// The outcomes of one cell.
struct Cell {
    pub work: Work,
    pub way: &'static str,
    pub outcomes: Vec<Outcome>,
}

/// Runs it, and writes `docs/results/migration/` unless only some cells are wanted.
pub fn run(quick: bool, cells: &Cells) -> Result<()> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-dtrack-")
        .tempdir()?;
    let recorded = !quick && !cells.are_some();
    let setting = format!(
        "Guests of {RAM_MIB} MiB with a workload in 128 MiB, TCG, one vCPU. Source and destination are two network \
         namespaces of one machine with two processors, joined by a link of {} Mbit a second (`tc tbf`, both ways). Every \
         migration begins with the same saved state. Bytes are those that crossed the link, both ways, headers included. The \
         pause lasts from the source's STOP event to the destination's RESUME event. QEMU's time begins with its command \
         and leaves out the start of the other QEMU; ours is that of the whole command, with all programs that it starts. A \
         migration that does not end within {} s is cancelled, and not repeated.",
        cells.mbit,
        run::LIMIT.as_secs()
    );
    let elsewhere = (!recorded).then_some(folder.path());
    let mut page = Page::new(BENCH, elsewhere, "Live migration", COMMAND, &setting)?;
    let link = Link::new()?;
    link.shape(cells.mbit)?;
    let turns = if quick { 1 } else { cells.turns };
    let (mut table, mut skips) = (Vec::new(), Vec::new());
    for work in Work::ALL {
        let saved = Saved::new(work, folder.path())?;
        for (way, how) in WAYS {
            if cells.wants(work, way) {
                table.push(cell(&saved, &link, (way, how), turns, &mut page)?);
            }
        }
        let writes = matches!(work, Work::Writer | Work::Noise | Work::Silent);
        for (way, how) in SKIPS {
            if writes && cells.wants(work, way) {
                skips.push(cell(&saved, &link, (way, how), turns.min(2), &mut page)?);
            }
        }
    }
    tables::add_ways(&mut page, &table)?;
    tables::add_skips(&mut page, &skips);
    if recorded {
        let claims = tables::claims(&table, &skips)?;
        page.add_claims(
            &claims,
            "-",
            "goals of our own, against QEMU's best of the same table.",
        );
        results::write_summary(BENCH, &claims)?;
    }
    page.write()
}

/// Some migrations of one guest in one way.
fn cell(
    saved: &Saved,
    link: &Link,
    (way, how): (&'static str, Way),
    turns: usize,
    page: &mut Page,
) -> Result<Cell> {
    let work = saved.work();
    let what = format!("{} by {way}", work.name());
    let mut outcomes: Vec<Outcome> = Vec::new();
    for turn in 0..turns {
        if outcomes.iter().any(|outcome| outcome.total_ms.is_none()) {
            break;
        }
        let outcome = run::migrate(saved, link, how).with_context(|| what.clone())?;
        eprintln!("{what} {turn}: {}", outcome.in_short());
        page.keep(&what, outcome.raw());
        outcomes.push(outcome);
    }
    Ok(Cell {
        work,
        way,
        outcomes,
    })
}
