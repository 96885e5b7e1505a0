//! The time of processors that a migration takes beside QEMU's over several connections, and the memory of the engines.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::COMMAND;
use crate::migration::guest::{Saved, Size, Work};
use crate::migration::hosts::Hosts;
use crate::migration::qemu::Tuning;
use crate::migration::run::{self, Outcome, Way};
use crate::page::{Figure, Page};
use stillframe_harness::results::{Claim, Goal, percentile};

/// Migrations of each cell.
const TURNS: usize = 3;
/// The guest; the link is as quick as the machine.
const SIZE: Size = Size {
    ram_mib: 2048,
    mbit: 10_000,
};
/// The guest whose deltas fill a cache.
const BUSY: Size = Size {
    ram_mib: 1024,
    mbit: 1000,
};
/// Neither deltas, ids nor compression: only moved, as QEMU does it.
const PLAIN: &[&str] = &[
    "--compression=none",
    "--delta-cache=0",
    "--page-ids=off",
    "--skip-fake=off",
    "--mode=pre-copy",
];
/// `--delta-cache`, unless something else is said, in MiB.
const CACHE_MIB: f64 = 512.0;

/// One guest, encrypted or not.
struct Row {
    shared: bool,
    tls: bool,
    qemu: Vec<Outcome>,
    plain: Vec<Outcome>,
    usual: Vec<Outcome>,
}

impl Row {
    /// How many times as many bytes Stillframe moves in a second of a processor.
    fn ratio(&self) -> f64 {
        median(&self.qemu, |outcome| outcome.processor_s)
            / median(&self.plain, |outcome| outcome.processor_s)
    }
}

fn name(shared: bool) -> &'static str {
    if shared { "shared" } else { "private" }
}

fn median(outcomes: &[Outcome], of: impl Fn(&Outcome) -> f64) -> f64 {
    percentile(&outcomes.iter().map(of).collect::<Vec<f64>>(), 0.5)
}

/// Measures all guests, and answers the promises.
pub fn measure(hosts: &Hosts, folder: &Path, page: &mut Page) -> Result<Vec<Claim>> {
    let mut rows = Vec::new();
    for shared in [true, false] {
        let saved = Saved::filled(shared, SIZE, folder)?;
        for tls in [false, true] {
            rows.push(row(&saved, (shared, tls), hosts, page)?);
        }
        fs::remove_file(saved.file())?;
    }
    let saved = Saved::new(Work::Writer, BUSY, folder)?;
    let busy = turn(&saved, hosts, ("busy", Way::Stillframe(&[])), page)?;
    fs::remove_file(saved.file())?;
    add(page, &rows, &busy);

    let ratio = |id, goal, wanted: &dyn Fn(&Row) -> bool| {
        let ratios = rows.iter().filter(|row| wanted(row)).map(Row::ratio);
        let worst = ratios.fold(f64::INFINITY, f64::min);
        Claim::new(id, Goal::AtLeast(goal), worst, "ratio", COMMAND)
    };
    let plain = rows.iter().flat_map(|row| &row.plain);
    let cached = rows.iter().flat_map(|row| &row.usual).chain([&busy]);
    let without = plain.map(|outcome| beyond(outcome, 0.0));
    let peaks = without.chain(cached.map(|outcome| beyond(outcome, CACHE_MIB)));
    let peaks = peaks.collect::<Result<Vec<f64>>>()?;
    let most = percentile(&peaks, 1.0);
    Ok(vec![
        ratio("migrate-processor-shared", 1.0, &|row| {
            !row.tls && row.shared
        }),
        ratio("migrate-processor-private", 0.6, &|row| {
            !row.tls && !row.shared
        }),
        ratio("migrate-processor-tls", 1.2, &|row| row.tls),
        Claim::new("migrate-memory", Goal::AtMost(256.0), most, "MiB", COMMAND),
    ])
}

/// The larger of both engines' memory beyond the cache, which is the source's.
fn beyond(outcome: &Outcome, cache_mib: f64) -> Result<f64> {
    let [source, destination] = outcome
        .engines_mib
        .context("the engines were not watched")?;
    Ok((source - cache_mib).max(destination))
}

