//! `cargo xtask bench papers dtrack`: live migration over a link of a given speed, beside QEMU's own in all the ways that
//! it offers; and D-Track's ways to leave out fake dirty pages, beside each other.
//!
//! [`crate::migration`] has the guests and one migration, and [`tables`] what is made of the outcomes.

mod tables;

use std::fs;

use anyhow::{Context, Result};

use crate::migration::bound::unique_bytes;
use crate::migration::guest::{Saved, Size, WORKLOAD_MIB, Work};
use crate::migration::hosts::Hosts;
use crate::migration::qemu::Tuning;
use crate::migration::run::{self, Outcome, Way};
use crate::page::Page;
use stillframe_harness::results;

const BENCH: &str = "migration";
const COMMAND: &str = "cargo xtask bench papers dtrack";

/// Post-copy, by both.
const QEMU_POST_COPY: &str = "QEMU post-copy";
const OUR_POST_COPY: &str = "Stillframe post-copy";
/// Of a VM that is watched.
const OUR_WATCHED: &str = "Stillframe, watched";

/// The ways, in the order of the columns. Stillframe's are the last.
const WAYS: [(&str, Way); 8] = [
    ("QEMU pre-copy", Way::Qemu(Tuning::PreCopy)),
    ("QEMU XBZRLE", Way::Qemu(Tuning::Xbzrle)),
    ("QEMU multifd + zstd", Way::Qemu(Tuning::MultifdZstd)),
    ("QEMU auto-converge", Way::Qemu(Tuning::AutoConverge)),
    (QEMU_POST_COPY, Way::Qemu(Tuning::PostCopy)),
    ("Stillframe", Way::Stillframe(&[])),
    (OUR_POST_COPY, Way::Stillframe(&["--mode=post-copy"])),
    (OUR_WATCHED, Way::Watched),
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

/// How pages are compressed.
const PACKS: [(&str, Way); 5] = [
    ("compression auto", pack(&["--compression=auto"])),
    ("compression none", pack(&["--compression=none"])),
    ("compression lz4", pack(&["--compression=lz4"])),
    ("compression zstd:1", pack(&["--compression=zstd:1"])),
    ("compression zstd:9", pack(&["--compression=zstd:9"])),
];

const fn pack(words: &'static [&'static str]) -> Way {
    Way::Stillframe(words)
}

const fn skip(words: &'static [&'static str]) -> Way {
    Way::WithoutDeltas(words)
}

/// The size of the recorded table.
const RECORDED: Size = Size {
    ram_mib: 512,
    mbit: 1000,
};

/// Cells of the table.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Cells {
    /// Only this guest; then nothing is recorded.
    #[arg(long, value_enum)]
    guest: Option<Work>,
    /// All guests, including memcached and postgresql; then nothing is recorded.
    #[arg(long, conflicts_with = "guest")]
    all_guests: bool,
    /// Only the ways whose name has this in it; then nothing is recorded.
    #[arg(long)]
    way: Option<String>,
    /// RAM of each guest, in MiB; nothing is recorded with another than 512.
    #[arg(long, default_value_t = RECORDED.ram_mib, value_parser = clap::value_parser!(u32).range(512..=4096))]
    ram_mib: u32,
    /// Mbit a second of the link; nothing is recorded with another than 1000.
    #[arg(long, default_value_t = RECORDED.mbit, value_parser = clap::value_parser!(u64).range(1..))]
    mbit: u64,
    /// Write these cells to docs/results/migration-NAME, without promises.
    #[arg(long, value_name = "NAME", value_parser = folder_name)]
    record: Option<String>,
    /// Migrations of each cell.
    #[arg(long, default_value_t = 3)]
    turns: usize,
}

impl Cells {
    fn size(&self) -> Size {
        Size {
            ram_mib: self.ram_mib,
            mbit: self.mbit,
        }
    }

    /// Whether they are those of the recorded table.
    fn are_core(&self) -> bool {
        self.guest.is_none() && !self.all_guests && self.way.is_none() && self.size() == RECORDED
    }

