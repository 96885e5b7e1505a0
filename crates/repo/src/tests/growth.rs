//! Measurements, run by hand: what a long watch adds to the memory of an open repository, what a blob
//! costs there, and how fast it is found.
//!
//! ```text
//! MALLOC_MMAP_THRESHOLD_=65536 cargo test --release -p stillframe-repo growth -- --ignored --nocapture --test-threads 1
//! ```
//!
//! The variable makes the C library give freed memory back at once, so that what is left is in use.

use std::time::Instant;

use stillframe_page::hash::ContentId;

use super::support::{Dice, Vm, init, test_dir};
use crate::index::Index;
use crate::index_file::{IndexFile, IndexedPack};
use crate::pack::{Directory, FileHash, Frame};

/// Resident memory, in KiB.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS"));
    let words = line.unwrap().split_ascii_whitespace();
    words.rev().nth(1).unwrap().parse().unwrap()
}

#[test]
#[ignore = "a measurement"]
fn what_a_watch_adds_per_checkpoint() {
    const CHECKPOINTS: u64 = 5_000;
    const LOOK_EVERY: u64 = 500;
    let dir = test_dir();
    let mut repo = init(dir.path());
    let mut vm = Vm::new("vm", 1024);
    let mut dice = Dice(1);
    println!("checkpoints    blobs   frames    packs  index files  resident KiB");
    for done in 1..=CHECKPOINTS {
        vm.run(&mut dice, 200);
        vm.checkpoint(&mut repo).unwrap();
        if done % LOOK_EVERY == 0 {
            let stats = repo.stats().unwrap();
            println!(
                "{done:11} {:8} {:8} {:8} {:12} {:13}",
                stats.blobs,
                stats.frames,
                stats.packs,
                stats.index_files,
                resident_kib()
            );
        }
    }
}

/// An id that is spread as content ids are.
fn id(dice: &mut Dice) -> ContentId {
    let mut id = [0; 32];
    for word in id.as_chunks_mut().0 {
        *word = dice.next().to_le_bytes();
    }
    ContentId(id)
}

/// A pack of full frames of pages.
fn pack_of_pages(dice: &mut Dice, blobs: usize) -> Directory {
    let frame = |_| Frame {
        kind: 2,
        stored_bytes: 20_000,
        plain_bytes: 16 * 4096,
        blobs: (0..16).map(|_| (id(dice), 4096)).collect(),
    };
    Directory {
        frames: (0..blobs / 16).map(frame).collect(),
    }
}

#[test]
#[ignore = "a measurement"]
fn what_a_blob_costs_and_how_fast_it_is_found() {
    const PACK: usize = 4096;
    for blobs in [100_000, 1_000_000] {
        let mut dice = Dice(blobs as u64);
        let before = resident_kib();
        let mut index = Index::default();
        let mut added = std::time::Duration::ZERO;
        let mut peak = 0;
        for number in 0..blobs / PACK {
            let directory = pack_of_pages(&mut dice, PACK);
            let begin = Instant::now();
            let file = IndexFile {
                supersedes: Vec::new(),
                packs: vec![IndexedPack {
                    pack: FileHash::of(&number.to_le_bytes()),
                    directory,
                }],
            };
            index.add_file(FileHash([0; 32]), &file, 1).unwrap();
            added += begin.elapsed();
            peak = peak.max(resident_kib() - before);
        }
        let grown = (resident_kib() - before) << 10;
        let count = index.blobs() as f64;
        println!(
            "{count} blobs: {:.1} bytes each, at most {:.1}; {:.2} M/s added",
            grown as f64 / count,
            (peak << 10) as f64 / count,
            count / added.as_secs_f64() / 1e6
        );
        for (what, seed) in [("there", blobs as u64), ("absent", 7)] {
            let mut dice = Dice(seed);
            let mut ids: Vec<ContentId> = (0..blobs / PACK * PACK).map(|_| id(&mut dice)).collect();
            // In no order that the memory could guess.
            ids.sort_unstable_by_key(|id| id.0[20..].to_vec());
            let begin = Instant::now();
            let found = ids.iter().filter(|id| index.contains(id)).count();
            println!(
                "  {what}: {:.2} M/s, {found} found",
                ids.len() as f64 / begin.elapsed().as_secs_f64() / 1e6
            );
            let begin = Instant::now();
            let bytes: u64 = ids
                .iter()
                .filter_map(|id| index.get(id))
                .map(|at| u64::from(at.bytes))
                .sum();
            println!(
                "  {what}: {:.2} M/s located ({bytes} bytes)",
                ids.len() as f64 / begin.elapsed().as_secs_f64() / 1e6
            );
        }
    }
}