fn row(saved: &Saved, (shared, tls): (bool, bool), hosts: &Hosts, page: &mut Page) -> Result<Row> {
    let mut row = Row {
        shared,
        tls,
        qemu: Vec::new(),
        plain: Vec::new(),
        usual: Vec::new(),
    };
    let tuning = if tls {
        Tuning::MultifdTls
    } else {
        Tuning::Multifd
    };
    let ours = |words| Way::Into { words, tls };
    for _ in 0..TURNS {
        let words = format!("{}{}", name(shared), if tls { ", TLS" } else { "" });
        let mut turn = |name, way| turn(saved, hosts, (&format!("{words}: {name}"), way), page);
        row.qemu.push(turn("QEMU", Way::Qemu(tuning))?);
        row.plain.push(turn("plain", ours(PLAIN))?);
        row.usual.push(turn("usual", ours(&[]))?);
    }
    Ok(row)
}

fn turn(
    saved: &Saved,
    hosts: &Hosts,
    (what, way): (&str, Way),
    page: &mut Page,
) -> Result<Outcome> {
    let outcome = run::migrate(saved, hosts, way).with_context(|| what.to_owned())?;
    eprintln!(
        "{what}: {}, processors {:.2} s, engines {:?} MiB",
        outcome.in_short(),
        outcome.processor_s,
        outcome.engines_mib
    );
    page.keep(what, outcome.raw());
    Ok(outcome)
}

fn add(page: &mut Page, rows: &[Row], busy: &Outcome) {
    let mut cells = Vec::new();
    for row in rows {
        let ways = [
            ("QEMU multifd", &row.qemu),
            ("Stillframe, only moved", &row.plain),
            ("Stillframe", &row.usual),
        ];
        for (way, outcomes) in ways {
            let moved = median(&row.qemu, |outcome| outcome.bytes as f64) / 1e9;
            let seconds = median(outcomes, |outcome| outcome.processor_s);
            cells.push(vec![
                name(row.shared).to_owned(),
                if row.tls { "yes" } else { "no" }.to_owned(),
                way.to_owned(),
                format!(
                    "{:.0}",
                    median(outcomes, |it| it.total_ms.unwrap_or(f64::NAN))
                ),
                format!("{seconds:.2}"),
                format!("{:.2}", moved / seconds),
                memory(outcomes),
            ]);
        }
    }
    let mib = |place: usize| busy.engines_mib.map_or(f64::NAN, |mib| mib[place]);
    page.add(&Figure {
        title: "Time of processors, and memory",
        paper: "-",
        ours: &format!(
            "medians; memory is the most of all. Of a guest of {} MiB that writes at random places, the engines had {:.0} MiB \
             at the source and {:.0} MiB at the destination.",
            BUSY.ram_mib,
            mib(0),
            mib(1)
        ),
        columns: &[
            "memory",
            "TLS",
            "way",
            "total ms",
            "processors s",
            "GB a second of a processor",
            "engines MiB (source, destination)",
        ],
        rows: &cells,
        pictures: &[],
        differs: &format!(
            "idle guests of {} MiB, three quarters filled by their workload and all of it allocated before, on a link that is not shaped, into a QEMU that \
             waits for the VM. Processors: both QEMUs and both engines, until both are done; with TCG the idle guest itself is \
             in it, in all rows. GB are those that QEMU sent. *only moved*: `{}`. Memory is what is the \
             engine's own (`RssAnon`), looked at every 5 ms.",
            SIZE.ram_mib,
            PLAIN.join(" ")
        ),
    });
}

fn memory(outcomes: &[Outcome]) -> String {
    let most = |place: usize| {
        let all = outcomes.iter().filter_map(|outcome| outcome.engines_mib);
        all.map(|mib| mib[place]).fold(f64::NAN, f64::max)
    };
    match most(0).is_nan() {
        true => "-".to_owned(),
        false => format!("{:.0}, {:.0}", most(0), most(1)),
    }
}
