//! The guest's work while it is migrated, by D-Track's ways to leave out pages (tables 2 and 3 of the paper).

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::COMMAND;
use crate::migration::guest::{Saved, Size, Work};
use crate::migration::hosts::Hosts;
use crate::migration::run::{self, Way};
use crate::page::{Figure, Page};
use stillframe_harness::results::{Claim, Goal, percentile};

/// Turns of all ways, one after another.
const TURNS: usize = 3;
/// A slow link: the first round takes half a minute.
const SIZE: Size = Size {
    ram_mib: 512,
    mbit: 100,
};

/// Nothing is left out in the first; the paper's two versions; ours.
const WAYS: [(&str, Way); 4] = [
    ("off", way(&["--skip-fake=off", "--page-ids=off"])),
    ("version 1", way(&["--skip-fake=thread", "--page-ids=off"])),
    (
        "version 2",
        way(&["--skip-fake=thread-delayed", "--page-ids=off"]),
    ),
    ("exact", way(&["--skip-fake=exact", "--page-ids=off"])),
];
const EXACT: usize = 3;

const fn way(words: &'static [&'static str]) -> Way {
    Way::WithoutDeltas(words)
}

/// Measures, and answers the promise.
pub fn measure(hosts: &Hosts, folder: &Path, page: &mut Page) -> Result<Vec<Claim>> {
    hosts.link.shape(SIZE.mbit)?;
    let saved = Saved::new(Work::Quicksort, SIZE, folder)?;
    let mut rates: [Vec<f64>; 4] = Default::default();
    for turn in 0..TURNS {
        for (rates, (name, way)) in rates.iter_mut().zip(WAYS) {
            let outcome = run::migrate(&saved, hosts, way).with_context(|| name.to_owned())?;
            let rate = outcome.ticks_per_s.context("no ticks")?;
            eprintln!(
                "{name} {turn}: {}, {rate:.1} ticks a second",
                outcome.in_short()
            );
            page.keep(name, outcome.raw());
            rates.push(rate);
        }
    }
    fs::remove_file(saved.file())?;
    // Each beside that of the same turn, so that a machine that gets slower does not count.
    let lost = |place: usize| {
        let pairs = rates[0].iter().zip(&rates[place]);
        let lost: Vec<f64> = pairs.map(|(off, on)| (1.0 - on / off) * 100.0).collect();
        percentile(&lost, 0.5)
    };
    let row = |place: usize| {
        vec![
            WAYS[place].0.to_owned(),
            format!("{:.1}", percentile(&rates[place], 0.5)),
            format!("{:.2}", lost(place)),
        ]
    };
    page.add(&Figure {
        title: "The guest's work (tables 2 and 3)",
        paper: "sorts a second of a guest, against pre-copy without D-Track: 15 to 32 % fewer with version 1, from 7.5 % fewer to \
                6 % more with version 2.",
        ours: "medians of the turns; what is lost is that against `off` of the same turn.",
        columns: &["pages left out", "ticks a second", "lost, %"],
        rows: &(0..WAYS.len()).map(row).collect::<Vec<_>>(),
        pictures: &[],
        differs: "quicksort in a guest of 512 MiB at 100 Mbit a second, from the command until the VM is stopped; a tick is two \
                  million words. No deltas and no ids (`--delta-cache 0 --page-ids off`).",
    });
    let (id, goal) = ("migrate-exact-work", Goal::AtMost(1.0));
    Ok(vec![Claim::new(id, goal, lost(EXACT), "percent", COMMAND)])
}
