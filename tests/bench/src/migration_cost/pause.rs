//! The pause of many migrations of one guest: beside QEMU's shortest, and beside what stop, save, load and cont take.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::json;

use super::COMMAND;
use crate::migration::guest::{Saved, Size, Work};
use crate::migration::hosts::Hosts;
use crate::migration::qemu::Tuning;
use crate::migration::run::{self, Way};
use crate::page::{Figure, Page};
use stillframe_harness::qmp::event_time_s;
use stillframe_harness::results::{Claim, Goal, percentile};

/// Migrations by Stillframe; of QEMU's, and of the floor.
const TURNS: usize = 25;
const PEER_TURNS: usize = 5;
/// The recorded table of `bench papers dtrack` has the same.
const SIZE: Size = Size {
    ram_mib: 512,
    mbit: 1000,
};
/// QEMU's ways that end with this guest.
const PEERS: [(&str, Tuning); 2] = [
    ("QEMU XBZRLE", Tuning::Xbzrle),
    ("QEMU post-copy", Tuning::PostCopy),
];
const PATIENCE: Duration = Duration::from_secs(30);

/// Measures, and answers the promises.
pub fn measure(hosts: &Hosts, folder: &Path, page: &mut Page) -> Result<Vec<Claim>> {
    hosts.link.shape(SIZE.mbit)?;
    let idle = Saved::new(Work::Idle, SIZE, folder)?;
    let mut floors = Vec::new();
    for _ in 0..PEER_TURNS {
        floors.push(floor(&idle, hosts)?);
    }
    page.keep("floor, ms", json!(floors));
    fs::remove_file(idle.file())?;

    let saved = Saved::new(Work::Writer, SIZE, folder)?;
    let mut pauses = |name: &str, way: Way, turns: usize| {
        let mut pauses = Vec::new();
        for _ in 0..turns {
            let outcome = run::migrate(&saved, hosts, way).with_context(|| name.to_owned())?;
            eprintln!("{name}: {}", outcome.in_short());
            page.keep(name, outcome.raw());
            // A migration of QEMU's that does not end has no pause.
            pauses.extend(outcome.downtime_ms);
        }
        anyhow::Ok(pauses)
    };
    let mut all = vec![("stop, save, load, cont", floors.clone())];
    for (name, tuning) in PEERS {
        all.push((name, pauses(name, Way::Qemu(tuning), PEER_TURNS)?));
    }
    let ours = pauses("Stillframe", Way::Stillframe(&[]), TURNS)?;
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

/// What QEMU itself takes to stop an idle guest, save its devices, load them into another QEMU and go on there; in
/// milliseconds, between the events.
fn floor(saved: &Saved, hosts: &Hosts) -> Result<f64> {
    let [here, there] = &hosts.link.hosts;
    let source = run::start(saved, here)?;
    let destination = saved.start(there)?;
    let file = source.folder().join("devices");
    let name = file.display().to_string();
    let mut from = source.second_monitor()?;
    let mut to = destination.second_monitor()?;
    let begin = Instant::now();
    from.execute("stop", json!({}))?;
    from.execute(
        "xen-save-devices-state",
        json!({"filename": name, "live": true}),
    )?;
    to.execute("xen-load-devices-state", json!({"filename": name}))?;
    to.execute("cont", json!({}))?;
    let stop = from.wait_event("STOP", PATIENCE)?;
    let resume = to.wait_event("RESUME", PATIENCE)?;
    let pause_ms = (event_time_s(&resume) - event_time_s(&stop)) * 1e3;
    eprintln!("floor: {pause_ms:.1} ms, {:?} in all", begin.elapsed());
    Ok(pause_ms)
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
                  guest of that size, whose memory stays where it is.",
    });
}
