//! `cargo xtask bench papers dtrack`: live migration over links of a given speed, beside QEMU's own in all the ways
//! that it offers.

mod guest;
mod qemu;
mod run;

use anyhow::{Context, Result};
use serde_json::json;

use self::guest::{RAM_MIB, Saved, Work};
use self::qemu::Tuning;
use self::run::{Outcome, Way};
use super::page::{Figure, Page};
use stillframe_harness::network::Link;

const BENCH: &str = "papers-dtrack";
const COMMAND: &str = "cargo xtask bench papers dtrack";

/// The ways, in the order of the columns.
const WAYS: [(&str, Way); 6] = [
    ("QEMU pre-copy", Way::Qemu(Tuning::PreCopy)),
    ("QEMU XBZRLE", Way::Qemu(Tuning::Xbzrle)),
    ("QEMU multifd + zstd", Way::Qemu(Tuning::MultifdZstd)),
    ("QEMU auto-converge", Way::Qemu(Tuning::AutoConverge)),
    ("QEMU post-copy", Way::Qemu(Tuning::PostCopy)),
    ("Stillframe", Way::Stillframe(&[])),
];

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

/// Runs it, and writes `docs/results/papers-dtrack/` unless only some cells are wanted.
pub fn run(quick: bool, cells: &Cells) -> Result<()> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-dtrack-")
        .tempdir()?;
    let some = quick || cells.guest.is_some() || cells.way.is_some();
    let setting = format!(
        "Guests of {RAM_MIB} MiB with a workload in 128 MiB, TCG, one vCPU. Source and destination are two network \
         namespaces of one machine, joined by a link of {} Mbit a second (`tc tbf`, both ways). Every migration begins \
         with the same saved state. Bytes are those that crossed the link, both ways; the pause lasts from the source's \
         STOP event to the destination's RESUME event. QEMU's time is without the start of the other QEMU, ours is with \
         the start of all programs.",
        cells.mbit
    );
    let mut page = Page::new(
        BENCH,
        some.then_some(folder.path()),
        "Live migration",
        COMMAND,
        &setting,
    )?;
    let link = Link::new()?;
    link.shape(cells.mbit)?;
    let wanted =
        |name: &str, only: &Option<String>| only.as_ref().is_none_or(|only| name.contains(&**only));
    for work in Work::ALL {
        if !wanted(work.name(), &cells.guest) {
            continue;
        }
        let saved = Saved::new(work, folder.path())?;
        let mut rows = Vec::new();
        for (name, way) in WAYS {
            if !wanted(name, &cells.way) {
                continue;
            }
            let mut outcomes = Vec::new();
            for turn in 0..if quick { 1 } else { cells.turns } {
                let what = || format!("{} by {name}", work.name());
                let outcome = run::migrate(&saved, &link, way).with_context(what)?;
                eprintln!("{} {turn}: {}", what(), outcome.raw());
                page.keep(&what(), json!(outcome.raw()));
                outcomes.push(outcome);
            }
            rows.push(row(name, &outcomes));
        }
        page.add(&Figure {
            title: work.name(),
            paper: "see the tables above.",
            ours: "medians.",
            columns: &["way", "total ms", "pause ms", "MiB"],
            rows: &rows,
            pictures: &[],
            differs: "see above.",
        });
    }
    page.write()
}

fn row(name: &str, outcomes: &[Outcome]) -> Vec<String> {
    let median = |of: &dyn Fn(&Outcome) -> Option<f64>| {
        let samples: Option<Vec<f64>> = outcomes.iter().map(of).collect();
        samples.map_or("does not end".to_owned(), |samples| {
            format!(
                "{:.1}",
                stillframe_harness::results::percentile(&samples, 0.5)
            )
        })
    };
    vec![
        name.to_owned(),
        median(&|outcome| outcome.total_ms),
        median(&|outcome| outcome.downtime_ms),
        median(&|outcome| Some(outcome.bytes as f64 / f64::from(1 << 20))),
    ]
}
