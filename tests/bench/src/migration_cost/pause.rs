//! The pause of many migrations of one guest: beside QEMU's shortest, and beside our own of a guest that does nothing, which
//! consists of stop, save, load and cont.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::COMMAND;
use crate::migration::guest::{Saved, Size, Work};
use crate::migration::hosts::Hosts;
use crate::migration::qemu::Tuning;
use crate::migration::run::{self, Way};
use crate::page::{Figure, Page};
use stillframe_harness::results::{Claim, Goal, percentile};

/// Migrations by Stillframe; of QEMU's, and of the floor.
const TURNS: usize = 25;
const PEER_TURNS: usize = 5;
/// The recorded table of `bench papers dtrack` has the same.
const SIZE: Size = Size {
    ram_mib: 512,
    mbit: 1000,
};
/// The pause in which there is hardly a page to send.
const FLOOR: &str = "Stillframe, an idle guest";
/// QEMU's ways that end with this guest.
const PEERS: [(&str, Tuning); 2] = [
    ("QEMU XBZRLE", Tuning::Xbzrle),
    ("QEMU post-copy", Tuning::PostCopy),
];

/// Measures, and answers the promises.
pub fn measure(hosts: &Hosts, folder: &Path, page: &mut Page) -> Result<Vec<Claim>> {
    hosts.link.shape(SIZE.mbit)?;
    let pre_copy = Way::Stillframe(&["--mode=pre-copy"]);
    let idle = Saved::new(Work::Idle, SIZE, folder)?;
    let floors = pauses(&idle, hosts, (FLOOR, pre_copy, PEER_TURNS), page)?;
    fs::remove_file(idle.file())?;

    let saved = Saved::new(Work::Writer, SIZE, folder)?;
    let mut all = vec![(FLOOR, floors.clone())];
    for (name, tuning) in PEERS {
        let way = (name, Way::Qemu(tuning), PEER_TURNS);
        all.push((name, pauses(&saved, hosts, way, page)?));
    }
    let way = ("Stillframe", Way::Stillframe(&[]), TURNS);
    let ours = pauses(&saved, hosts, way, page)?;
    all.push(("Stillframe", ours.clone()));
    fs::remove_file(saved.file())?;
    add(page, &all);

    let peers = all[1..=PEERS.len()].iter();
    let shortest = peers.filter(|(_, pauses)| !pauses.is_empty());
    let shortest = shortest.map(|(_, pauses)| percentile(pauses, 0.5));
    let shortest = shortest.fold(f64::INFINITY, f64::min);
    let late = percentile(&ours, 0.99) / shortest;
    let over_floor = percentile(&ours, 0.5) / percentile(&floors, 0.5);
    let claim = |id, goal, value| Claim::new(id, Goal::AtMost(goal), value, "ratio", COMMAND);
    Ok(vec![
        claim("migrate-downtime-p99", 2.0, late),
        claim("migrate-downtime-floor", 1.5, over_floor),
    ])
}

/// The pauses of this many migrations, in milliseconds.
fn pauses(
    saved: &Saved,
    hosts: &Hosts,
    (name, way, turns): (&str, Way, usize),
    page: &mut Page,
) -> Result<Vec<f64>> {
    let mut pauses = Vec::new();
    for _ in 0..turns {
        let outcome = run::migrate(saved, hosts, way).with_context(|| name.to_owned())?;
        eprintln!("{name}: {}", outcome.in_short());
        page.keep(name, outcome.raw());
        // A migration of QEMU's that does not end has no pause.
        pauses.extend(outcome.downtime_ms);
    }
    Ok(pauses)
}

fn add(page: &mut Page, all: &[(&str, Vec<f64>)]) {
    let row = |(name, pauses): &(&str, Vec<f64>)| {
        let words = |share: f64| match pauses.is_empty() {
            true => "does not end".to_owned(),
            false => format!("{:.1}", percentile(pauses, share)),
        };
        vec![
            (*name).to_owned(),
            pauses.len().to_string(),
            words(0.0),
            words(0.5),
            words(0.99),
            words(1.0),
        ]
    };
    page.add(&Figure {
        title: "The pause of many migrations",
        paper: "-",
        ours: "in milliseconds.",
        columns: &["way", "migrations", "least", "median", "99 %", "most"],
        rows: &all.iter().map(row).collect::<Vec<_>>(),
        pictures: &[],
        differs: "a guest of 512 MiB that writes words at random places of 128 MiB, at 1 Gbit a second; in the first row an idle \
                  guest of that size, by pre-copy.",
    });
}