    /// The command that gives them.
    fn command(&self) -> String {
        let mut command = COMMAND.to_owned();
        if let Some(work) = self.guest {
            command += &format!(" --guest {}", work.name());
        }
        if self.all_guests {
            command += " --all-guests";
        }
        if let Some(way) = &self.way {
            command += &format!(" --way '{way}'");
        }
        if self.size() != RECORDED {
            command += &format!(" --ram-mib {} --mbit {}", self.ram_mib, self.mbit);
        }
        if let Some(name) = &self.record {
            command += &format!(" --turns {} --record {name}", self.turns);
        }
        command
    }

    fn works(&self) -> impl Iterator<Item = Work> {
        Work::ALL.into_iter().filter(|&work| match self.guest {
            Some(only) => work == only,
            None => self.all_guests || work.is_core(),
        })
    }

    fn wants(&self, way: &str) -> bool {
        self.way.as_ref().is_none_or(|only| way.contains(only))
    }
}

fn folder_name(name: &str) -> Result<String, String> {
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    match !name.is_empty() && name.bytes().all(fits) {
        true => Ok(name.to_owned()),
        false => Err("a name consists of small letters, digits and -".to_owned()),
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
    let recorded = !quick && cells.are_core() && cells.record.is_none();
    let size = cells.size();
    let setting = setting(size);
    let name = cells.record.as_ref();
    let bench = name.map_or(BENCH.to_owned(), |name| format!("{BENCH}-{name}"));
    let elsewhere = (!recorded && name.is_none()).then_some(folder.path());
    let command = cells.command();
    let mut page = Page::new(&bench, elsewhere, "Live migration", &command, &setting)?;
    let hosts = Hosts::new()?;
    hosts.link.shape(size.mbit)?;
    let turns = if quick { 1 } else { cells.turns };
    let (mut table, mut skips, mut packs) = (Vec::new(), Vec::new(), Vec::new());
    let mut writer_bytes = None;
    for work in cells.works() {
        let saved = Saved::new(work, size, folder.path())?;
        for (way, how) in WAYS {
            if cells.wants(way) {
                table.push(cell(&saved, &hosts, (way, how), turns, &mut page)?);
            }
        }
        for (way, how) in SKIPS {
            if work.writes() && cells.wants(way) {
                skips.push(cell(&saved, &hosts, (way, how), turns.min(2), &mut page)?);
            }
        }
        for (way, how) in PACKS {
            if work.compresses() && cells.wants(way) {
                packs.push(cell(&saved, &hosts, (way, how), turns.min(2), &mut page)?);
            }
        }
        if work == Work::Writer {
            let bytes = unique_bytes(saved.file())?;
            page.keep("unique content of writer, compressed", bytes.into());
            writer_bytes = Some(bytes);
        }
        // Such a file takes as much space as the guest has RAM.
        fs::remove_file(saved.file())?;
    }
    tables::add_ways(&mut page, &table)?;
    if !skips.is_empty() {
        tables::add_skips(&mut page, &skips);
    }
    if !packs.is_empty() {
        tables::add_packs(&mut page, &packs);
    }
    if recorded {
        let claims = tables::claims(&table, &skips, writer_bytes)?;
        page.add_claims(
            &claims,
            "-",
            "goals of our own, against QEMU's best of the same table.",
        );
        results::write_summary(BENCH, &claims)?;
    }
    page.write()
}

/// What is the same for all figures.
fn setting(size: Size) -> String {
    let Size { ram_mib, mbit } = size;
    format!(
        "Guests of {ram_mib} MiB, TCG, one vCPU; the first five have a workload in {WORKLOAD_MIB} MiB. Source and destination \
         are two network namespaces of one machine with two processors, joined by a link of {mbit} Mbit a second (`tc tbf`, \
         both ways). Every migration begins with the same saved state. Bytes are those that crossed the link, both ways, \
         headers included. The pause lasts from the source's STOP event to the destination's RESUME event. QEMU's time begins \
         with its command and leaves out the start of the other QEMU; ours is that of the whole command, with all programs \
         that it starts. A migration that does not end within {} s is cancelled, and not repeated.",
        size.limit().as_secs()
    )
}

/// Some migrations of one guest in one way.
fn cell(
    saved: &Saved,
    hosts: &Hosts,
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
        let outcome = run::migrate(saved, hosts, how).with_context(|| what.clone())?;
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
